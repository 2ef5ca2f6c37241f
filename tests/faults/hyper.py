"""Faults of the hyper-connections."""

import torch
from torch import Tensor

from tests.faults.harness import Fault, Patch
from v4tool.model import block, hyper, port_v4

ATTN = "hc_split[hc_attn]"
PRE, POST, COMB = (f"layers.0.hc_attn.{name}" for name in ("pre", "post", "comb"))
FFN_COMB = ("hc_split[hc_ffn]", "layers.0.hc_ffn.comb")
NORM = {"operator": "rms_norm[norm]", "key": "norm.out", "suspects": ("hc_head",)}


def split(patch: Patch, change) -> None:
    """Change what `hc_split` gives: (config, pre, post, comb) -> the three."""
    right = hyper.hc_split

    def wrong(scope, name, mixes):
        return change(scope.config, *right(scope, name, mixes))

    patch.setattr(hyper, "hc_split", wrong)


def comb_transposed(patch: Patch) -> None:
    right = hyper.hc_post
    patch.setattr(block, "hc_post", lambda y, r, post, comb, **kw: right(y, r, post, comb.mT, **kw))


def pre_post_swapped(patch: Patch) -> None:
    right = hyper.hc_mixes

    def wrong(scope, name, x):
        mixes, m = right(scope, name, x), scope.config.hc_mult
        if mixes.shape[-1] == m:
            return mixes
        pre, post, comb = mixes.split([m, m, m * m], dim=-1)
        return torch.cat([post, pre, comb], dim=-1)

    patch.setattr(hyper, "hc_mixes", wrong)


def sinkhorn(change):
    """Replace Sinkhorn's alternation: change gets (right, logits, iterations, eps)."""

    def inject(patch: Patch) -> None:
        right = hyper.sinkhorn
        patch.setattr(hyper, "sinkhorn", lambda c, n, eps: change(right, c, n, eps))

    return inject


def row_last(right, logits: Tensor, iterations: int, eps: float) -> Tensor:
    comb = right(logits, iterations, eps)
    return comb / (comb.sum(-1, keepdim=True) + eps)


def streams_fp32(patch: Patch) -> None:
    def wrong(y, residual, post, comb, **kw):
        mixed = torch.einsum("tij,tid->tjd", comb, residual.double())
        return (post.unsqueeze(-1) * y.double().unsqueeze(1) + mixed).float()

    patch.setattr(block, "hc_post", wrong)


def one_stream(patch: Patch) -> None:
    right = block.block

    def wrong(scope, x, layer):
        if layer == 0 and scope.segments[0].step.prefix == "":
            x = x.clone()
            x[:, 1:] = 0
        return right(scope, x, layer)

    patch.setattr(port_v4, "block", wrong)


def head_without_weights(patch: Patch) -> None:
    right = hyper.hc_mixes

    def wrong(scope, name, x):
        mixes = right(scope, name, x)
        return torch.zeros_like(mixes) if name == "hc_head" else mixes

    patch.setattr(hyper, "hc_mixes", wrong)


def streams_out_of_order(patch: Patch) -> None:
    right = hyper.weighted_streams
    patch.setattr(hyper, "weighted_streams", lambda p, x, **kw: right(p, x.flip(1), **kw))


def residual_lost(patch: Patch) -> None:
    right = hyper.hc_post
    patch.setattr(
        block, "hc_post", lambda y, r, p, c, **kw: right(y, torch.zeros_like(r), p, c, **kw)
    )


# On the small checkpoint Sinkhorn's alternation has converged in layer 0's attention, where all
# streams are equal besides, so some faults show one hyper-connection later there.
LARGER = {"prompt": "len6", "larger": True}
FAULTS = [
    Fault("comb_transposed", comb_transposed, "hc_post", "layers.0.hc_ffn.pre", **LARGER),
    Fault("comb_transposed_small", comb_transposed, "hc_post", "layers.0.out"),
    Fault(
        "post_without_2x",
        lambda p: split(p, lambda c, pre, post, comb: (pre, post / 2, comb)),
        ATTN,
        POST,
    ),
    Fault(
        "post_with_eps",
        lambda p: split(p, lambda c, pre, post, comb: (pre, post + c.hc_eps, comb)),
        ATTN,
        POST,
    ),
    Fault(
        "pre_without_eps",
        lambda p: split(p, lambda c, pre, post, comb: (pre - c.hc_eps, post, comb)),
        ATTN,
        PRE,
        status="differs",
    ),
    Fault("pre_post_swapped", pre_post_swapped, ATTN, PRE),
    Fault("sinkhorn_21", sinkhorn(lambda f, c, n, eps: f(c, n + 1, eps)), ATTN, COMB, **LARGER),
    Fault("sinkhorn_21_small", sinkhorn(lambda f, c, n, eps: f(c, n + 1, eps)), *FFN_COMB),
    Fault("sinkhorn_3", sinkhorn(lambda f, c, n, eps: f(c, 3, eps)), ATTN, COMB),
    Fault("sinkhorn_row_last", sinkhorn(row_last), ATTN, COMB, **LARGER),
    Fault("sinkhorn_row_last_small", sinkhorn(row_last), *FFN_COMB),
    Fault("sinkhorn_no_eps", sinkhorn(lambda f, c, n, eps: f(c, n, 0.0)), ATTN, COMB),
    Fault(
        "rsqrt_missing",
        lambda p: p.setattr(hyper, "_inverse_rms", lambda f, s: f.new_ones(len(f), 1).double()),
        ATTN,
        PRE,
    ),
    Fault("streams_fp32", streams_fp32, "hc_post", "layers.0.hc_ffn.pre", backend="readable"),
    Fault("one_stream", one_stream, "streams", PRE, place=""),
    Fault(
        "hc_head_mean",
        lambda p: p.setattr(block, "hc_head", lambda s, x: x.double().mean(1).float().bfloat16()),
        **NORM,
    ),
    Fault("hc_head_zero", head_without_weights, **NORM),
    Fault(
        "streams_out_of_order",
        streams_out_of_order,
        "rms_norm[ffn_norm]",
        "layers.0.ffn_norm.out",
        suspects=("hc_pre",),
    ),
    Fault("residual_lost", residual_lost, "hc_post", "layers.0.hc_ffn.pre"),
]
