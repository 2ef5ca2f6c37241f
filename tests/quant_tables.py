"""The golden quantisation tables, and comparison by bits, for tests of v4tool.quant."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

QUANT_TABLES = load_file(Path(__file__).parent / "golden_tables" / "quant_tables.safetensors")
"""SPEC 3: scale codes of every finite non-negative BF16 amax, codes of every finite BF16 value."""

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit agree; to torch.equal -0 is 0 and NaN is not itself."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    as_integer = _INTEGER[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(as_integer), b.contiguous().view(as_integer))


def all_bf16() -> Tensor:
    """Every BF16 value by its bits, [65536]."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
