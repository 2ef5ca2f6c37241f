"""`BlockPass`, the context of one block in one pass; `DuplicateInputs`, the check of equal rows.

`BlockPass` has what the identities take: configuration, step, key prefix, the file's tensors, the
findings. `DuplicateInputs` checks projections without their weights: where two input rows are
equal, in any tokens or passes, the output rows must be equal.
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
"""Values of one key that an identity takes at a time; they fit into the processor's cache."""


@dataclass(frozen=True)
class Inputs:
    """Hashes of the input rows of some projections in one pass.

    prefix: of the block pass's keys; input_name: of their common input (`attn_norm.out`);
    digests: one hash per row; outputs: names of the projections' outputs, of as many rows.
    """

    prefix: str
    input_name: str
    digests: list[int]
    outputs: tuple[str, ...]


class DuplicateInputs:
    """Equal input rows of the same weights must have equal output rows.

    Inputs are added by pass, safely from several threads; `check` compares the outputs at the end.
    """

    def __init__(self, tensors: FileTensors, findings: Findings) -> None:
        self.tensors, self.findings = tensors, findings
        self._inputs: dict[str, list[Inputs]] = {}
        self._lock = threading.Lock()

    def add(
        self, weights: str, inputs: Array, prefix: str, outputs: Sequence[str], input_name: str
    ) -> None:
        """Add the input rows of one pass, inputs [rows, ...], of some projections.

        weights: path of the block's weights, equal in all passes over it; prefix: of the pass's
        keys; outputs: names of the projections' outputs; input_name: of their common
        input.
        """
        present = tuple(name for name in outputs if prefix + name in self.tensors)
        self.findings.applied(RULE, [prefix + name for name in present], len(inputs))
        if present:
            digests = [hash(row.tobytes()) for row in inputs]
            with self._lock:
                same_weights = self._inputs.setdefault(weights + input_name, [])
                same_weights.append(Inputs(prefix, input_name, digests, present))

    def check(self) -> None:
        """Compare the output rows of equal inputs with the first of them, prefill first."""
        for _, passes in sorted(self._inputs.items()):
            first: dict[int, tuple[str, int]] = {}
            for one in sorted(passes, key=lambda one: (pass_of(one.prefix), one.prefix)):
                pairs = []
                for row, digest in enumerate(one.digests):
                    known = first.setdefault(digest, (one.prefix, row))
                    if known != (one.prefix, row):
                        pairs.append((row, *known))
                for name in one.outputs:
                    self._compare(one.prefix, name, pairs, one.input_name)
        self._inputs.clear()

    def _compare(
        self, prefix: str, name: str, pairs: Sequence[tuple[int, str, int]], input_name: str
    ) -> None:
        """Compare rows of one output with the rows of equal inputs.

        pairs: row, prefix of the other pass, row in the other pass.
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
                f"row {row} like row {other_row} of {key}, as in {input_name}",
                f"another one; {len(wrong)} of {len(pairs)} such rows differ",
            )

    def _row(self, key: str, row: int) -> Array:
        """One row along the last dimension of a key; a token may have several rows."""
        tensors, kind = self.tensors, self.tensors.kinds[key]
        readers: dict[Kind, Callable[..., Array]] = {
            "bf16": tensors.bits,
            "acc": tensors.floats,
            "int": tensors.ints,
        }
        shape = tensors.shape(key)
        rows_per_token = math.prod(shape[:-1]) // tensors.count(key)
        values = readers[kind](key, row // rows_per_token, row // rows_per_token + 1)
        return np.asarray(values.reshape(rows_per_token, -1)[row % rows_per_token])


@dataclass(frozen=True)
class BlockPass:
    """One block in one pass.

    prefix: of its keys (`decode.0.layers.3.`); layer: n_layers for MTP; earlier: the passes over
    the same block before this one, in order.
    """

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
        """Path of the block's weights in the checkpoint, equal in all passes over the block."""
        return self.config.block_path(self.layer) + "."

    @property
    def is_mtp(self) -> bool:
        """Whether this is the MTP block."""
        return self.config.is_mtp(self.layer)

    @property
    def pass_prefix(self) -> str:
        """Prefix of the pass without the layer (`decode.0.`)."""
        return pass_of(self.prefix)

    def key(self, name: str) -> str:
        """A key of this block in this pass."""
        return self.prefix + name

    def has(self, *names: str) -> bool:
        """Whether all of these keys of the block are in the file and usable."""
        return self.tensors.has(*(self.prefix + name for name in names))

    def pieces(self, width: int) -> Iterator[tuple[int, int]]:
        """Ranges start, stop of the pass's tokens, of about VALUES_AT_ONCE values each.

        width: values per token.
        """
        size = max(1, VALUES_AT_ONCE // width)
        for start in range(0, self.step.tokens, size):
            yield start, min(start + size, self.step.tokens)

    @cached_property
    def _tables(self) -> tuple[F64, F64]:
        return self.tables_at(np.arange(self.step.start, self.step.end))

    def tables(self, start: int, stop: int) -> tuple[F64, F64]:
        """Cosine and sine of the pass's tokens start ... stop - 1: F64 [n, R/2] each."""
        cos, sin = self._tables
        return cos[start:stop], sin[start:stop]

    def tables_at(self, positions: npt.NDArray[np.int64]) -> tuple[F64, F64]:
        """Cosine and sine of any positions: F64 [n, R/2] each."""
        return rope_tables(rope_frequencies(self.config, self.ratio), positions)
