"""NumPy reference of the model's operators without weights (SPEC 3 to 5), independent of the port.

BF16 values are passed as 16-bit patterns (`Bits`). s tokens, H heads, C head_dim, R rotary
dimensions, n rows of keys and values, m entries of a query in the index table, t compressed blocks,
IH and ID the indexer's heads and head_dim. Left out: operators that take a weight.
"""

import itertools
import math
from functools import lru_cache

import numpy as np

from v4tool.check.bits import F32, F64, Bits, Ints, round_f32, to_bf16, to_f32, to_f64
from v4tool.config import ModelConfig
from v4tool.config_fields import FP4_GROUP, KV_BLOCK
from v4tool.names import Step, compressed_columns, table_offset

TABLE_BLOCK = 64
"""Columns of the index table that the attention kernel takes at a time (SPEC 5, step 6)."""


def rope_frequencies(config: ModelConfig, ratio: int) -> F32:
    """Rotary angle per position of each pair of dimensions: F32 [R/2] (SPEC 5, Rotary tables)."""
    width = config.rope_head_dim
    base = config.compress_rope_theta if ratio else config.rope_theta
    powers = np.array([base ** (2 * i / width) for i in range(width // 2)]).astype(np.float32)
    plain = np.float32(1) / powers
    if not ratio:
        return plain
    bound = {
        beta: width
        * math.log(config.original_seq_len / (2 * math.pi * beta))
        / (2 * math.log(base))
        for beta in (config.beta_fast, config.beta_slow)
    }
    low = max(math.floor(bound[config.beta_fast]), 0)
    high: float = min(math.ceil(bound[config.beta_slow]), width - 1)
    if low == high:
        high += 0.001
    steps = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    smooth = np.float32(1) - np.clip(steps, np.float32(0), np.float32(1))
    slow = plain / np.float32(config.rope_factor)
    mixed: F32 = slow * (np.float32(1) - smooth) + plain * smooth
    return mixed


def rope_tables(frequencies: F32, positions: Ints) -> tuple[F64, F64]:
    """Cosine and sine, rounded to FP32, of the FP32 angles: two F64 [n, R/2]."""
    angles = positions.astype(np.float32)[:, None] * frequencies
    return (
        np.cos(angles.astype(np.float64)).astype(np.float32).astype(np.float64),
        np.sin(angles.astype(np.float64)).astype(np.float32).astype(np.float64),
    )


def apply_rope(x: Bits, tables: tuple[F64, F64], *, inverse: bool = False) -> Bits:
    """Rotary embedding of pairs (2i, 2i+1): bits [n, R] or [n, H, R] -> the same shape.

    tables: cosine and sine of the n rows (`rope_tables`); inverse: rotate back.
    """
    cos, sin = (t if x.ndim == 2 else t[:, None] for t in tables)
    if inverse:
        sin = -sin
    values = to_f64(x)
    real, imaginary = values[..., 0::2], values[..., 1::2]
    out = np.empty_like(values)
    out[..., 0::2] = real * cos - imaginary * sin
    out[..., 1::2] = real * sin + imaginary * cos
    return to_bf16(out)


def unit_rms(q: Bits, eps: float) -> Bits:
    """RMS norm of each head without a weight, rounded to BF16 at every step: bits [..., C].

    SPEC 5, attention step 1.
    """
    values = to_f32(q)
    # a product of two BF16 values is exact in FP32
    squares = round_f32(values * values)
    mean = squares.astype(np.float64).sum(-1) / q.shape[-1]
    variance = to_f64(to_bf16(to_f64(to_bf16(mean)) + eps))
    inverse = to_f32(to_bf16(1 / np.sqrt(variance)))
    values *= inverse[..., None]
    return to_bf16(values)


def _ceil_power(amax: F64, floor: float, largest: float) -> F64:
    """2^ceil(log2(max(amax, floor) * fp32(1 / largest))), the product in FP32 (SPEC 3)."""
    product = np.maximum(amax.astype(np.float32), np.float32(floor)) * np.float32(1 / largest)
    mantissa, exponent = np.frexp(product.astype(np.float64))
    return np.asarray(np.ldexp(1.0, exponent - (mantissa == 0.5)))


def fp8_round_trip(x: Bits, block: int = KV_BLOCK) -> Bits:
    """Quantise to E4M3 and back, a scale per block: bits [..., n], block divides n (SPEC 3)."""
    values = to_f64(x).reshape(*x.shape[:-1], -1, block)
    scale = _ceil_power(np.abs(values).max(-1), 1e-4, 448.0)[..., None]
    q = np.clip(values / scale, -448, 448)
    exponent = np.maximum(np.frexp(q)[1] - 1, -6)
    step = np.ldexp(1.0, exponent - 3)
    return to_bf16(np.rint(q / step) * step * scale).reshape(x.shape)


def fp4_round_trip(x: Bits, block: int = FP4_GROUP) -> Bits:
    """Quantise to E2M1 and back, a scale per block: bits [..., n], block divides n (SPEC 3)."""
    values = to_f64(x).reshape(*x.shape[:-1], -1, block)
    scale = _ceil_power(np.abs(values).max(-1), 6 * 2.0**-126, 6.0)[..., None]
    q = np.clip(values / scale, -6, 6)
    step = np.where(np.abs(q) < 2, 0.5, np.where(np.abs(q) < 4, 1.0, 2.0))
    return to_bf16(np.rint(q / step) * step * scale).reshape(x.shape)


def hadamard(x: Bits) -> Bits:
    """Hadamard transform: times `sylvester(n)` over sqrt(n): bits [..., n] -> bits [..., n]."""
    n = x.shape[-1]
    return to_bf16(to_f64(x) @ sylvester(n) * n**-0.5)


@lru_cache
def sylvester(n: int) -> F64:
    """The Hadamard matrix in natural order (Sylvester's): F64 [n, n].

    Entry (i, j) is -1 to the power of the number of ones in i AND j.
    """
    index = np.arange(n)
    overlap = index[:, None] & index
    parity = np.zeros_like(overlap)
    while overlap.any():
        parity ^= overlap & 1
        overlap >>= 1
    return 1.0 - 2.0 * parity


def window_part(config: ModelConfig, step: Step) -> Ints:
    """The window columns of the index table: int64 [s, columns] (SPEC 5, attention step 3)."""
    window, tokens = config.window_size, step.tokens
    if step.start == 0:
        rows = np.arange(tokens)[:, None]
        table = np.maximum(rows - window + 1, 0) + np.arange(min(tokens, window))
        return np.where(table > rows, -1, table)
    columns = np.arange(window)
    if step.start >= window - 1:
        return ((columns + step.start + 1) % window)[None]
    return np.where(columns > step.start, -1, columns)[None]


def allowed_blocks(step: Step, ratio: int) -> Ints:
    """Number of complete blocks at each query's position: int64 [s]."""
    return np.arange(step.start + 1, step.end + 1) // ratio


def all_blocks(config: ModelConfig, step: Step, ratio: int) -> Ints:
    """Index table columns that list every complete block, then -1: int64 [s, t]."""
    blocks = np.arange(compressed_columns(step, ratio))
    allowed = allowed_blocks(step, ratio)[:, None]
    return np.where(blocks < allowed, blocks + table_offset(config, step), -1)


def block_scores(q: Bits, k: Bits, weights: Bits) -> F64:
    """The indexer's score of each block for each query (SPEC 5, Indexer): BF16 values, F64 [s, t].

    q bits [s, IH, ID], k bits [t, ID], weights bits [s, IH].
    """
    scores = to_f64(
        to_bf16(
            np.maximum(to_f64(to_bf16(to_f64(q) @ to_f64(k).T)), 0) * to_f64(weights)[..., None]
        )
    )
    return to_f64(to_bf16(scores.sum(1)))


def top_blocks(scores: F64, allowed: Ints, k: int, offset: int) -> Ints:
    """Stable top-k of each query's allowed blocks, padded with -1: int64 [s, k].

    scores [s, t], where t may end at the last block that any query may see; allowed: int64 [s],
    how many blocks each query may see; offset: added to each block's number. Among equal scores
    the lowest block comes first.
    """
    forbidden = np.arange(scores.shape[1]) >= allowed[:, None]
    ranked = np.argsort(np.where(forbidden, np.inf, -scores), axis=1, kind="stable")[:, :k]
    chosen = np.where(ranked < allowed[:, None], ranked + offset, -1)
    return np.pad(chosen, ((0, 0), (0, k - chosen.shape[1])), constant_values=-1)


def attention_sums(q: Bits, kv: Bits, table: Ints) -> tuple[F64, F64, F64]:
    """Softmax attention without the sink (SPEC 5, step 6), in binary64.

    q bits [s, H, C], kv bits [n, C], table int64 [s, m] -> numerator [s, H, C], denominator and
    largest score [s, H].
    """
    s, heads, width = q.shape
    table, blocks = _blocks_in_use(table)
    used, table = _rows_in_use(table, len(kv))
    first = np.arange(s * heads).reshape(s, heads) * (len(used) + 1)
    flat = first[..., None] + table[:, None]
    rows = to_f64(kv[used])
    scores = np.empty((s * heads, len(used) + 1))
    scores[:, -1] = -np.inf
    np.matmul(to_f64(q).reshape(-1, width), rows.T, out=scores[:, :-1])
    scores *= width**-0.5
    p = np.take(scores.reshape(-1), flat, mode="clip")
    highest, denominator, factors = _online_softmax(p, blocks)
    _rescale(p, factors, blocks)
    # the buffer of the scores takes the weights, 0 where a query does not list a row
    # the buffer of the scores takes the weights, 0 where a query does not list a row
    scores[:] = 0.0
    scores.reshape(-1)[flat] = p
    numerator = np.matmul(scores[:, :-1], rows).reshape(s, heads, width)
    return numerator, denominator, highest


def _rows_in_use(table: Ints, rows: int) -> tuple[Ints, Ints]:
    """The rows that a table lists, ascending, and the table as indices into them.

    -1 becomes the index after the last row.
    """
    marks = np.zeros(rows + 1, bool)
    marks[table] = True  # -1 marks the element after the rows
    used = np.flatnonzero(marks[:-1])
    rank = np.full(rows + 1, len(used))
    rank[used] = np.arange(len(used))
    return used, rank[table]


def _blocks_in_use(table: Ints) -> tuple[Ints, list[slice]]:
    """The table without blocks of TABLE_BLOCK columns that are all -1, and the others' columns.

    The kernel works by such blocks; one without an entry changes nothing.
    """
    starts = range(0, table.shape[1], TABLE_BLOCK)
    parts = [part for i in starts if ((part := table[:, i : i + TABLE_BLOCK]) >= 0).any()]
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    blocks = [slice(end - part.shape[1], end) for part, end in zip(parts, ends, strict=True)]
    return np.concatenate([table[:, :0], *parts], axis=1), blocks


def _online_softmax(p: F64, blocks: list[slice]) -> tuple[F64, F64, list[F64]]:
    """Online softmax over blocks of columns: replaces scores [s, H, m] by weights, in place.

    A weight is relative to the maximum of its own and all earlier blocks, and rounded to BF16.
    Returns the final maximum and the sum of the unrounded weights, [s, H] each, and for each block
    the factor by which the sums before it are scaled.
    """
    highest, denominator = np.full(p.shape[:2], -np.inf), np.zeros(p.shape[:2])
    scales = []
    for block in blocks:
        part = p[..., block]
        higher = np.maximum(highest, part.max(-1))
        base = np.where(higher == -np.inf, 0.0, higher)
        part -= base[..., None]
        np.exp(part, out=part)
        scales.append(np.exp(highest - base))
        denominator = denominator * scales[-1] + part.sum(-1)
        part[:] = round_f32(part.astype(np.float32))
        highest = higher
    return highest, denominator, scales


def _rescale(p: F64, scales: list[F64], blocks: list[slice]) -> None:
    """Scale every block's weights to the final maximum, as the kernel's running sum does."""
    for block, later in zip(blocks[:-1], _suffix_products(scales[1:]), strict=True):
        p[..., block] *= later[..., None]


def _suffix_products(scales: list[F64]) -> list[F64]:
    """For each factor, the product of it and all later ones."""
    products = list(itertools.accumulate(reversed(scales), np.multiply))
    return products[::-1]
