"""Decoder block, embedding, output heads of the main stack and of MTP, MTP block (SPEC section 5).

T tokens of the batch, M streams, D dim, V vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.model.attention import attention
from v4tool.model.hyper import hc_head, hc_post, hc_pre
from v4tool.model.moe import moe
from v4tool.model.scope import Scope
from v4tool.names import has_indexer
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import linear_hi
from v4tool.threads import ordered_map

HEAD_ROWS = 4096
"""Rows of the output matrix that are in memory at a time; the whole is 1 GiB in the release."""
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


def block(scope: Scope, x_TMD: Tensor, layer: int) -> Tensor:
    """Attention and mixture of experts, each in a hyper-connection: BF16 [T, M, D] -> the same."""
    y, post, comb = hc_pre(scope, "hc_attn", x_TMD)
    y = scope.tap("attn_norm.out", scope.norm("attn_norm", y))
    y = attention(scope / "attn", y, layer)
    x_TMD = hc_post(y, x_TMD, post, comb, threads=scope.threads)
    y, post, comb = hc_pre(scope, "hc_ffn", x_TMD)
    y = scope.tap("ffn_norm.out", scope.norm("ffn_norm", y))
    y = moe(scope / "ffn", y, layer)
    return hc_post(y, x_TMD, post, comb, threads=scope.threads)


def last_rows(scope: Scope, x: Tensor) -> Tensor:
    """The last token's row of each segment: [T, ...] -> [segments, ...]."""
    return torch.stack([part[-1] for _, part in scope.parts(x)])


def head_input(scope: Scope, x_TMD: Tensor) -> Tensor:
    """Input of the output matrix; records `norm.out`: BF16 [T, M, D] -> BF16 [segments, D]."""
    return last_rows(scope, scope.tap("norm.out", scope.norm("norm", hc_head(scope, x_TMD))))


def logits(scope: Scope, y_nD: Tensor, matrix: str) -> Tensor:
    """Logits of some rows; the output matrix is read in pieces: BF16 [n, D] -> acc [n, V]."""
    size = scope.config.vocab_size
    row_bytes = scope.weights.nbytes(matrix) // size

    def piece(start: int) -> Tensor:
        stop = min(start + HEAD_ROWS, size)
        buffer = scope.buffers.take("codes", (stop - start) * row_bytes, torch.uint8)
        return linear_hi(
            y_nD, scope.weights.read_rows(matrix, start, stop, buffer), scope.single.numerics
        )

    return torch.cat(list(ordered_map(piece, range(0, size, HEAD_ROWS), scope.threads)), dim=1)


def tap_logits(scope: Scope, names: Iterable[str], logits_nV: Tensor) -> None:
    """Pass each segment's row of logits to its tap as [1, V], under each name."""
    for name in names:
        for segment, row in zip(scope.segments, logits_nV, strict=True):
            scope.tap_for(segment, name, row.unsqueeze(0))


def mtp_input(scope: Scope, h_TMD: Tensor, embedding: str) -> Tensor:
    """Projected embedding plus each projected stream: BF16 [T, M, D] (SPEC 5, MTP block)."""
    e = scope.tap("enorm.out", scope.norm("enorm", embed(scope, embedding)))
    e = scope.linear("e_proj", e).unsqueeze(1)
    h = scope.tap("hnorm.out", scope.norm("hnorm", h_TMD))
    h = scope.linear("h_proj", h)
    return to_bf16(e.to(scope.acc) + h.to(scope.acc))


def mtp(scope: Scope, h_TMD: Tensor, embedding: str) -> Tensor:
    """The MTP block, without the output matrix: streams [T, M, D] -> BF16 [segments, D]."""
    x = block(scope, mtp_input(scope, h_TMD, embedding), scope.config.n_layers)
    return head_input(scope, x)
