"""Faults of norms, head and MTP."""

import torch

from tests.faults.harness import Fault, Patch
from v4tool.model import block, head, hyper, layers, mtp, stream
from v4tool.model.scope import Scope
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import linear_hi

MTP_NORM = {
    "operator": "rms_norm[norm]",
    "key": "mtp.0.prefill.norm.out",
    "suspects": ("hc_head", "hc_post"),
}


def ffn_norm_twice(patch: Patch) -> None:
    right = block.moe

    def wrong(scope, x, layer):
        weight = scope.weights.read(scope.path.removesuffix("ffn.") + "ffn_norm.weight")
        return right(scope, layers.rms(x, weight, scope.config.norm_eps, scope.acc), layer)

    patch.setattr(block, "moe", wrong)


def final_norm_missing(patch: Patch) -> None:
    right = block.head_input

    def wrong(scope, x):
        right(scope, x)  # norm.out is recorded all the same
        return head.last_rows(scope, hyper.hc_head(scope, x))

    for module in (block, mtp):
        patch.setattr(module, "head_input", wrong)


def norm_before_head(patch: Patch) -> None:
    right = hyper.hc_head
    patch.setattr(block, "hc_head", lambda scope, x: right(scope, scope.norm("norm", x)))


def mtp_given(change):
    """Change the streams that MTP gets: BF16 [T, M, D]."""

    def inject(patch: Patch) -> None:
        right = mtp.mtp
        patch.setattr(mtp, "mtp", lambda scope, h, table: right(scope, change(h), table))

    return inject


def collapsed(h):
    return to_bf16(h.double().mean(1, keepdim=True)).expand_as(h).contiguous()


def position_zero(patch: Patch) -> None:
    right = block.embed

    def wrong(scope, path):
        e = right(scope, path).clone()
        if scope.path.startswith("mtp."):
            e[scope.positions == 0] = 0
        return e

    patch.setattr(mtp, "embed", wrong)


def swapped_projections(patch: Patch) -> None:
    right, other = Scope.quantized, {"e_proj": "h_proj", "h_proj": "e_proj"}
    patch.setattr(Scope, "quantized", lambda self, n, width: right(self, other.get(n, n), width))


def main_weights(names: tuple[str, ...]):
    """MTP reads the main model's weights of these names."""

    def inject(patch: Patch) -> None:
        right = Scope.weight

        def wrong(self, name):
            if self.path == "mtp.0." and name in names:
                return self.weights.read(name)
            return right(self, name)

        patch.setattr(Scope, "weight", wrong)

    return inject


def ids_shifted(patch: Patch) -> None:
    right = stream.Sequence.mtp_segments

    def wrong(self):
        prefill, decode = right(self)
        ids = torch.cat([prefill.ids[1:], prefill.ids[-1:]])
        return type(prefill)(prefill.step, ids, prefill.states, prefill.tap), decode

    patch.setattr(stream.Sequence, "mtp_segments", wrong)


def other_eps(patch: Patch) -> None:
    right = layers.rms
    patch.setattr(
        "v4tool.model.scope.rms", lambda x, w, eps, acc, **kw: right(x, w, 1e-5, acc, **kw)
    )


HEADS = ("hc_head_fn", "hc_head_base", "hc_head_scale")

FAULTS = [
    Fault(
        "ffn_norm_twice",
        ffn_norm_twice,
        "gate_weights",
        "layers.0.ffn.gate.out.0",
        suspects=("gate_scores",),
    ),
    Fault("final_norm_missing", final_norm_missing, "head", "head.out"),
    Fault(
        "final_norm_before_hc_head",
        norm_before_head,
        "rms_norm[norm]",
        "norm.out",
        suspects=("hc_head",),
    ),
    Fault(
        "head_bf16",
        lambda p: p.setattr(head, "linear_hi", lambda x, w, n: to_bf16(linear_hi(x, w, n))),
        "head",
        "head.out",
    ),
    Fault(
        "mtp_hidden_collapsed",
        mtp_given(collapsed),
        "rms_norm[hnorm]",
        "mtp.0.prefill.hnorm.out",
    ),
    Fault("mtp_position0_zero", position_zero, "rms_norm[enorm]", "mtp.0.prefill.enorm.out"),
    Fault("mtp_proj_swapped", swapped_projections, "q_linear[e_proj]", "mtp.0.prefill.e_proj.out"),
    Fault("mtp_main_hc_head", main_weights(HEADS), **MTP_NORM),
    Fault("mtp_main_norm", main_weights(("norm.weight",)), **MTP_NORM),
    Fault(
        "mtp_ids_shifted",
        ids_shifted,
        "embedding",
        "mtp.0.prefill.embed.out",
        status="input",
    ),
    Fault(
        "eps_1e-5", other_eps, "rms_norm[attn_norm]", "layers.0.attn_norm.out", suspects=("hc_pre",)
    ),
]
