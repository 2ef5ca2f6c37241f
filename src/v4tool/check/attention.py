"""Identities of the attention: q, kv, cache, index table, softmax, rotations (SPEC 5, Attention).

Every function takes one block in one pass and reports to `block.findings`; a key that is missing or
unusable is skipped. Left out: the projections with their weights (`products`). Without a checkpoint
they are checked by duplicate inputs, and the norms and the softmax by bounds of their weights.
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
    """Weight bounds of q_norm and kv_norm, and duplicate inputs of all of the projections."""
    norm(block, "q_norm", "attn.wq_a.out", "attn.q_norm.out")
    norm(block, "kv_norm", "attn.wkv.out", "attn.kv_norm.out")
    tensors = block.tensors
    projections = {
        "attn_norm.out": (
            "attn.wq_a.out", "attn.wkv.out", "attn.indexer.weights_proj.out",
            "attn.compressor.wkv.out", "attn.compressor.wgate.out",
            "attn.indexer.compressor.wkv.out", "attn.indexer.compressor.wgate.out",
        ),
        "attn.q_norm.out": ("attn.wq_b.out", "attn.indexer.wq_b.out"),
        "attn.wo_b.in": ("attn.wo_b.out",),
    }  # fmt: skip
    for name, outputs in projections.items():
        if block.has(name):
            rows = tensors.bits(block.key(name))
            block.duplicates.add(block.weights, rows, block.prefix, outputs, name)


def norm(block: BlockPass, rule: str, x: str, out: str) -> None:
    """Bounds of an RMS norm's weight from recorded input x and output `out`, over the last dim."""
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
    """`in.q` from `wq_b.out`, and `rope.rot.0.out` as the rotary dimensions of `in.q`."""
    config, tensors, rope_dim = block.config, block.tensors, block.config.rope_head_dim
    shape = (-1, config.n_heads, config.head_dim)
    if not block.has(Q):
        return
    width = config.n_heads * config.head_dim
    with (
        Comparison(block.findings, "q", block.key(Q), [block.key("attn.wq_b.out")]) as q_values,
        Comparison(
            block.findings, "rot.0", block.key("attn.rope.rot.0.out"), [block.key(Q)]
        ) as rotation,
    ):
        for start, stop in block.pieces(width):
            q = tensors.bits(block.key(Q), start, stop)
            if block.has("attn.wq_b.out"):
                raw = tensors.bits(block.key("attn.wq_b.out"), start, stop).reshape(shape)
                expected = unit_rms(raw, config.norm_eps)
                expected[..., -rope_dim:] = apply_rope(
                    expected[..., -rope_dim:], block.tables(start, stop)
                )
                q_values.add(start * width, q, expected)
            if block.has("attn.rope.rot.0.out"):
                part = tensors.bits(block.key("attn.rope.rot.0.out"), start, stop)
                rotation.add(start * config.n_heads * rope_dim, part, q[..., -rope_dim:])


def own_rows(block: BlockPass) -> Ints:
    """Indices of the rows of `in.kv` that hold this pass's tokens: int64 [s]."""
    if block.step.start == 0:
        return np.arange(block.step.tokens)
    return np.array([block.step.start % block.config.window_size])


def check_window_rows(block: BlockPass) -> None:
    """`rope.rot.1.out` and the rows of `in.kv` of this pass's tokens, from `kv_norm.out`."""
    rope_dim, tensors = block.config.rope_head_dim, block.tensors
    normed, rotation = block.key("attn.kv_norm.out"), block.key("attn.rope.rot.1.out")
    tables = block.tables(0, block.step.tokens)
    if tensors.has(normed, rotation):
        expected = apply_rope(tensors.bits(normed)[:, -rope_dim:], tables)
        block.findings.compare("rot.1", rotation, tensors.bits(rotation), expected, [normed])
    if not tensors.has(normed, block.key(KV)):
        return
    rows = tensors.bits(normed).copy()
    rows[:, :-rope_dim] = fp8_round_trip(rows[:, :-rope_dim])
    rows[:, -rope_dim:] = apply_rope(rows[:, -rope_dim:], tables)
    found = tensors.bits(block.key(KV))[own_rows(block)]
    sources = [normed] + ([rotation] if rotation in tensors else [])
    block.findings.compare("kv", block.key(KV), found, rows, sources)


def check_cache(block: BlockPass) -> None:
    """The rows of `in.kv` that come from earlier passes, and its compressed rows."""
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
    """The ring buffer of the window after a pass: bits [window, C] (SPEC 5, step 4).

    Position t is in row t % window; rows not yet written are 0.
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
    """The compressed rows of `in.kv`: those of the previous pass, then those completed here."""
    out, parts, sources = block.key("attn.compressor.out"), [], []
    if block.step.start:
        if not (block.earlier and block.earlier[-1].has(KV)):
            return
        before = block.earlier[-1]
        parts.append(block.tensors.bits(before.key(KV))[table_offset(before.config, before.step) :])
        sources.append(before.key(KV))
    if complete_blocks(block.step, block.ratio):
        if out not in block.tensors:
            return
        parts.append(block.tensors.bits(out))
        sources.append(out)
    expected = np.concatenate(parts) if parts else found[:0]
    if len(expected) == len(found) == compressed_columns(block.step, block.ratio):
        block.findings.compare("kv blocks", block.key(KV), found, expected, sources)


def check_table(block: BlockPass) -> None:
    """`in.topk_idxs`: its window columns, and its compressed columns from indexer or position."""
    if not block.has(TABLE):
        return
    table, key = block.tensors.ints(block.key(TABLE)), block.key(TABLE)
    window = window_part(block.config, block.step)
    columns = window.shape[1]
    block.findings.equal("window", key, table[:, :columns], window, [])
    if has_indexer(block.ratio):
        if block.has("attn.indexer.out"):
            chosen = block.tensors.ints(block.key("attn.indexer.out"))
            sources = [block.key("attn.indexer.out")]
            block.findings.equal("chosen blocks", key, table[:, columns:], chosen, sources)
    elif block.ratio:
        expected = all_blocks(block.config, block.step, block.ratio)
        block.findings.equal("all blocks", key, table[:, columns:], expected, [])


def check_core(block: BlockPass) -> None:
    """Bounds of each head's attention sink from `sparse_attn.out` and its inputs."""
    if not block.has(Q, KV, TABLE, OUT):
        return
    tensors, config = block.tensors, block.config
    kv, table = tensors.bits(block.key(KV)), tensors.ints(block.key(TABLE))
    if table.size == 0 or table.max() >= len(kv) or table.min() < -1 or (table < 0).all(1).any():
        return
    sources = tuple(block.key(name) for name in (Q, KV, TABLE))
    bounds = RowBounds(block.key(OUT), sources, config.n_heads, discrete=False)
    for start, stop in block.pieces(config.n_heads * max(config.head_dim, table.shape[1])):
        q = tensors.bits(block.key(Q), start, stop)
        sums = attention_sums(q, kv, table[start:stop])
        bounds.add(*sink_bounds(tensors.bits(block.key(OUT), start, stop), *sums))
    block.weight_bounds.add("attention", f"{block.weights}attn.attn_sink", bounds)


def check_output(block: BlockPass) -> None:
    """`rope.o_inv.out` from `sparse_attn.out`, and `attn.out` as a copy of `wo_b.out`."""
    rope_dim, config, tensors = block.config.rope_head_dim, block.config, block.tensors
    if block.has(OUT, "attn.rope.o_inv.out"):
        out, back = block.key(OUT), block.key("attn.rope.o_inv.out")
        with Comparison(block.findings, "inverse rotation", back, [out]) as comparison:
            for start, stop in block.pieces(config.n_heads * config.head_dim):
                o = tensors.bits(out, start, stop)[..., -rope_dim:]
                expected = apply_rope(o, block.tables(start, stop), inverse=True)
                found = tensors.bits(back, start, stop)
                comparison.add(start * config.n_heads * rope_dim, found, expected)
    copy(block, "attn.out", "attn.out", "attn.wo_b.out")


def copy(block: BlockPass, rule: str, key: str, source: str) -> None:
    """Two keys of the block that must be equal."""
    if block.has(key, source):
        tensors = block.tensors
        key, source = block.key(key), block.key(source)
        block.findings.compare(rule, key, tensors.bits(key), tensors.bits(source), [source])
