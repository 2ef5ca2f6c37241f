"""The catalogue of faults: known mistakes of ports, as variants of the nodes of `model.vt`.

A fault replaces helpers of a node, or wraps the node's function; it has the operator's own
signature and knows nothing of a port. `diff` tries those of the operators at fault and names the
ones that reproduce the candidate's value. Left out: trying them (`verdict`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Namespace = Mapping[str, Any]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One mistake.

    name: as porters call it; summary: what the port does. replace: node -> helpers from those in
    use; wrap: node -> function from the node's own and the file's names.
    """

    name: str
    summary: str
    replace: Mapping[str, Callable[[Namespace], dict[str, Any]]] = field(default_factory=dict)
    wrap: Mapping[str, Callable[[Function, Namespace], Function]] = field(default_factory=dict)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that the mistake is in."""
        return frozenset(self.replace) | frozenset(self.wrap)

    def replaced(self, node: str, helpers: Namespace) -> dict[str, Any]:
        """The helpers that a node gets."""
        return self.replace[node](helpers) if node in self.replace else {}

    def applied(self, node: str, function: Function, namespace: Namespace) -> Function:
        """The function that a node gets."""
        return self.wrap[node](function, namespace) if node in self.wrap else function


def constants(**values: Any) -> Callable[[Namespace], dict[str, Any]]:
    """Replace names of the file by values."""
    return lambda helpers: values


def on(*nodes: str, **values: Any) -> dict[str, Callable[[Namespace], dict[str, Any]]]:
    """The same constants in several nodes."""
    return {node: constants(**values) for node in nodes}


def argument(
    position: int, change: Callable[[Any], Any]
) -> Callable[[Function, Namespace], Function]:
    """The node's function with one positional argument changed."""

    def wrapped(function: Function, namespace: Namespace) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            changed = change(args[position])
            return function(*args[:position], changed, *args[position + 1 :], **kwargs)

        return call

    return wrapped


def result(change: Callable[[Any], Any]) -> Callable[[Function, Namespace], Function]:
    """The node's function with its result changed."""
    return lambda function, namespace: lambda *args, **kwargs: change(function(*args, **kwargs))


def first_argument() -> Callable[[Function, Namespace], Function]:
    """A node that gives its first argument back."""
    return lambda function, namespace: lambda *args, **kwargs: args[0]


def rotation(turn: Callable[[Tensor, Tensor, Tensor], Tensor], *, sign: int = 1) -> Any:
    """A rotation of the last R dims written differently: turn gets (x [..., R], cos, sin)."""

    def wrapped(function: Function, namespace: Namespace) -> Function:
        def call(x: Tensor, positions: Tensor, ratio: int, **kwargs: Any) -> Tensor:
            cos, sin = namespace["rope_table"](positions, ratio, x.ndim)
            last = namespace["acc"](x[..., x.shape[-1] - namespace["R"] :])
            return turn(last, cos, sign * sin)

        return call

    return wrapped


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).float()


def _unturned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.float()


def _forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return pairs.flatten(-2).float()


def _plain_head_norm(function: Function, namespace: Namespace) -> Function:
    def call(q: Tensor) -> Tensor:
        return q.reshape(*q.shape[:2], namespace["H"], namespace["HD"])

    return call


def _scores(change: Callable[[Tensor], Tensor]) -> Callable[[Function, Namespace], Function]:
    """A gate with another function of its logits; the file's is sqrt(softplus(logit))."""

    def wrapped(function: Function, namespace: Namespace) -> Function:
        def call(x: Tensor, **kwargs: Any) -> Tensor:
            given = namespace["acc"](x)
            return change(given @ namespace["acc"](function.__globals__["gate_w"]).T)

        return call

    return wrapped


def _with_sinkhorn(iterations: int) -> dict[str, Any]:
    return on("hc_split", SINKHORN_ITERS=iterations)


MINUS_INF = float("-inf")

FAULTS = (
    Fault("comb_transposed", "comb summed over its second index",
          wrap={"hc_post": argument(3, lambda comb: comb.transpose(-1, -2))}),
    Fault("sinkhorn_21", "one iteration more", replace=_with_sinkhorn(21)),
    Fault("sinkhorn_3", "three iterations", replace=_with_sinkhorn(3)),
    Fault("post_without_2x", "post = sigmoid without the factor 2",
          wrap={"hc_split": result(lambda found: (found[0], found[1] / 2, found[2]))}),
    Fault("hc_head_mean", "mean of the streams before the head",
          wrap={"hc_head": lambda f, ns: lambda x, **kw: ns["acc"](x).mean(2).float()}),
    Fault("half_split", "halves rotated instead of neighbouring pairs",
          wrap={"rope": rotation(_halves), "rope_back": rotation(_halves, sign=-1)}),
    Fault("inverse_missing", "the attention's result is not rotated back",
          wrap={"rope_back": rotation(_unturned)}),
    Fault("inverse_forward", "the attention's result is rotated forward once more",
          wrap={"rope_back": rotation(_forward)}),
    Fault("compress_base_everywhere", "compress_rope_theta and YaRN in plain layers",
          wrap={node: argument(2, lambda ratio: ratio or 4) for node in ("rope", "rope_back")}),
    Fault("main_base_on_compressed", "rope_theta in compressed layers",
          wrap={node: argument(2, lambda ratio: 0) for node in ("rope", "rope_back")}),
    Fault("sink_missing", "no sink in the softmax's denominator",
          replace={"sparse_attn": lambda ns: {}},
          wrap={"sparse_attn": lambda f, ns: _with_global(f, "sink_w",
                                                          lambda w: w * 0 + MINUS_INF)}),
    Fault("sink_rolled", "the heads' sinks shifted by one",
          wrap={"sparse_attn": lambda f, ns: _with_global(f, "sink_w", lambda w: w.roll(1))}),
    Fault("head_rms_missing", "queries without the RMS norm of each head",
          wrap={"head_rms": _plain_head_norm}),
    Fault("ape_missing", "no position term in the pooling scores",
          wrap={"compressor_pool": lambda f, ns: _with_global(f, "ape_w", lambda w: w * 0)}),
    Fault("pool_mean", "mean instead of the softmax of the scores",
          wrap={"compressor_pool": argument(1, lambda gate: gate * 0)}),
    Fault("hadamard_missing", "no Hadamard rotation of indexer rows",
          replace={n: lambda ns: {"hadamard": lambda x: x}
                   for n in ("index_compressor_out", "index_score")}),
    Fault("sigmoid_scores", "sigmoid instead of sqrt(softplus) in the gate",
          wrap={"gate_scores": _scores(torch.sigmoid)}),
    Fault("softplus_without_sqrt", "softplus without its root in the gate",
          wrap={"gate_scores": result(lambda s: s * s)}),
    Fault("no_route_scale", "routing weights without routed_scaling_factor",
          replace=on("gate_weights", ROUTE_SCALE=1.0)),
    Fault("route_scale_twice", "routed_scaling_factor applied twice",
          wrap={"gate_weights": lambda f, ns: lambda *a, **k: f(*a, **k) * ns["ROUTE_SCALE"]}),
    Fault("no_renormalisation", "chosen scores not divided by their sum",
          wrap={"gate_weights": lambda f, ns: lambda scores, chosen, **kw: scores.gather(
              1, chosen.long()) * ns["ROUTE_SCALE"]}),
    Fault("bias_missing", "experts chosen without the bias",
          wrap={"gate_select": lambda f, ns: _with_global(f, "bias_w", lambda w: w * 0)}),
    Fault("clamp_missing", "no SwiGLU limit",
          replace=on("expert_down", SWIGLU_LIMIT=float("inf"))),
    Fault("clamp_gate_both_sides", "the gate clamped from below too",
          wrap={"expert_down": lambda f, ns: lambda gate, *a, **kw: f(
              gate.clamp(min=-ns["SWIGLU_LIMIT"]), *a, **kw)}),
    Fault("w1_w3_swapped", "gate and up exchanged",
          wrap={"expert_down": lambda f, ns: lambda gate, up, *a, **kw: f(up, gate, *a, **kw)}),
)  # fmt: skip
"""Every fault that `diff` tries (public reports of ports; SPEC has the right computation)."""


def _with_global(function: Function, name: str, change: Callable[[Any], Any]) -> Function:
    """The function with a bound weight changed while it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        names = function.__globals__
        before = names[name]
        names[name] = change(before)
        try:
            return function(*args, **kwargs)
        finally:
            names[name] = before

    return call
