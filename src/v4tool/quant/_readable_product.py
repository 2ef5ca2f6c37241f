"""Reference backend of `linear` in plain torch; the C and NumPy backends must equal its bits."""

import torch
from torch import Tensor

from v4tool.quant._weight import QuantizedWeight, Weight, dequantize, in_memory
from v4tool.quant.activation import act_quant, to_bf16
from v4tool.quant.formats import E4M3, E8M0, look_up


def quantized(x: Tensor, w: Weight, threads: int = 1) -> Tensor:
    """BF16 [M, K], quantised by act_quant, times w [N, K] -> BF16 [M, N]."""
    w = in_memory(w)
    values = activation(*act_quant(x, w.block), w.block)
    return to_bf16(product(values, dequantize(w), 32 if w.kind == "fp4" else 128))


def plain(x: Tensor, w: Tensor, threads: int = 1) -> Tensor:
    """BF16 [M, K] times BF16 or F32 [N, K] -> binary64 [M, N]."""
    return product(x.double(), w.double(), 128)


def grouped(x: Tensor, w: Weight, threads: int = 1) -> Tensor:
    """BF16 [M, G, K] times BF16 of the values of w [G * R, K] -> BF16 [M, G, R]."""
    w = in_memory(w)
    weights = bf16_values(w, x.shape[1])
    parts = [product(x[:, g].double(), weights[g], 128) for g in range(x.shape[1])]
    return to_bf16(torch.stack(parts, dim=1))


def activation(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Values of x quantised by act_quant, F64 [M, K]: codes [M, K], scale [M, ceil(K / block)]."""
    scales = look_up(E8M0, scale).double().repeat_interleave(block, -1)
    return look_up(E4M3, codes).double() * scales[:, : codes.shape[1]]


def bf16_values(w: QuantizedWeight, groups: int) -> Tensor:
    """BF16(element * scale) of a weight [G * R, K]; binary64 [G, R, K]."""
    return to_bf16(dequantize(w)).double().reshape(groups, -1, w.shape[1])


def product(x: Tensor, w: Tensor, group: int) -> Tensor:
    """The definition in `linear`, literally: binary64 [M, K] and [N, K] -> [M, N]."""
    acc = x.new_zeros(x.shape[0], w.shape[0])
    w_t = w.t().contiguous()
    for start in range(0, x.shape[1], group):
        g = torch.zeros_like(acc)
        for k in range(start, min(start + group, x.shape[1])):
            g.addcmul_(x[:, k, None], w_t[k])
        acc += g
    return torch.where(acc.isnan(), torch.nan, acc)
