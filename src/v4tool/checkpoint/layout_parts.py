"""Tensors that the checkpoints of all architectures share, module by module (SPEC section 2).

One generator a module, in the order of SPEC's table; a name is the module's path, a dot, and what
is stored there, the same paths under which the model records.
"""

from collections.abc import Iterator

from v4tool.checkpoint.layout import Entry
from v4tool.config import ModelConfig
from v4tool.config_dspark import DSparkFields
from v4tool.config_fields import FP4_GROUP


def bf16(path: str, *shape: int) -> Entry:
    return f"{path}.weight", "BF16", shape


def fp8(config: ModelConfig, path: str, n: int, k: int) -> Iterator[Entry]:
    """An FP8 weight [n, k] and one scale per block."""
    rows, columns = config.fp8_block
    yield f"{path}.weight", "F8_E4M3", (n, k)
    yield f"{path}.scale", "F8_E8M0", (-(-n // rows), -(-k // columns))


def fp4(path: str, n: int, k: int) -> Iterator[Entry]:
    """An FP4 weight [n, k], two codes to a byte, and one scale per group along k."""
    yield f"{path}.weight", "I8", (n, k // 2)
    yield f"{path}.scale", "F8_E8M0", (n, k // FP4_GROUP)


def hyper(c: ModelConfig, path: str) -> Iterator[Entry]:
    mixes = (2 + c.hc_mult) * c.hc_mult
    yield f"{path}_fn", "F32", (mixes, c.hc_mult * c.dim)
    yield f"{path}_base", "F32", (mixes,)
    yield f"{path}_scale", "F32", (3,)


def hyper_head(c: ModelConfig) -> Iterator[Entry]:
    yield "hc_head_fn", "F32", (c.hc_mult, c.hc_mult * c.dim)
    yield "hc_head_base", "F32", (c.hc_mult,)
    yield "hc_head_scale", "F32", (1,)


def projections(c: ModelConfig) -> Iterator[Entry]:
    """Of every attention: sink, queries, window rows."""
    yield "attn.attn_sink", "F32", (c.n_heads,)
    yield from fp8(c, "attn.wq_a", c.q_lora_rank, c.dim)
    yield bf16("attn.q_norm", c.q_lora_rank)
    yield from fp8(c, "attn.wq_b", c.n_heads * c.head_dim, c.q_lora_rank)
    yield from fp8(c, "attn.wkv", c.head_dim, c.dim)
    yield bf16("attn.kv_norm", c.head_dim)


def output(c: ModelConfig) -> Iterator[Entry]:
    """Of every attention: the grouped output projection."""
    yield from fp8(c, "attn.wo_a", c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups)
    yield from fp8(c, "attn.wo_b", c.dim, c.o_groups * c.o_lora_rank)


def experts(c: ModelConfig, routed: int) -> Iterator[Entry]:
    """The shared expert and so many routed ones."""
    up, down = (c.moe_inter_dim, c.dim), (c.dim, c.moe_inter_dim)
    shapes = (("w1", *up), ("w3", *up), ("w2", *down))
    for name, n, k in shapes:
        yield from fp8(c, f"ffn.shared_experts.{name}", n, k)
    for expert in range(routed):
        for name, n, k in shapes:
            yield from fp4(f"ffn.experts.{expert}.{name}", n, k)


def dspark(c: ModelConfig, layer: int) -> Iterator[Entry]:
    """Of a draft block beside the block itself: the first takes the main stack's streams in, the
    last has the Markov and the confidence head.
    """
    assert isinstance(c, DSparkFields)
    if layer == c.n_layers:
        yield from fp8(c, "main_proj", c.dim, len(c.dspark_target_layer_ids) * c.dim)
        yield bf16("main_norm", c.dim)
    if layer == c.n_layers + c.n_mtp_layers - 1:
        yield bf16("norm", c.dim)
        for matrix in (c.markov.embed, c.markov.head):
            yield bf16(matrix, c.vocab_size, c.dspark_markov_rank)
        yield bf16("confidence_head.proj", 1, c.dim + c.dspark_markov_rank)
