"""Identities of the attention: queries, keys and values, index table, core, rotations (SPEC
section 5, Attention).

What only weights could tie (`wq_a.out`, `wkv.out` as outputs, `wo_b.in`) is bounded by norms or
left to the checkpoint.
"""

import numpy as np

from v4tool.check.bits import Bits, Ints, widen
from v4tool.check.block_pass import BlockPass
from v4tool.check.findings import Comparison
from v4tool.check.formulas import (
    all_blocks,
    attention_sums,
    fp8_steps,
    turned,
    unit_rms,
    window_part,
)
from v4tool.check.weight_bounds import Votes, norm_bounds, sink_bounds
from v4tool.names import complete_blocks, compressed_columns, has_indexer, table_offset

SPARSE = "attn.sparse_attn."
Q, KV, TABLE, OUT = (SPARSE + name for name in ("in.q", "in.kv", "in.topk_idxs", "out"))


def check_attention(place: BlockPass) -> None:
    """All identities of one block's attention in one pass."""
    check_low_rank(place)
    check_queries(place)
    check_window_rows(place)
    check_cache(place)
    check_table(place)
    check_core(place)
    check_output(place)


def check_low_rank(place: BlockPass) -> None:
    """The two norms whose weights are unknown, and projections of equal inputs."""
    norm(place, "q_norm", "attn.wq_a.out", "attn.q_norm.out")
    norm(place, "kv_norm", "attn.wkv.out", "attn.kv_norm.out")
    source = place.source
    ties = {
        "attn_norm.out": (
            "attn.wq_a.out", "attn.wkv.out", "attn.indexer.weights_proj.out",
            "attn.compressor.wkv.out", "attn.compressor.wgate.out",
            "attn.indexer.compressor.wkv.out", "attn.indexer.compressor.wgate.out",
        ),
        "attn.q_norm.out": ("attn.wq_b.out", "attn.indexer.wq_b.out"),
        "attn.wo_b.in": ("attn.wo_b.out",),
    }  # fmt: skip
    for name, outputs in ties.items():
        if place.has(name):
            rows = source.bits(place.key(name))
            place.sameness.tie(place.weights, rows, place.prefix, outputs, name)


def norm(place: BlockPass, rule: str, x: str, out: str) -> None:
    """An RMS norm of a recorded input, rows over the last dimension, with an unknown weight."""
    if not place.has(x, out):
        return
    source, width = place.source, place.source.shape(place.key(out))[-1]
    votes = Votes(place.key(out), (place.key(x),), width, discrete=True)
    for start, stop in place.pieces(source.bits(place.key(out), 0, 1).size):
        values = widen(source.bits(place.key(x), start, stop)).reshape(-1, width)
        rows = source.bits(place.key(out), start, stop).reshape(-1, width)
        votes.add(*norm_bounds(rows, values, place.config.norm_eps))
    place.unknowns.add(rule, f"{place.weights}{out.removesuffix('.out')}.weight", votes)


def check_queries(place: BlockPass) -> None:
    """`in.q` from `wq_b.out`; its rotated dims as recorded by the rotation."""
    config, source, rotated = place.config, place.source, place.config.rope_head_dim
    shape = (-1, config.n_heads, config.head_dim)
    if not place.has(Q):
        return
    width = config.n_heads * config.head_dim
    with (
        Comparison(place.book, "q", place.key(Q), [place.key("attn.wq_b.out")]) as of_q,
        Comparison(
            place.book, "rot.0", place.key("attn.rope.rot.0.out"), [place.key(Q)]
        ) as of_rotation,
    ):
        for start, stop in place.pieces(width):
            q = source.bits(place.key(Q), start, stop)
            if place.has("attn.wq_b.out"):
                raw = source.bits(place.key("attn.wq_b.out"), start, stop).reshape(shape)
                expected = unit_rms(raw, config.norm_eps)
                expected[..., -rotated:] = turned(
                    expected[..., -rotated:], place.tables(start, stop)
                )
                of_q.add(start * width, q, expected)
            if place.has("attn.rope.rot.0.out"):
                part = source.bits(place.key("attn.rope.rot.0.out"), start, stop)
                of_rotation.add(start * config.n_heads * rotated, part, q[..., -rotated:])


def own_rows(place: BlockPass) -> Ints:
    """Which rows of `in.kv` are this pass's own tokens: int64 [s]."""
    if place.step.start == 0:
        return np.arange(place.step.tokens)
    return np.array([place.step.start % place.config.window_size])


def check_window_rows(place: BlockPass) -> None:
    """The pass's own keys and values: norm, FP8 steps, rotation, and where they stand in
    `in.kv`.
    """
    rotated, source = place.config.rope_head_dim, place.source
    normed, rotation = place.key("attn.kv_norm.out"), place.key("attn.rope.rot.1.out")
    tables = place.tables(0, place.step.tokens)
    if source.has(normed, rotation):
        expected = turned(source.bits(normed)[:, -rotated:], tables)
        place.book.compare("rot.1", rotation, source.bits(rotation), expected, [normed])
    if not source.has(normed, place.key(KV)):
        return
    rows = source.bits(normed).copy()
    rows[:, :-rotated] = fp8_steps(rows[:, :-rotated])
    rows[:, -rotated:] = turned(rows[:, -rotated:], tables)
    found = source.bits(place.key(KV))[own_rows(place)]
    of = [normed] + ([rotation] if rotation in source else [])
    place.book.compare("kv", place.key(KV), found, rows, of)


def check_cache(place: BlockPass) -> None:
    """Rows of `in.kv` that come from earlier passes, and the compressed blocks at its end."""
    if not place.has(KV):
        return
    kv, offset = place.source.bits(place.key(KV)), table_offset(place.config, place.step)
    if place.ratio:
        _check_blocks(place, kv[offset:])
    if place.step.start and place.earlier and place.earlier[-1].has(KV):
        before = place.earlier[-1]
        ring = ring_after(before)
        ring[own_rows(place)] = kv[own_rows(place)]
        place.book.compare("kv cache", place.key(KV), kv[:offset], ring, [before.key(KV)])


def ring_after(place: BlockPass) -> Bits:
    """The window cache that a pass leaves: bits [window, C], position t in row t % window (SPEC
    5, step 4).
    """
    window, step = place.config.window_size, place.step
    kv = place.source.bits(place.key(KV))
    if step.start:
        return kv[:window].copy()
    ring = np.zeros((window, kv.shape[1]), np.uint16)
    positions = np.arange(max(step.tokens - window, 0), step.tokens)
    ring[positions % window] = kv[positions]
    return ring


def _check_blocks(place: BlockPass, found: Bits) -> None:
    """The compressed rows: those of the pass before, then what this pass completed."""
    out, parts, of = place.key("attn.compressor.out"), [], []
    if place.step.start:
        if not (place.earlier and place.earlier[-1].has(KV)):
            return
        before = place.earlier[-1]
        parts.append(place.source.bits(before.key(KV))[table_offset(before.config, before.step) :])
        of.append(before.key(KV))
    if complete_blocks(place.step, place.ratio):
        if out not in place.source:
            return
        parts.append(place.source.bits(out))
        of.append(out)
    expected = np.concatenate(parts) if parts else found[:0]
    if len(expected) == len(found) == compressed_columns(place.step, place.ratio):
        place.book.compare("kv blocks", place.key(KV), found, expected, of)


def check_table(place: BlockPass) -> None:
    """The index table, entry by entry."""
    if not place.has(TABLE):
        return
    table, key = place.source.ints(place.key(TABLE)), place.key(TABLE)
    window = window_part(place.config, place.step)
    columns = window.shape[1]
    place.book.equal("window", key, table[:, :columns], window, [])
    if has_indexer(place.ratio):
        if place.has("attn.indexer.out"):
            chosen = place.source.ints(place.key("attn.indexer.out"))
            of = [place.key("attn.indexer.out")]
            place.book.equal("chosen blocks", key, table[:, columns:], chosen, of)
    elif place.ratio:
        expected = all_blocks(place.config, place.step, place.ratio)
        place.book.equal("all blocks", key, table[:, columns:], expected, [])


def check_core(place: BlockPass) -> None:
    """`sparse_attn.out`, up to the sink that each head has."""
    if not place.has(Q, KV, TABLE, OUT):
        return
    source, config = place.source, place.config
    kv, table = source.bits(place.key(KV)), source.ints(place.key(TABLE))
    if table.size == 0 or table.max() >= len(kv) or table.min() < -1 or (table < 0).all(1).any():
        return
    of = tuple(place.key(name) for name in (Q, KV, TABLE))
    votes = Votes(place.key(OUT), of, config.n_heads, discrete=False)
    for start, stop in place.pieces(config.n_heads * max(config.head_dim, table.shape[1])):
        q = source.bits(place.key(Q), start, stop)
        sums = attention_sums(q, kv, table[start:stop])
        votes.add(*sink_bounds(source.bits(place.key(OUT), start, stop), *sums))
    place.unknowns.add("attention", f"{place.weights}attn.attn_sink", votes)


def check_output(place: BlockPass) -> None:
    """The inverse rotation, and `attn.out`."""
    rotated, config, source = place.config.rope_head_dim, place.config, place.source
    if place.has(OUT, "attn.rope.o_inv.out"):
        out, back = place.key(OUT), place.key("attn.rope.o_inv.out")
        with Comparison(place.book, "inverse rotation", back, [out]) as comparison:
            for start, stop in place.pieces(config.n_heads * config.head_dim):
                o = source.bits(out, start, stop)[..., -rotated:]
                expected = turned(o, place.tables(start, stop), inverse=True)
                found = source.bits(back, start, stop)
                comparison.add(start * config.n_heads * rotated, found, expected)
    copy(place, "attn.out", "attn.out", "attn.wo_b.out")


def copy(place: BlockPass, rule: str, key: str, of: str) -> None:
    """Two keys that hold the same."""
    if place.has(key, of):
        source = place.source
        key, of = place.key(key), place.key(of)
        place.book.compare(rule, key, source.bits(key), source.bits(of), [of])
