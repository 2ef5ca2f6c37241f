"""The fields of `config.json` that the arithmetic uses: names, types, and rules between fields.

`ModelFields` validates one field at a time by its type and relations of fields by `_CHECKS`: a
combination that SPEC gives no meaning to is refused (SPEC section 1). `explain` words the errors.
Left out: reading the file and what follows from the fields (`config`).
"""

import reprlib
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    model_validator,
)

ACT_BLOCK = 128
"""Activations share one scale over this many elements along `in` (SPEC 3)."""
KV_BLOCK = 64
"""Block of the in-place quantisation of keys and values (SPEC 5, attention and compressor)."""
FP4_GROUP = 32
"""Elements per scale of an FP4 weight along `in` and of `fp4_act_quant` (SPEC 2 and 3)."""
RATIOS = (0, 4, 128)
"""SPEC says for these ratios alone whether blocks overlap and an indexer chooses them (only 4)."""

MAX_SIZE = 2**31 - 1
"""Of a single dimension or count."""
MAX_EXPERTS = 1_000_000
"""Of routed experts in all layers together (the release has 11,008); each is six tensors' names."""

RELEASE_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_hash_layers": "num_hash_layers",
    "vocab_size": "vocab_size",
    "n_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "moe_inter_dim": "moe_intermediate_size",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "compress_ratios": "compress_ratios",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "rope_type": "rope_scaling.type",
    "rope_factor": "rope_scaling.factor",
    "original_seq_len": "rope_scaling.original_max_position_embeddings",
    "beta_fast": "rope_scaling.beta_fast",
    "beta_slow": "rope_scaling.beta_slow",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "expert_dtype": "expert_dtype",
    "fp8_fmt": "quantization_config.fmt",
    "scale_fmt": "quantization_config.scale_fmt",
    "fp8_block": "quantization_config.weight_block_size",
    "max_seq_len": "max_position_embeddings",
}
"""Short name -> path of the field in `config.json`, dots for nesting."""


Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
SizeOrNone = Annotated[int, Field(ge=0, le=MAX_SIZE)]


class ModelFields(BaseModel):
    """The model's dimensions and constants under short names, frozen (SPEC section 1)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    dim: Size
    n_layers: Size
    n_mtp_layers: SizeOrNone
    n_hash_layers: SizeOrNone
    vocab_size: Size
    n_heads: Size
    head_dim: Size
    rope_head_dim: Size
    q_lora_rank: Size
    o_groups: Size
    o_lora_rank: Size
    moe_inter_dim: Size
    n_routed_experts: Size
    n_shared_experts: Literal[1]
    n_activated_experts: Size
    score_func: Literal["sqrtsoftplus"]
    route_scale: PositiveFloat
    swiglu_limit: PositiveFloat
    norm_eps: PositiveFloat
    window_size: Size
    compress_ratios: tuple[SizeOrNone, ...]
    rope_theta: PositiveFloat
    compress_rope_theta: PositiveFloat
    rope_type: Literal["yarn"]
    rope_factor: PositiveFloat
    original_seq_len: Size
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    index_n_heads: Size
    index_head_dim: Size
    index_topk: Size
    hc_mult: Size
    hc_sinkhorn_iters: Size
    hc_eps: PositiveFloat
    expert_dtype: Literal["fp4"]
    fp8_fmt: Literal["e4m3"]
    scale_fmt: Literal["ue8m0"]
    fp8_block: tuple[Size, Size]
    max_seq_len: Size

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse combinations of fields that SPEC gives no meaning to."""
        problems = [p for check in _CHECKS for p in check(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def explain(error: ValidationError) -> str:
    """Every problem in one line: `field: expected ..., found ...`."""
    lines = []
    for e in error.errors():
        if not e["loc"]:
            lines.append(str(e["ctx"]["error"]))
            continue
        field = RELEASE_NAMES[str(e["loc"][0])] + "".join(f"[{i}]" for i in e["loc"][1:])
        expected = e["msg"].removeprefix("Input should be ")
        lines.append(f"{field}: expected {expected}, found {reprlib.repr(e['input'])}")
    return "; ".join(lines)


def _wrong(field: str, expected: str, found: object) -> str:
    return f"{RELEASE_NAMES.get(field, field)}: expected {expected}, found {found}"


def _check_heads(c: ModelFields) -> list[str]:
    out = []
    if c.rope_head_dim % 2:
        out.append(_wrong("rope_head_dim", "an even number (pairs are rotated)", c.rope_head_dim))
    if c.head_dim <= c.rope_head_dim:
        out.append(_wrong("head_dim", f"more than qk_rope_head_dim {c.rope_head_dim}", c.head_dim))
    elif (c.head_dim - c.rope_head_dim) % KV_BLOCK:
        out.append(
            _wrong(
                "head_dim",
                f"qk_rope_head_dim {c.rope_head_dim} plus a multiple of {KV_BLOCK} "
                "(keys and values are quantised in such blocks)",
                c.head_dim,
            )
        )
    if c.n_heads * c.head_dim % c.o_groups:
        out.append(_wrong("o_groups", f"a divisor of {c.n_heads} heads x {c.head_dim}", c.o_groups))
    return out


def _check_indexer(c: ModelFields) -> list[str]:
    n = c.index_head_dim
    if n & (n - 1) or n < FP4_GROUP:
        return [
            _wrong(
                "index_head_dim", f"a power of two from {FP4_GROUP} on (Hadamard, FP4 groups)", n
            )
        ]
    if n < c.rope_head_dim:
        return [_wrong("index_head_dim", f"at least qk_rope_head_dim {c.rope_head_dim}", n)]
    return []


def _check_blocks(c: ModelFields) -> list[str]:
    """Dimensions that a quantised activation runs along must hold whole blocks."""
    out = []
    if c.fp8_block != (ACT_BLOCK, ACT_BLOCK):
        out.append(_wrong("fp8_block", f"[{ACT_BLOCK}, {ACT_BLOCK}]", list(c.fp8_block)))
    along = {
        RELEASE_NAMES["dim"]: c.dim,
        RELEASE_NAMES["q_lora_rank"]: c.q_lora_rank,
        RELEASE_NAMES["moe_inter_dim"]: c.moe_inter_dim,
        "o_groups x o_lora_rank": c.o_groups * c.o_lora_rank,
    }
    for name, value in along.items():
        if value % ACT_BLOCK:
            out.append(
                f"{name}: expected a multiple of {ACT_BLOCK} (block of the activations), "
                f"found {value}"
            )
    return out


def _check_routing(c: ModelFields) -> list[str]:
    out = []
    if c.n_activated_experts > c.n_routed_experts:
        out.append(
            _wrong(
                "n_activated_experts",
                f"at most n_routed_experts {c.n_routed_experts}",
                c.n_activated_experts,
            )
        )
    if c.n_layers * c.n_routed_experts > MAX_EXPERTS:
        out.append(
            _wrong(
                "n_routed_experts",
                f"at most {MAX_EXPERTS} experts in all of {c.n_layers} layers",
                c.n_routed_experts,
            )
        )
    if c.n_hash_layers > c.n_layers:
        out.append(
            _wrong("n_hash_layers", f"at most num_hidden_layers {c.n_layers}", c.n_hash_layers)
        )
    return out


def _check_ratios(c: ModelFields) -> list[str]:
    needed, found = c.n_layers + c.n_mtp_layers, len(c.compress_ratios)
    if found < needed:
        what = f"{needed} entries ({c.n_layers} layers, then {c.n_mtp_layers} for MTP)"
        return [_wrong("compress_ratios", what, found)]
    odd = sorted({r for r in c.compress_ratios if r not in RATIOS})
    if odd:
        return [_wrong("compress_ratios", "only 0, 4 and 128 (no other is defined)", odd)]
    return []


_CHECKS = (_check_heads, _check_indexer, _check_blocks, _check_routing, _check_ratios)
