"""Identities of the compressor and the indexer (SPEC section 5, Compressor and Indexer).

Left out: pooling, which takes the unknown `ape`; it is checked with the checkpoint.
"""

import numpy as np

from v4tool.check.bits import Bits, rounded, wide
from v4tool.check.block_pass import BlockPass
from v4tool.check.formulas import (
    allowed_blocks,
    best_blocks,
    block_scores,
    fp4_steps,
    fp8_steps,
    hadamard,
    turned,
)
from v4tool.names import (
    complete_blocks,
    compressed_columns,
    has_indexer,
    selected_columns,
    table_offset,
)


def check_compressed(place: BlockPass) -> None:
    """All identities of one block's compressor and, for ratio 4, of its indexer."""
    if not place.ratio:
        return
    last = 2
    if has_indexer(place.ratio):
        last = 4 if complete_blocks(place.step, place.ratio) else 3
        check_compressor(place, "indexer compressor", "attn.indexer.compressor", 3)
        check_indexer(place)
    check_compressor(place, "compressor", "attn.compressor", last)


def check_compressor(place: BlockPass, rule: str, name: str, number: int) -> None:
    """`norm.out` to its rotation and on to `out`: FP8 steps, or Hadamard and FP4 steps."""
    normed, out = place.key(f"{name}.norm.out"), place.key(f"{name}.out")
    rotation, source = place.key(f"attn.rope.rot.{number}.out"), place.source
    if not complete_blocks(place.step, place.ratio) or normed not in source:
        return
    rows, rotated = source.bits(normed).copy(), place.config.rope_head_dim
    blocks = np.arange(place.step.start // place.ratio, place.step.end // place.ratio)
    rows[:, -rotated:] = turned(rows[:, -rotated:], place.tables_at(blocks * place.ratio))
    if rotation in source:
        place.book.compare(
            f"{rule} rotation", rotation, source.bits(rotation), rows[:, -rotated:], [normed]
        )
    if out in source:
        if rule == "compressor":
            rows[:, :-rotated] = fp8_steps(rows[:, :-rotated])
        else:
            rows = fp4_steps(hadamard(rows))
        of = [normed, *([rotation] if rotation in source else [])]
        place.book.compare(rule, out, source.bits(out), rows, of)


def indexer_keys(place: BlockPass) -> tuple[Bits, list[str]] | None:
    """The indexer's blocks of all passes so far, bits [t, ID], and the keys they come from."""
    parts, of = [], []
    for one in (*place.earlier, place):
        key = one.key("attn.indexer.compressor.out")
        if complete_blocks(one.step, one.ratio):
            if key not in place.source:
                return None
            parts.append(place.source.bits(key))
            of.append(key)
    if sum(map(len, parts)) != compressed_columns(place.step, place.ratio):
        return None
    width = place.config.index_head_dim
    return np.concatenate([np.zeros((0, width), np.uint16), *parts]), of


def check_indexer(place: BlockPass) -> None:
    """The indexer's rotation, and which blocks its scores choose, in which order."""
    config, source, rotated = place.config, place.source, place.config.rope_head_dim
    wq_b, rotation = place.key("attn.indexer.wq_b.out"), place.key("attn.rope.rot.2.out")
    proj, out = place.key("attn.indexer.weights_proj.out"), place.key("attn.indexer.out")
    if wq_b not in source:
        return
    keys = indexer_keys(place) if source.has(proj, out) else None
    k = selected_columns(config, place.step, place.ratio)
    offset, allowed = table_offset(config, place.step), allowed_blocks(place.step, place.ratio)
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    turns, choices = [], []
    width = config.index_n_heads * max(config.index_head_dim, len(keys[0]) if keys else 0)
    for start, stop in place.pieces(width):
        q = source.bits(wq_b, start, stop).reshape(stop - start, config.index_n_heads, -1).copy()
        q[..., -rotated:] = turned(q[..., -rotated:], place.tables(start, stop))
        turns.append(q[..., -rotated:].copy())
        if keys is not None:
            weights = rounded(wide(source.bits(proj, start, stop)) * factor)
            # blocks that are not complete for the last of these queries are for none of them
            seen = keys[0][: allowed[stop - 1]]
            scores = block_scores(fp4_steps(hadamard(q)), seen, weights)
            choices.append(best_blocks(scores, allowed[start:stop], k, offset))
    if rotation in source:
        found = source.bits(rotation)
        place.book.compare("indexer rotation", rotation, found, np.concatenate(turns), [wq_b])
    if keys is not None:
        expected = np.concatenate(choices)
        place.book.equal("indexer", out, source.ints(out), expected, [wq_b, proj, *keys[1]])
