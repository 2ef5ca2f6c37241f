"""Hyper-connections: hc_pre, hc_post and hc_head over M residual streams (SPEC section 5).

T tokens, M streams, D dim. The coefficients stay in acc; they are rounded to FP32 only in the
recording.
"""

import torch
from torch import Tensor

from v4tool.model.layers import by_tokens, ordered_sum, sigmoid
from v4tool.model.scope import Scope
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import linear_hi


def hc_mixes(scope: Scope, name: str, x_TMD: Tensor) -> Tensor:
    """Projection of the streams, divided by their RMS: BF16 [T, M, D] -> acc [T, mixes]."""
    fn = scope.weight(f"{name}_fn")
    flat = x_TMD.flatten(1)
    mixes = linear_hi(flat, fn, scope.numerics)
    return mixes * by_tokens(lambda f: _inverse_rms(f, scope), flat, threads=scope.threads)


def _inverse_rms(flat: Tensor, scope: Scope) -> Tensor:
    wide = flat.to(scope.acc)
    mean = ordered_sum(wide * wide) / wide.shape[-1]
    return torch.rsqrt(mean + scope.config.norm_eps).unsqueeze(-1)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax over rows, then alternating column and row normalisation: acc [T, M, M] -> same."""
    e = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = e / ordered_sum(e, keepdim=True) + eps
    for dim in (-2, *((-1, -2) * (iterations - 1))):
        comb = comb / (ordered_sum(comb, dim, keepdim=True) + eps)
    return comb


def hc_split(scope: Scope, name: str, mixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients from mixes acc [T, (2+M)M]: pre [T, M], post [T, M], comb [T, M, M] (SPEC 5)."""
    config, m = scope.config, scope.config.hc_mult
    base, scale = scope.weight(f"{name}_base").to(scope.acc), scope.weight(f"{name}_scale")
    of_pre, of_post, of_comb = mixes.split([m, m, m * m], dim=-1)
    base_pre, base_post, base_comb = base.split([m, m, m * m])
    scale_pre, scale_post, scale_comb = scale.to(scope.acc)
    pre = sigmoid(of_pre * scale_pre + base_pre) + config.hc_eps
    post = 2 * sigmoid(of_post * scale_post + base_post)
    logits = (of_comb * scale_comb + base_comb).unflatten(-1, (m, m))
    return pre, post, sinkhorn(logits, config.hc_sinkhorn_iters, config.hc_eps)


def weighted_streams(pre_TM: Tensor, x_TMD: Tensor, *, threads: int = 1) -> Tensor:
    """BF16(sum over streams of pre * x): acc [T, M], BF16 [T, M, D] -> BF16 [T, D]."""

    def mixed(pre: Tensor, x: Tensor) -> Tensor:
        return to_bf16(ordered_sum(pre.unsqueeze(-1) * x.to(pre.dtype), -2))

    return by_tokens(mixed, pre_TM, x_TMD, threads=threads)


def hc_pre(scope: Scope, name: str, x_TMD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Input BF16 [T, D] of the sub-layer, and the coefficients post, comb (acc) for `hc_post`."""
    pre, post, comb = hc_split(scope, name, hc_mixes(scope, name, x_TMD))
    scope.tap(f"{name}.pre", pre)
    scope.tap(f"{name}.post", post)
    scope.tap(f"{name}.comb", comb)
    return weighted_streams(pre, x_TMD, threads=scope.threads), post, comb


def hc_post(
    y_TD: Tensor, residual_TMD: Tensor, post_TM: Tensor, comb_TMM: Tensor, *, threads: int = 1
) -> Tensor:
    """out_j = BF16(post_j y + sum_i comb_ij residual_i): the sum runs over comb's FIRST index
    (SPEC 5).
    """

    def mixed(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        wide = residual.to(post.dtype)
        out = post.unsqueeze(-1) * y.to(post.dtype).unsqueeze(1)
        for i in range(wide.shape[1]):
            out += comb[:, i].unsqueeze(-1) * wide[:, i].unsqueeze(1)
        return to_bf16(out)

    return by_tokens(mixed, y_TD, residual_TMD, post_TM, comb_TMM, threads=threads)


def hc_head(scope: Scope, x_TMD: Tensor) -> Tensor:
    """Weighted sum of the streams before the head: BF16 [T, M, D] -> BF16 [T, D] (SPEC 5, Head)."""
    mixes = hc_mixes(scope, "hc_head", x_TMD)
    base, scale = scope.weight("hc_head_base").to(scope.acc), scope.weight("hc_head_scale")
    pre = sigmoid(mixes * scale.to(scope.acc) + base) + scope.config.hc_eps
    return weighted_streams(pre, x_TMD, threads=scope.threads)
