"""Context of one block in one pass for the identities, and the check of duplicate inputs.

`BlockPass` carries what an identity needs: configuration, step, key prefix, the file's tensors, the
findings. `DuplicateInputs` remembers every row that went into a projection: the same row again must
have come out the same.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import F64
from v4tool.check.file_tensors import Array, FileTensors
from v4tool.check.findings import Findings
from v4tool.check.formulas import rope_frequencies, rope_tables
from v4tool.check.weight_bounds import WeightBounds
from v4tool.config import ModelConfig
from v4tool.names import Kind, Step, pass_of

RULE = "same in, same out"
VALUES_AT_ONCE = 1 << 17
"""Values of one key that an identity works on at a time: they stay in the cache."""


@dataclass(frozen=True)
class Inputs:
    """Rows that went into weights in one pass: a digest each; outputs: ends of keys with the
    same rows.
    """

    prefix: str
    of: str
    digests: list[int]
    outputs: tuple[str, ...]


class DuplicateInputs:
    """Equal rows into the same weights must have come out equal. Collected by pass, judged at
    the end.
    """

    def __init__(self, tensors: FileTensors, findings: Findings) -> None:
        self.tensors, self.findings = tensors, findings
        self._inputs: dict[str, list[Inputs]] = {}
        self._lock = threading.Lock()

    def add(
        self, weights: str, inputs: Array, prefix: str, outputs: Sequence[str], of: str
    ) -> None:
        """Rows of one pass, inputs [rows, ...]; outputs: ends of keys that have the same rows.

        weights: what the passes that share these weights have in common; of: the input's name.
        """
        present = tuple(name for name in outputs if prefix + name in self.tensors)
        self.findings.applied(RULE, [prefix + name for name in present], len(inputs))
        if present:
            digests = [hash(row.tobytes()) for row in inputs]
            with self._lock:
                same_weights = self._inputs.setdefault(weights + of, [])
                same_weights.append(Inputs(prefix, of, digests, present))

    def check(self) -> None:
        """Compare the outputs of equal inputs, the prefill's first."""
        for _, passes in sorted(self._inputs.items()):
            first: dict[int, tuple[str, int]] = {}
            for one in sorted(passes, key=lambda one: (pass_of(one.prefix), one.prefix)):
                pairs = []
                for row, digest in enumerate(one.digests):
                    known = first.setdefault(digest, (one.prefix, row))
                    if known != (one.prefix, row):
                        pairs.append((row, *known))
                for name in one.outputs:
                    self._compare(one.prefix, name, pairs, one.of)
        self._inputs.clear()

    def _compare(
        self, prefix: str, name: str, pairs: Sequence[tuple[int, str, int]], of: str
    ) -> None:
        """One output's rows against those that came of the same input: (row, other prefix, its
        row).
        """
        wrong = [
            (row, f"{other}{name}", other_row)
            for row, other, other_row in pairs
            if other + name in self.tensors
            and not np.array_equal(
                self._row(other + name, other_row), self._row(prefix + name, row)
            )
        ]
        if wrong:
            row, key, other_row = wrong[0]
            self.findings.report(
                prefix + name,
                RULE,
                f"row {row} like row {other_row} of {key}, as in {of}",
                f"another one; {len(wrong)} of {len(pairs)} such rows differ",
            )

    def _row(self, key: str, row: int) -> Array:
        """One row over the last dimension; a token may have several."""
        tensors, kind = self.tensors, self.tensors.kinds[key]
        readers: dict[Kind, Callable[..., Array]] = {
            "bf16": tensors.bits,
            "acc": tensors.floats,
            "int": tensors.ints,
        }
        shape = tensors.shape(key)
        a_token = math.prod(shape[:-1]) // tensors.count(key)
        values = readers[kind](key, row // a_token, row // a_token + 1)
        return np.asarray(values.reshape(a_token, -1)[row % a_token])


@dataclass(frozen=True)
class BlockPass:
    """One block in one pass. prefix: what its keys begin with (`decode.0.layers.3.`)."""

    config: ModelConfig
    step: Step
    layer: int
    prefix: str
    tensors: FileTensors
    findings: Findings
    weight_bounds: WeightBounds
    duplicates: DuplicateInputs
    earlier: tuple["BlockPass", ...] = field(default=(), repr=False)

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
        return self.tensors.has(*(self.prefix + name for name in names))

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """The pass's tokens in stretches, each of about VALUES_AT_ONCE values of this width."""
        size = max(1, VALUES_AT_ONCE // width)
        for start in range(0, self.step.tokens, size):
            yield start, min(start + size, self.step.tokens)

    @cached_property
    def _tables(self) -> tuple[F64, F64]:
        return self.tables_at(np.arange(self.step.start, self.step.end))

    def tables(self, start: int, stop: int) -> tuple[F64, F64]:
        """Rotary tables of the pass's tokens start ... stop - 1."""
        cos, sin = self._tables
        return cos[start:stop], sin[start:stop]

    def tables_at(self, positions: npt.NDArray[np.int64]) -> tuple[F64, F64]:
        """Rotary tables of any positions."""
        return rope_tables(rope_frequencies(self.config, self.ratio), positions)
