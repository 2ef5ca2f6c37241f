"""Identities of the KV compressor and the indexer (SPEC section 5, Compressor and Indexer).

From `compressor.norm.out` to `compressor.out`, and from the indexer's queries, keys and weights to
its top-k. Left out: the pooling before the norm, which takes the weight `ape` (`coefficients`).
t compressed blocks, ID index_head_dim.
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
    """All identities of one block's compressor and, if it has one, of its indexer."""
    if not block.ratio:
        return
    last = 2
    if has_indexer(block.ratio):
        last = 4 if complete_blocks(block.step, block.ratio) else 3
        check_compressor(block, "indexer compressor", "attn.indexer.compressor", 3)
        check_indexer(block)
    check_compressor(block, "compressor", "attn.compressor", last)


def check_compressor(block: BlockPass, rule: str, name: str, number: int) -> None:
    """A compressor's rotation and output from its `norm.out`.

    The main compressor's output is quantised to FP8 outside the rotary dimensions; the indexer's is
    Hadamard-transformed and quantised to FP4. number: of the rotation in `attn.rope.rot.<n>.out`.
    """
    normed, out = block.key(f"{name}.norm.out"), block.key(f"{name}.out")
    rotation, tensors = block.key(f"attn.rope.rot.{number}.out"), block.tensors
    if not complete_blocks(block.step, block.ratio) or normed not in tensors:
        return
    rows, rope_dim = tensors.bits(normed).copy(), block.config.rope_head_dim
    blocks = np.arange(block.step.start // block.ratio, block.step.end // block.ratio)
    rows[:, -rope_dim:] = apply_rope(rows[:, -rope_dim:], block.tables_at(blocks * block.ratio))
    if rotation in tensors:
        block.findings.compare(
            f"{rule} rotation", rotation, tensors.bits(rotation), rows[:, -rope_dim:], [normed]
        )
    if out in tensors:
        if rule == "compressor":
            rows[:, :-rope_dim] = fp8_round_trip(rows[:, :-rope_dim])
        else:
            rows = fp4_round_trip(hadamard(rows))
        sources = [normed, *([rotation] if rotation in tensors else [])]
        block.findings.compare(rule, out, tensors.bits(out), rows, sources)


def indexer_keys(block: BlockPass) -> tuple[Bits, list[str]] | None:
    """The indexer's keys of all passes so far, bits [t, ID], and the recorded keys they come from.

    None if a recorded key is missing.
    """
    parts, sources = [], []
    for one in (*block.earlier, block):
        key = one.key("attn.indexer.compressor.out")
        if complete_blocks(one.step, one.ratio):
            if key not in block.tensors:
                return None
            parts.append(block.tensors.bits(key))
            sources.append(key)
    if sum(map(len, parts)) != compressed_columns(block.step, block.ratio):
        return None
    width = block.config.index_head_dim
    return np.concatenate([np.zeros((0, width), np.uint16), *parts]), sources


def check_indexer(block: BlockPass) -> None:
    """The rotation of the indexer's queries, and the top-k of its scores, in order."""
    config, tensors, rope_dim = block.config, block.tensors, block.config.rope_head_dim
    wq_b, rotation = block.key("attn.indexer.wq_b.out"), block.key("attn.rope.rot.2.out")
    proj, out = block.key("attn.indexer.weights_proj.out"), block.key("attn.indexer.out")
    if wq_b not in tensors:
        return
    keys = indexer_keys(block) if tensors.has(proj, out) else None
    k = selected_columns(config, block.step, block.ratio)
    offset, allowed = table_offset(config, block.step), allowed_blocks(block.step, block.ratio)
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    rotations, choices = [], []
    width = config.index_n_heads * max(config.index_head_dim, len(keys[0]) if keys else 0)
    for start, stop in block.pieces(width):
        q = tensors.bits(wq_b, start, stop).reshape(stop - start, config.index_n_heads, -1).copy()
        q[..., -rope_dim:] = apply_rope(q[..., -rope_dim:], block.tables(start, stop))
        rotations.append(q[..., -rope_dim:].copy())
        if keys is not None:
            weights = to_bf16(to_f64(tensors.bits(proj, start, stop)) * factor)
            # the last of these queries may see the most blocks
            visible = keys[0][: allowed[stop - 1]]
            scores = block_scores(fp4_round_trip(hadamard(q)), visible, weights)
            choices.append(top_blocks(scores, allowed[start:stop], k, offset))
    if rotation in tensors:
        found = tensors.bits(rotation)
        block.findings.compare(
            "indexer rotation", rotation, found, np.concatenate(rotations), [wq_b]
        )
    if keys is not None:
        expected = np.concatenate(choices)
        block.findings.equal("indexer", out, tensors.ints(out), expected, [wq_b, proj, *keys[1]])
