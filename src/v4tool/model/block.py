"""Embedding, decoder block and last norm of DeepSeek-V4 (SPEC section 5).

T tokens of the batch, M streams, D dim, V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.model.attention import attention
from v4tool.model.head import last_rows
from v4tool.model.hyper import hc_head, hc_post, hc_pre
from v4tool.model.moe import moe
from v4tool.model.scope import Scope
from v4tool.names import has_indexer

Attention = Callable[[Scope, Tensor, int], Tensor]
"""A block's attention: BF16 [T, D] -> BF16 [T, D]."""
EMBEDDING = "embed.weight"
EVERY_LAYER = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "ffn.gate")
COMPRESSOR = ("attn.compressor.wkv", "attn.compressor.wgate")
INDEXER = ("attn.indexer.wq_b",)
SHARED = tuple(f"ffn.shared_experts.{name}" for name in ("w1", "w3", "w2"))


def embed(scope: Scope, path: str) -> Tensor:
    """Embeddings of the batch's ids, recorded: BF16 [T, D]; path: name of the embedding matrix."""
    return scope.tap("embed.out", scope.weights.gather_rows(path, scope.ids))


def large_weights(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of a layer's large weights that are always read (no routed experts), to prefetch."""
    ratio = config.ratio(layer)
    compressor = COMPRESSOR if ratio else ()
    names = EVERY_LAYER + compressor + (INDEXER if has_indexer(ratio) else ()) + SHARED
    return tuple(f"{config.block_path(layer)}.{name}.weight" for name in names)


def block(scope: Scope, x_TMD: Tensor, layer: int, attend: Attention = attention) -> Tensor:
    """Attention and mixture of experts, each in a hyper-connection: BF16 [T, M, D] -> the same."""
    y, post, comb = hc_pre(scope, "hc_attn", x_TMD)
    y = scope.tap("attn_norm.out", scope.norm("attn_norm", y))
    y = attend(scope / "attn", y, layer)
    x_TMD = hc_post(y, x_TMD, post, comb, threads=scope.threads)
    y, post, comb = hc_pre(scope, "hc_ffn", x_TMD)
    y = scope.tap("ffn_norm.out", scope.norm("ffn_norm", y))
    y = moe(scope / "ffn", y, layer)
    return hc_post(y, x_TMD, post, comb, threads=scope.threads)


def head_input(scope: Scope, x_TMD: Tensor) -> Tensor:
    """Input of the output matrix; records `norm.out`: BF16 [T, M, D] -> BF16 [segments, D]."""
    return last_rows(scope, scope.tap("norm.out", scope.norm("norm", hc_head(scope, x_TMD))))
