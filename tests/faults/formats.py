"""Faults of the number formats: weights and activations."""

import torch
from torch import Tensor

from tests.faults.harness import Fault, Patch
from tests.faults.own import (
    ceil_power,
    floor_power,
    nearest_power,
    q_linear_of,
    rescaled,
)
from v4tool.model import moe, scope
from v4tool.model.scope import Scope
from v4tool.quant.formats import E2M1, E4M3, E8M0, unpack_fp4
from v4tool.quant.linear import QuantizedWeight, in_memory

EXPERT = {
    "operator": "q_linear[ffn.experts.<E>.w1]",
    "key": "layers.0.ffn.experts.<E>.w1.out",
}
FIRST = {"operator": "q_linear[attn.wq_a]", "key": "layers.0.attn.wq_a.out"}


def stored(change):
    """Change a quantised weight as it is read: change gets and gives a QuantizedWeight."""

    def inject(patch: Patch) -> None:
        right = Scope.quantized
        patch.setattr(
            Scope,
            "quantized",
            lambda self, name, width: change(in_memory(right(self, name, width))),
        )

    return inject


def expert_values(values):
    """Change the values that an FP4 weight stands for."""

    def inject(patch: Patch) -> None:
        right, wrong = moe.q_linear, q_linear_of(weights=values)
        patch.setattr(
            moe, "q_linear", lambda x, w, n: (wrong if w.kind == "fp4" else right)(x, w, n)
        )

    return inject


def products(activations):
    """Change what every quantised product sees of its activations."""

    def inject(patch: Patch) -> None:
        wrong = q_linear_of(activations)
        patch.setattr(scope, "q_linear", wrong)
        patch.setattr(moe, "q_linear", wrong)

    return inject


def fp4_only(change):
    return lambda w: change(w) if w.kind == "fp4" else w


def nibbles_swapped(w: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight((w.codes >> 4) | (w.codes << 4), w.scale, w.kind)


def per_group(w: QuantizedWeight, elements: Tensor, group: int = 32) -> Tensor:
    scale = E8M0.double()[w.scale.int()].repeat_interleave(group, 1)
    repeats = -(-elements.shape[1] // scale.shape[1])
    return elements * scale.repeat(1, repeats)[:, : elements.shape[1]]


def planar(w: QuantizedWeight) -> Tensor:
    codes = torch.cat([w.codes & 0xF, w.codes >> 4], dim=1)
    return per_group(w, E2M1.double()[codes.int()])


def as_int4(w: QuantizedWeight) -> Tensor:
    codes = unpack_fp4(w.codes).int()
    return per_group(w, torch.where(codes > 7, codes - 16, codes).double())


def group_16(w: QuantizedWeight) -> Tensor:
    return per_group(w, E2M1.double()[unpack_fp4(w.codes).int()], group=16)


def rescale(change):
    return lambda w: QuantizedWeight(w.codes, change(w.scale), w.kind)


def fp8_rescale(change):
    return lambda w: rescale(change)(w) if w.kind == "fp8" else w


def transposed(scale: Tensor) -> Tensor:
    return scale.T.contiguous() if scale.shape[0] == scale.shape[1] else scale


def code_as_number(patch: Patch) -> None:
    def values(w: QuantizedWeight) -> Tensor:
        rows, cols = w.codes.shape
        scale = w.scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        return E4M3.double()[w.codes.int()] * scale[:, :cols]

    patch.setattr(scope, "q_linear", q_linear_of(weights=values))


FAULTS = [
    Fault("nibbles_swapped", stored(fp4_only(nibbles_swapped)), **EXPERT),
    Fault("fp4_planar", expert_values(planar), **EXPERT),
    Fault("fp4_as_int4", expert_values(as_int4), **EXPERT),
    Fault("fp4_group_16", expert_values(group_16), **EXPERT),
    Fault("e8m0_bias_128", stored(rescale(lambda s: s - 1)), **FIRST),
    Fault("e8m0_as_number", code_as_number, **FIRST),
    Fault(
        "fp8_scale_transposed_small",
        stored(fp8_rescale(transposed)),
        "output_groups",
        "layers.0.attn.wo_b.in",
    ),
    Fault(
        "fp8_scale_transposed",
        stored(fp8_rescale(transposed)),
        prompt="len6",
        larger=True,
        **FIRST,
    ),
    Fault("fp8_scale_dropped", stored(fp8_rescale(lambda s: torch.full_like(s, 127))), **FIRST),
    Fault("scale_floor", products(rescaled(floor_power, floor_power)), **FIRST),
    Fault("scale_nearest", products(rescaled(nearest_power, nearest_power)), **FIRST),
    Fault("scale_rounded_after_use", products(rescaled(lambda s: s, ceil_power)), **FIRST),
    Fault("scale_fp32", products(rescaled(lambda s: s, lambda s: s)), **FIRST),
    Fault("activations_not_quantised", products(lambda x: x.double()), **FIRST),
]
