"""One block in one pass, as the identities see it; and inputs that come twice.

`Place` carries what an identity needs: configuration, step, key prefix, the file's tensors, the
book. `Sameness` remembers every row that went into a projection: the same row again must have
come out the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import F64
from v4tool.check.book import Book
from v4tool.check.bounds import Unknowns
from v4tool.check.formulas import rope_frequencies, rope_tables
from v4tool.check.source import Array, Source
from v4tool.config import ModelConfig
from v4tool.names import Kind, Step, pass_of

RULE = "same in, same out"
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
        self.book.applied(RULE, [prefix + name for name in present], rows)
        pairs = []
        for row in range(rows if present else 0):
            digest = b"".join(_digest(values[row]) for values in inputs)
            first = self._seen.setdefault((weights + of, digest), (prefix, row))
            if first != (prefix, row):
                pairs.append((row, *first))
        for name in present:
            self._compare(prefix, name, pairs, of)

    def _compare(
        self, prefix: str, name: str, pairs: Sequence[tuple[int, str, int]], of: str
    ) -> None:
        """One output's rows against those that came of the same input: (row, other prefix, its
        row).
        """
        wrong = [
            (row, f"{other}{name}", other_row)
            for row, other, other_row in pairs
            if other + name in self.source
            and not np.array_equal(
                self._row(other + name, other_row), self._row(prefix + name, row)
            )
        ]
        if wrong:
            row, key, other_row = wrong[0]
            self.book.report(
                prefix + name,
                RULE,
                f"row {row} like row {other_row} of {key}, as in {of}",
                f"another one; {len(wrong)} of {len(pairs)} such rows differ",
            )

    def _row(self, key: str, row: int) -> Array:
        """One row over the last dimension; a token may have several."""
        source, kind = self.source, self.source.kinds[key]
        readers: dict[Kind, Callable[..., Array]] = {
            "bf16": source.bits,
            "acc": source.floats,
            "int": source.ints,
        }
        shape = source.shape(key)
        a_token = math.prod(shape[:-1]) // source.count(key)
        values = readers[kind](key, row // a_token, row // a_token + 1)
        return np.asarray(values.reshape(a_token, -1)[row % a_token])


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
