"""Faults of the mixture of experts."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.faults.harness import Fault, Patch, Tensors
from v4tool.model import moe
from v4tool.model.layers import ordered_sum, sigmoid, softplus
from v4tool.model.scope import Scope
from v4tool.quant.activation import to_bf16

WEIGHTS = {"operator": "gate_weights", "key": "layers.0.ffn.gate.out.0"}
SCORES = {**WEIGHTS, "suspects": ("gate_scores",)}
DOWN = {
    "operator": "expert_down[ffn.experts.<E>]",
    "key": "layers.0.ffn.experts.<E>.w2.out",
}
SUM = {"operator": "moe", "key": "layers.0.ffn.out"}


def gate(change):
    """Replace the gate's weights: change gets (config, layer, scores, biased, experts)."""

    def wrong(scope, x, layer):
        scores_ = moe.scores(scope, x)
        experts = moe.choose_experts(scope, scores_, layer)
        hashed = scope.config.is_hash(layer)
        biased = scores_ if hashed else scores_ + scope.weight("gate.bias").double()
        weights = change(scope.config, layer, scores_, biased, experts.long())
        scope.tap_flat("gate.out.0", weights)
        scope.tap_flat("gate.out.1", experts)
        return weights, experts

    return lambda patch: patch.setattr(moe, "gate", wrong)


def normed(weights: Tensor, scale: float) -> Tensor:
    return weights / ordered_sum(weights).unsqueeze(1) * scale


def scores(change):
    """Replace sqrt(softplus(logits)): change gets the logits."""
    return lambda patch: patch.setattr(
        moe, "scores", lambda scope, x: change(scope.linear_hi("gate", x))
    )


def bf16_router(patch: Patch) -> None:
    patch.setattr(
        moe,
        "scores",
        lambda scope, x: torch.sqrt(softplus(to_bf16(scope.linear_hi("gate", x)).double())),
    )


def choose(change):
    """Replace the choice of experts: change gets (right, scope, scores, layer)."""

    def inject(patch: Patch) -> None:
        right = moe.choose_experts
        patch.setattr(moe, "choose_experts", lambda *args: change(right, *args))

    return inject


def without_bias(right, scope, scores_, layer):
    if scope.config.is_hash(layer):
        return right(scope, scores_, layer)
    k = scope.config.n_activated_experts
    return scores_.sort(dim=1, descending=True, stable=True).indices[:, :k]


def by_score(right, scope, scores_, layer):
    k = scope.config.n_activated_experts
    if scope.config.is_hash(layer):
        return scores_.sort(dim=1, descending=True, stable=True).indices[:, :k].int()
    return right(scope, scores_, layer)


def previous_token(right, scope, scores_, layer):
    if not scope.config.is_hash(layer):
        return right(scope, scores_, layer)
    shifted = tuple(replace(s, ids=s.ids.roll(1)) for s in scope.segments)
    return right(replace(scope, segments=shifted), scores_, layer)


def swiglu(change, shared: bool | None = None):
    """Replace the expert's inner function, of all experts or of one sort."""

    def inject(patch: Patch) -> None:
        right = moe.swiglu

        def wrong(a, u, limit, weight):
            if shared is not None and shared != (weight is None):
                return right(a, u, limit, weight)
            h = change(a, u, limit)
            return to_bf16(h if weight is None else weight.unsqueeze(1) * h)

        patch.setattr(moe, "swiglu", wrong)

    return inject


def silu(a: Tensor) -> Tensor:
    return sigmoid(a) * a


def beyond(linear: str, low: bool = False, shared: bool = False):
    """Whether an expert has a value beyond 10 (below -10) there, or the fault changes nothing."""

    def needed(found: Tensors) -> bool:
        part = "layers.0.ffn.shared_experts." if shared else "layers.0.ffn.experts."
        values = [v for k, v in found.items() if k.startswith(part) and f".{linear}.out" in k]
        return any(bool((v < -10).any() if low else (v > 10).any()) for v in values)

    return needed


def w1_w3_swapped(patch: Patch) -> None:
    right = Scope.quantized
    other = {"w1": "w3", "w3": "w1"}
    patch.setattr(Scope, "quantized", lambda self, n, width: right(self, other.get(n, n), width))


def weight_after_w2(patch: Patch) -> None:
    right = moe.expert

    def wrong(scope, x, weight):
        outputs = right(scope, x, None)
        if weight is not None:
            w2 = to_bf16(outputs["w2.out"].double() * weight.unsqueeze(1))
            outputs = {**outputs, "w2.out": w2, "out": w2}
        return outputs

    patch.setattr(moe, "expert", wrong)


def weight_in_bf16(patch: Patch) -> None:
    right = moe.swiglu

    def wrong(a, u, limit, weight):
        return right(a, u, limit, None if weight is None else to_bf16(weight).double())

    patch.setattr(moe, "swiglu", wrong)


class RecordedTensors(dict):
    """An expert's outputs that are recorded as they are, and added as something else."""

    added: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.added if name == "out" else super().__getitem__(name)


def shared_added_as(change):
    """Replace what the shared expert adds: change gets (config, its output)."""

    def inject(patch: Patch) -> None:
        right = moe.expert

        def wrong(scope, x, weight):
            outputs = right(scope, x, weight)
            if weight is not None:
                return outputs
            recorded = RecordedTensors(outputs)
            recorded.added = change(scope.config, outputs["out"])
            return recorded

        patch.setattr(moe, "expert", wrong)

    return inject


FAULTS = [
    Fault(
        "bias_in_weights",
        gate(lambda c, layer, s, b, e: normed(b.gather(1, e), c.route_scale)),
        "gate_weights",
        "layers.2.ffn.gate.out.0",
        suspects=(),
    ),
    Fault(
        "bias_missing",
        choose(without_bias),
        "gate_select",
        "layers.2.ffn.gate.out.1",
        prompt="len33",
    ),
    Fault(
        "no_renormalisation",
        gate(lambda c, layer, s, b, e: s.gather(1, e) * c.route_scale),
        **SCORES,
    ),
    Fault("no_route_scale", gate(lambda c, layer, s, b, e: normed(s.gather(1, e), 1.0)), **SCORES),
    Fault(
        "route_scale_twice",
        gate(lambda c, layer, s, b, e: normed(s.gather(1, e), c.route_scale**2)),
        **SCORES,
    ),
    Fault("sigmoid_scores", scores(sigmoid), **SCORES),
    Fault("softplus_without_sqrt", scores(softplus), **SCORES),
    Fault("router_bf16", bf16_router, **SCORES),
    Fault("hash_ignored", choose(by_score), "gate_hash", "layers.0.ffn.gate.out.1"),
    Fault(
        "hash_uniform_weights",
        gate(
            lambda c, layer, s, b, e: (
                torch.full(e.shape, c.route_scale / e.shape[1], dtype=torch.float64)
                if c.is_hash(layer)
                else normed(s.gather(1, e), c.route_scale)
            )
        ),
        **SCORES,
    ),
    Fault("hash_previous_token", choose(previous_token), "gate_hash", "layers.0.ffn.gate.out.1"),
    Fault(
        "clamp_missing_shared",
        swiglu(lambda a, u, limit: silu(a) * u, shared=True),
        "expert_down[ffn.shared_experts]",
        "layers.0.ffn.shared_experts.w2.out",
        needs=beyond("w1", shared=True),
    ),
    Fault(
        "clamp_missing_routed",
        swiglu(lambda a, u, limit: silu(a) * u, shared=False),
        needs=beyond("w1"),
        **DOWN,
    ),
    Fault(
        "clamp_gate_both_sides",
        swiglu(lambda a, u, limit: silu(a.clamp(-limit, limit)) * u.clamp(-limit, limit)),
        needs=beyond("w1", low=True),
        **{**DOWN, "prompt": "len33"},
    ),
    Fault(
        "clamp_up_above_only",
        swiglu(lambda a, u, limit: silu(a.clamp(max=limit)) * u.clamp(max=limit)),
        needs=beyond("w3", low=True),
        **DOWN,
    ),
    Fault(
        "clamp_after_product",
        swiglu(lambda a, u, limit: (silu(a) * u).clamp(-limit, limit)),
        needs=beyond("w1"),
        **DOWN,
    ),
    Fault(
        "w1_w3_swapped",
        w1_w3_swapped,
        "q_linear[ffn.experts.<E>.w1]",
        "layers.0.ffn.experts.<E>.w1.out",
    ),
    Fault("weight_after_w2", weight_after_w2, **DOWN),
    Fault("weight_in_bf16", weight_in_bf16, **DOWN),
    Fault("shared_missing", shared_added_as(lambda c, out: torch.zeros_like(out)), **SUM),
    Fault(
        "shared_scaled",
        shared_added_as(lambda c, out: to_bf16(out.double() * c.route_scale)),
        **SUM,
    ),
]
