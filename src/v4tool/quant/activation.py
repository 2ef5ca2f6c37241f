"""Activation quantisation to FP8 and FP4, and the Hadamard rotation (SPEC sections 3 and 5).

Scales are powers of two, so a BF16 value divided by its scale is again a BF16 value (or far below
half a step of the grid): rounding to E4M3 or E2M1 is a table look-up over all BF16 bit patterns. A
block with an infinity or a NaN gets the scale NaN (code 255), which SPEC leaves open. Left out: the
products (`linear`).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from v4tool.quant.formats import E2M1, E4M3, E8M0, e2m1_encode, e4m3_encode, look_up

if TYPE_CHECKING:
    import numpy as np

_ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
_FP8_CODE = torch.where(_ALL_BF16.isnan(), 0x7F, e4m3_encode(_ALL_BF16)).to(torch.uint8).numpy()
_FP4_CODE = torch.where(_ALL_BF16.isnan(), 0, e2m1_encode(_ALL_BF16)).to(torch.uint8).numpy()
_E8M0_BF16 = E8M0.bfloat16()
_INVERSE_BF16 = (1.0 / E8M0.double()).bfloat16()


def _scale_codes(amax: Tensor, floor: float, inverse_max: float) -> Tensor:
    """E8M0 code of 2^ceil(log2(max(amax, floor) / max)); F32 [...] -> uint8; not finite: 255.

    The ceiling is taken from the bits of one FP32 product: the exponent, plus one if any mantissa
    bit is set. The floors keep the product a normal number.
    """
    factor = torch.tensor(inverse_max, dtype=torch.float32)
    least = torch.tensor(floor, dtype=torch.float32)
    bits = (torch.maximum(amax, least) * factor).view(torch.int32)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return torch.where(amax.isfinite(), code, 255).to(torch.uint8)


def fp8_scale(amax: Tensor) -> Tensor:
    """Scale code of an FP8 block with largest magnitude amax: F32 [...] -> uint8 [...] (SPEC 3)."""
    return _scale_codes(amax, 1e-4, 1 / 448)


def fp4_scale(amax: Tensor) -> Tensor:
    """Scale code of an FP4 block with largest magnitude amax: F32 [...] -> uint8 [...] (SPEC 3)."""
    return _scale_codes(amax, 6 * 2.0**-126, 1 / 6)


def _blocks(x: Tensor, block: int) -> Tensor:
    """Split the last dimension: BF16 [..., n] -> [..., ceil(n / block), block], zero-padded."""
    missing = -x.shape[-1] % block
    padded = F.pad(x, (0, missing)) if missing else x
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // block, block)


def _amax(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, F32. Bits without the sign are ordered as magnitudes."""
    bits = (blocks.contiguous().view(torch.int16) & 0x7FFF).amax(-1)
    return bits.view(torch.bfloat16).float()


def _quotient_bits(blocks: Tensor, scale: Tensor) -> Tensor:
    """Bits of x / scale, exact in BF16 unless it rounds to code 0: uint16, shape of blocks."""
    return (blocks * look_up(_INVERSE_BF16, scale).unsqueeze(-1)).view(torch.uint16)


def _take(table: "np.ndarray[Any, Any]", bits: Tensor) -> Tensor:
    """table[bits]: [65536] and uint16 [...] -> [...]. On the CPU by NumPy, which is faster."""
    if bits.device.type == "cpu":
        return torch.from_numpy(table.take(bits.numpy()))
    return look_up(torch.from_numpy(table), bits)


def act_quant(x: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise to E4M3 with one power-of-two scale per block of the last dimension (SPEC 3).

    BF16 [..., n] -> (codes uint8 [..., n], E8M0 scale codes uint8 [..., ceil(n / block)]).
    """
    blocks = _blocks(x, block)
    scale = fp8_scale(_amax(blocks))
    codes = _take(_FP8_CODE, _quotient_bits(blocks, scale))
    return codes.flatten(-2)[..., : x.shape[-1]], scale


_FP8_VALUE = E4M3[torch.from_numpy(_FP8_CODE).int()].bfloat16().view(torch.int16).numpy()
_FP4_VALUE = E2M1[torch.from_numpy(_FP4_CODE).int()].bfloat16().view(torch.int16).numpy()


def act_quant_inplace(x: Tensor, block: int) -> Tensor:
    """Quantise to E4M3 and back, BF16(q * scale), as the release's in-place act_quant (SPEC 3).

    BF16 [..., n] -> the same. Unlike in the release, x is not modified.
    """
    blocks = _blocks(x, block)
    scale = fp8_scale(_amax(blocks))
    q = _take(_FP8_VALUE, _quotient_bits(blocks, scale))
    out = q.view(torch.bfloat16) * look_up(_E8M0_BF16, scale).unsqueeze(-1)
    return out.flatten(-2)[..., : x.shape[-1]]


def fp4_act_quant(x: Tensor, block: int = 32) -> Tensor:
    """Quantise to E2M1 and back with one scale per block: BF16 [..., n] -> the same (SPEC 3)."""
    blocks = _blocks(x, block)
    scale = fp4_scale(_amax(blocks))
    q = _take(_FP4_VALUE, _quotient_bits(blocks, scale))
    out = q.view(torch.bfloat16) * look_up(_E8M0_BF16, scale).unsqueeze(-1)
    return out.flatten(-2)[..., : x.shape[-1]]


def hadamard(x: Tensor, acc: torch.dtype = torch.float64) -> Tensor:
    """Hadamard transform of the last dimension: the natural-order Sylvester matrix over sqrt(n).

    BF16 [..., n] -> the same. Evaluated in `acc` as log2(n) stages of sums and differences in a
    fixed order, scaled once at the end (SPEC 5, "Indexer"). n must be a power of two.
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"the Hadamard rotation needs a power of two, not {n}")
    rows = x.reshape(-1, n)
    # few enough rows at a time to stay in the cache through all stages
    parts = [_hadamard(part.to(acc)) for part in rows.split(max(1, 2**15 // n))]
    return torch.cat(parts).reshape(x.shape) if parts else x.clone()


def _hadamard(y: Tensor) -> Tensor:
    """The transform of acc [rows, n], which is overwritten -> BF16 [rows, n]."""
    n, half = y.shape[1], 1
    while half < n:
        a, b = y.view(-1, n // (2 * half), 2, half).unbind(2)
        difference = a - b
        a += b
        b.copy_(difference)
        half *= 2
    y *= n**-0.5
    return to_bf16(y)


def to_bf16(x: Tensor) -> Tensor:
    """Round to FP32, then to BF16, both to nearest even (SPEC 4); every NaN becomes 0x7FC0.

    torch gives NaNs different bits in the vectorised and the scalar part of one conversion.
    """
    return x.float().bfloat16().nan_to_num_(torch.nan, torch.inf, -torch.inf)
