"""Correct and incorrect operators to inject: products with any values, attention with switches.

With neutral settings each gives the port's own bits (`test_not_faults`), so that a fault made of it
changes what it says and nothing else.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from v4tool.config import Numerics
from v4tool.quant.activation import act_quant, to_bf16
from v4tool.quant.formats import E4M3, E8M0
from v4tool.quant.linear import QuantizedWeight, Weight, dequantize, in_memory

Values = Callable[[Tensor], Tensor]


def quantised(x: Tensor) -> Tensor:
    """What the product sees of BF16 activations: q times scale in binary64, FP8 per 128."""
    codes, scale = act_quant(x)
    scales = E8M0.double()[scale.int()].repeat_interleave(128, -1)[..., : x.shape[-1]]
    return E4M3.double()[codes.int()] * scales


def q_linear_of(
    activations: Values = quantised, weights: Callable[[QuantizedWeight], Tensor] = dequantize
) -> Callable[[Tensor, Weight, Numerics], Tensor]:
    """A `q_linear` that sees other activations or other weights."""

    def q_linear(x: Tensor, w: Weight, numerics: Numerics) -> Tensor:
        return to_bf16(activations(x) @ weights(in_memory(w)).T)

    return q_linear


def rescaled(scale_of: Callable[[Tensor], Tensor], read_with: Callable[[Tensor], Tensor]) -> Values:
    """Activations in FP8 with another scale per 128: made with one scale, read with another.

    Both take amax / 448, FP32, to the scale.
    """

    def values(x: Tensor) -> Tensor:
        missing = -x.shape[-1] % 128
        blocks = torch.nn.functional.pad(x.float(), (0, missing)).unflatten(-1, (-1, 128))
        ratio = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) * torch.tensor(1 / 448)
        q = (blocks / scale_of(ratio)).clamp(-448, 448).to(torch.float8_e4m3fn)
        out = q.double() * read_with(ratio).double()
        return out.flatten(-2)[..., : x.shape[-1]]

    return values


def ceil_power(x: Tensor) -> Tensor:
    """The power of two at or above."""
    return torch.exp2(torch.ceil(torch.log2(x.double()))).float()


def floor_power(x: Tensor) -> Tensor:
    """The power of two at or below."""
    return torch.exp2(torch.floor(torch.log2(x.double()))).float()


def nearest_power(x: Tensor) -> Tensor:
    """The power of two whose exponent is nearest."""
    return torch.exp2(torch.round(torch.log2(x.double()))).float()


def attention_of(
    *,
    softmax_scale: float = 1.0,
    sink: Callable[[Tensor], Tensor] = lambda s: s,
    pad: str = "nothing",
    round_p: bool = True,
    round_denominator: bool = False,
    block: int = 64,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Numerics], Tensor]:
    """A `sparse_attn` with one rule changed; pad: what -1 means (`nothing`, `row`: the last one,
    `zero`)."""

    def sparse_attn(
        q: Tensor, kv: Tensor, table: Tensor, sinks: Tensor, numerics: Numerics
    ) -> Tensor:
        outs = [_one(q[i], kv, table[i].long(), sink(sinks)) for i in range(len(q))]
        return torch.stack(outs)

    def _one(q: Tensor, kv: Tensor, table: Tensor, sinks: Tensor) -> Tensor:
        rows = kv[table].double()  # -1 takes the last row
        scores = q.double() @ rows.T * q.shape[-1] ** -0.5 * softmax_scale
        if pad != "row":
            scores = torch.where(table < 0, 0.0 if pad == "zero" else -math.inf, scores)
        m = torch.full((len(q), 1), -math.inf, dtype=torch.float64)
        above, below = torch.zeros(q.shape, dtype=torch.float64), torch.zeros_like(m)
        for i in range(0, len(table), block):
            part = scores[:, i : i + block]
            new = torch.maximum(m, part.amax(-1, keepdim=True))
            p, shrink = torch.exp(part - new), torch.exp(m - new)
            numerator = to_bf16(p).double() if round_p else p
            above = above * shrink + numerator @ rows[i : i + block]
            below = below * shrink + (numerator if round_denominator else p).sum(-1, keepdim=True)
            m = new
        return to_bf16(above / (below + torch.exp(sinks.double()[:, None] - m)))

    return sparse_attn
