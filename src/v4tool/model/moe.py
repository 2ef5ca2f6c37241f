"""The mixture of experts: gate, routed experts, shared expert (SPEC section 5, MoE).

T tokens of the batch, E experts, K experts per token, I the experts' inner width. An expert's weights are
read once for all tokens of the batch that reach it, and only if one does.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from v4tool.model.layers import ordered_sum
from v4tool.model.scope import Scope
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import q_linear


def scores(scope: Scope, x_TD: Tensor) -> Tensor:
    """Affinity of every token to every expert: BF16 [T, D] -> acc [T, E], sqrt(softplus) of the logits."""
    return torch.sqrt(F.softplus(scope.linear_hi("gate", x_TD)))


def choose_experts(scope: Scope, scores_TE: Tensor, layer: int) -> Tensor:
    """The experts of every token: [T, K], I32 from the token's id in hash layers, else I64 by score.

    The bias only selects; ties go to the lowest index.
    """
    if scope.config.is_hash(layer):
        return scope.weights.gather_rows(f"{scope.path}gate.tid2eid", scope.ids).to(torch.int32)
    biased = scores_TE + scope.weight("gate.bias").to(scope.acc)
    ranked = biased.sort(dim=1, descending=True, stable=True)
    return ranked.indices[:, : scope.config.n_activated_experts]


def gate(scope: Scope, x_TD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Routing weights acc [T, K] and experts [T, K] of every token."""
    scores_TE = scores(scope, x_TD)
    experts = choose_experts(scope, scores_TE, layer)
    weights = scores_TE.gather(1, experts.long())
    weights = weights / ordered_sum(weights).unsqueeze(1) * scope.config.route_scale
    scope.tap_flat("gate.out.0", weights)
    scope.tap_flat("gate.out.1", experts)
    return weights, experts


def swiglu(gate_nI: Tensor, up_nI: Tensor, limit: float, weight_n: Tensor | None) -> Tensor:
    """BF16(weight * silu(min(gate, limit)) * clamp(up, +-limit)): acc [n, I] twice -> BF16 [n, I].

    The routing weight multiplies here, before the rounding to BF16 and w2's quantisation.
    """
    a, u = gate_nI.clamp(max=limit), up_nI.clamp(-limit, limit)
    h = a * torch.sigmoid(a) * u
    return to_bf16(h if weight_n is None else weight_n.unsqueeze(1) * h)


def expert(scope: Scope, x_nD: Tensor, weight_n: Tensor | None) -> dict[str, Tensor]:
    """One expert on n tokens: what it records, by name, BF16 [n, ...]; `out` is its result [n, D]."""
    acc, numerics = scope.acc, scope.numerics

    def linear(name: str, x: Tensor) -> Tensor:
        return q_linear(x, scope.quantized(name, x.shape[1]), numerics)

    w1, w3 = linear("w1", x_nD), linear("w3", x_nD)
    h = swiglu(w1.to(acc), w3.to(acc), scope.config.swiglu_limit, weight_n)
    w2 = linear("w2", h)
    return {"w1.out": w1, "w3.out": w3, "w2.out": w2, "out": w2}


def routed_rows(experts_TK: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every expert reached, lowest first, with the tokens I64 [n] that reach it and their places in K."""
    for e in experts_TK.unique().tolist():
        rows, places = (experts_TK == e).nonzero(as_tuple=True)
        yield e, rows, places


def tap_expert(scope: Scope, outputs: dict[str, Tensor], rows: Tensor) -> None:
    """Show every segment its tokens' rows of an expert's outputs; a segment without any sees nothing."""
    owners = torch.repeat_interleave(
        torch.arange(len(scope.segments)), torch.tensor([s.step.tokens for s in scope.segments])
    )[rows]
    for place, segment in enumerate(scope.segments):
        mine = owners == place
        if mine.any():
            for name, value in outputs.items():
                scope.tap_for(segment, name, value[mine])


def moe(scope: Scope, x_TD: Tensor, layer: int) -> Tensor:
    """Routed experts in index order, then the shared one, summed in acc: BF16 [T, D] -> BF16 [T, D]."""
    weights, experts = gate(scope, x_TD, layer)
    y = torch.zeros(x_TD.shape, dtype=scope.acc)
    for e, rows, places in routed_rows(experts):
        place = scope / "experts" / str(e)
        outputs = expert(place, x_TD[rows], weights[rows, places])
        tap_expert(place, outputs, rows)
        y[rows] += outputs["out"].to(scope.acc)
    shared = scope / "shared_experts"
    outputs = expert(shared, x_TD, None)
    for name, value in outputs.items():
        shared.tap_flat(name, value)
    return scope.tap("out", to_bf16(y + outputs["out"].to(scope.acc)))
