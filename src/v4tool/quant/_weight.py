"""Quantised weights as stored (FP4 or FP8 codes, scales), and dequantisation (SPEC section 2)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from v4tool.quant.activation import to_bf16
from v4tool.quant.formats import E2M1, E4M3, E8M0, look_up, unpack_fp4

BLOCK = 128
"""Rows and columns of an FP8 weight under one scale in V4, and elements of x (SPEC 2 and 3)."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantised weight as stored in the checkpoint (SPEC 2).

    kind "fp8": codes uint8 [N, K], scale uint8 [ceil(N / block), ceil(K / block)];
    kind "fp4": codes uint8 [N, K / 2], low nibble first, scale uint8 [N, ceil(K / 32)].
    block: also how many elements of x are quantised with one scale in front of the weight.
    """

    codes: Tensor
    scale: Tensor
    kind: Literal["fp8", "fp4"]
    block: int = BLOCK

    def __post_init__(self) -> None:
        rows, cols, block = *self.shape, self.block
        fp8 = (-(-rows // block), -(-cols // block))
        want = fp8 if self.kind == "fp8" else (rows, -(-cols // 32))
        if tuple(self.scale.shape) != want:
            raise ValueError(
                f"scale of a {self.kind} weight {self.shape}: {want} expected, "
                f"{tuple(self.scale.shape)} found"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): output and input features."""
        rows, cols = self.codes.shape
        return rows, cols if self.kind == "fp8" else 2 * cols

    def rows(self, start: int, stop: int) -> "QuantizedWeight":
        """Rows start ... stop of the weight as a view; of FP8, start is a multiple of block."""
        if self.kind == "fp4":
            return replace(self, codes=self.codes[start:stop], scale=self.scale[start:stop])
        if start % self.block:
            raise ValueError(
                f"an FP8 weight can be cut at multiples of {self.block} rows only, not at {start}"
            )
        scale = self.scale[start // self.block : -(-stop // self.block)]
        return replace(self, codes=self.codes[start:stop], scale=scale)


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight whose codes are read from the file during a product, each row once.

    shape: (N, K); scale, kind, block: as of a QuantizedWeight. read(start, stop): the codes of rows
    start ... stop-1, which the next call in the same thread overwrites.
    """

    shape: tuple[int, int]
    scale: Tensor
    kind: Literal["fp8", "fp4"]
    read: Callable[[int, int], Tensor]
    block: int = BLOCK

    def whole(self) -> QuantizedWeight:
        """The weight with all of its codes in memory."""
        return QuantizedWeight(self.read(0, self.shape[0]), self.scale, self.kind, self.block)


Weight = QuantizedWeight | StoredWeight


def in_memory(w: Weight) -> QuantizedWeight:
    """The weight with all of its codes in memory."""
    return w.whole() if isinstance(w, StoredWeight) else w


def dequantize(w: QuantizedWeight) -> Tensor:
    """The exact values, element times scale; binary64 [N, K]."""
    rows, cols = w.shape
    if w.kind == "fp4":
        values, scale = look_up(E2M1, unpack_fp4(w.codes)), w.scale.repeat_interleave(32, 1)
    else:
        scale = w.scale.repeat_interleave(w.block, 0)[:rows].repeat_interleave(w.block, 1)
        values = look_up(E4M3, w.codes)
    return values.double() * look_up(E8M0, scale[:, :cols]).double()


FP8_VALUES: Tensor = E8M0.double()[:, None] * E4M3.double()
"""[256, 256] binary64: the exact value of every scale code and E4M3 code."""

BF16_OF_FP8: Tensor = to_bf16(FP8_VALUES).double()
"""[256, 256] binary64: the same rounded to BF16; other values for extreme scales only (wo_a)."""
