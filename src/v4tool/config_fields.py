"""`ModelFields`: the fields of `config.json` common to all architectures, types, consistency rules.

Types validate single fields, `checks` of the class the relations of fields: combinations that SPEC
does not define are refused (SPEC section 1). `explain` formats the errors. Left out: reading the
file (`config`).
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    model_validator,
)

ACT_BLOCK = 128
"""Elements per scale of a quantised activation (SPEC 3)."""
KV_BLOCK = 64
"""Elements per scale of the in-place quantisation of keys and values (SPEC 5)."""
FP4_GROUP = 32
"""Elements per scale of an FP4 weight along `in` and of `fp4_act_quant` (SPEC 2 and 3)."""
RATIOS = (0, 4, 128)
"""Compression ratios that SPEC defines; 4 has overlapping blocks and an indexer."""

MAX_SIZE = 2**31 - 1
"""Largest value of a dimension or count."""
MAX_EXPERTS = 1_000_000
"""Most routed experts in all layers together: each has six tensors in the layout."""

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
"""Short name -> path of the field in DeepSeek-V4's `config.json`, dots for nesting."""

Check = Callable[[Any], list[str]]
"""A rule between fields of a configuration: what is wrong, a line each."""


Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
SizeOrNone = Annotated[int, Field(ge=0, le=MAX_SIZE)]


class ModelFields(BaseModel):
    """Dimensions and constants of the model, under short names, immutable (SPEC section 1)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    release_names: ClassVar[Mapping[str, str]] = RELEASE_NAMES
    checks: ClassVar[tuple[Check, ...]] = ()

    dim: Size
    n_layers: Size
    n_mtp_layers: SizeOrNone
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse combinations of fields that SPEC does not define."""
        problems = [p for check in self.checks for p in check(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def explain(error: ValidationError, names: Mapping[str, str]) -> str:
    """All errors in one line, `field: expected ..., found ...; ...`; names: of the fields."""
    lines = []
    for e in error.errors():
        if not e["loc"]:
            lines.append(str(e["ctx"]["error"]))
            continue
        field = names[str(e["loc"][0])] + "".join(f"[{i}]" for i in e["loc"][1:])
        expected = e["msg"].removeprefix("Input should be ")
        lines.append(f"{field}: expected {expected}, found {reprlib.repr(e['input'])}")
    return "; ".join(lines)


def wrong(c: ModelFields, field: str, expected: str, found: object) -> str:
    """One line on a field that contradicts others; `field` is its short name."""
    return f"{c.release_names.get(field, field)}: expected {expected}, found {found}"


def check_heads(c: ModelFields) -> list[str]:
    """Pairs are rotated, heads are grouped for the output projection."""
    out = []
    if c.rope_head_dim % 2:
        expected = "an even number (pairs are rotated)"
        out.append(wrong(c, "rope_head_dim", expected, c.rope_head_dim))
    if c.head_dim <= c.rope_head_dim:
        expected = f"more than qk_rope_head_dim {c.rope_head_dim}"
        out.append(wrong(c, "head_dim", expected, c.head_dim))
    if c.n_heads * c.head_dim % c.o_groups:
        expected = f"a divisor of {c.n_heads} heads x {c.head_dim}"
        out.append(wrong(c, "o_groups", expected, c.o_groups))
    return out


def check_index_heads(c: ModelFields) -> list[str]:
    """The rotated dims are part of the indexer's heads too."""
    if c.index_head_dim < c.rope_head_dim:
        expected = f"at least qk_rope_head_dim {c.rope_head_dim}"
        return [wrong(c, "index_head_dim", expected, c.index_head_dim)]
    return []


def check_multiples(c: ModelFields, block: int, along: Mapping[str, int]) -> list[str]:
    """Dimensions along which activations are quantised must be multiples of the block size."""
    out = []
    if c.fp8_block != (block, block):
        out.append(wrong(c, "fp8_block", f"[{block}, {block}]", list(c.fp8_block)))
    every = {
        c.release_names["dim"]: c.dim,
        c.release_names["q_lora_rank"]: c.q_lora_rank,
        c.release_names["moe_inter_dim"]: c.moe_inter_dim,
        "o_groups x o_lora_rank": c.o_groups * c.o_lora_rank,
        **along,
    }
    for name, value in every.items():
        if value % block:
            expected = f"a multiple of {block} (block of the activations)"
            out.append(f"{name}: expected {expected}, found {value}")
    return out


def check_routing(c: ModelFields) -> list[str]:
    """No token can be sent to more experts than there are."""
    out = []
    if c.n_activated_experts > c.n_routed_experts:
        expected = f"at most n_routed_experts {c.n_routed_experts}"
        out.append(wrong(c, "n_activated_experts", expected, c.n_activated_experts))
    if c.n_layers * c.n_routed_experts > MAX_EXPERTS:
        expected = f"at most {MAX_EXPERTS} experts in all of {c.n_layers} layers"
        out.append(wrong(c, "n_routed_experts", expected, c.n_routed_experts))
    return out
