"""Attention over a sliding window and compressed blocks (SPEC section 5, Attention).

T tokens of the batch, s of a segment, H heads, C head_dim, n rows of keys, m entries of the index
table.
"""

import math

import torch
from torch import Tensor

from v4tool.config import Numerics
from v4tool.model.compress import Rotary, compressor, indexer, quantize_kv
from v4tool.model.layers import ordered_sum, rotate, rotated_part, unit_rms
from v4tool.model.scope import LayerState, Scope, Segment, single_threaded
from v4tool.names import Step, compressed_columns, has_indexer, table_offset
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import batched_linear_hi, grouped_linear
from v4tool.threads import parallel_for

TABLE_BLOCK = 64
"""Table entries per block of the online softmax, as in the release's kernel."""
QUERIES_AT_ONCE = 8
"""Queries whose gathered keys are in memory at a time: bounds memory for long prompts."""


def window_table(step: Step, window: int) -> Tensor:
    """The window part of the index table: I64 [s, min(s, window)]; in a decode step [1, window]."""
    if step.start == 0:
        rows = torch.arange(step.tokens).unsqueeze(1)
        table = (rows - window + 1).clamp(min=0) + torch.arange(min(step.tokens, window))
        return torch.where(table > rows, -1, table)
    newest = step.start % window
    if step.start >= window - 1:
        ring = torch.arange(window)
        return torch.cat([ring[newest + 1 :], ring[: newest + 1]]).unsqueeze(0)
    table = torch.arange(window)
    return torch.where(table > step.start, -1, table).unsqueeze(0)


def all_blocks_table(step: Step, ratio: int, offset: int) -> Tensor:
    """Index table of all compressed blocks, -1 where incomplete for the query: I64 [s, blocks]."""
    blocks = torch.arange(compressed_columns(step, ratio))
    allowed = (torch.arange(step.start, step.end) + 1) // ratio
    return torch.where(blocks < allowed.unsqueeze(1), blocks + offset, -1)


def store_window(state: LayerState, step: Step, kv: Tensor, window: int) -> None:
    """Write the pass's last rows into the ring buffer, position t into row t % window."""
    if state.window is None:
        state.window = kv.new_zeros(window, kv.shape[-1])
    kept = kv[-window:]
    rows = torch.arange(step.end - kept.shape[0], step.end) % window
    state.window[rows] = kept


def attended_rows(state: LayerState, step: Step, kv: Tensor, blocks: Tensor | None) -> Tensor:
    """Keys, also values, that this pass attends to: BF16 [n, C] (SPEC 5, step 5)."""
    own = kv if step.start == 0 or state.window is None else state.window
    return own.clone() if blocks is None else torch.cat([own, blocks])


def sparse_attn(
    q_sHC: Tensor, kv_nC: Tensor, table_sm: Tensor, sink_H: Tensor, numerics: Numerics
) -> Tensor:
    """Attention of each query over the rows listed in its table, with a sink (SPEC 5, step 6).

    q BF16 [s, H, C], kv BF16 [n, C], table integer [s, m] (-1: no row), sink acc [H] -> BF16 [s,
    H, C]. Online softmax over blocks of 64 entries in order; the numerator takes BF16(p), the
    denominator p.
    """
    out, single = torch.empty_like(q_sHC), single_threaded(numerics)
    pieces = list(zip(*(x.split(QUERIES_AT_ONCE) for x in (out, q_sHC, table_sm)), strict=True))

    def task(i: int) -> None:
        result, q, table = pieces[i]
        result.copy_(_attend(q, kv_nC, table, sink_H, single))

    parallel_for(task, len(pieces), numerics.threads)
    return out


def _attend(
    q_sHC: Tensor, kv_nC: Tensor, table_sm: Tensor, sink_H: Tensor, numerics: Numerics
) -> Tensor:
    rows_smC = kv_nC.index_select(0, table_sm.clamp(min=0).flatten()).unflatten(0, table_sm.shape)
    scores_sHm = batched_linear_hi(q_sHC, rows_smC, numerics) * q_sHC.shape[-1] ** -0.5
    scores_sHm.masked_fill_((table_sm < 0).unsqueeze(1), -math.inf)
    highest = scores_sHm.new_full(q_sHC.shape[:2], -math.inf)
    numerator, denominator = scores_sHm.new_zeros(q_sHC.shape), torch.zeros_like(highest)
    for scores, rows in zip(
        scores_sHm.split(TABLE_BLOCK, -1), rows_smC.split(TABLE_BLOCK, 1), strict=True
    ):
        higher = torch.maximum(highest, scores.amax(-1))
        # a block without any row leaves the maximum at -inf; exp(-inf - -inf) would be NaN
        base = higher.masked_fill(higher == -math.inf, 0.0)
        p = torch.exp(scores - base.unsqueeze(-1))
        rescale = torch.exp(highest - base)
        denominator = denominator * rescale + ordered_sum(p)
        numerator *= rescale.unsqueeze(-1)
        numerator += batched_linear_hi(to_bf16(p), rows.transpose(1, 2), numerics)
        highest = higher
    denominator = denominator + torch.exp(sink_H - highest)
    return to_bf16(numerator.div_(denominator.unsqueeze(-1)))


def queries(scope: Scope, x_TD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Normed low-rank queries BF16 [T, q_lora_rank], and the heads' BF16 [T, H, C] (step 1)."""
    config = scope.config
    qr = scope.tap("q_norm.out", scope.norm("q_norm", scope.linear("wq_a", x_TD)))
    q = scope.linear("wq_b", qr).unflatten(-1, (config.n_heads, config.head_dim))
    q = unit_rms(q, config.norm_eps, scope.acc, threads=scope.threads)
    return qr, rotary.rotate_batch(q)


def latent_rows(scope: Scope, x_TD: Tensor, rotary: Rotary, use: str = "") -> Tensor:
    """Normed and rotated rows of the window: BF16 [T, C]; use: ending of the recorded names."""
    raw = scope.linear("wkv", x_TD, f"wkv{use}")
    return rotary.rotate_batch(scope.tap(f"kv_norm{use}.out", scope.norm("kv_norm", raw)))


def keys_values(scope: Scope, x_TD: Tensor, rotary: Rotary, use: str = "") -> Tensor:
    """Keys of the window, which are also the values: BF16 [T, C] (step 2)."""
    return quantize_kv(latent_rows(scope, x_TD, rotary, use), scope.config)


def compressed(
    scope: Scope, x_TD: Tensor, qr_TQ: Tensor, layer: int, rotary: Rotary
) -> list[tuple[Tensor, Tensor | None]]:
    """Index table I64 [s, m] and compressed rows BF16 [t, C] of each segment (step 3).

    The rows are None in a layer without compression.
    """
    config, ratio = scope.config, scope.config.ratio(layer)
    tables = [window_table(segment.step, config.window_size) for segment in scope.segments]
    if not ratio:
        return [(table, None) for table in tables]
    if has_indexer(ratio):
        chosen = indexer(scope / "indexer", x_TD, qr_TQ, layer, rotary)
    else:
        steps = [segment.step for segment in scope.segments]
        chosen = [all_blocks_table(s, ratio, table_offset(config, s)) for s in steps]
    states = [segment.state(layer).compressor for segment in scope.segments]
    rows = compressor(
        scope / "compressor", x_TD, ratio, states, lambda x: quantize_kv(x, config), rotary
    )
    both = [torch.cat(pair, dim=1) for pair in zip(tables, chosen, strict=True)]
    return list(zip(both, rows, strict=True))


def attend(
    scope: Scope, segment: Segment, q_sHC: Tensor, kv_nC: Tensor, table_sm: Tensor, sink_H: Tensor
) -> Tensor:
    """`sparse_attn` of one segment, its inputs and output recorded: BF16 [s, H, C]."""
    scope.tap_for(segment, "sparse_attn.in.q", q_sHC.unsqueeze(0))
    scope.tap_for(segment, "sparse_attn.in.kv", kv_nC.unsqueeze(0))
    scope.tap_for(segment, "sparse_attn.in.topk_idxs", table_sm.unsqueeze(0))
    out = sparse_attn(q_sHC, kv_nC, table_sm, sink_H, scope.numerics)
    scope.tap_for(segment, "sparse_attn.out", out.unsqueeze(0))
    return out


def core(
    scope: Scope,
    segment: Segment,
    layer: int,
    q_sHC: Tensor,
    kv_sC: Tensor,
    table_sm: Tensor,
    blocks: Tensor | None,
    sink_H: Tensor,
) -> Tensor:
    """Update one segment's window cache and compute its attention: BF16 [s, H, C]."""
    step, state = segment.step, segment.state(layer)
    store_window(state, step, kv_sC, scope.config.window_size)
    rows, table = attended_rows(state, step, kv_sC, blocks), table_sm.to(torch.int32)
    return attend(scope, segment, q_sHC, rows, table, sink_H)


def output(scope: Scope, o_THC: Tensor, rotary: Rotary) -> Tensor:
    """Inverse rotation and output projections: BF16 [T, H, C] -> BF16 [T, D] (step 7)."""
    config = scope.config
    o_THC = rotate(o_THC, rotary.tables, inverse=True, threads=scope.threads)
    scope.tap("rope.o_inv.out", rotated_part(o_THC, config))
    grouped = o_THC.flatten(1).unflatten(-1, (config.o_groups, -1))
    wo_a = scope.quantized("wo_a", grouped.shape[-1])
    low = scope.tap("wo_b.in", grouped_linear(grouped, wo_a, scope.numerics).flatten(1))
    return scope.tap("out", scope.linear("wo_b", low))


def attention(scope: Scope, x_TD: Tensor, layer: int) -> Tensor:
    """The attention of a block: BF16 [T, D] -> BF16 [T, D]."""
    rotary = Rotary(scope, scope.config.ratio(layer))
    qr, q = queries(scope, x_TD, rotary)
    kv = keys_values(scope, x_TD, rotary)
    tables = compressed(scope, x_TD, qr, layer, rotary)
    sink = scope.weight("attn_sink").to(scope.acc)
    parts = zip(scope.parts(q, kv), tables, strict=True)
    heads = [
        core(scope, segment, layer, q_s, kv_s, table, blocks, sink)
        for (segment, q_s, kv_s), (table, blocks) in parts
    ]
    del q, parts  # frees memory: among the largest tensors of a block
    return output(scope, torch.cat(heads) if len(heads) > 1 else heads[0], rotary)
