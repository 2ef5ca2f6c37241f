"""Decoding and encoding of E2M1, E4M3 and E8M0: tables, bit operations (SPEC sections 2 and 3).

E2M1 (FP4), E4M3 (FP8, the "fn" variant: no infinities, 0x7F and 0xFF are NaN) and E8M0 (scales,
0xFF is NaN). Decoding is a table look-up over all codes; encoding rounds to nearest, ties to the
even code, in binary64, so that it is exact for every FP32 and BF16 input. torch's float8 casts are
not used: their saturation and rounding differ from the release.
"""

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0


def _e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (8 + mantissa) * 2.0 ** (exponent - 10))


_E2M1_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1: Tensor = torch.tensor([*_E2M1_POSITIVE, *(-v for v in _E2M1_POSITIVE)], dtype=torch.float32)
"""[16] F32: the value of every E2M1 code; code + 8 is the negative, 8 is -0."""

E4M3: Tensor = torch.tensor([_e4m3_value(c) for c in range(256)], dtype=torch.float32)
"""[256] F32: the value of every E4M3 code; 0x7F and 0xFF are NaN."""

E8M0: Tensor = torch.tensor([2.0 ** (e - 127) for e in range(255)] + [float("nan")]).to(
    torch.float32
)
"""[256] F32: the value of every E8M0 code, 2^(e-127) (code 0: subnormal, exact); 255 is NaN."""


def unpack_fp4(packed: Tensor) -> Tensor:
    """Split bytes into E2M1 codes: uint8 [..., n] -> uint8 [..., 2n], low nibble first (SPEC 2)."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def e4m3_encode(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 code, ties to even, clamped to +-448; any float -> uint8.

    Values are first clamped, as the release does; NaN gives 0x7F with the sign kept (SPEC 3).
    """
    v = x.double()
    mag = v.abs().clamp(max=E4M3_MAX)
    exponent = torch.frexp(mag)[1].clamp(min=-5) - 1
    step = torch.ldexp(torch.ones_like(mag), exponent - 3)
    units = torch.round(mag / step).to(torch.int64)
    # units counts steps: 8..16 in a normal binade, 0..8 in the subnormal one; a carry to 16 is
    # the next binade
    code = torch.where(mag < 2.0**-6, units, units + 8 * (exponent + 6))
    code = torch.where(torch.isnan(v), torch.full_like(code, 0x7F), code)
    return (code | (torch.signbit(v).to(torch.int64) << 7)).to(torch.uint8)


def e2m1_encode(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 code, ties to even, clamped to +-6; any float -> uint8 (SPEC 3)."""
    v = x.double()
    mag = v.abs().clamp(max=E2M1_MAX)
    exponent = torch.frexp(mag)[1].clamp(min=1) - 1
    step = torch.ldexp(torch.ones_like(mag), exponent - 1)
    units = torch.round(mag / step).to(torch.int64)
    code = torch.where(mag < 1.0, units, units + 2 * exponent)
    return (code | (torch.signbit(v).to(torch.int64) << 3)).to(torch.uint8)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """table[codes] on the device of the codes: [n] and integer [...] -> [...]."""
    return table.to(codes.device)[codes.int()]
