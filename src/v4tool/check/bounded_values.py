"""Sums with error bounds and their comparison with recorded BF16 values (SPEC section 5, HC).

Coefficients of hyper-connections are recorded rounded to FP32, so each recomputed sum has an error
bound: `FP32_HALF_ULP` times the sum of its terms' magnitudes. Where a rounding boundary of BF16
lies within that bound, both neighbours are accepted, and only there. An intermediate value that is
not recorded itself keeps its error bound in the sums that follow (`BoundedValues`). s tokens,
D dim, K terms and J results of a sum.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import (
    F32,
    F64,
    FP32_HALF_ULP,
    Bits,
    equal_values,
    format_number,
    ordinals,
    round_f32,
    to_bf16,
    to_f64,
)
from v4tool.check.block_pass import BlockPass
from v4tool.check.findings import value_of

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SparseError:
    """Error bounds of an array of which few elements have any.

    indices: flat indices, ascending, int64 [n]; bounds: absolute error at each, F64 [n].
    """

    indices: Indices
    bounds: F64

    def at(self, indices: Indices) -> F64:
        """The bounds at some flat indices, 0 for elements without error."""
        if not self.indices.size:
            return np.zeros(indices.size)
        found = np.minimum(np.searchsorted(self.indices, indices), self.indices.size - 1)
        return np.where(self.indices[found] == indices, self.bounds[found], 0.0)


NO_ERROR = SparseError(np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True)
class BoundedValues:
    """Values F64 [s, K, D] with absolute error bounds.

    buffer: [s, 1 + K, D], whose rows from 1 on are `values`; `post_terms` fills row 0 in place.
    """

    values: F64
    error: SparseError = NO_ERROR
    buffer: F64 | None = None

    def dense_error(self) -> F64:
        """The error bounds as an array of the values' shape."""
        dense = np.zeros(self.values.shape)
        dense.reshape(-1)[self.error.indices] = self.error.bounds
        return dense


def term_buffer(s: int, k: int, d: int) -> F64:
    """An uninitialised buffer for values [s, k, d] and one more term before them."""
    return np.empty((s, 1 + k, d))


def propagated_error(coefficients: F64, terms: BoundedValues) -> SparseError:
    """The part of the sums' error that comes from their terms' error.

    coefficients [s, J, K], terms [s, K, D] -> bounds for [s, J, D].
    """
    if not terms.error.indices.size:
        return NO_ERROR
    s, k, d = np.unravel_index(terms.error.indices, terms.values.shape)
    streams, width = coefficients.shape[1], terms.values.shape[2]
    positions = (s[:, None] * streams + np.arange(streams)) * width + d[:, None]
    amounts = np.abs(coefficients[s, :, k]) * terms.error.bounds[:, None]
    indices, inverse = np.unique(positions, return_inverse=True)
    totals = np.bincount(inverse.reshape(-1), amounts.reshape(-1), len(indices))
    return SparseError(indices, totals.astype(np.float64))


def error_of_sums(
    indices: Indices, coefficients: F64, terms: BoundedValues, from_terms: SparseError
) -> F64:
    """Error bounds of the sums at flat indices of [s, J, D]: F64 [n].

    from_terms: the part that `propagated_error` gives; the coefficients' rounding is added to it.
    """
    s, j, d = np.unravel_index(indices, (*coefficients.shape[:2], terms.values.shape[2]))
    sizes = (np.abs(coefficients[s, j]) * np.abs(terms.values[s, :, d])).sum(-1)
    return np.asarray(FP32_HALF_ULP * (1 + 1e-6) * sizes + from_terms.at(indices))


def bounded_sums(coefficients: F64, terms: BoundedValues) -> BoundedValues:
    """Sums rounded to BF16; those that may round to a neighbour as well have an error bound.

    coefficients [s, J, K], terms [s, K, D] -> [s, J, D].
    """
    sums: F64 = coefficients @ terms.values
    words = sums.astype(np.float32)
    buffer = term_buffer(*sums.shape)
    buffer[:, 1:] = round_f32(words)
    from_terms = propagated_error(coefficients, terms)
    indices = _near_boundary(words, coefficients, terms, from_terms)
    error = error_of_sums(indices, coefficients, terms, from_terms)
    near = sums.reshape(-1)[indices]
    low, high = to_f64(to_bf16(near - error)), to_f64(to_bf16(near + error))
    ambiguous = low != high
    bounds = SparseError(indices[ambiguous], (high - low)[ambiguous])
    return BoundedValues(buffer[:, 1:], bounds, buffer)


def _near_boundary(
    words: F32, coefficients: F64, terms: BoundedValues, from_terms: SparseError
) -> Indices:
    """Flat indices of the sums whose error bound may reach a rounding boundary of BF16.

    A superset: the bound is taken from the largest magnitudes, which is cheap to compute.
    """
    largest = np.maximum(terms.values.max(-1), -terms.values.min(-1))[..., None]
    error = (np.abs(coefficients) @ largest * FP32_HALF_ULP * 1.01).astype(np.float32)
    # between two BF16 neighbours the boundary is the midpoint, FP32 word 0x....8000
    middle = words.view(np.uint32) & np.uint32(0xFFFF0000)
    middle |= np.uint32(0x8000)
    distance = middle.view(np.float32)
    distance -= words
    np.abs(distance, out=distance)
    # the sum was rounded to FP32, which moved it by up to half an ulp
    error = error + np.abs(words).max(-1, keepdims=True) * np.float32(2**-24)
    near = np.flatnonzero(distance <= error)
    return np.union1d(near, from_terms.indices) if from_terms.indices.size else near


class BoundedComparison:
    """Recorded BF16 values compared with sums that have an error bound, in pieces.

    `close` reports at most one finding, with the first wrong value and how many there are.
    """

    def __init__(self, block: BlockPass, rule: str, key: str, sources: list[str]) -> None:
        self.block, self.rule, self.key, self.sources = block, rule, key, sources
        self.count = self.wrong = 0
        self.first: tuple[int, str, str] | None = None

    def add(self, start: int, found: Bits, coefficients: F64, terms: BoundedValues) -> None:
        """Compare bits [s, J, D] with the sums; `start`: flat index of the first one in the key."""
        sums: F64 = coefficients @ terms.values
        expected = to_bf16(sums)
        self.count += found.size
        differ = np.flatnonzero(~equal_values(found, expected).reshape(-1))
        if not differ.size:
            return
        error = error_of_sums(differ, coefficients, terms, propagated_error(coefficients, terms))
        exact, seen = sums.reshape(-1)[differ], ordinals(found.reshape(-1)[differ])
        low, high = ordinals(to_bf16(exact - error)), ordinals(to_bf16(exact + error))
        wrong = differ[(seen < low) | (seen > high)]
        self.wrong += wrong.size
        if wrong.size and self.first is None:
            i = int(wrong[0])
            shown = [format_number(value_of(bits.reshape(-1)[i])) for bits in (expected, found)]
            self.first = (start + i, shown[0], shown[1])

    def close(self) -> None:
        """Count the values under the rule, and report a finding if one was wrong."""
        findings = self.block.findings
        findings.applied(self.rule, [self.key, *self.sources], self.count)
        if self.first is None:
            return
        index, expected, found = self.first
        where = findings.indices(self.key, index, (self.count,))
        findings.report(
            self.key,
            self.rule,
            f"{expected} at {where} (from {', '.join(self.sources)})",
            f"{found}; {self.wrong} of {self.count} values differ",
        )
