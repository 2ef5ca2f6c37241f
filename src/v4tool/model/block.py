"""A decoder block, the two heads and the MTP block (SPEC section 5).

T tokens of the batch, M streams, D dim, V vocabulary.
"""

import torch
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.model.attention import attention
from v4tool.model.hyper import hc_head, hc_post, hc_pre
from v4tool.model.moe import moe
from v4tool.model.scope import Scope
from v4tool.model.workers import in_order
from v4tool.names import has_indexer
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import linear_hi

HEAD_ROWS = 4096
"""Rows of the output matrix that are in memory at a time; whole, it is 1 GiB in the release."""
EVERY_LAYER = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "ffn.gate")
COMPRESSOR = ("attn.compressor.wkv", "attn.compressor.wgate")
INDEXER = ("attn.indexer.wq_b",)
SHARED = tuple(f"ffn.shared_experts.{name}" for name in ("w1", "w3", "w2"))


def embed(scope: Scope, path: str) -> Tensor:
    """The embedding of the batch's ids, recorded: BF16 [T, D]; `path` is the main matrix."""
    return scope.tap("embed.out", scope.weights.gather_rows(path, scope.ids))


def large_weights(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The large weights of a layer that are read whatever the tokens: names."""
    ratio = config.ratio(layer)
    compressor = COMPRESSOR if ratio else ()
    names = EVERY_LAYER + compressor + (INDEXER if has_indexer(ratio) else ()) + SHARED
    return tuple(f"{config.block_path(layer)}.{name}.weight" for name in names)


def block(scope: Scope, x_TMD: Tensor, layer: int) -> Tensor:
    """Attention, then the experts, each in its hyper-connection: BF16 [T, M, D] -> the same."""
    y, post, comb = hc_pre(scope, "hc_attn", x_TMD)
    y = scope.tap("attn_norm.out", scope.norm("attn_norm", y))
    y = attention(scope / "attn", y, layer)
    x_TMD = hc_post(y, x_TMD, post, comb, threads=scope.threads)
    y, post, comb = hc_pre(scope, "hc_ffn", x_TMD)
    y = scope.tap("ffn_norm.out", scope.norm("ffn_norm", y))
    y = moe(scope / "ffn", y, layer)
    return hc_post(y, x_TMD, post, comb, threads=scope.threads)


def last_rows(scope: Scope, x: Tensor) -> Tensor:
    """The last position of every segment: [T, ...] -> [segments, ...]."""
    return torch.stack([part[-1] for _, part in scope.parts(x)])


def logits(scope: Scope, y_TD: Tensor, matrix: str) -> Tensor:
    """The last positions' logits: BF16 [T, D] -> acc [segments, V], the matrix in pieces."""
    last = last_rows(scope, y_TD)
    size = scope.config.vocab_size
    row_bytes = scope.weights.nbytes(matrix) // size

    def piece(start: int) -> Tensor:
        stop = min(start + HEAD_ROWS, size)
        buffer = scope.buffers.take("codes", (stop - start) * row_bytes, torch.uint8)
        return linear_hi(
            last, scope.weights.read_rows(matrix, start, stop, buffer), scope.alone.numerics
        )

    return torch.cat(list(in_order(piece, range(0, size, HEAD_ROWS), scope.threads)), dim=1)


def head(scope: Scope, x_TMD: Tensor, matrix: str) -> Tensor:
    """Streams to logits, `norm.out`, `head.out` recorded: BF16 [T, M, D] -> acc [segments, V]."""
    y = scope.tap("norm.out", scope.norm("norm", hc_head(scope, x_TMD)))
    result = logits(scope, y, matrix)
    tap_logits(scope, "head.out", result)
    return result


def tap_logits(scope: Scope, name: str, logits_nV: Tensor) -> None:
    """Show every segment its row of logits as [1, V]."""
    for segment, row in zip(scope.segments, logits_nV, strict=True):
        scope.tap_for(segment, name, row.unsqueeze(0))


def mtp_input(scope: Scope, h_TMD: Tensor, embedding: str) -> Tensor:
    """The embedding joined to each stream: BF16 [T, M, D] (SPEC 5, MTP block)."""
    e = scope.tap("enorm.out", scope.norm("enorm", embed(scope, embedding)))
    e = scope.linear("e_proj", e).unsqueeze(1)
    h = scope.tap("hnorm.out", scope.norm("hnorm", h_TMD))
    h = scope.linear("h_proj", h)
    return to_bf16(e.to(scope.acc) + h.to(scope.acc))


def mtp(scope: Scope, h_TMD: Tensor, embedding: str, matrix: str) -> Tensor:
    """The MTP block and its head: the main layers' streams [T, M, D] -> acc [segments, V]."""
    x = block(scope, mtp_input(scope, h_TMD, embedding), scope.config.n_layers)
    result = head(scope, x, matrix)
    tap_logits(scope, "logits.out", result)
    tap_logits(scope, "out", result)
    return result
