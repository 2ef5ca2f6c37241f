"""Faults of the attention, its index tables and its caches."""

import math

import torch

from tests.faults.harness import Fault, Patch
from tests.faults.own import attention_of
from tests.faults.rotation import MSCALE
from v4tool.model import attention, compress
from v4tool.quant.activation import act_quant_inplace
from v4tool.quant.linear import QuantizedWeight, grouped_linear, in_memory

CORE = {"operator": "sparse_attn", "key": "layers.0.attn.sparse_attn.out"}
KV = {"operator": "attn_kv", "key": "layers.0.attn.sparse_attn.in.kv"}
TABLE = "layers.{}.attn.sparse_attn.in.topk_idxs"
GROUPS = {"operator": "output_groups", "key": "layers.0.attn.wo_b.in"}
CHOICE = {"operator": "index_choice", "suspects": ("index_score",)}
MTP_KV = "mtp.0.decode.attn.sparse_attn.in.kv"


def replaced(name: str, value):
    """Replace one name of the attention module."""
    return lambda patch: patch.setattr(attention, name, value)


def kv_norm_missing(patch: Patch) -> None:
    def wrong(scope, x, rotary):
        raw = scope.linear("wkv", x)
        scope.tap("kv_norm.out", scope.norm("kv_norm", raw))
        return compress.quantize_kv(rotary.rotate_batch(raw), scope.config)

    patch.setattr(attention, "keys_values", wrong)


def compressed_not_quantised(patch: Patch) -> None:
    right = compress.compressor

    def wrong(scope, x, ratio, states, quantize, rotary):
        return right(scope, x, ratio, states, lambda rows: rows, rotary)

    patch.setattr(attention, "compressor", wrong)


def window(patch: Patch, change) -> None:
    """Change the window table: change gets (right, step, window)."""
    right = attention.window_table
    patch.setattr(attention, "window_table", lambda step, w: change(right, step, w))


def one_short(right, step, w):
    table = right(step, w)
    rows = torch.arange(step.start, step.end).unsqueeze(1)
    return torch.where((step.start == 0) & (rows - table >= w - 1), -1, table)


def compressed_masked(patch: Patch) -> None:
    right = attention.core

    def wrong(scope, segment, layer, q, kv, table, blocks, sink):
        if segment.step.start == 0:
            table = table.clone()
            table[:, min(segment.step.tokens, scope.config.window_size) :] = -1
        return right(scope, segment, layer, q, kv, table, blocks, sink)

    patch.setattr(attention, "core", wrong)


def choose(patch: Patch, change) -> None:
    """Change the indexer's choice: change gets (right, scores, allowed, k, offset)."""
    right = compress.choose_blocks
    patch.setattr(compress, "choose_blocks", lambda *args: change(right, *args))


def blocks_table(patch: Patch, allowed) -> None:
    def wrong(step, ratio, offset):
        blocks = torch.arange(step.end // ratio)
        limit = allowed(torch.arange(step.start, step.end), ratio).unsqueeze(1)
        return torch.where(blocks < limit, blocks + offset, -1)

    patch.setattr(attention, "all_blocks_table", wrong)


def ring(patch: Patch, keep) -> None:
    """Change what a prefill leaves in the ring: keep gets (kv, window) -> rows 0 … of the ring."""
    right = attention.store_window

    def wrong(state, step, kv, size):
        right(state, step, kv, size)
        if step.start == 0 and step.tokens > size:
            state.window[:] = keep(kv, size)

    patch.setattr(attention, "store_window", wrong)


def ring_position(patch: Patch) -> None:
    right = attention.store_window

    def wrong(state, step, kv, size):
        right(state, step, kv, size)
        if step.start:
            state.window = state.window.roll(1, 0)

    patch.setattr(attention, "store_window", wrong)


def grouped(change):
    """Change what goes into wo_a: change gets (x [T, G, K], weight) -> the two."""

    def inject(patch: Patch) -> None:
        patch.setattr(attention, "grouped_linear", lambda x, w, n: grouped_linear(*change(x, w), n))

    return inject


def strided(x, w):
    tokens, groups, width = x.shape
    heads = x.reshape(tokens, -1, groups, HEAD_DIM)
    return heads.transpose(1, 2).reshape(tokens, groups, width), w


HEAD_DIM = 128
"""Of the small golden checkpoint."""


def first_group(x, w):
    rows = w.shape[0] // x.shape[1]
    first = in_memory(w).rows(0, rows)
    codes, scale = (t.repeat(x.shape[1], 1) for t in (first.codes, first.scale))
    return x, QuantizedWeight(codes, scale, w.kind)


def before_norm(patch: Patch) -> None:
    right_queries, right_norm = attention.queries, attention.Scope.norm
    raw = {}

    def norm(self, name, x):
        if name == "q_norm":
            raw["x"] = x
        return right_norm(self, name, x)

    def wrong(scope, x, rotary):
        _, q = right_queries(scope, x, rotary)
        return raw["x"], q

    patch.setattr(attention.Scope, "norm", norm)
    patch.setattr(attention, "queries", wrong)


def phase_swapped(config, step):
    return config.window_size if step.start == 0 else 6


def decode_offset_of_prefill(patch: Patch) -> None:
    right = compress.table_offset
    patch.setattr(compress, "table_offset", lambda c, step: 6 if step.start else right(c, step))


FAULTS = [
    Fault(
        "mscale_on_softmax",
        replaced("sparse_attn", attention_of(softmax_scale=MSCALE**2)),
        **CORE,
    ),
    Fault(
        "sink_missing",
        replaced("sparse_attn", attention_of(sink=lambda s: torch.full_like(s, -math.inf))),
        **CORE,
    ),
    Fault(
        "sink_scaled",
        replaced("sparse_attn", attention_of(sink=lambda s: s * HEAD_DIM**-0.5)),
        **CORE,
    ),
    Fault("sink_rolled", replaced("sparse_attn", attention_of(sink=lambda s: s.roll(1))), **CORE),
    Fault(
        "head_rms_missing",
        replaced("unit_rms", lambda x, eps, acc, **kw: x),
        "head_rms",
        "layers.0.attn.rope.rot.0.out",
    ),
    Fault("kv_norm_missing", kv_norm_missing, "rope[1]", "layers.0.attn.rope.rot.1.out"),
    Fault("kv_quant_missing", replaced("quantize_kv", lambda x, config: x), **KV),
    Fault(
        "kv_quant_on_rope_dims",
        replaced("quantize_kv", lambda x, config: act_quant_inplace(x, 64)),
        **KV,
    ),
    Fault(
        "compressed_kv_quant_missing",
        compressed_not_quantised,
        "compressor_out",
        "layers.1.attn.compressor.out",
        prompt="len6",
    ),
    Fault(
        "window_127",
        lambda p: window(p, one_short),
        "attn_table",
        TABLE.format(0),
        prompt="len129",
    ),
    Fault(
        "window_unbounded",
        lambda p: window(p, lambda f, step, w: f(step, step.tokens if step.start == 0 else w)),
        "attn_table",
        TABLE.format(0),
        prompt="len129",
        status="shape",
    ),
    Fault("pad_reads_row", replaced("sparse_attn", attention_of(pad="row")), **CORE),
    Fault("pad_scores_zero", replaced("sparse_attn", attention_of(pad="zero")), **CORE),
    Fault(
        "offset_missing",
        lambda p: p.setattr(compress, "table_offset", lambda c, step: 0),
        key="layers.1.attn.indexer.out",
        prompt="len6",
        **CHOICE,
    ),
    Fault(
        "offset_of_other_phase",
        decode_offset_of_prefill,
        key="decode.0.layers.1.attn.indexer.out",
        prompt="len6",
        decode=1,
        **CHOICE,
    ),
    Fault(
        "compressed_branch_masked",
        compressed_masked,
        "attn_table",
        TABLE.format(1),
        prompt="len6",
    ),
    Fault(
        "block_not_causal",
        lambda p: choose(p, lambda f, s, a, k, o: f(s, torch.full_like(a, s.shape[1]), k, o)),
        key="layers.1.attn.indexer.out",
        prompt="len6",
        **CHOICE,
    ),
    Fault(
        "own_block_admitted",
        lambda p: choose(p, lambda f, s, a, k, o: f(s, (a + 1).clamp(max=s.shape[1]), k, o)),
        key="layers.1.attn.indexer.out",
        prompt="len6",
        **CHOICE,
    ),
    Fault(
        "block_not_causal_128",
        lambda p: blocks_table(p, lambda i, r: torch.full_like(i, len(i) // r)),
        "attn_table",
        TABLE.format(2),
        prompt="len129",
    ),
    Fault(
        "ring_not_rotated",
        lambda p: ring(p, lambda kv, size: kv[-size:]),
        "attn_kv",
        MTP_KV,
        prompt="len129",
    ),
    Fault(
        "ring_first_window_kept",
        lambda p: ring(p, lambda kv, size: kv[:size]),
        "attn_kv",
        MTP_KV,
        prompt="len129",
    ),
    Fault("ring_off_by_one", ring_position, "attn_kv", MTP_KV),
    Fault("groups_strided", grouped(strided), **GROUPS),
    Fault("one_group", grouped(first_group), **GROUPS),
    Fault("wo_a_input_fp8", grouped(lambda x, w: (act_quant_inplace(x, 128), w)), **GROUPS),
    Fault(
        "indexer_q_before_norm",
        before_norm,
        "q_linear[attn.indexer.wq_b]",
        "layers.1.attn.indexer.wq_b.out",
    ),
    Fault(
        "topk_last_query_for_all",
        lambda p: choose(p, lambda f, s, a, k, o: f(s[-1:].expand_as(s).contiguous(), a, k, o)),
        key="layers.1.attn.indexer.out",
        prompt="len129",
        **CHOICE,
    ),
    Fault(
        "dense_no_topk",
        lambda p: choose(p, lambda f, s, a, k, o: f(s, a, s.shape[1], o)),
        key="layers.1.attn.indexer.out",
        prompt="len129",
        status="shape",
        **CHOICE,
    ),
    Fault(
        "p_not_rounded",
        replaced("sparse_attn", attention_of(round_p=False)),
        **CORE,
    ),
    Fault(
        "denominator_of_rounded_p",
        replaced("sparse_attn", attention_of(round_denominator=True)),
        **CORE,
    ),
    Fault(
        "table_in_one_block",
        replaced("sparse_attn", attention_of(block=1 << 20)),
        "sparse_attn",
        "layers.0.attn.sparse_attn.out",
        prompt="len129",
    ),
]
