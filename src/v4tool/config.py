"""The model's configuration, read from a checkpoint's `config.json`, and the numerics (SPEC 1, 4).

Every field the arithmetic needs must be in the file under the release's name: nothing is
defaulted, and a value that SPEC gives no meaning to is refused rather than guessed at. Attributes
carry the release's short names. Fields the arithmetic does not use are ignored, except where they
contradict it (`_CONTRADICTIONS`). Left out: what a profile decides (cases, paths, seeds) and
every tensor's shape (`checkpoint/layout.py`).
"""

import json
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from v4tool.errors import ConfigError

if TYPE_CHECKING:
    import torch

ACT_BLOCK = 128
"""Activations share one scale over this many elements along `in` (SPEC 3)."""
KV_BLOCK = 64
"""Block of the in-place quantisation of keys and values (SPEC 5, attention and compressor)."""
FP4_GROUP = 32
"""Elements per scale of an FP4 weight along `in` and of `fp4_act_quant` (SPEC 2 and 3)."""
RATIOS = (0, 4, 128)
"""SPEC says for these ratios alone whether blocks overlap and an indexer chooses them (only 4)."""

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

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16, little and big endian."""

_NEWER_SCHEMA = ("layer_types", "rope_parameters")

_CONTRADICTIONS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""Fields that need not be there, but whose other values would mean another model than SPEC's."""

_RELEASE_EXTRAS: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}


class ModelConfig(BaseModel):
    """The model's dimensions and constants, frozen (SPEC section 1)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    dim: PositiveInt
    n_layers: PositiveInt
    n_mtp_layers: NonNegativeInt
    n_hash_layers: NonNegativeInt
    vocab_size: PositiveInt
    n_heads: PositiveInt
    head_dim: PositiveInt
    rope_head_dim: PositiveInt
    q_lora_rank: PositiveInt
    o_groups: PositiveInt
    o_lora_rank: PositiveInt
    moe_inter_dim: PositiveInt
    n_routed_experts: PositiveInt
    n_shared_experts: Literal[1]
    n_activated_experts: PositiveInt
    score_func: Literal["sqrtsoftplus"]
    route_scale: PositiveFloat
    swiglu_limit: PositiveFloat
    norm_eps: PositiveFloat
    window_size: PositiveInt
    compress_ratios: tuple[NonNegativeInt, ...]
    rope_theta: PositiveFloat
    compress_rope_theta: PositiveFloat
    rope_type: Literal["yarn"]
    rope_factor: PositiveFloat
    original_seq_len: PositiveInt
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt
    hc_mult: PositiveInt
    hc_sinkhorn_iters: PositiveInt
    hc_eps: PositiveFloat
    expert_dtype: Literal["fp4"]
    fp8_fmt: Literal["e4m3"]
    scale_fmt: Literal["ue8m0"]
    fp8_block: tuple[PositiveInt, PositiveInt]
    max_seq_len: PositiveInt

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse combinations of fields that SPEC gives no meaning to."""
        problems = [p for check in _CHECKS for p in check(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def from_file(cls, path: Path | str) -> "ModelConfig":
        """Read a `config.json` (or the one in a directory).

        Raises ConfigError, one line, when it is missing, no JSON, or has a missing or senseless
        field.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            data = path.read_bytes()
            if data[:2] in _UTF16_MARKS:
                raise ConfigError(f"{path}: is UTF-16 text, expected UTF-8: save it as UTF-8")
            text = data.decode("utf-8-sig")
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}: cannot be read: {e}") from None
        try:
            raw = json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{path}: is no valid JSON: {e}") from None
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, d: Any, source: str = "config") -> "ModelConfig":
        """Build from the release's field names; `source` names the origin in errors
        (ConfigError).
        """
        if not isinstance(d, dict):
            raise ConfigError(f"{source}: expected a JSON object, found {type(d).__name__}")
        _refuse_other_schema(d, source)
        values, missing = _collect(d)
        if missing:
            raise ConfigError(f"{source}: missing {_fields(missing)}; no value is assumed for it")
        try:
            return cls.model_validate(values)
        except ValidationError as e:
            raise ConfigError(f"{source}: {_explain(e)}") from None

    def to_release_dict(self) -> dict[str, Any]:
        """The fields under the release's names, nested as in `config.json`; `from_dict` reads it
        back.
        """
        out: dict[str, Any] = dict(_RELEASE_EXTRAS)
        for short, path in RELEASE_NAMES.items():
            *parents, leaf = path.split(".")
            node = out
            for p in parents:
                node = node.setdefault(p, {})
            value = getattr(self, short)
            node[leaf] = list(value) if isinstance(value, tuple) else value
        out["quantization_config"] |= {"activation_scheme": "dynamic", "quant_method": "fp8"}
        return out

    def ratio(self, layer: int) -> int:
        """Compression ratio of a block: 0, 4 or 128; layer `n_layers` is the MTP block."""
        return self.compress_ratios[layer]

    def is_mtp(self, layer: int) -> bool:
        """Whether this block index is the MTP block, which follows the main layers."""
        return layer >= self.n_layers

    def is_hash(self, layer: int) -> bool:
        """Whether the block routes by token id (`ffn.gate.tid2eid`) rather than by score."""
        return layer < self.n_hash_layers

    def block_path(self, layer: int) -> str:
        """Where a block's tensors live: `layers.<n>`, and `mtp.<i>` from index `n_layers` on."""
        return f"mtp.{layer - self.n_layers}" if self.is_mtp(layer) else f"layers.{layer}"

    @property
    def mtp_problem(self) -> str | None:
        """Why the MTP block of this configuration cannot be computed, or None when it can."""
        extra = len(self.compress_ratios) - self.n_layers
        if self.n_mtp_layers == 0:
            return "num_nextn_predict_layers is 0: there is no MTP layer"
        if self.n_mtp_layers > 1 or extra > self.n_mtp_layers:
            return (
                f"compress_ratios has {len(self.compress_ratios)} entries for {self.n_layers} "
                f"layers and num_nextn_predict_layers is {self.n_mtp_layers}: these mtp blocks are "
                "of another design (as in the DSpark re-release), one MTP layer is defined"
            )
        if self.ratio(self.n_layers) != 0:
            return (
                f"the MTP layer's compress_ratios entry is {self.ratio(self.n_layers)}, not 0"
                ": MTP is only defined with a plain window"
            )
        return None

    @property
    def mtp_supported(self) -> bool:
        """Whether the MTP block can be computed; `mtp_problem` says why not."""
        return self.mtp_problem is None


class Numerics(BaseModel):
    """How the reference computes: the accumulation dtype (SPEC section 4), threads and code path.

    Neither threads nor backend may change a bit of the result; `accumulate` does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accumulate: Literal["float64", "float32"] = "float64"
    threads: PositiveInt = 1
    backend: Literal["auto", "readable", "numpy", "c"] = "auto"

    @property
    def acc(self) -> "torch.dtype":
        """The dtype between two rounding places, torch.float64 or torch.float32."""
        import torch  # here: it takes a second, and reading a configuration does not need it

        return torch.float64 if self.accumulate == "float64" else torch.float32


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        twice = sorted({k for k in names if names.count(k) > 1})
        raise ValueError(f"duplicate key {', '.join(twice)}")
    return out


def _refuse_other_schema(d: dict[str, Any], source: str) -> None:
    newer = [k for k in _NEWER_SCHEMA if k in d]
    if newer:
        raise ConfigError(
            f"{source}: {', '.join(newer)}: expected the release's schema (compress_ratios, "
            "rope_theta, compress_rope_theta, rope_scaling), found a newer one, which is not mapped"
        )
    for field, wanted in _CONTRADICTIONS.items():
        if field in d and d[field] != wanted:
            raise ConfigError(
                f"{source}: {field}: expected {json.dumps(wanted)}, found {json.dumps(d[field])}"
            )


def _collect(d: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values by short name and the release names of the missing ones; null counts as
    missing.
    """
    values: dict[str, Any] = {}
    missing: list[str] = []
    for short, path in RELEASE_NAMES.items():
        node: Any = d
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        if node is None:
            missing.append(path)
        values[short] = tuple(node) if isinstance(node, list) else node
    return values, missing


def _fields(names: list[str]) -> str:
    """`field a` or `fields a, b`; a nested group that lacks all its fields still lists each of
    them.
    """
    return f"field{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _explain(error: ValidationError) -> str:
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


def _check_heads(c: ModelConfig) -> list[str]:
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


def _check_indexer(c: ModelConfig) -> list[str]:
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


def _check_blocks(c: ModelConfig) -> list[str]:
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


def _check_routing(c: ModelConfig) -> list[str]:
    out = []
    if c.n_activated_experts > c.n_routed_experts:
        out.append(
            _wrong(
                "n_activated_experts",
                f"at most n_routed_experts {c.n_routed_experts}",
                c.n_activated_experts,
            )
        )
    if c.n_hash_layers > c.n_layers:
        out.append(
            _wrong("n_hash_layers", f"at most num_hidden_layers {c.n_layers}", c.n_hash_layers)
        )
    return out


def _check_ratios(c: ModelConfig) -> list[str]:
    needed, found = c.n_layers + c.n_mtp_layers, len(c.compress_ratios)
    if found < needed:
        what = f"{needed} entries ({c.n_layers} layers, then {c.n_mtp_layers} for MTP)"
        return [_wrong("compress_ratios", what, found)]
    odd = sorted({r for r in c.compress_ratios if r not in RATIOS})
    if odd:
        return [_wrong("compress_ratios", "only 0, 4 and 128 (no other is defined)", odd)]
    return []


_CHECKS = (_check_heads, _check_indexer, _check_blocks, _check_routing, _check_ratios)
