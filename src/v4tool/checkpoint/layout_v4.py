"""The tensors of a DeepSeek-V4 checkpoint, with either draft head, shard by shard (SPEC 2)."""

from collections.abc import Iterator

from v4tool.checkpoint.layout import Entry, Place
from v4tool.checkpoint.layout_parts import (
    bf16,
    dspark,
    experts,
    fp8,
    hyper,
    hyper_head,
    output,
    projections,
)
from v4tool.config_v4 import V4Config, V4DSparkConfig, V4Fields


def v4_shards(c: V4Config) -> Iterator[list[Place]]:
    """The embedding, a layer each, the head, the MTP block where it can be computed."""
    yield from _main(c)
    if c.mtp_supported:
        path = c.block_path(c.n_layers)
        yield [(path, _block(c, c.n_layers)), (path, _mtp(c))]


def v4_dspark_shards(c: V4DSparkConfig) -> Iterator[list[Place]]:
    """The same main stack, then a draft block each (SPEC41 section 7)."""
    yield from _main(c)
    for layer in range(c.n_layers, c.n_layers + c.n_mtp_layers):
        path = c.block_path(layer)
        places: list[Place] = [(path, _block(c, layer)), (path, dspark(c, layer))]
        if layer == c.n_layers + c.n_mtp_layers - 1:
            places.append((path, hyper_head(c)))
        yield places


def _main(c: V4Fields) -> Iterator[list[Place]]:
    yield [("", [bf16("embed", c.vocab_size, c.dim)])]
    for layer in range(c.n_layers):
        yield [(c.block_path(layer), _block(c, layer))]
    yield [("", _head(c))]


def _block(c: V4Fields, layer: int) -> Iterator[Entry]:
    yield from hyper(c, "hc_attn")
    yield bf16("attn_norm", c.dim)
    yield from _attention(c, c.ratio(layer))
    yield from hyper(c, "hc_ffn")
    yield bf16("ffn_norm", c.dim)
    yield from _moe(c, layer)


def _attention(c: V4Fields, ratio: int) -> Iterator[Entry]:
    yield from projections(c)
    if ratio:
        yield from _compressor(c, "attn.compressor", ratio, c.head_dim)
    if ratio == 4:
        yield from fp8(c, "attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield bf16("attn.indexer.weights_proj", c.index_n_heads, c.dim)
        yield from _compressor(c, "attn.indexer.compressor", ratio, c.index_head_dim)
    yield from output(c)


def _compressor(c: V4Fields, path: str, ratio: int, width: int) -> Iterator[Entry]:
    columns = width * (2 if ratio == 4 else 1)
    yield f"{path}.ape", "F32", (ratio, columns)
    yield bf16(f"{path}.wkv", columns, c.dim)
    yield bf16(f"{path}.wgate", columns, c.dim)
    yield bf16(f"{path}.norm", width)


def _moe(c: V4Fields, layer: int) -> Iterator[Entry]:
    yield bf16("ffn.gate", c.n_routed_experts, c.dim)
    if c.is_hash(layer):
        yield "ffn.gate.tid2eid", "I64", (c.vocab_size, c.n_activated_experts)
    else:
        yield "ffn.gate.bias", "F32", (c.n_routed_experts,)
    yield from experts(c, c.n_routed_experts)


def _head(c: V4Fields) -> Iterator[Entry]:
    yield bf16("norm", c.dim)
    yield bf16("head", c.vocab_size, c.dim)
    yield from hyper_head(c)


def _mtp(c: V4Fields) -> Iterator[Entry]:
    yield from fp8(c, "e_proj", c.dim, c.dim)
    yield from fp8(c, "h_proj", c.dim, c.dim)
    for norm in ("enorm", "hnorm", "norm"):
        yield bf16(norm, c.dim)
    yield from hyper_head(c)
