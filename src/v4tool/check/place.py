"""One block in one pass, as the identities see it; and inputs that come twice.

`Place` carries what an identity needs: configuration, step, key prefix, the file's tensors, the book. `Sameness`
remembers every row that went into a projection: the same row again must have come out the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import F64
from v4tool.check.bounds import Unknowns
from v4tool.check.formulas import rope_frequencies, rope_tables
from v4tool.check.rules import Book
from v4tool.check.source import Array, Source
from v4tool.config import ModelConfig
from v4tool.names import Step, pass_of

VALUES_AT_ONCE = 1 << 19
"""Values of one key that an identity works on at a time: they stay in the cache."""


class Sameness:
    """Rows that went into weights, by weight; `tie` compares the outputs of equal ones."""

    def __init__(self, source: Source, book: Book) -> None:
        self.source, self.book = source, book
        self._seen: dict[tuple[str, bytes], tuple[str, int]] = {}

    def tie(
        self, weights: str, inputs: Sequence[Array], prefix: str, outputs: Sequence[str], of: str
    ) -> None:
        """Rows of one pass: inputs [rows, ...] each; outputs: ends of keys that have the same rows.

        weights: what the passes that share these weights have in common; of: the input's name.
        """
        present = [name for name in outputs if prefix + name in self.source]
        rows = len(inputs[0])
        self.book.applied("same in, same out", [prefix + name for name in present], rows)
        if not present:
            return
        for row in range(rows):
            digest = b"".join(_digest(values[row]) for values in inputs)
            first = self._seen.setdefault((weights + of, digest), (prefix, row))
            if first != (prefix, row):
                self._compare(first, prefix, row, present, of)

    def _compare(
        self, first: tuple[str, int], prefix: str, row: int, outputs: Sequence[str], of: str
    ) -> None:
        for name in outputs:
            other, other_row = first
            if other + name not in self.source:
                continue
            a, b = self._row(other + name, other_row), self._row(prefix + name, row)
            if not np.array_equal(a, b):
                self.book.report(
                    prefix + name,
                    "same in, same out",
                    f"row {row} like row {other_row} of {other}{name}, as in {of}",
                    f"{int((a != b).sum())} of {a.size} values differ",
                )

    def _row(self, key: str, row: int) -> Array:
        kind = self.source.kinds[key]
        get = {"bf16": self.source.bits, "acc": self.source.floats, "int": self.source.ints}[kind]
        values: Array = get(key).reshape(-1, self.source.shape(key)[-1])  # type: ignore[operator]
        return values[row]


def _digest(row: npt.NDArray[np.generic]) -> bytes:
    return hash(row.tobytes()).to_bytes(8, "little", signed=True)


@dataclass(frozen=True)
class Place:
    """One block in one pass. prefix: what its keys begin with (`decode.0.layers.3.`)."""

    config: ModelConfig
    step: Step
    layer: int
    prefix: str
    source: Source
    book: Book
    unknowns: Unknowns
    sameness: Sameness
    earlier: tuple["Place", ...] = field(default=(), repr=False)

    @property
    def ratio(self) -> int:
        """The block's compression ratio."""
        return self.config.ratio(self.layer)

    @property
    def weights(self) -> str:
        """The path of the block's weights: equal for passes that share them."""
        return self.config.block_path(self.layer) + "."

    @property
    def is_mtp(self) -> bool:
        """Whether this is the MTP block."""
        return self.config.is_mtp(self.layer)

    @property
    def pass_prefix(self) -> str:
        """The pass's own prefix."""
        return pass_of(self.prefix)

    def key(self, name: str) -> str:
        """A key of this block in this pass."""
        return self.prefix + name

    def has(self, *names: str) -> bool:
        """Whether all of these keys of the block can be read."""
        return self.source.has(*(self.prefix + name for name in names))

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """The pass's tokens in stretches, each of about VALUES_AT_ONCE values of this width."""
        size = max(1, VALUES_AT_ONCE // width)
        for start in range(0, self.step.tokens, size):
            yield start, min(start + size, self.step.tokens)

    def tables(self, start: int, stop: int) -> tuple[F64, F64]:
        """Rotary tables of the pass's tokens start ... stop - 1."""
        first = self.step.start
        return rope_tables(
            rope_frequencies(self.config, self.ratio), np.arange(first + start, first + stop)
        )

    def tables_at(self, positions: npt.NDArray[np.int64]) -> tuple[F64, F64]:
        """Rotary tables of any positions."""
        return rope_tables(rope_frequencies(self.config, self.ratio), positions)
