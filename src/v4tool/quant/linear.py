"""The matrix products of the forward pass (SPEC sections 3 to 5) behind one order of accumulation.

With `accumulate = float64` every product of an x [M, K] and a weight [N, K] is, for each element,
by definition

    acc = 0
    for each group of 128 along K, in increasing order (the last one may be shorter):
        g = 0
        for k in the group, in increasing order: g = g + x[k] * w[k]
        acc = acc + g

in binary64, where x[k] and w[k] are the values themselves, scales included. The order depends on
nothing else: not on threads, M, N or the machine. Each x[k] * w[k] is exact in binary64 (at most
8 + 24 bits), so that it makes no difference whether it is fused with the addition. Within a group
of FP8 times FP8 every sum is exact too (at most 43 bits), and nearly always so for the other
kinds. Every NaN result is the one quiet NaN.

The three ways to compute it agree bit for bit: the readable one (here), the fallback
(`_numpy_product`) and the C kernel (`_c_product`). `accumulate = float32` is torch's own FP32
product of the same values, on the readable way only; its last bits depend on torch's build and
threads.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from v4tool.quant.activation import act_quant, to_bf16
from v4tool.quant.formats import E2M1, E4M3, E8M0, unpack_fp4

if TYPE_CHECKING:
    from v4tool.config import Numerics

GROUP = 128
"""Elements of K that are summed on their own before they join the accumulator."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as the checkpoint holds it (SPEC 2).

    kind "fp8": codes uint8 [N, K], scale uint8 [ceil(N / 128), ceil(K / 128)], one code per 128 x
    128 block; kind "fp4": codes uint8 [N, K / 2], two to a byte, low nibble first, scale uint8
    [N, ceil(K / 32)].
    """

    codes: Tensor
    scale: Tensor
    kind: Literal["fp8", "fp4"]

    def __post_init__(self) -> None:
        rows, cols = self.shape
        want = (-(-rows // 128), -(-cols // 128)) if self.kind == "fp8" else (rows, -(-cols // 32))
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
        """Rows start ... stop of the weight as a view; for FP8 start must be a multiple of 128."""
        if self.kind == "fp4":
            return QuantizedWeight(self.codes[start:stop], self.scale[start:stop], self.kind)
        if start % 128:
            raise ValueError(
                f"an FP8 weight can be cut at multiples of 128 rows only, not at {start}"
            )
        return QuantizedWeight(
            self.codes[start:stop], self.scale[start // 128 : -(-stop // 128)], self.kind
        )


def dequantize(w: QuantizedWeight) -> Tensor:
    """The exact values, element times scale; binary64 [N, K]."""
    rows, cols = w.shape
    if w.kind == "fp4":
        values, scale = E2M1[unpack_fp4(w.codes).int()], w.scale.repeat_interleave(32, 1)
    else:
        scale = w.scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        values = E4M3[w.codes.int()]
    return values.double() * E8M0[scale[:, :cols].int()].double()


def q_linear(x: Tensor, w: QuantizedWeight, numerics: "Numerics") -> Tensor:
    """Quantise x to FP8 in blocks of 128, multiply by the weight, round to BF16 (SPEC 3).

    BF16 [..., K] and [N, K] -> BF16 [..., N].
    """
    codes, scale = act_quant(x, GROUP)
    values = E4M3.double()[codes.int()]
    scales = E8M0.double()[scale.int()].repeat_interleave(GROUP, -1)[..., : x.shape[-1]]
    return to_bf16(_product(values * scales, dequantize(w), numerics))


def linear_hi(x: Tensor, w: Tensor, numerics: "Numerics") -> Tensor:
    """acc(x) times acc(w) transposed, kept in acc (SPEC 5).

    BF16 [..., K] and BF16 or F32 [N, K] -> acc [..., N].
    """
    return _product(x.double(), w.double(), numerics)


def grouped_linear(x: Tensor, w: QuantizedWeight, numerics: "Numerics") -> Tensor:
    """The product with wo_a: each group has its own rows of the weight (SPEC 5, attention step 7).

    BF16 [..., G, K] and FP8 [G * R, K] -> BF16 [..., G, R]. The weight is BF16(element * scale);
    x is not quantised.
    """
    groups = x.shape[-2]
    weights = to_bf16(dequantize(w)).double().reshape(groups, -1, x.shape[-1])
    parts = [_product(x[..., g, :].double(), weights[g], numerics) for g in range(groups)]
    return to_bf16(torch.stack(parts, dim=-2))


def _product(x: Tensor, w: Tensor, numerics: "Numerics") -> Tensor:
    if numerics.accumulate == "float32":
        return F.linear(x.float(), w.float())
    return readable_product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], -1)


def readable_product(x: Tensor, w: Tensor) -> Tensor:
    """The definition above, word for word; binary64 [M, K] and [N, K] -> [M, N]."""
    acc = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64)
    w_t = w.t().contiguous()
    for start in range(0, x.shape[1], GROUP):
        g = torch.zeros_like(acc)
        for k in range(start, min(start + GROUP, x.shape[1])):
            g += x[:, k, None] * w_t[k]
        acc += g
    return torch.where(acc.isnan(), torch.nan, acc)
