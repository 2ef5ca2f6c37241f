"""Random operands of products, ordinary and extreme, and the available backends."""

import pytest
import torch
from torch import Tensor

from v4tool.config import Numerics
from v4tool.quant.linear import QuantizedWeight, extension_problem

HAS_KERNEL = extension_problem() is None
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="the C kernel is not built")

FAST = ["numpy", pytest.param("c", marks=needs_kernel)]
"""The backends that must equal the readable one, as parameters of a test."""
THERE = ["numpy", "c"] if HAS_KERNEL else ["numpy"]
READABLE = Numerics(backend="readable")


def numerics(backend: str, threads: int = 1) -> Numerics:
    return Numerics.model_validate({"backend": backend, "threads": threads})


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes(g: torch.Generator, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=g)


def spread(g: torch.Generator, *shape: int, binades: int = 0) -> Tensor:
    """Normal variates, each times its own power of two of up to +- binades; binary64."""
    powers = torch.randint(-binades, binades + 1, shape, generator=g)
    return torch.randn(shape, generator=g, dtype=torch.float64) * torch.exp2(powers.double())


def fp4(
    g: torch.Generator, n: int, k: int, scales: tuple[int, int], block: int = 128
) -> QuantizedWeight:
    scale = codes(g, n, -(-k // 32), low=scales[0], high=scales[1])
    return QuantizedWeight(codes(g, n, k // 2), scale, "fp4", block)


def fp8(
    g: torch.Generator,
    n: int,
    k: int,
    scales: tuple[int, int],
    nan: bool = False,
    block: int = 128,
) -> QuantizedWeight:
    elements = codes(g, n, k)
    if not nan:
        elements[elements & 0x7F == 0x7F] = 0x80
    scale = codes(g, -(-n // block), -(-k // block), low=scales[0], high=scales[1])
    return QuantizedWeight(elements, scale, "fp8", block)
