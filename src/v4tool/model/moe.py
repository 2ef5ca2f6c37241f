"""Mixture of experts: gate, routed experts and shared expert (SPEC section 5, MoE).

T tokens of the batch, E experts, K experts per token, I the experts' inner width. An expert's
weights are read once for all tokens of the batch that are routed to it, and only if there are any.
Several experts are computed at a time, one thread each; recording and summing are in index order.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, chain

import torch
from torch import Tensor

from v4tool.model.layers import by_tokens, ordered_sum, sigmoid, softplus
from v4tool.model.scope import Scope
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import q_linear
from v4tool.threads import ordered_map

EXPERTS_AHEAD = 8
"""Experts that are prefetched ahead: 100 MB in the release, 0.2 s of a slow disk."""
PRODUCTS_AT_LEAST = 1 << 22
"""Average multiplications per expert above which several experts are computed at a time; below, the
kernel runs less than a millisecond and threads contend for the GIL.
"""


def scores(scope: Scope, x_TD: Tensor) -> Tensor:
    """Routing scores of all experts, sqrt(softplus(logits)): BF16 [T, D] -> acc [T, E]."""
    return torch.sqrt(softplus(scope.linear_hi("gate", x_TD)))


def choose_experts(scope: Scope, scores_TE: Tensor, layer: int) -> Tensor:
    """Experts of each token: [T, K], I32 by token id in hash layers, else I64 by top-k of scores.

    The bias affects only the choice; ties go to the lowest index.
    """
    if scope.config.is_hash(layer):
        return scope.weights.gather_rows(f"{scope.path}gate.tid2eid", scope.ids).to(torch.int32)
    biased = scores_TE + scope.weight("gate.bias").to(scope.acc)
    ranked = biased.sort(dim=1, descending=True, stable=True)
    return ranked.indices[:, : scope.config.n_activated_experts]


def gate(scope: Scope, x_TD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Routing weights acc [T, K] and experts [T, K] of each token."""
    scores_TE = scores(scope, x_TD)
    experts = choose_experts(scope, scores_TE, layer)
    weights = scores_TE.gather(1, experts.long())
    weights = weights / ordered_sum(weights).unsqueeze(1) * scope.config.route_scale
    scope.tap_flat("gate.out.0", weights)
    scope.tap_flat("gate.out.1", experts)
    return weights, experts


def swiglu(gate_nI: Tensor, up_nI: Tensor, limit: float, weight_n: Tensor | None) -> Tensor:
    """BF16(weight * silu(min(gate, limit)) * clamp(up, +-limit)): acc [n, I] twice -> BF16 [n, I].

    The routing weight is applied here, before rounding to BF16 and the quantisation for w2.
    """
    a, u = gate_nI.clamp(max=limit), up_nI.clamp(-limit, limit)
    h = sigmoid(a).mul_(a).mul_(u)
    return to_bf16(h if weight_n is None else weight_n.unsqueeze(1) * h)


def expert(scope: Scope, x_nD: Tensor, weight_n: Tensor | None) -> dict[str, Tensor]:
    """One expert on n tokens: its recorded outputs by name, BF16 [n, ...]; `out` is the result."""
    acc, limit = scope.acc, scope.config.swiglu_limit

    def linear(name: str, x: Tensor) -> Tensor:
        return q_linear(x, scope.quantized(name, x.shape[1]), scope.numerics)

    def inner(w1: Tensor, w3: Tensor, weight: Tensor | None = None) -> Tensor:
        return swiglu(w1.to(acc), w3.to(acc), limit, weight)

    w1, w3 = linear("w1", x_nD), linear("w3", x_nD)
    weights = () if weight_n is None else (weight_n,)
    w2 = linear("w2", by_tokens(inner, w1, w3, *weights, threads=scope.threads))
    return {"w1.out": w1, "w3.out": w3, "w2.out": w2, "out": w2}


def routed_rows(weights_TK: Tensor, experts_TK: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert with tokens, in index order: its number, tokens I64 [n], weights acc [n]."""
    ordered, where = experts_TK.flatten().sort(stable=True)
    reached, counts = ordered.unique_consecutive(return_counts=True)
    rows, weights = where // experts_TK.shape[1], weights_TK.flatten()[where]
    parts = (x.split(counts.tolist()) for x in (rows, weights))
    yield from zip(reached.tolist(), *parts, strict=True)


def tap_expert(scope: Scope, outputs: dict[str, Tensor], rows: Tensor) -> None:
    """Pass each segment its rows of an expert's outputs; segments without rows are skipped.

    rows: I64 [n], ascending token indices of the batch.
    """
    ends = list(accumulate(segment.step.tokens for segment in scope.segments))
    tokens = rows.tolist()
    stops = [bisect_left(tokens, end) for end in ends]
    for segment, start, stop in zip(scope.segments, [0, *stops], stops, strict=False):
        if start < stop:
            for name, value in outputs.items():
                scope.tap_for(segment, name, value[start:stop])


def threads_for(scope: Scope, x_TD: Tensor, reached: int) -> int:
    """Number of experts to compute at a time; reached: number of experts that have tokens."""
    config = scope.config
    rows = len(x_TD) * config.n_activated_experts / max(reached, 1)
    products = rows * 3 * x_TD.shape[1] * config.moe_inter_dim
    return scope.threads if products >= PRODUCTS_AT_LEAST else 1


def expert_weights(scope: Scope, e: int) -> list[str]:
    """Names of the tensors of expert e."""
    linears = [f"{scope.path}experts.{e}.{name}" for name in ("w1", "w3", "w2")]
    return [f"{linear}.{part}" for linear in linears for part in ("weight", "scale")]


def moe(scope: Scope, x_TD: Tensor, layer: int) -> Tensor:
    """Mixture of experts, summed in acc in index order, shared expert last: BF16 [T, D] -> same."""
    weights, experts = gate(scope, x_TD, layer)
    jobs, single = list(routed_rows(weights, experts)), scope.single
    upcoming = [expert_weights(scope, e) for e, _, _ in jobs] + [list(scope.upcoming)]
    scope.weights.advise(list(chain(*upcoming[:EXPERTS_AHEAD])))

    def routed(i: int) -> dict[str, Tensor]:
        for names in upcoming[i + EXPERTS_AHEAD : i + EXPERTS_AHEAD + 1]:
            scope.weights.advise(names)
        e, rows, weights_n = jobs[i]
        return expert(single / "experts" / str(e), x_TD.index_select(0, rows), weights_n)

    y = torch.zeros(x_TD.shape, dtype=scope.acc)
    results = ordered_map(routed, range(len(jobs)), threads_for(scope, x_TD, len(jobs)))
    for (e, rows, _), outputs in zip(jobs, results, strict=True):
        tap_expert(scope / "experts" / str(e), outputs, rows)
        y.index_add_(0, rows, outputs["out"].to(scope.acc))
    shared = scope / "shared_experts"
    outputs = expert(shared, x_TD, None)
    for name, value in outputs.items():
        shared.tap_flat(name, value)
    add = by_tokens(
        lambda a, b: to_bf16(a + b.to(scope.acc)), y, outputs["out"], threads=scope.threads
    )
    return scope.tap("out", add)
