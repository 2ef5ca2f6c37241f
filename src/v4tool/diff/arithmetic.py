"""Arithmetic of another engine: variants of an operator that are right, as other helpers.

The operators are the nodes of `model.vt`. Each computes with helpers of that file (`bf16`,
`act_quant`, ...); an engine with another arithmetic rounds or quantises elsewhere: the same node
with another helper. An *axis* is one such freedom, an *option* one of its values; the first option
of every axis is the release's. Left out: faults (`faults`) and choosing (`search`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.diff.forms import Function, InPlace, Namespace, half_attention, weight_after_down

Replacements = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """One value of an axis.

    name: in the field's words; replace: the helpers that differ, from the file's own ones; wrap:
    the node's function in another form, from the function and the file's names; steps: whether
    results fall on steps as coarse as BF16's, so that a last bit can become a whole step.
    """

    name: str
    replace: Callable[[Namespace], Replacements]
    steps: bool = False
    wrap: Callable[[Function, Namespace], Function] | None = None


@dataclass(frozen=True)
class Axis:
    """A freedom that engines take: its name, the helper it is about, the nodes that have it."""

    name: str
    helper: str
    nodes: frozenset[str]
    options: tuple[Option, ...]

    def option(self, name: str) -> Option:
        """The option of this name; KeyError where there is none."""
        return {option.name: option for option in self.options}[name]


def fp32_error(terms: int) -> float:
    """Relative L2 of a right operator with sums of `terms` products accumulated in FP32.

    Each addition rounds by at most 2^-24 of the partial sum; independent roundings add up with the
    root of their number.
    """
    return 2.0**-24 * math.sqrt(terms)


def step_error(terms: int) -> float:
    """Relative L2 of a right operator whose result is then rounded to BF16 (step 2^-8).

    An element takes the neighbouring value where its sum lies within `fp32_error` of a boundary,
    which happens with a probability of twice that over the step.
    """
    return 2.0**-8 * math.sqrt(2 * fp32_error(terms) / 2.0**-8)


def _not_at_all(namespace: Namespace) -> Replacements:
    return {}


def _f32(x: Tensor) -> Tensor:
    return x.to(torch.float32)


def _rounded(dtype: torch.dtype) -> Callable[[Namespace], Replacements]:
    return lambda namespace: {"bf16": lambda x: x.to(torch.float32).to(dtype)}


def _unquantised(namespace: Namespace) -> Replacements:
    return {"act_quant": lambda x, width: namespace["acc"](x)}


def _bf16_activations(namespace: Namespace) -> Replacements:
    return {"act_quant": lambda x, width: namespace["acc"](x.to(torch.bfloat16))}


def _int8(width: int, scale_dtype: torch.dtype) -> Callable[[Namespace], Replacements]:
    """8-bit integers with one scale per `width` elements, as ggml's Q8_0 (32) and Q8_K (256)."""

    def quantised(namespace: Namespace) -> Replacements:
        def act_quant(x: Tensor, _: int) -> Tensor:
            blocks = namespace["blocks_of"](x, width)
            scale = blocks.abs().amax(-1, keepdim=True) / 127
            inverse = torch.where(scale == 0, 0.0, 1 / scale)
            codes = torch.round(blocks * inverse).clamp(-127, 127)
            values: Tensor = codes.double() * scale.to(scale_dtype).double()
            return values.flatten(-2)[..., : x.shape[-1]]

        return {"act_quant": act_quant}

    return quantised


def _bf16_weights(namespace: Namespace) -> Replacements:
    stored = namespace["weight_values"]
    return {
        "weight_values": lambda codes, scale: namespace["acc"](
            stored(codes, scale).to(torch.bfloat16)
        )
    }


def _bf16_inputs(namespace: Namespace) -> Replacements:
    """Inputs of a product rounded to BF16; weights that are BF16 stay as they are."""
    return {"acc": lambda x: x.to(torch.bfloat16).to(torch.float64)}


def _without(*names: str) -> Callable[[Namespace], Replacements]:
    return lambda namespace: dict.fromkeys(names, lambda x: x)


RELEASE = "as the release"
QUANTISED = frozenset({"q_linear", "expert_down"})
ROUNDED = frozenset(
    [
        "rms_norm",
        "q_linear",
        "hc_pre",
        "hc_post",
        "hc_head",
        "rope",
        "rope_back",
        "head_rms",
        "attn_kv",
        "compressor_pool",
        "compressor_out",
        "index_compressor_out",
        "index_weights",
        "index_score",
        "sparse_attn",
        "output_groups",
        "expert_down",
        "moe",
        "mtp_join",
    ]
)

AXES = (
    Axis(
        "rounding of results",
        "bf16",
        ROUNDED,
        (
            Option("BF16", _not_at_all, steps=True),
            Option("FP32", lambda namespace: {"bf16": _f32}),
            Option("FP16", _rounded(torch.float16), steps=True),
        ),
    ),
    Axis(
        "activations of linears",
        "act_quant",
        QUANTISED,
        (
            Option("FP8 per 128", _not_at_all),
            Option("not quantised", _unquantised),
            Option("BF16", _bf16_activations),
            Option("Q8_0 (INT8 per 32)", _int8(32, torch.float16), steps=True),
            Option("Q8_K (INT8 per 256)", _int8(256, torch.float32), steps=True),
        ),
    ),
    Axis(
        "weights of linears",
        "weight_values",
        QUANTISED | {"output_groups"},
        (Option("as stored", _not_at_all), Option("BF16", _bf16_weights)),
    ),
    Axis(
        "key/value rows",
        "act_quant",
        frozenset({"attn_kv", "compressor_out"}),
        (Option("FP8 per 64", _not_at_all), Option("not quantised", _unquantised)),
    ),
    Axis(
        "indexer rows",
        "fp4_act_quant",
        frozenset({"index_compressor_out", "index_score"}),
        (
            Option("Hadamard and FP4", _not_at_all),
            Option("Hadamard, no FP4", _without("fp4_act_quant")),
            Option("FP4, no Hadamard", _without("hadamard")),
            Option("neither", _without("fp4_act_quant", "hadamard")),
        ),
    ),
    Axis(
        "inputs of unquantised products",
        "acc",
        frozenset({"compressor_rows", "index_weights", "gate_scores", "output_groups", "head"}),
        (Option("as given", _not_at_all), Option("BF16", _bf16_inputs)),
    ),
    Axis(
        "attention",
        "sparse_attn",
        frozenset({"sparse_attn"}),
        (
            Option("as given", _not_at_all),
            Option("FP16 cache", _not_at_all, wrap=half_attention(0, sums=False)),
            Option("FP16 cache and sums", _not_at_all, steps=True, wrap=half_attention(0)),
            Option("FP16 cache, sums, weights", _not_at_all, steps=True, wrap=half_attention(1)),
            Option(
                "FP16 cache, sums, weights in vectors of 128",
                _not_at_all,
                steps=True,
                wrap=half_attention(128),
            ),
        ),
    ),
    Axis(
        "gate weight",
        "expert_down",
        frozenset({"expert_down"}),
        (
            Option("before w2", _not_at_all),
            Option("after w2", _not_at_all, wrap=weight_after_down),
        ),
    ),
)

PRESETS: dict[str, dict[str, str]] = {
    RELEASE: {},
    "release's quantisation in FP32": {"rounding of results": "FP32"},
    "FP32, nothing quantised": {
        "rounding of results": "FP32",
        "activations of linears": "not quantised",
        "key/value rows": "not quantised",
        "indexer rows": "neither",
    },
    "BF16, nothing quantised": {
        "activations of linears": "not quantised",
        "key/value rows": "not quantised",
        "indexer rows": "neither",
    },
    "FP32, BF16 products, nothing quantised": {
        "rounding of results": "FP32",
        "activations of linears": "not quantised",
        "key/value rows": "not quantised",
        "indexer rows": "neither",
        "inputs of unquantised products": "BF16",
    },
}
"""Starting points of the search, named after what engines do: axis -> option."""


def axes_of(node: str) -> tuple[Axis, ...]:
    """The axes of a node of `model.vt`."""
    return tuple(axis for axis in AXES if node in axis.nodes)


@dataclass(frozen=True)
class Arithmetic:
    """Options by axis, and for single operators where they differ from that.

    preset: options by axis name; operators: (operator, axis name) -> option name. An operator is a
    node's label, `q_linear[attn.wq_a]`, with routed experts as `<E>`.
    """

    preset: Mapping[str, str]
    operators: Mapping[tuple[str, str], str]

    def option(self, operator: str, axis: Axis) -> Option:
        """The option that an operator has on one of its node's axes."""
        name = self.operators.get((operator, axis.name), self.preset.get(axis.name))
        return axis.options[0] if name is None else axis.option(name)

    def options(self, node: str, operator: str) -> tuple[Option, ...]:
        """An operator's options on all of its node's axes, in the order of `AXES`."""
        return tuple(self.option(operator, axis) for axis in axes_of(node))

    def with_option(self, operator: str, axis: Axis, option: Option) -> "Arithmetic":
        """The same with another option for one operator."""
        return Arithmetic(self.preset, {**self.operators, (operator, axis.name): option.name})


def replacements(namespace: Namespace, options: Iterable[Option]) -> Replacements:
    """The helpers that options replace, from the file's own."""
    found: Replacements = {}
    for option in options:
        found |= option.replace(namespace)
    return found


def in_form(function: Function, namespace: Namespace, options: Iterable[Option]) -> Function:
    """A node's function in the form of these options."""
    for option in options:
        if option.wrap is not None:
            function = InPlace(function, option.wrap(function, namespace))
    return function


def bound(options: Iterable[Iterable[Option]], terms: int) -> float:
    """The largest relative L2 of a right result behind operators with these options.

    terms: the longest sum of the model. Errors of several operators are independent, so their
    squares add up; 4 times that root is allowed.
    """
    errors = [fp32_error(terms)]
    for several in options:
        steps = any(option.steps for option in several)
        errors.append(step_error(terms) if steps else fp32_error(terms))
    return 4 * math.hypot(*errors)


def longest_sum(config: ModelConfig) -> int:
    """The number of terms of the longest sum of products in the model."""
    heads = config.n_heads * config.head_dim // config.o_groups
    return max(config.hc_mult * config.dim, heads, config.o_groups * config.o_lora_rank,
               config.moe_inter_dim)  # fmt: skip
