"""`Scope`: a module path that loads weights by name and records activations under the same path.

The tokens of all sequences of a pass are computed together as one flat batch [T, ...]; a `Segment`
is one sequence's slice of it. `scope / "attn"` is the scope of a submodule; `scope.linear("wq_a",
x)` loads `….attn.wq_a.weight` and `.scale`, multiplies the batch with the weight, passes
`….attn.wq_a.out` of each segment to its tap and releases the weight. Left out: what a tap does with
a value.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from v4tool.config import ModelConfig, Numerics
from v4tool.model.layers import rms
from v4tool.names import Step
from v4tool.quant.linear import StoredWeight, linear_hi, q_linear
from v4tool.threads import ScratchBuffers

Tap = Callable[[str, Tensor], None]


def single_threaded(numerics: Numerics) -> Numerics:
    """The same numerics with one thread, for work that already runs in a worker thread."""
    return numerics if numerics.threads == 1 else numerics.model_copy(update={"threads": 1})


class Weights(Protocol):
    """A reader of weights by name: a checkpoint, or a dictionary in a test."""

    def nbytes(self, name: str) -> int: ...

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor: ...

    def read_rows(
        self, name: str, start: int, stop: int, buffer: Tensor | None = None
    ) -> Tensor: ...

    def gather_rows(self, name: str, ids: Tensor) -> Tensor: ...

    def advise(self, names: list[str]) -> None: ...


@dataclass
class CompressorState:
    """A compressor's state for one sequence.

    kv, gate: acc [rows, c*d], rows of tokens from position `first` on, needed for later blocks;
    blocks: BF16 [t, d], the compressed rows so far.
    """

    kv: Tensor | None = None
    gate: Tensor | None = None
    first: int = 0
    blocks: Tensor | None = None


@dataclass
class LayerState:
    """One layer's state for one sequence between passes (SPEC 5, attention step 4).

    window: BF16 [window_size, C], position t in row t % window_size.
    """

    window: Tensor | None = None
    compressor: CompressorState = field(default_factory=CompressorState)
    indexer_compressor: CompressorState = field(default_factory=CompressorState)


@dataclass(frozen=True)
class Segment:
    """One sequence's tokens in this pass: the step, ids I64 [s], layer states, tap."""

    step: Step
    ids: Tensor
    states: dict[int, LayerState]
    tap: Tap

    def state(self, layer: int) -> LayerState:
        """The layer's state for this sequence, created empty."""
        return self.states.setdefault(layer, LayerState())

    @property
    def positions(self) -> Tensor:
        """I64 [s]: the positions of the tokens."""
        return torch.arange(self.step.start, self.step.end)


@dataclass(frozen=True)
class Scope:
    """A module path: `path` is the prefix of weight names, `record` of the keys within a pass.

    upcoming: large weights that are read after this block, to prefetch. buffers: reused memory
    that weights are read into; newly allocated memory takes five times as long as the read.
    """

    weights: Weights
    config: ModelConfig
    numerics: Numerics
    segments: tuple[Segment, ...]
    path: str = ""
    record: str = ""
    upcoming: tuple[str, ...] = ()
    buffers: ScratchBuffers = field(default_factory=ScratchBuffers)

    def __truediv__(self, name: str) -> "Scope":
        return replace(self, path=f"{self.path}{name}.", record=f"{self.record}{name}.")

    @property
    def acc(self) -> torch.dtype:
        """The accumulation dtype."""
        return self.numerics.acc

    @property
    def threads(self) -> int:
        """Worker threads to use."""
        return self.numerics.threads

    @property
    def single(self) -> "Scope":
        """The same scope with one thread, for work that already runs in a worker thread."""
        return replace(self, numerics=single_threaded(self.numerics))

    @property
    def positions(self) -> Tensor:
        """I64 [T]: the position of every token of the batch in its own sequence."""
        return torch.cat([segment.positions for segment in self.segments])

    @property
    def ids(self) -> Tensor:
        """I64 [T]: the token ids of the batch."""
        return torch.cat([segment.ids for segment in self.segments])

    @overload
    def parts(self, x: Tensor, /) -> Iterator[tuple[Segment, Tensor]]: ...

    @overload
    def parts(self, x: Tensor, y: Tensor, /) -> Iterator[tuple[Segment, Tensor, Tensor]]: ...

    def parts(self, *xs: Tensor) -> Any:
        """Each segment with its slice of every batch tensor [T, ...]."""
        if len(self.segments) == 1:
            return iter([(*self.segments, *xs)])
        sizes = [segment.step.tokens for segment in self.segments]
        return zip(self.segments, *(x.split(sizes) for x in xs), strict=True)

    def weight(self, name: str) -> Tensor:
        """A weight of this module as stored, in newly allocated memory."""
        return self.weights.read(self.path + name)

    def buffered(self, name: str, use: str) -> Tensor:
        """A weight as stored, in this thread's buffer `use`, valid until that is used again."""
        name = self.path + name
        return self.weights.read(
            name, self.buffers.take(use, self.weights.nbytes(name), torch.uint8)
        )

    def quantized(self, name: str, width: int) -> StoredWeight:
        """A quantised weight for inputs of `width` elements; codes are read when it is multiplied.

        Scales and codes are read into this thread's buffers and overwritten by the next weight.
        """
        scale = self.buffered(f"{name}.scale", "scale")
        codes = f"{self.path}{name}.weight"
        size = self.weights.nbytes(codes)
        # two FP4 codes share a byte, and each of their rows has scales of its own (SPEC 2)
        fp4 = len(scale) * width == 2 * size
        row_bytes = width // 2 if fp4 else width

        def read(start: int, stop: int) -> Tensor:
            buffer = self.buffers.take("codes", (stop - start) * row_bytes, torch.uint8)
            return self.weights.read_rows(codes, start, stop, buffer)

        block, shape = self.config.fp8_block[0], (size // row_bytes, width)
        return StoredWeight(shape, scale, "fp4" if fp4 else "fp8", read, block)

    def tap_for(self, segment: Segment, name: str, value: Tensor) -> None:
        """Pass one segment's value to its tap without changes (`tap` adds a batch dimension)."""
        segment.tap(f"{segment.step.prefix}{self.record}{name}", value)

    def tap(self, name: str, batch: Tensor) -> Tensor:
        """Pass each segment's slice of [T, ...] to its tap as [1, s, ...]; returns the batch."""
        for segment, part in self.parts(batch):
            self.tap_for(segment, name, part.unsqueeze(0))
        return batch

    def tap_flat(self, name: str, batch: Tensor) -> Tensor:
        """As `tap`, but as [s, ...]: for modules that the release calls with flat tokens (MoE)."""
        for segment, part in self.parts(batch):
            self.tap_for(segment, name, part)
        return batch

    def linear(self, name: str, x: Tensor, recorded: str | None = None) -> Tensor:
        """Quantised product with weight `name`, recorded as `recorded` (default: its name).

        BF16 [T, ..., in] -> [T, ..., out].
        """
        y = q_linear(x, self.quantized(name, x.shape[-1]), self.numerics)
        return self.tap(f"{recorded or name}.out", y)

    def linear_hi(self, name: str, x: Tensor) -> Tensor:
        """Product with an unquantised weight, not recorded: BF16 [T, in] -> acc [T, out]."""
        return linear_hi(x, self.buffered(f"{name}.weight", "codes"), self.numerics)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm with weight `name`, not recorded: BF16 [T, ..., n] -> the same."""
        weight = self.weight(f"{name}.weight")
        return rms(x, weight, self.config.norm_eps, self.acc, threads=self.threads)
