"""The tensors of a DeepSeek-V4.1 checkpoint, shard by shard (SPEC41 section 2).

SPEC41 gives the number of the release's shards (48), not which tensors each holds: the order here
is that of the golden checkpoints, with the image part behind.
"""

from collections.abc import Iterator

from v4tool.checkpoint.layout import Entry, Place
from v4tool.checkpoint.layout_parts import (
    bf16,
    dspark,
    experts,
    fp8,
    hyper,
    output,
    projections,
)
from v4tool.config_v41 import V41Config

VISION_BLOCKS, VISION_WIDTH, VISION_INNER, PATCH = 32, 1024, 2816, 14
"""Sizes of the image part, of which the text model's configuration says nothing."""
MERGED_PATCHES, COLOURS = 9, 3
"""Patches that the aligner takes together, and values of a pixel."""


def v41_shards(c: V41Config) -> Iterator[list[Place]]:
    """Both vocabulary matrices, a layer each, every Engram table, a draft each, the image part."""
    yield [("", _vocabulary(c))]
    for layer in range(c.n_layers):
        yield [(c.block_path(layer), _block(c, layer))]
        if layer in c.engram_layer_ids:
            yield [(c.block_path(layer), _table(c, layer))]
    for layer in range(c.n_layers, c.n_layers + c.n_mtp_layers):
        yield [(c.block_path(layer), _block(c, layer)), (c.block_path(layer), dspark(c, layer))]
    yield [("", _vision())]
    yield [("", _aligner(c))]


def _vocabulary(c: V41Config) -> Iterator[Entry]:
    yield bf16("embed", c.vocab_size, c.dim)
    yield bf16("norm", c.dim)
    yield bf16("head", c.vocab_size, c.dim)


def _block(c: V41Config, layer: int) -> Iterator[Entry]:
    yield from hyper(c, "hc_attn")
    yield bf16("attn_norm", c.dim)
    yield from _attention(c, layer)
    yield from hyper(c, "hc_ffn")
    yield bf16("ffn_norm", c.dim)
    yield from _moe(c, layer)
    if layer in c.engram_layer_ids:
        yield from _engram(c)


def _attention(c: V41Config, layer: int) -> Iterator[Entry]:
    yield from projections(c)
    if layer in c.kv_source_layer_ids:
        yield bf16("attn.compressor.wkv", c.head_dim, c.dim)
        if c.ratio(layer) > 1:
            yield bf16("attn.compressor.wgate", c.head_dim, c.dim)
        yield bf16("attn.compressor.norm", c.head_dim)
        yield bf16("attn.indexer.wk", c.index_head_dim, c.head_dim)
        yield bf16("attn.indexer.k_norm", c.index_head_dim)
    if layer in c.index_source_layer_ids:
        yield from fp8(c, "attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield bf16("attn.indexer.weights_proj", c.index_n_heads, c.dim)
    yield from output(c)


def _moe(c: V41Config, layer: int) -> Iterator[Entry]:
    routed, _ = c.experts_of(layer)
    yield bf16("ffn.gate", routed, c.dim)
    yield "ffn.gate.bias", "F32", (routed,)
    yield "ffn.gate.bias_vl", "F32", (routed,)
    yield from experts(c, routed)


def _engram(c: V41Config) -> Iterator[Entry]:
    yield from fp8(c, "engram.wkv", (c.hc_mult + 1) * c.dim, c.engram_columns * c.engram_head_dim)
    yield "engram.q_weight", "BF16", (c.hc_mult, c.dim)
    yield "engram.k_weight", "BF16", (c.hc_mult, c.dim)


def _table(c: V41Config, layer: int) -> Iterator[Entry]:
    rows, width = c.engram_rows(layer), c.engram_head_dim
    yield "engram.embed.weight", "F8_E4M3", (rows, width)
    yield "engram.embed.scale", "F8_E8M0", (rows, width // c.fp8_block[1])


def _vision() -> Iterator[Entry]:
    width, inner = VISION_WIDTH, VISION_INNER
    for block in range(VISION_BLOCKS):
        path = f"vision.blocks.{block}"
        yield from _affine(f"{path}.attn.wqkv", 3 * width, width)
        yield from _affine(f"{path}.attn.wo", width, width)
        yield bf16(f"{path}.mlp.w1", 2 * inner, width)
        yield bf16(f"{path}.mlp.w2", width, inner)
        yield bf16(f"{path}.norm1", width)
        yield bf16(f"{path}.norm2", width)
    yield bf16("vision.norm", width)
    yield from _affine("vision.patch_embed.proj", width, COLOURS, PATCH, PATCH)


def _aligner(c: V41Config) -> Iterator[Entry]:
    yield from _affine("aligner.w1", c.dim, MERGED_PATCHES * VISION_WIDTH)
    yield from _affine("aligner.w2", c.dim, c.dim)
    for name in ("start", "end", "newline"):
        yield f"image_{name}", "BF16", (c.dim,)


def _affine(path: str, out: int, *inputs: int) -> Iterator[Entry]:
    yield bf16(path, out, *inputs)
    yield f"{path}.bias", "BF16", (out,)
