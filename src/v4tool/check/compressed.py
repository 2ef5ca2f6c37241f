"""Identities of the compressor and the indexer (SPEC section 5, Compressor and Indexer).

Left out: pooling, which takes the unknown `ape`; it is checked with the checkpoint.
"""

import numpy as np

from v4tool.check.bits import Bits, to_bf16, to_f64
from v4tool.check.block_pass import BlockPass
from v4tool.check.formulas import (
    allowed_blocks,
    apply_rope,
    block_scores,
    fp4_round_trip,
    fp8_round_trip,
    hadamard,
    top_blocks,
)
from v4tool.names import (
    complete_blocks,
    compressed_columns,
    has_indexer,
    selected_columns,
    table_offset,
)


def check_compressed(block: BlockPass) -> None:
    """All identities of one block's compressor and, for ratio 4, of its indexer."""
    if not block.ratio:
        return
    last = 2
    if has_indexer(block.ratio):
        last = 4 if complete_blocks(block.step, block.ratio) else 3
        check_compressor(block, "indexer compressor", "attn.indexer.compressor", 3)
        check_indexer(block)
    check_compressor(block, "compressor", "attn.compressor", last)


def check_compressor(block: BlockPass, rule: str, name: str, number: int) -> None:
    """`norm.out` to its rotation and on to `out`: FP8 steps, or Hadamard and FP4 steps."""
    normed, out = block.key(f"{name}.norm.out"), block.key(f"{name}.out")
    rotation, tensors = block.key(f"attn.rope.rot.{number}.out"), block.tensors
    if not complete_blocks(block.step, block.ratio) or normed not in tensors:
        return
    rows, rotated = tensors.bits(normed).copy(), block.config.rope_head_dim
    blocks = np.arange(block.step.start // block.ratio, block.step.end // block.ratio)
    rows[:, -rotated:] = apply_rope(rows[:, -rotated:], block.tables_at(blocks * block.ratio))
    if rotation in tensors:
        block.findings.compare(
            f"{rule} rotation", rotation, tensors.bits(rotation), rows[:, -rotated:], [normed]
        )
    if out in tensors:
        if rule == "compressor":
            rows[:, :-rotated] = fp8_round_trip(rows[:, :-rotated])
        else:
            rows = fp4_round_trip(hadamard(rows))
        of = [normed, *([rotation] if rotation in tensors else [])]
        block.findings.compare(rule, out, tensors.bits(out), rows, of)


def indexer_keys(block: BlockPass) -> tuple[Bits, list[str]] | None:
    """The indexer's blocks of all passes so far, bits [t, ID], and the keys they come from."""
    parts, of = [], []
    for one in (*block.earlier, block):
        key = one.key("attn.indexer.compressor.out")
        if complete_blocks(one.step, one.ratio):
            if key not in block.tensors:
                return None
            parts.append(block.tensors.bits(key))
            of.append(key)
    if sum(map(len, parts)) != compressed_columns(block.step, block.ratio):
        return None
    width = block.config.index_head_dim
    return np.concatenate([np.zeros((0, width), np.uint16), *parts]), of


def check_indexer(block: BlockPass) -> None:
    """The indexer's rotation, and which blocks its scores choose, in which order."""
    config, tensors, rotated = block.config, block.tensors, block.config.rope_head_dim
    wq_b, rotation = block.key("attn.indexer.wq_b.out"), block.key("attn.rope.rot.2.out")
    proj, out = block.key("attn.indexer.weights_proj.out"), block.key("attn.indexer.out")
    if wq_b not in tensors:
        return
    keys = indexer_keys(block) if tensors.has(proj, out) else None
    k = selected_columns(config, block.step, block.ratio)
    offset, allowed = table_offset(config, block.step), allowed_blocks(block.step, block.ratio)
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    turns, choices = [], []
    width = config.index_n_heads * max(config.index_head_dim, len(keys[0]) if keys else 0)
    for start, stop in block.pieces(width):
        q = tensors.bits(wq_b, start, stop).reshape(stop - start, config.index_n_heads, -1).copy()
        q[..., -rotated:] = apply_rope(q[..., -rotated:], block.tables(start, stop))
        turns.append(q[..., -rotated:].copy())
        if keys is not None:
            weights = to_bf16(to_f64(tensors.bits(proj, start, stop)) * factor)
            # blocks that are not complete for the last of these queries are for none of them
            seen = keys[0][: allowed[stop - 1]]
            scores = block_scores(fp4_round_trip(hadamard(q)), seen, weights)
            choices.append(top_blocks(scores, allowed[start:stop], k, offset))
    if rotation in tensors:
        found = tensors.bits(rotation)
        block.findings.compare("indexer rotation", rotation, found, np.concatenate(turns), [wq_b])
    if keys is not None:
        expected = np.concatenate(choices)
        block.findings.equal("indexer", out, tensors.ints(out), expected, [wq_b, proj, *keys[1]])
