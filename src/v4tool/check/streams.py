"""Identities of the residual streams: block input, hyper-connections, norms (SPEC section 5, HC).

The hyper-connections' coefficients are recorded rounded to FP32, so each recomputed sum has an
error bound: `FP32_HALF_ULP` times the sum of its terms' magnitudes. Where a rounding boundary of
BF16 lies within that bound, both neighbours are accepted, and only there. An intermediate value
that is not recorded itself keeps its error bound in the sums that follow (`BoundedValues`).
s tokens, M streams, D dim, K terms and J results of a sum.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from v4tool.check.attention import norm
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
    to_f32,
    to_f64,
)
from v4tool.check.block_pass import BlockPass
from v4tool.check.findings import value_of
from v4tool.check.weight_bounds import RowBounds, norm_bounds

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


@dataclass(frozen=True)
class Streams:
    """The residual streams at a block's input. sources: the keys that they are computed from."""

    block: BlockPass
    sources: list[str]

    @classmethod
    def before(cls, block: BlockPass) -> "Streams | None":
        """The input streams of a block, or None if the file lacks a key that they come from."""
        if block.is_mtp:
            sources = [block.key("e_proj.out"), block.key("h_proj.out")]
        elif block.layer == 0:
            sources = [block.pass_prefix + "embed.out"]
        else:
            sources = [f"{block.pass_prefix}layers.{block.layer - 1}.out"]
        return cls(block, sources) if block.tensors.has(*sources) else None

    def read(self, start: int, stop: int) -> BoundedValues:
        """The streams of tokens start ... stop - 1: BF16 values [s, M, D] without error."""
        tensors, config = self.block.tensors, self.block.config
        buffer = term_buffer(stop - start, config.hc_mult, config.dim)
        values = to_f32(tensors.bits(self.sources[0], start, stop))
        if self.block.is_mtp:
            sums = to_f64(tensors.bits(self.sources[1], start, stop)) + values[:, None]
            buffer[:, 1:] = to_f32(to_bf16(sums))
        else:
            buffer[:, 1:] = values[:, None] if self.block.layer == 0 else values
        return BoundedValues(buffer[:, 1:], buffer=buffer)


def check_streams(block: BlockPass) -> None:
    """Both norms of a block, and its output streams, recomputed from its input streams."""
    entering = Streams.before(block)
    if entering is None or not block.has("hc_attn.pre"):
        return
    attn = _Norm(block, "attn_norm", "attn_norm.out", [*entering.sources, block.key("hc_attn.pre")])
    middle = [block.key(f"hc_attn.{name}") for name in ("post", "comb")] + [block.key("attn.out")]
    goes_on = block.tensors.has(*middle) and block.has("hc_ffn.pre")
    ffn = _Norm(
        block, "ffn_norm", "ffn_norm.out", [*entering.sources, *middle, block.key("hc_ffn.pre")]
    )
    last = [block.key(f"hc_ffn.{name}") for name in ("post", "comb")] + [block.key("ffn.out")]
    leaving = block.key("out")
    ends = goes_on and not block.is_mtp and block.tensors.has(leaving, *last)
    outgoing = BoundedComparison(block, "streams", leaving, [*entering.sources, *middle, *last])
    width = block.config.hc_mult * block.config.dim
    for start, stop in block.pieces(width):
        x = entering.read(start, stop)
        attn.add(start, stop, bounded_sums(_pre(block, "hc_attn", start, stop), x))
        if not goes_on:
            continue
        x = bounded_sums(*post_terms(block, "hc_attn", "attn.out", x, start, stop))
        ffn.add(start, stop, bounded_sums(_pre(block, "hc_ffn", start, stop), x))
        if ends:
            found = block.tensors.bits(leaving, start, stop)
            post = post_terms(block, "hc_ffn", "ffn.out", x, start, stop)
            outgoing.add(start * width, found, *post)
    attn.close()
    if goes_on:
        ffn.close()
    if ends:
        outgoing.close()


def middle_streams(
    block: BlockPass, x: BoundedValues, start: int, stop: int
) -> BoundedValues | None:
    """The streams between attention and experts of tokens start ... stop - 1: [s, M, D].

    x: the input streams of these tokens. None if a key is missing.
    """
    if not block.has("hc_attn.post", "hc_attn.comb", "attn.out"):
        return None
    return bounded_sums(*post_terms(block, "hc_attn", "attn.out", x, start, stop))


def _pre(block: BlockPass, name: str, start: int, stop: int) -> F64:
    """`pre` of tokens start ... stop - 1 as coefficients [s, 1, M]."""
    return block.tensors.floats(block.key(f"{name}.pre"), start, stop).astype(np.float64)[:, None]


def post_terms(
    block: BlockPass, name: str, result: str, x: BoundedValues, start: int, stop: int
) -> tuple[F64, BoundedValues]:
    """hc_post as one sum: coefficients [s, M, 1 + M] and terms [s, 1 + M, D].

    The first term is the sublayer's result (key `result`), the others are the streams x.
    """
    tensors = block.tensors
    post = tensors.floats(block.key(f"{name}.post"), start, stop).astype(np.float64)
    comb = tensors.floats(block.key(f"{name}.comb"), start, stop).astype(np.float64)
    coefficients = np.concatenate([post[..., None], comb.swapaxes(1, 2)], axis=2)
    buffer = x.buffer
    if buffer is None:
        buffer = term_buffer(*x.values.shape)
        buffer[:, 1:] = x.values
    buffer[:, 0] = to_f32(tensors.bits(block.key(result), start, stop))
    # stream k of token s is term k + 1 of the sum, so flat indices move by one row a token
    k, width = x.values.shape[1:]
    moved = x.error.indices + (x.error.indices // (k * width) + 1) * width
    return coefficients, BoundedValues(buffer, SparseError(moved, x.error.bounds))


class _Norm:
    """Bounds of the unknown weight of a norm whose input is the streams weighted by `pre`."""

    def __init__(self, block: BlockPass, rule: str, out: str, sources: list[str]) -> None:
        self.block, self.rule, self.out = block, rule, out
        self.bounds = RowBounds(block.key(out), tuple(sources), block.config.dim, discrete=True)

    def add(self, start: int, stop: int, y: BoundedValues) -> None:
        """Add the bounds that tokens start ... stop - 1 give; y: the norm's input, [s, 1, D]."""
        if self.block.has(self.out):
            out = self.block.tensors.bits(self.block.key(self.out), start, stop)
            values = y.values[:, 0].astype(np.float32)
            error = y.error.indices, y.error.bounds
            self.bounds.add(*norm_bounds(out, values, self.block.config.norm_eps, error))

    def close(self) -> None:
        """Add the bounds to those of other passes, which are intersected at the end."""
        if self.bounds.rows:
            name = f"{self.block.weights}{self.out.removesuffix('.out')}.weight"
            self.block.weight_bounds.add(self.rule, name, self.bounds)


def check_mtp_input(block: BlockPass) -> None:
    """MTP's own keys: its two input norms and projections, and the copies of its logits."""
    tensors = block.tensors
    norm(block, "enorm", "embed.out", "enorm.out")
    _check_hnorm(block)
    if block.has("enorm.out"):
        rows = tensors.bits(block.key("enorm.out"))
        block.duplicates.add(block.weights, rows, block.prefix, ["e_proj.out"], "enorm.out")
    if block.has("hnorm.out"):
        rows = tensors.bits(block.key("hnorm.out")).reshape(-1, block.config.dim)
        block.duplicates.add(block.weights, rows, block.prefix, ["h_proj.out"], "hnorm.out")
    for name in ("out", "logits.out"):
        if block.has(name, "head.out"):
            source = block.key("head.out")
            found, expected = tensors.floats(block.key(name)), tensors.floats(source)
            words = [values.view(np.uint32) for values in (found, expected)]
            block.findings.equal("logits", block.key(name), words[0], words[1], [source])


def _check_hnorm(block: BlockPass) -> None:
    """`hnorm` of the last layer's streams: the MTP prefill takes all positions, the MTP decode
    step the last.
    """
    streams = f"layers.{block.config.n_layers - 1}.out"
    if not (block.has("hnorm.out") and streams in block.tensors):
        return
    tensors, dim, tokens = block.tensors, block.config.dim, block.step.tokens
    first = tensors.count(streams) - tokens
    bounds = RowBounds(block.key("hnorm.out"), (streams,), dim, discrete=True)
    for start, stop in block.pieces(block.config.hc_mult * dim):
        x = to_f32(tensors.bits(streams, first + start, first + stop)).reshape(-1, dim)
        out = tensors.bits(block.key("hnorm.out"), start, stop).reshape(-1, dim)
        bounds.add(*norm_bounds(out, x, block.config.norm_eps))
    block.weight_bounds.add("hnorm", f"{block.weights}hnorm.weight", bounds)
