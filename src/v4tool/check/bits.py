"""BF16 as 16-bit patterns in NumPy: conversion, rounding, and intervals that round to a value.

Follows SPEC section 4: binary64 is rounded to FP32 first, then to BF16, both to nearest even. It
shares no code with the port, which rounds through torch. Arrays of `Bits` hold BF16 values as the
upper halves of FP32 words.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

FP32_HALF_ULP = 2.0**-24
"""Largest relative error of rounding to FP32, in which accumulated values are recorded."""
SMALLEST_NORMAL = 0x00800000
"""FP32 bits of the smallest normal BF16 number, 2^-126."""
LARGEST = float(np.finfo(np.float32).max)
DOUBLE_ROUNDING = 2.0**-23
"""Relative distance from a BF16 boundary within which rounding to FP32 first may matter."""


def to_f32(bits: Bits) -> F32:
    """The values of BF16 bit patterns, exact: uint16 [...] -> F32 [...]."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f64(bits: Bits) -> F64:
    """The values of BF16 bit patterns in binary64."""
    return to_f32(bits).astype(np.float64)


def upper_halves(values: F32) -> Bits:
    """FP32 words without their lower 16 bits, without rounding: F32 [...] -> uint16 [...]."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def to_bf16(values: F64 | F32) -> Bits:
    """Round to FP32, then to BF16, to nearest even (SPEC 4): float [...] -> uint16 [...].

    Undefined for NaN.
    """
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    out = (words >> np.uint32(16)) & np.uint32(1)
    out += np.uint32(0x7FFF)
    out += words
    out >>= np.uint32(16)
    return out.astype(np.uint16)


def round_f32(values: F32) -> F32:
    """FP32 values rounded to BF16 precision, to nearest even: F32 [...] -> F32 [...]."""
    words = values.view(np.uint32)
    out = words >> np.uint32(16)
    out &= np.uint32(1)
    out += np.uint32(0x7FFF)
    out += words
    out &= np.uint32(0xFFFF0000)
    return out.view(np.float32)


def equal_values(a: Bits, b: Bits) -> Mask:
    """Whether BF16 values are equal, element by element; +0 equals -0."""
    return np.asarray((a == b) | (((a | b) & np.uint16(0x7FFF)) == 0))


def ordinals(bits: Bits) -> Ints:
    """Integers in the order of the values, BF16 neighbours 1 apart: uint16 [...] -> int64 [...]."""
    magnitude = (bits & np.uint16(0x7FFF)).astype(np.int64)
    return np.where(bits & np.uint16(0x8000), -magnitude, magnitude)


def rounding_interval(bits: Bits) -> tuple[F64, F64]:
    """Smallest and largest magnitude that round to each magnitude: uint16 [...] -> two F64 [...].

    Closed intervals, widened by DOUBLE_ROUNDING. 0 and subnormal values, whose neighbours are
    closer than that, share one interval around 0 that ends below the smallest normal value.
    """
    magnitude = (bits & np.uint16(0x7FFF)).astype(np.int32) << 16
    normal = magnitude >= SMALLEST_NORMAL
    words = np.where(normal, magnitude, SMALLEST_NORMAL - 0x8000)
    high = (words + 0x8000).view(np.float32).astype(np.float64)
    low = (words - 0x8000).view(np.float32).astype(np.float64)
    low = np.where(normal, low * (1 - DOUBLE_ROUNDING), -high)
    return low, high * (1 + DOUBLE_ROUNDING)


def holds_bf16(low: F64, high: F64) -> Mask:
    """Whether each closed interval contains a BF16 value; False if low > high."""
    with np.errstate(over="ignore", invalid="ignore"):
        words = np.clip(high, -LARGEST, LARGEST).astype(np.float32)
        below = np.nextafter(words, np.float32(-np.inf))
    words = np.where(words.astype(np.float64) > high, below, words)
    raw = words.view(np.uint32)
    negative = (raw >> np.uint32(31)).astype(bool)
    # the largest BF16 value not above `high` has a smaller magnitude if positive, else a larger one
    cut = np.where(negative, raw + np.uint32(0xFFFF), raw) & np.uint32(0xFFFF0000)
    largest = cut.astype(np.uint32).view(np.float32).astype(np.float64)
    return (low <= high) & (largest >= low)


def unravel(index: int, shape: tuple[int, ...]) -> list[int]:
    """A flat index as one index for each dimension of a shape."""
    return [int(i) for i in np.unravel_index(index, shape)]


def format_number(value: Any) -> str:
    """A number as messages show it, with nine significant digits."""
    return f"{float(value):.9g}"
