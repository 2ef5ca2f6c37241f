"""Identities of the residual streams: block input, hyper-connections, norms (SPEC section 5, HC).

Norms and output streams of a block are recomputed from its recorded input streams and coefficients,
with the error bounds of `bounded_values`. s tokens, M streams, D dim.
"""

from dataclasses import dataclass

import numpy as np

from v4tool.check.attention import norm
from v4tool.check.bits import F64, to_bf16, to_f32, to_f64
from v4tool.check.block_pass import BlockPass
from v4tool.check.bounded_values import (
    BoundedComparison,
    BoundedValues,
    SparseError,
    bounded_sums,
    term_buffer,
)
from v4tool.check.weight_bounds import RowBounds, norm_bounds


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
