"""Identities of the attention: queries, keys and values, index table, core, rotations (SPEC
section 5, Attention).

What only weights could tie (`wq_a.out`, `wkv.out` as outputs, `wo_b.in`) is bounded by norms or
left to the checkpoint.
"""

import numpy as np

from v4tool.check.bits import Bits, Ints, to_f32
from v4tool.check.block_pass import BlockPass
from v4tool.check.findings import Comparison
from v4tool.check.formulas import (
    all_blocks,
    apply_rope,
    attention_sums,
    fp8_round_trip,
    unit_rms,
    window_part,
)
from v4tool.check.weight_bounds import RowBounds, norm_bounds, sink_bounds
from v4tool.names import complete_blocks, compressed_columns, has_indexer, table_offset

SPARSE = "attn.sparse_attn."
Q, KV, TABLE, OUT = (SPARSE + name for name in ("in.q", "in.kv", "in.topk_idxs", "out"))


def check_attention(block: BlockPass) -> None:
    """All identities of one block's attention in one pass."""
    check_low_rank(block)
    check_queries(block)
    check_window_rows(block)
    check_cache(block)
    check_table(block)
    check_core(block)
    check_output(block)


def check_low_rank(block: BlockPass) -> None:
    """The two norms whose weights are unknown, and projections of equal inputs."""
    norm(block, "q_norm", "attn.wq_a.out", "attn.q_norm.out")
    norm(block, "kv_norm", "attn.wkv.out", "attn.kv_norm.out")
    tensors = block.tensors
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
        if block.has(name):
            rows = tensors.bits(block.key(name))
            block.duplicates.add(block.weights, rows, block.prefix, outputs, name)


def norm(block: BlockPass, rule: str, x: str, out: str) -> None:
    """An RMS norm of a recorded input, rows over the last dimension, with an unknown weight."""
    if not block.has(x, out):
        return
    tensors, width = block.tensors, block.tensors.shape(block.key(out))[-1]
    bounds = RowBounds(block.key(out), (block.key(x),), width, discrete=True)
    for start, stop in block.pieces(tensors.bits(block.key(out), 0, 1).size):
        values = to_f32(tensors.bits(block.key(x), start, stop)).reshape(-1, width)
        rows = tensors.bits(block.key(out), start, stop).reshape(-1, width)
        bounds.add(*norm_bounds(rows, values, block.config.norm_eps))
    block.weight_bounds.add(rule, f"{block.weights}{out.removesuffix('.out')}.weight", bounds)


def check_queries(block: BlockPass) -> None:
    """`in.q` from `wq_b.out`; its rotated dims as recorded by the rotation."""
    config, tensors, rotated = block.config, block.tensors, block.config.rope_head_dim
    shape = (-1, config.n_heads, config.head_dim)
    if not block.has(Q):
        return
    width = config.n_heads * config.head_dim
    with (
        Comparison(block.findings, "q", block.key(Q), [block.key("attn.wq_b.out")]) as of_q,
        Comparison(
            block.findings, "rot.0", block.key("attn.rope.rot.0.out"), [block.key(Q)]
        ) as of_rotation,
    ):
        for start, stop in block.pieces(width):
            q = tensors.bits(block.key(Q), start, stop)
            if block.has("attn.wq_b.out"):
                raw = tensors.bits(block.key("attn.wq_b.out"), start, stop).reshape(shape)
                expected = unit_rms(raw, config.norm_eps)
                expected[..., -rotated:] = apply_rope(
                    expected[..., -rotated:], block.tables(start, stop)
                )
                of_q.add(start * width, q, expected)
            if block.has("attn.rope.rot.0.out"):
                part = tensors.bits(block.key("attn.rope.rot.0.out"), start, stop)
                of_rotation.add(start * config.n_heads * rotated, part, q[..., -rotated:])


def own_rows(block: BlockPass) -> Ints:
    """Which rows of `in.kv` are this pass's own tokens: int64 [s]."""
    if block.step.start == 0:
        return np.arange(block.step.tokens)
    return np.array([block.step.start % block.config.window_size])


def check_window_rows(block: BlockPass) -> None:
    """The pass's own keys and values: norm, FP8 steps, rotation, and where they stand in
    `in.kv`.
    """
    rotated, tensors = block.config.rope_head_dim, block.tensors
    normed, rotation = block.key("attn.kv_norm.out"), block.key("attn.rope.rot.1.out")
    tables = block.tables(0, block.step.tokens)
    if tensors.has(normed, rotation):
        expected = apply_rope(tensors.bits(normed)[:, -rotated:], tables)
        block.findings.compare("rot.1", rotation, tensors.bits(rotation), expected, [normed])
    if not tensors.has(normed, block.key(KV)):
        return
    rows = tensors.bits(normed).copy()
    rows[:, :-rotated] = fp8_round_trip(rows[:, :-rotated])
    rows[:, -rotated:] = apply_rope(rows[:, -rotated:], tables)
    found = tensors.bits(block.key(KV))[own_rows(block)]
    of = [normed] + ([rotation] if rotation in tensors else [])
    block.findings.compare("kv", block.key(KV), found, rows, of)


def check_cache(block: BlockPass) -> None:
    """Rows of `in.kv` that come from earlier passes, and the compressed blocks at its end."""
    if not block.has(KV):
        return
    kv, offset = block.tensors.bits(block.key(KV)), table_offset(block.config, block.step)
    if block.ratio:
        _check_blocks(block, kv[offset:])
    if block.step.start and block.earlier and block.earlier[-1].has(KV):
        before = block.earlier[-1]
        ring = ring_after(before)
        ring[own_rows(block)] = kv[own_rows(block)]
        block.findings.compare("kv cache", block.key(KV), kv[:offset], ring, [before.key(KV)])


def ring_after(block: BlockPass) -> Bits:
    """The window cache that a pass leaves: bits [window, C], position t in row t % window (SPEC
    5, step 4).
    """
    window, step = block.config.window_size, block.step
    kv = block.tensors.bits(block.key(KV))
    if step.start:
        return kv[:window].copy()
    ring = np.zeros((window, kv.shape[1]), np.uint16)
    positions = np.arange(max(step.tokens - window, 0), step.tokens)
    ring[positions % window] = kv[positions]
    return ring


def _check_blocks(block: BlockPass, found: Bits) -> None:
    """The compressed rows: those of the pass before, then what this pass completed."""
    out, parts, of = block.key("attn.compressor.out"), [], []
    if block.step.start:
        if not (block.earlier and block.earlier[-1].has(KV)):
            return
        before = block.earlier[-1]
        parts.append(block.tensors.bits(before.key(KV))[table_offset(before.config, before.step) :])
        of.append(before.key(KV))
    if complete_blocks(block.step, block.ratio):
        if out not in block.tensors:
            return
        parts.append(block.tensors.bits(out))
        of.append(out)
    expected = np.concatenate(parts) if parts else found[:0]
    if len(expected) == len(found) == compressed_columns(block.step, block.ratio):
        block.findings.compare("kv blocks", block.key(KV), found, expected, of)


def check_table(block: BlockPass) -> None:
    """The index table, entry by entry."""
    if not block.has(TABLE):
        return
    table, key = block.tensors.ints(block.key(TABLE)), block.key(TABLE)
    window = window_part(block.config, block.step)
    columns = window.shape[1]
    block.findings.equal("window", key, table[:, :columns], window, [])
    if has_indexer(block.ratio):
        if block.has("attn.indexer.out"):
            chosen = block.tensors.ints(block.key("attn.indexer.out"))
            of = [block.key("attn.indexer.out")]
            block.findings.equal("chosen blocks", key, table[:, columns:], chosen, of)
    elif block.ratio:
        expected = all_blocks(block.config, block.step, block.ratio)
        block.findings.equal("all blocks", key, table[:, columns:], expected, [])


def check_core(block: BlockPass) -> None:
    """`sparse_attn.out`, up to the sink that each head has."""
    if not block.has(Q, KV, TABLE, OUT):
        return
    tensors, config = block.tensors, block.config
    kv, table = tensors.bits(block.key(KV)), tensors.ints(block.key(TABLE))
    if table.size == 0 or table.max() >= len(kv) or table.min() < -1 or (table < 0).all(1).any():
        return
    of = tuple(block.key(name) for name in (Q, KV, TABLE))
    bounds = RowBounds(block.key(OUT), of, config.n_heads, discrete=False)
    for start, stop in block.pieces(config.n_heads * max(config.head_dim, table.shape[1])):
        q = tensors.bits(block.key(Q), start, stop)
        sums = attention_sums(q, kv, table[start:stop])
        bounds.add(*sink_bounds(tensors.bits(block.key(OUT), start, stop), *sums))
    block.weight_bounds.add("attention", f"{block.weights}attn.attn_sink", bounds)


def check_output(block: BlockPass) -> None:
    """The inverse rotation, and `attn.out`."""
    rotated, config, tensors = block.config.rope_head_dim, block.config, block.tensors
    if block.has(OUT, "attn.rope.o_inv.out"):
        out, back = block.key(OUT), block.key("attn.rope.o_inv.out")
        with Comparison(block.findings, "inverse rotation", back, [out]) as comparison:
            for start, stop in block.pieces(config.n_heads * config.head_dim):
                o = tensors.bits(out, start, stop)[..., -rotated:]
                expected = apply_rope(o, block.tables(start, stop), inverse=True)
                found = tensors.bits(back, start, stop)
                comparison.add(start * config.n_heads * rotated, found, expected)
    copy(block, "attn.out", "attn.out", "attn.wo_b.out")


def copy(block: BlockPass, rule: str, key: str, of: str) -> None:
    """Two keys that hold the same."""
    if block.has(key, of):
        tensors = block.tensors
        key, of = block.key(key), block.key(of)
        block.findings.compare(rule, key, tensors.bits(key), tensors.bits(of), [of])
