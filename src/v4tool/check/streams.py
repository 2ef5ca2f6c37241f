"""Identities of the residual streams: what enters a block, hyper-connections, norms (SPEC
section 5, HC).

The coefficients are recorded rounded to FP32, so a recomputed value is known only to within
`FP32_HALF_ULP` of the sum of its terms. Where a boundary of BF16 lies that close, both
neighbours are accepted, and nowhere else; where such a value is not recorded itself but goes
on, it is carried as unsure by one BF16 step. s tokens, M streams, D dim.
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
    """A few places of an array and a number for each: flat indices, ascending, and F64 of that
    length.
    """

    where: Indices
    amount: F64

    def at(self, where: Indices) -> F64:
        """The numbers at some flat indices, 0 where there is none."""
        if not self.where.size:
            return np.zeros(where.size)
        place = np.minimum(np.searchsorted(self.where, where), self.where.size - 1)
        return np.where(self.where[place] == where, self.amount[place], 0.0)


NO_ERROR = SparseError(np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True)
class BoundedValues:
    """Values F64 [s, K, D] of which a few are unsure.

    spread: where, and how far the real value may lie from the one given; room: a buffer [s, 1 +
    K, D] that holds the values behind a free first row, for `post_terms`.
    """

    values: F64
    spread: SparseError = NO_ERROR
    room: F64 | None = None

    def dense_spread(self) -> F64:
        """The spread as an array of the values' shape."""
        dense = np.zeros(self.values.shape)
        dense.reshape(-1)[self.spread.where] = self.spread.amount
        return dense


def term_buffer(s: int, k: int, d: int) -> F64:
    """A buffer for values [s, k, d] with room for one more term in front."""
    return np.empty((s, 1 + k, d))


def propagated_error(coefficients: F64, terms: BoundedValues) -> SparseError:
    """How far sums may be off because terms are: coefficients [s, J, K], terms [s, K, D]."""
    if not terms.spread.where.size:
        return NO_ERROR
    s, k, d = np.unravel_index(terms.spread.where, terms.values.shape)
    streams, width = coefficients.shape[1], terms.values.shape[2]
    positions = (s[:, None] * streams + np.arange(streams)) * width + d[:, None]
    amounts = np.abs(coefficients[s, :, k]) * terms.spread.amount[:, None]
    where, back = np.unique(positions, return_inverse=True)
    totals = np.bincount(back.reshape(-1), amounts.reshape(-1), len(where))
    return SparseError(where, totals.astype(np.float64))


def error_of_sums(
    where: Indices, coefficients: F64, terms: BoundedValues, extra: SparseError
) -> F64:
    """How far the sums at flat indices of [s, J, D] may be off."""
    s, j, d = np.unravel_index(where, (*coefficients.shape[:2], terms.values.shape[2]))
    sizes = (np.abs(coefficients[s, j]) * np.abs(terms.values[s, :, d])).sum(-1)
    return np.asarray(FP32_HALF_ULP * (1 + 1e-6) * sizes + extra.at(where))


def bounded_sums(coefficients: F64, terms: BoundedValues) -> BoundedValues:
    """The BF16 value of each sum, unsure where the sum is too close to a boundary.

    coefficients [s, J, K], terms [s, K, D] -> [s, J, D].
    """
    sums: F64 = coefficients @ terms.values
    words = sums.astype(np.float32)
    room = term_buffer(*sums.shape)
    room[:, 1:] = round_f32(words)
    extra = propagated_error(coefficients, terms)
    where = _close(words, coefficients, terms, extra)
    error = error_of_sums(where, coefficients, terms, extra)
    at = sums.reshape(-1)[where]
    low, high = to_f64(to_bf16(at - error)), to_f64(to_bf16(at + error))
    unsure = low != high
    return BoundedValues(room[:, 1:], SparseError(where[unsure], (high - low)[unsure]), room)


def _close(words: F32, coefficients: F64, terms: BoundedValues, extra: SparseError) -> Indices:
    """Flat indices of the sums that may lie within their error of a BF16 boundary (some too
    many).
    """
    largest = np.maximum(terms.values.max(-1), -terms.values.min(-1))[..., None]
    error = (np.abs(coefficients) @ largest * FP32_HALF_ULP * 1.01).astype(np.float32)
    # the boundary of BF16 in the middle of the step that a word lies in
    middle = words.view(np.uint32) & np.uint32(0xFFFF0000)
    middle |= np.uint32(0x8000)
    distance = middle.view(np.float32)
    distance -= words
    np.abs(distance, out=distance)
    # rounding to FP32 has moved the word by as much as half its last place
    error = error + np.abs(words).max(-1, keepdims=True) * np.float32(2**-24)
    near = np.flatnonzero(distance <= error)
    return np.union1d(near, extra.where) if extra.where.size else near


class BoundedComparison:
    """Recorded values against sums with an error, in pieces; reports once."""

    def __init__(self, block: BlockPass, rule: str, key: str, of: list[str]) -> None:
        self.block, self.rule, self.key, self.of = block, rule, key, of
        self.count = self.accepted = self.wrong = 0
        self.first: tuple[int, str, str] | None = None

    def add(self, start: int, found: Bits, coefficients: F64, terms: BoundedValues) -> None:
        """Compare found bits [s, J, D] with the sums; `start`: flat index of the first one."""
        sums: F64 = coefficients @ terms.values
        expected = to_bf16(sums)
        self.count += found.size
        where = np.flatnonzero(~equal_values(found, expected).reshape(-1))
        if not where.size:
            return
        error = error_of_sums(where, coefficients, terms, propagated_error(coefficients, terms))
        at, seen = sums.reshape(-1)[where], ordinals(found.reshape(-1)[where])
        fits = (ordinals(to_bf16(at - error)) <= seen) & (seen <= ordinals(to_bf16(at + error)))
        self.accepted += int(fits.sum())
        wrong = where[~fits]
        self.wrong += wrong.size
        if wrong.size and self.first is None:
            i = int(wrong[0])
            shown = [format_number(value_of(bits.reshape(-1)[i])) for bits in (expected, found)]
            self.first = (start + i, shown[0], shown[1])

    def close(self) -> None:
        """Report what was found."""
        findings = self.block.findings
        findings.applied(self.rule, [self.key, *self.of], self.count)
        if self.first is None:
            return
        index, expected, found = self.first
        where = findings.indices(self.key, index, (self.count,))
        findings.report(
            self.key,
            self.rule,
            f"{expected} at {where} (from {', '.join(self.of)})",
            f"{found}; {self.wrong} of {self.count} values differ",
        )


@dataclass(frozen=True)
class Streams:
    """What enters a block: where it comes from, and how to read some tokens of it."""

    block: BlockPass
    of: list[str]

    @classmethod
    def before(cls, block: BlockPass) -> "Streams | None":
        """The streams that enter the block, or None where the file lacks what they are made of."""
        if block.is_mtp:
            of = [block.key("e_proj.out"), block.key("h_proj.out")]
        elif block.layer == 0:
            of = [block.pass_prefix + "embed.out"]
        else:
            of = [f"{block.pass_prefix}layers.{block.layer - 1}.out"]
        return cls(block, of) if block.tensors.has(*of) else None

    def read(self, start: int, stop: int) -> BoundedValues:
        """BF16 values of some tokens: [s, M, D], all of them sure."""
        tensors, config = self.block.tensors, self.block.config
        room = term_buffer(stop - start, config.hc_mult, config.dim)
        values = to_f32(tensors.bits(self.of[0], start, stop))
        if self.block.is_mtp:
            sums = to_f64(tensors.bits(self.of[1], start, stop)) + values[:, None]
            room[:, 1:] = to_f32(to_bf16(sums))
        else:
            room[:, 1:] = values[:, None] if self.block.layer == 0 else values
        return BoundedValues(room[:, 1:], room=room)


def check_streams(block: BlockPass) -> None:
    """Norms of the mixed streams, and the streams that leave the block."""
    entering = Streams.before(block)
    if entering is None or not block.has("hc_attn.pre"):
        return
    attn = _Norm(block, "attn_norm", "attn_norm.out", [*entering.of, block.key("hc_attn.pre")])
    middle = [block.key(f"hc_attn.{name}") for name in ("post", "comb")] + [block.key("attn.out")]
    goes_on = block.tensors.has(*middle) and block.has("hc_ffn.pre")
    ffn = _Norm(block, "ffn_norm", "ffn_norm.out", [*entering.of, *middle, block.key("hc_ffn.pre")])
    last = [block.key(f"hc_ffn.{name}") for name in ("post", "comb")] + [block.key("ffn.out")]
    leaving = block.key("out")
    ends = goes_on and not block.is_mtp and block.tensors.has(leaving, *last)
    judged = BoundedComparison(block, "streams", leaving, [*entering.of, *middle, *last])
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
            judged.add(start * width, found, *post)
    attn.close()
    if goes_on:
        ffn.close()
    if ends:
        judged.close()


def middle_streams(
    block: BlockPass, x: BoundedValues, start: int, stop: int
) -> BoundedValues | None:
    """The streams after attention from those before it, some tokens; None where keys are
    missing.
    """
    if not block.has("hc_attn.post", "hc_attn.comb", "attn.out"):
        return None
    return bounded_sums(*post_terms(block, "hc_attn", "attn.out", x, start, stop))


def _pre(block: BlockPass, name: str, start: int, stop: int) -> F64:
    """`pre` of some tokens as coefficients [s, 1, M]."""
    return block.tensors.floats(block.key(f"{name}.pre"), start, stop).astype(np.float64)[:, None]


def post_terms(
    block: BlockPass, name: str, result: str, x: BoundedValues, start: int, stop: int
) -> tuple[F64, BoundedValues]:
    """Coefficients [s, M, 1 + M] and terms [s, 1 + M, D] of hc_post: the sublayer's result,
    then the streams.
    """
    tensors = block.tensors
    post = tensors.floats(block.key(f"{name}.post"), start, stop).astype(np.float64)
    comb = tensors.floats(block.key(f"{name}.comb"), start, stop).astype(np.float64)
    coefficients = np.concatenate([post[..., None], comb.swapaxes(1, 2)], axis=2)
    room = x.room
    if room is None:
        room = term_buffer(*x.values.shape)
        room[:, 1:] = x.values
    room[:, 0] = to_f32(tensors.bits(block.key(result), start, stop))
    # an unsure stream k of token s is term k + 1 now
    k, width = x.values.shape[1:]
    moved = x.spread.where + (x.spread.where // (k * width) + 1) * width
    return coefficients, BoundedValues(room, SparseError(moved, x.spread.amount))


class _Norm:
    """A norm whose input is the mixed streams and whose weight is unknown."""

    def __init__(self, block: BlockPass, rule: str, out: str, of: list[str]) -> None:
        self.block, self.rule, self.out = block, rule, out
        self.votes = RowBounds(block.key(out), tuple(of), block.config.dim, discrete=True)

    def add(self, start: int, stop: int, y: BoundedValues) -> None:
        """Take some tokens' mixed streams, [s, 1, D]."""
        if self.block.has(self.out):
            out = self.block.tensors.bits(self.block.key(self.out), start, stop)
            values = y.values[:, 0].astype(np.float32)
            unsure = y.spread.where, y.spread.amount
            self.votes.add(*norm_bounds(out, values, self.block.config.norm_eps, unsure))

    def close(self) -> None:
        """Judge the weight."""
        if self.votes.rows:
            name = f"{self.block.weights}{self.out.removesuffix('.out')}.weight"
            self.block.weight_bounds.add(self.rule, name, self.votes)


def check_mtp_input(block: BlockPass) -> None:
    """What enters the MTP block: norms of embedding and streams, projections of equal inputs,
    logits.
    """
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
            of = block.key("head.out")
            found, expected = tensors.floats(block.key(name)), tensors.floats(of)
            words = [values.view(np.uint32) for values in (found, expected)]
            block.findings.equal("logits", block.key(name), words[0], words[1], [of])


def _check_hnorm(block: BlockPass) -> None:
    """The prefill norms every position's streams of the last layer, the decode step the last
    position's.
    """
    streams = f"layers.{block.config.n_layers - 1}.out"
    if not (block.has("hnorm.out") and streams in block.tensors):
        return
    tensors, dim, tokens = block.tensors, block.config.dim, block.step.tokens
    first = tensors.count(streams) - tokens
    votes = RowBounds(block.key("hnorm.out"), (streams,), dim, discrete=True)
    for start, stop in block.pieces(block.config.hc_mult * dim):
        x = to_f32(tensors.bits(streams, first + start, first + stop)).reshape(-1, dim)
        out = tensors.bits(block.key("hnorm.out"), start, stop).reshape(-1, dim)
        votes.add(*norm_bounds(out, x, block.config.norm_eps))
    block.weight_bounds.add("hnorm", f"{block.weights}hnorm.weight", votes)
