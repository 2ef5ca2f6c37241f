"""KV compressor (pools each block of tokens into one row) and indexer (top-k over these blocks).

SPEC section 5, Compressor and Indexer. T tokens of the batch, s of a segment, t blocks, r tokens
per block, d the pooled width, c = 2 where blocks overlap, IH heads and ID dims of the indexer.

Prefill and decode share one path: append the new rows to the state, pool every block that is
complete now, drop rows that no later block needs.
"""

import math
from collections.abc import Callable
from copy import copy
from itertools import count

import torch
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.config_fields import FP4_GROUP, KV_BLOCK
from v4tool.model.layers import (
    by_tokens,
    ordered_sum,
    rope_frequencies,
    rope_tables,
    rotate,
    rotated_part,
)
from v4tool.model.scope import CompressorState, Scope, Segment
from v4tool.names import (
    Step,
    complete_blocks,
    compressor_groups,
    selected_columns,
    table_offset,
)
from v4tool.quant.activation import act_quant_inplace, fp4_act_quant, hadamard, to_bf16
from v4tool.threads import ordered_map

QUERIES_AT_ONCE = 8
"""Queries whose scores against all blocks are held at a time."""


class Rotary:
    """A layer's rotary embedding; numbers the recorded rotations `rope.rot.<i>` per segment.

    scope: the attention's, under which rotations are recorded.
    """

    def __init__(self, scope: Scope, ratio: int) -> None:
        self.scope = scope
        self.frequencies = rope_frequencies(scope.config, ratio)
        self.tables = rope_tables(self.frequencies, scope.positions, scope.acc)
        self.numbers = {id(segment): count() for segment in scope.segments}

    def on(self, scope: Scope) -> "Rotary":
        """The same for other tokens of the same sequences; the numbers go on."""
        other = copy(self)
        other.scope, other.tables = scope, rope_tables(self.frequencies, scope.positions, scope.acc)
        other.numbers = dict(zip(map(id, scope.segments), self.numbers.values(), strict=True))
        return other

    def tap(self, segment: Segment, rotated: Tensor) -> None:
        """Record the rotated dims of one segment's tensor [s, ..., C] as its next rotation."""
        part = rotated_part(rotated, self.scope.config).unsqueeze(0)
        self.scope.tap_for(segment, f"rope.rot.{next(self.numbers[id(segment)])}.out", part)

    def rotate_batch(self, x: Tensor) -> Tensor:
        """Rotate BF16 [T, ..., C], each token at its position, and record it."""
        rotated = rotate(x, self.tables, threads=self.scope.threads)
        for segment, part in self.scope.parts(rotated):
            self.tap(segment, part)
        return rotated

    def rotate_at(self, positions: Tensor, x: Tensor) -> Tensor:
        """Rotate BF16 [n, C], row i at positions[i], without recording it."""
        return rotate(x, rope_tables(self.frequencies, positions, self.scope.acc))


def append_rows(state: CompressorState, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The state's rows with the new ones appended: acc [rows, c*d] each."""
    if state.kv is None or state.gate is None:
        return kv, gate
    return torch.cat([state.kv, kv]), torch.cat([state.gate, gate])


def keep_rows(state: CompressorState, kv: Tensor, gate: Tensor, step: Step, ratio: int) -> None:
    """Store the rows of the incomplete block and, if blocks overlap, of the last complete one."""
    first = max(step.end // ratio - (compressor_groups(ratio) - 1), 0) * ratio
    drop = first - state.first
    state.kv, state.gate, state.first = kv[drop:].clone(), gate[drop:].clone(), first


def block_rows(x: Tensor, first_block: int, blocks: int, ratio: int, before: float) -> Tensor:
    """The rows that are pooled into each block: acc [rows, c*d] -> [t, c*r, d].

    x starts at the block before `first_block` if there is one. If blocks overlap (c = 2), a block
    takes the FIRST d columns of the previous block's rows and the LAST d of its own; before: value
    of the rows before block 0.
    """
    if compressor_groups(ratio) == 1:
        own: Tensor = x[: blocks * ratio].unflatten(0, (blocks, ratio))
        return own
    d = x.shape[-1] // 2
    if first_block == 0:
        x = torch.cat([x.new_full((ratio, 2 * d), before), x])
    tiles = x[: (blocks + 1) * ratio].unflatten(0, (blocks + 1, ratio))
    return torch.cat([tiles[:-1, :, :d], tiles[1:, :, d:]], dim=1)


def pool(kv: Tensor, gate: Tensor) -> Tensor:
    """Softmax-weighted sum over a block's rows, per column: acc [t, rows, d], twice -> [t, d]."""
    e = torch.exp(gate - gate.amax(1, keepdim=True))
    return ordered_sum(kv * (e / ordered_sum(e, 1, keepdim=True)), 1)


def completed_blocks(
    state: CompressorState, step: Step, kv: Tensor, gate: Tensor, ratio: int
) -> Tensor | None:
    """Add one segment's rows, acc [s, c*d] each, to the state; pool the blocks that are complete.

    Returns BF16 [t, d], None if no block is complete.
    """
    kv, gate = append_rows(state, kv, gate)
    blocks, first = complete_blocks(step, ratio), step.start // ratio
    pooled = None
    if blocks:
        kv_rows = block_rows(kv, first, blocks, ratio, before=0.0)
        gate_rows = block_rows(gate, first, blocks, ratio, before=-math.inf)
        pooled = to_bf16(pool(kv_rows, gate_rows))
    keep_rows(state, kv, gate, step, ratio)
    return pooled


def block_positions(step: Step, ratio: int) -> Tensor:
    """Positions of the first tokens of the completed blocks, at which they are rotated: I64 [t]."""
    return torch.arange(step.start // ratio, step.end // ratio) * ratio


def compressor(
    scope: Scope,
    x_TD: Tensor,
    ratio: int,
    states: list[CompressorState],
    quantize: Callable[[Tensor], Tensor],
    rotary: Rotary,
) -> list[Tensor]:
    """All compressed rows of each segment, earlier and new ones: BF16 [blocks, d].

    x BF16 [T, D]; states: one per segment; quantize: BF16 [t, d] -> the same, applied after the
    rotation (FP8 outside the rotated dims, or Hadamard and FP4).
    """
    kv = scope.tap("wkv.out", scope.linear_hi("wkv", x_TD))
    gate = scope.tap("wgate.out", scope.linear_hi("wgate", x_TD))
    gate = gate + scope.weight("ape").to(scope.acc)[scope.positions % ratio]
    for (segment, kv_s, gate_s), state in zip(scope.parts(kv, gate), states, strict=True):
        pooled = completed_blocks(state, segment.step, kv_s, gate_s, ratio)
        if pooled is None:
            continue
        normed = scope.norm("norm", pooled)
        scope.tap_for(segment, "norm.out", normed.unsqueeze(0))
        rotated = rotary.rotate_at(block_positions(segment.step, ratio), normed)
        rotary.tap(segment, rotated)
        new = quantize(rotated)
        scope.tap_for(segment, "out", new.unsqueeze(0))
        state.blocks = new if state.blocks is None else torch.cat([state.blocks, new])
    none = to_bf16(kv[:0, : kv.shape[-1] // compressor_groups(ratio)])
    return [none if state.blocks is None else state.blocks for state in states]


def quantize_kv(x: Tensor, config: ModelConfig) -> Tensor:
    """Round to FP8 in blocks of 64, except the rotated dims: BF16 [n, C] -> the same (SPEC 5)."""
    plain = x.shape[-1] - config.rope_head_dim
    return torch.cat([act_quant_inplace(x[..., :plain], KV_BLOCK), x[..., plain:]], dim=-1)


def hadamard_fp4(x: Tensor, acc: torch.dtype, *, threads: int = 1) -> Tensor:
    """Hadamard rotation, then rounding to FP4 in blocks of 32: BF16 [..., ID] -> the same."""
    return by_tokens(lambda p: fp4_act_quant(hadamard(p, acc), FP4_GROUP), x, threads=threads)


def index_scores(q_sHd: Tensor, k_td: Tensor, weights_sH: Tensor, acc: torch.dtype) -> Tensor:
    """The indexer's score of each block for each query: BF16 [s, t] (SPEC 5, Indexer).

    q BF16 [s, IH, ID], k BF16 [t, ID], weights BF16 [s, IH]. The products of FP4 values are exact
    in acc.
    """
    scores = to_bf16(q_sHd.to(acc) @ k_td.to(acc).T)
    weighted = to_bf16(scores.relu().to(acc) * weights_sH.to(acc).unsqueeze(-1))
    return to_bf16(ordered_sum(weighted.to(acc), 1))


def choose_blocks(scores_st: Tensor, allowed_s: Tensor, k: int, offset: int) -> Tensor:
    """Top-k blocks of each query, ties to the lowest index: I64 [s, k], padded with -1.

    scores BF16 [s, t]; allowed I64 [s]: number of blocks that are complete for the query; offset:
    row of block 0 among the attended rows.
    """
    forbidden = torch.arange(scores_st.shape[1]) >= allowed_s.unsqueeze(1)
    ranked = scores_st.masked_fill(forbidden, -math.inf).sort(dim=1, descending=True, stable=True)
    best = ranked.indices[:, :k]
    return torch.where(best < allowed_s.unsqueeze(1), best + offset, -1)


def indexer(scope: Scope, x_TD: Tensor, qr_TQ: Tensor, layer: int, rotary: Rotary) -> list[Tensor]:
    """Top-k blocks of each segment, as rows among its attended rows: I64 [s, k], padded with -1.

    x BF16 [T, D]; qr BF16 [T, q_lora_rank], the normed low-rank queries.
    """
    config, acc = scope.config, scope.acc
    ratio = config.ratio(layer)
    q = scope.linear("wq_b", qr_TQ).unflatten(-1, (config.index_n_heads, config.index_head_dim))
    q = hadamard_fp4(rotary.rotate_batch(q), acc, threads=scope.threads)
    states = [segment.state(layer).indexer_compressor for segment in scope.segments]
    keys = compressor(
        scope / "compressor", x_TD, ratio, states, lambda x: hadamard_fp4(x, acc), rotary
    )
    projected = scope.tap("weights_proj.out", to_bf16(scope.linear_hi("weights_proj", x_TD)))
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    weights = to_bf16(projected.to(acc) * factor)
    chosen = []
    for (segment, q_s, weights_s), k_td in zip(scope.parts(q, weights), keys, strict=True):
        chosen.append(_choices(scope, segment, q_s, k_td, weights_s, ratio))
        scope.tap_for(segment, "out", chosen[-1].unsqueeze(0))
    return chosen


def _choices(
    scope: Scope, segment: Segment, q: Tensor, k_td: Tensor, weights: Tensor, ratio: int
) -> Tensor:
    step = segment.step
    k = selected_columns(scope.config, step, ratio)
    offset = table_offset(scope.config, step)
    allowed = (segment.positions + 1) // ratio
    pieces = list(zip(*(x.split(QUERIES_AT_ONCE) for x in (q, weights, allowed)), strict=True))

    def piece(i: int) -> Tensor:
        q, weights, allowed = pieces[i]
        return choose_blocks(index_scores(q, k_td, weights, scope.acc), allowed, k, offset)

    return torch.cat(list(ordered_map(piece, range(len(pieces)), scope.threads)))
