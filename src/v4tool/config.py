"""`ModelConfig`: a checkpoint's `config.json`; `Numerics`: how to compute (SPEC 1 and 4).

`architecture` says which subclass a file is read as; its fields must be in the file, no default is
assumed. Fields that the arithmetic does not use are ignored, except where their value contradicts
it (`_CONTRADICTIONS`). Left out: what one architecture has alone (`config_v4`, `config_v41`), the
common fields (`config_fields`), what a profile decides (cases, paths, seeds) and every tensor's
shape (`checkpoint/layout.py`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from v4tool.architecture import Architecture, choose
from v4tool.config_fields import ModelFields, explain
from v4tool.errors import ConfigError
from v4tool.file_kinds import json_text
from v4tool.untrusted import kind_of, parse_json, read_small, shortened

if TYPE_CHECKING:
    import torch

_NEWER_SCHEMA = ("layer_types", "rope_parameters")

_CONTRADICTIONS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""Optional fields, with the only value for which the model is SPEC's."""


class ModelConfig(ModelFields):
    """The model's configuration: reads and writes `config.json`, and describes each block.

    other_names: alternative paths of a field; only_values: values of fields that have a single
    valid value and may be missing; release_extras: fields that `to_release_dict` adds.
    """

    architecture: ClassVar[Architecture]
    other_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    only_values: ClassVar[Mapping[str, Any]] = {}
    release_extras: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def from_file(cls, path: Path | str) -> "ModelConfig":
        """Read a `config.json` (or the one in a directory).

        ConfigError if it is missing, not JSON, or has a missing or invalid field.
        """
        path = Path(path)
        if kind_of(path) == "a directory":
            path = path / "config.json"
        try:
            text = json_text(read_small(path))
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}: cannot be read: {e}") from None
        except ValueError as e:
            raise ConfigError(f"{path}: {e}") from None
        try:
            raw = parse_json(text)
        except ValueError as e:
            raise ConfigError(f"{path}: is no valid JSON: {e}") from None
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, d: Any, source: str = "config") -> "ModelConfig":
        """Build the subclass of the file's architecture from the fields of a `config.json`.

        source: file name for errors (ConfigError).
        """
        if not isinstance(d, dict):
            raise ConfigError(f"{source}: expected a JSON object, found {type(d).__name__}")
        found: type[ModelConfig] = choose(d).load("config")
        return found.from_fields(d, source)

    @classmethod
    def from_fields(cls, d: dict[str, Any], source: str) -> Self:
        """Build this class from such fields; errors as `from_dict`."""
        d = cls.unnested(d)
        _refuse_other_schema(d, source)
        values, missing = cls._collect(d)
        if missing:
            raise ConfigError(f"{source}: missing {_fields(missing)}; no value is assumed for it")
        try:
            return cls.model_validate(values)
        except ValidationError as e:
            raise ConfigError(f"{source}: {explain(e, cls.release_names)}") from None

    @classmethod
    def unnested(cls, d: dict[str, Any]) -> dict[str, Any]:
        """The model's fields where `release_names` looks for them."""
        return d

    @classmethod
    def _collect(cls, d: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The values by short name, the release names of the missing ones; null is missing."""
        values: dict[str, Any] = {}
        missing: list[str] = []
        for short in cls.model_fields:
            path = cls.release_names[short]
            places = (path, *cls.other_names.get(short, ()))
            node = next((v for p in places if (v := _value_at(d, p)) is not None), None)
            if node is None:
                node = cls.only_values.get(short)
            if node is None:
                missing.append(path)
            values[short] = tuple(node) if isinstance(node, list) else node
        return values, missing

    def to_release_dict(self) -> dict[str, Any]:
        """The fields of `config.json`, named and nested as there; the inverse of `from_dict`."""
        out: dict[str, Any] = dict(self.release_extras)
        for short, path in self.release_names.items():
            *parents, leaf = path.split(".")
            node = out
            for p in parents:
                node = node.setdefault(p, {})
            value = getattr(self, short)
            node[leaf] = list(value) if isinstance(value, tuple) else value
        out["quantization_config"] |= {"activation_scheme": "dynamic", "quant_method": "fp8"}
        return out

    def kept(self, layers: Sequence[int]) -> dict[str, Any]:
        """The fields of `to_release_dict` that are others if only these main layers are kept.

        layers: ascending; they are renumbered and keep their kind. The draft blocks stay.
        """
        ratios = [self.compress_ratios[layer] for layer in layers]
        drafts = list(self.compress_ratios[self.n_layers :])
        return {"num_hidden_layers": len(layers), "compress_ratios": ratios + drafts}

    def ratio(self, layer: int) -> int:
        """Compression ratio of a block, 0 without compression; drafts follow the main layers."""
        return self.compress_ratios[layer]

    def is_mtp(self, layer: int) -> bool:
        """Whether this block index is one of the draft blocks, which follow the main layers."""
        return layer >= self.n_layers

    def is_hash(self, layer: int) -> bool:
        """Whether the block routes by token id (`ffn.gate.tid2eid`) rather than by score."""
        return False

    def experts_of(self, layer: int) -> tuple[int, int]:
        """Routed experts of a block, and how many of them a token takes."""
        return self.n_routed_experts, self.n_activated_experts

    @property
    def draft_tokens(self) -> int:
        """Tokens that a draft block takes in a decode step."""
        return 1

    def block_path(self, layer: int) -> str:
        """Prefix of a block's tensor names: `layers.<n>`, or `mtp.<i>` from index n_layers on."""
        return f"mtp.{layer - self.n_layers}" if self.is_mtp(layer) else f"layers.{layer}"

    @property
    def mtp_problem(self) -> str | None:
        """Why the draft blocks cannot be computed with this configuration; None if they can."""
        if self.n_mtp_layers == 0:
            return "num_nextn_predict_layers is 0: there is no MTP layer"
        return None

    @property
    def mtp_supported(self) -> bool:
        """Whether the draft blocks can be computed (see `mtp_problem`)."""
        return self.mtp_problem is None


class Numerics(BaseModel):
    """How to compute: accumulation dtype (SPEC section 4), threads, backend of matrix products.

    Only `accumulate` affects results; threads and backend do not change a bit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accumulate: Literal["float64", "float32"] = "float64"
    threads: PositiveInt = 1
    backend: Literal["auto", "readable", "numpy", "c"] = "auto"

    @property
    def acc(self) -> "torch.dtype":
        """The accumulation dtype, torch.float64 or torch.float32."""
        import torch  # not at the top: importing it takes a second

        return torch.float64 if self.accumulate == "float64" else torch.float32


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
                f"{source}: {field}: expected {json.dumps(wanted)}, "
                f"found {shortened(json.dumps(d[field]))}"
            )


def _value_at(d: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    node: Any = d
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _fields(names: list[str]) -> str:
    """Field names for a message: `field a` or `fields a, b`."""
    return f"field{'s' if len(names) > 1 else ''} {', '.join(names)}"
