"""Identities of the mixture of experts: copies, duplicate inputs, the sum (SPEC section 5, MoE).

Left out: the experts' products and the gate, which take weights (`products`), and which experts a
file must have (`specification`).
"""

import numpy as np

from v4tool.check.attention import copy
from v4tool.check.bits import F64, to_bf16, to_f32, to_f64
from v4tool.check.block_pass import BlockPass

ROUTED = "ffn.gate.out.1"
COLUMNS_AT_ONCE = 1024
"""Columns that are summed at a time; they fit into the processor's cache."""


def check_experts(block: BlockPass) -> None:
    """All identities of one block's mixture of experts."""
    copy(block, "shared out", "ffn.shared_experts.out", "ffn.shared_experts.w2.out")
    check_equal_inputs(block)
    for expert in block.tensors.experts.get(block.key("ffn."), []):
        name = f"ffn.experts.{expert}"
        copy(block, "expert out", f"{name}.out", f"{name}.w2.out")
    check_sum(block)


def check_equal_inputs(block: BlockPass) -> None:
    """Duplicate inputs of the gate and the shared expert.

    Their input is `ffn_norm.out`; in hash layers the chosen experts depend on the token id alone.
    """
    if block.has("ffn_norm.out"):
        rows = block.tensors.bits(block.key("ffn_norm.out"))
        outputs = ["ffn.shared_experts.w1.out", "ffn.shared_experts.w3.out"]
        if not block.config.is_hash(block.layer):
            outputs += ["ffn.gate.out.0", ROUTED]
        block.duplicates.add(block.weights, rows, block.prefix, outputs, "ffn_norm.out")
    ids = block.pass_prefix + "input_ids"
    if block.config.is_hash(block.layer) and ids in block.tensors:
        tokens = block.tensors.ints(ids).reshape(-1, 1)
        block.duplicates.add(block.weights, tokens, block.prefix, [ROUTED], "input_ids")


def check_sum(block: BlockPass) -> None:
    """`ffn.out` as the sum of the chosen experts' outputs and the shared expert's, in binary64."""
    if not block.has("ffn.out", ROUTED, "ffn.shared_experts.out"):
        return
    tensors, routes = block.tensors, block.tensors.ints(block.key(ROUTED))
    total: F64 = np.zeros((block.step.tokens, block.config.dim))
    expert_outs = []
    for expert in np.unique(routes).tolist():
        name = f"ffn.experts.{expert}.out"
        rows = np.flatnonzero((routes == expert).any(1))
        if not block.has(name) or tensors.count(block.key(name)) != len(rows):
            return
        result = tensors.bits(block.key(name))
        for start in range(0, result.shape[1], COLUMNS_AT_ONCE):
            columns = slice(start, start + COLUMNS_AT_ONCE)
            total[rows, columns] += to_f32(result[:, columns])
        expert_outs.append(block.key(name))
    shared = block.key("ffn.shared_experts.out")
    total += to_f64(tensors.bits(shared))
    out = block.key("ffn.out")
    sources = [shared, block.key("ffn.experts.*.out")]
    block.findings.compare("ffn sum", out, tensors.bits(out), to_bf16(total), sources)
    block.findings.applied("ffn sum", [*expert_outs, block.key(ROUTED)])
