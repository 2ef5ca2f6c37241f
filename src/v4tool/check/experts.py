"""Identities of the mixture of experts: copies, the sum, and equal inputs (SPEC section 5, MoE)."""

import numpy as np

from v4tool.check.attention import copy
from v4tool.check.bits import F64, rounded, wide, widen
from v4tool.check.block_pass import BlockPass

ROUTED = "ffn.gate.out.1"
COLUMNS_AT_ONCE = 1024
"""Columns that are summed up at a time: they stay in the cache."""


def check_experts(place: BlockPass) -> None:
    """All identities of one block's mixture of experts."""
    copy(place, "shared out", "ffn.shared_experts.out", "ffn.shared_experts.w2.out")
    check_equal_inputs(place)
    for expert in place.source.experts.get(place.key("ffn."), []):
        name = f"ffn.experts.{expert}"
        copy(place, "expert out", f"{name}.out", f"{name}.w2.out")
    check_sum(place)


def check_equal_inputs(place: BlockPass) -> None:
    """Gate and shared expert see the token; in hash layers the gate's choice sees only its id."""
    if place.has("ffn_norm.out"):
        rows = place.source.bits(place.key("ffn_norm.out"))
        outputs = ["ffn.shared_experts.w1.out", "ffn.shared_experts.w3.out"]
        if not place.config.is_hash(place.layer):
            outputs += ["ffn.gate.out.0", ROUTED]
        place.sameness.tie(place.weights, rows, place.prefix, outputs, "ffn_norm.out")
    ids = place.pass_prefix + "input_ids"
    if place.config.is_hash(place.layer) and ids in place.source:
        tokens = place.source.ints(ids).reshape(-1, 1)
        place.sameness.tie(place.weights, tokens, place.prefix, [ROUTED], "input_ids")


def check_sum(place: BlockPass) -> None:
    """`ffn.out` from all experts that the gate names and the shared one."""
    if not place.has("ffn.out", ROUTED, "ffn.shared_experts.out"):
        return
    source, routes = place.source, place.source.ints(place.key(ROUTED))
    total: F64 = np.zeros((place.step.tokens, place.config.dim))
    of = []
    for expert in np.unique(routes).tolist():
        name = f"ffn.experts.{expert}.out"
        rows = np.flatnonzero((routes == expert).any(1))
        if not place.has(name) or source.count(place.key(name)) != len(rows):
            return
        result = source.bits(place.key(name))
        for start in range(0, result.shape[1], COLUMNS_AT_ONCE):
            columns = slice(start, start + COLUMNS_AT_ONCE)
            total[rows, columns] += widen(result[:, columns])
        of.append(place.key(name))
    shared = place.key("ffn.shared_experts.out")
    total += wide(source.bits(shared))
    out = place.key("ffn.out")
    shown = [shared, place.key("ffn.experts.*.out")]
    place.book.compare("ffn sum", out, source.bits(out), rounded(total), shown)
    place.book.applied("ffn sum", [*of, place.key(ROUTED)])
