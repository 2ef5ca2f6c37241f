"""Every tensor of a checkpoint, its dtype, shape and shard, derived from the configuration (SPEC
2).

One generator per module, in the order of SPEC's table; a name is the module's path, a dot, and
what is stored there, the same paths under which the model records. Left out: where the bytes lie
(`shards.py`). The MTP block is left out where the configuration's `mtp_problem` says that it
cannot be computed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from v4tool.config import ModelConfig
from v4tool.config_fields import FP4_GROUP

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
"""Bytes per stored element by safetensors dtype; an I8 element of a weight holds two FP4 codes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor: safetensors dtype name, stored shape, number of its shard (from 1)."""

    dtype: str
    shape: tuple[int, ...]
    shard: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)

    @property
    def parameters(self) -> int:
        """Parameters held: FP4 codes counted one by one; scales and the hash table hold none."""
        per_element = {"F8_E8M0": 0, "I64": 0, "I8": 2}.get(self.dtype, 1)
        return per_element * prod(self.shape)


@dataclass(frozen=True)
class Totals:
    """Sums over a layout: tensors (all, and those of MTP), bytes on disk, parameters."""

    tensors: int
    mtp_tensors: int
    total_size: int
    parameters: int


_Entry = tuple[str, str, tuple[int, ...]]
"""Name below a path, dtype, shape."""


def layout(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of every tensor of the checkpoint, in the order of the shards (SPEC 2)."""
    out: dict[str, TensorSpec] = {}
    head_shard = config.n_layers + 2
    blocks = config.n_layers + (1 if config.mtp_supported else 0)
    _add(out, 1, "", [_bf16("embed", config.vocab_size, config.dim)])
    for layer in range(config.n_layers):
        _add(out, layer + 2, config.block_path(layer), _block(config, layer))
    _add(out, head_shard, "", _head(config))
    for layer in range(config.n_layers, blocks):
        _add(out, head_shard + 1, config.block_path(layer), _block(config, layer))
        _add(out, head_shard + 1, config.block_path(layer), _mtp(config))
    return out


def totals(specs: Mapping[str, TensorSpec]) -> Totals:
    """Count tensors, bytes and parameters of a layout or of a part of one."""
    return Totals(
        tensors=len(specs),
        mtp_tensors=sum(name.startswith("mtp.") for name in specs),
        total_size=sum(s.nbytes for s in specs.values()),
        parameters=sum(s.parameters for s in specs.values()),
    )


def shard_name(shard: int, count: int) -> str:
    """File name of shard `shard` (from 1) of `count`."""
    return f"model-{shard:05d}-of-{count:05d}.safetensors"


def _add(
    out: dict[str, TensorSpec], shard: int, path: str, entries: Iterator[_Entry] | list[_Entry]
) -> None:
    prefix = f"{path}." if path else ""
    for name, dtype, shape in entries:
        out[prefix + name] = TensorSpec(dtype, shape, shard)


def _bf16(path: str, *shape: int) -> _Entry:
    return f"{path}.weight", "BF16", shape


def _fp8(config: ModelConfig, path: str, n: int, k: int) -> Iterator[_Entry]:
    """An FP8 weight [n, k] and one scale per block."""
    rows, columns = config.fp8_block
    yield f"{path}.weight", "F8_E4M3", (n, k)
    yield f"{path}.scale", "F8_E8M0", (-(-n // rows), -(-k // columns))


def _fp4(path: str, n: int, k: int) -> Iterator[_Entry]:
    """An FP4 weight [n, k], two codes to a byte, and one scale per group along k."""
    yield f"{path}.weight", "I8", (n, k // 2)
    yield f"{path}.scale", "F8_E8M0", (n, k // FP4_GROUP)


def _block(c: ModelConfig, layer: int) -> Iterator[_Entry]:
    yield from _hyper(c, "hc_attn")
    yield _bf16("attn_norm", c.dim)
    yield from _attention(c, c.ratio(layer))
    yield from _hyper(c, "hc_ffn")
    yield _bf16("ffn_norm", c.dim)
    yield from _moe(c, c.is_hash(layer))


def _hyper(c: ModelConfig, path: str) -> Iterator[_Entry]:
    mixes = (2 + c.hc_mult) * c.hc_mult
    yield f"{path}_fn", "F32", (mixes, c.hc_mult * c.dim)
    yield f"{path}_base", "F32", (mixes,)
    yield f"{path}_scale", "F32", (3,)


def _hyper_head(c: ModelConfig) -> Iterator[_Entry]:
    yield "hc_head_fn", "F32", (c.hc_mult, c.hc_mult * c.dim)
    yield "hc_head_base", "F32", (c.hc_mult,)
    yield "hc_head_scale", "F32", (1,)


def _attention(c: ModelConfig, ratio: int) -> Iterator[_Entry]:
    width = c.n_heads * c.head_dim
    yield "attn.attn_sink", "F32", (c.n_heads,)
    yield from _fp8(c, "attn.wq_a", c.q_lora_rank, c.dim)
    yield _bf16("attn.q_norm", c.q_lora_rank)
    yield from _fp8(c, "attn.wq_b", width, c.q_lora_rank)
    yield from _fp8(c, "attn.wkv", c.head_dim, c.dim)
    yield _bf16("attn.kv_norm", c.head_dim)
    if ratio:
        yield from _compressor(c, "attn.compressor", ratio, c.head_dim)
    if ratio == 4:
        yield from _fp8(c, "attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield _bf16("attn.indexer.weights_proj", c.index_n_heads, c.dim)
        yield from _compressor(c, "attn.indexer.compressor", ratio, c.index_head_dim)
    yield from _fp8(c, "attn.wo_a", c.o_groups * c.o_lora_rank, width // c.o_groups)
    yield from _fp8(c, "attn.wo_b", c.dim, c.o_groups * c.o_lora_rank)


def _compressor(c: ModelConfig, path: str, ratio: int, width: int) -> Iterator[_Entry]:
    columns = width * (2 if ratio == 4 else 1)
    yield f"{path}.ape", "F32", (ratio, columns)
    yield _bf16(f"{path}.wkv", columns, c.dim)
    yield _bf16(f"{path}.wgate", columns, c.dim)
    yield _bf16(f"{path}.norm", width)


def _moe(c: ModelConfig, by_hash: bool) -> Iterator[_Entry]:
    yield _bf16("ffn.gate", c.n_routed_experts, c.dim)
    if by_hash:
        yield "ffn.gate.tid2eid", "I64", (c.vocab_size, c.n_activated_experts)
    else:
        yield "ffn.gate.bias", "F32", (c.n_routed_experts,)
    for name, n, k in _expert_shapes(c):
        yield from _fp8(c, f"ffn.shared_experts.{name}", n, k)
    for expert in range(c.n_routed_experts):
        for name, n, k in _expert_shapes(c):
            yield from _fp4(f"ffn.experts.{expert}.{name}", n, k)


def _expert_shapes(c: ModelConfig) -> tuple[tuple[str, int, int], ...]:
    up, down = (c.moe_inter_dim, c.dim), (c.dim, c.moe_inter_dim)
    return ("w1", *up), ("w3", *up), ("w2", *down)


def _head(c: ModelConfig) -> Iterator[_Entry]:
    yield _bf16("norm", c.dim)
    yield _bf16("head", c.vocab_size, c.dim)
    yield from _hyper_head(c)


def _mtp(c: ModelConfig) -> Iterator[_Entry]:
    yield from _fp8(c, "e_proj", c.dim, c.dim)
    yield from _fp8(c, "h_proj", c.dim, c.dim)
    for norm in ("enorm", "hnorm", "norm"):
        yield _bf16(norm, c.dim)
    yield from _hyper_head(c)
