"""ModelConfig: all fields are read from the file, no defaults, invalid values refused (SPEC 1)."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import v4tool
from tests.conftest import GOLDEN_MINI
from v4tool.config import ModelConfig, Numerics
from v4tool.config_fields import RELEASE_NAMES
from v4tool.errors import ConfigError

DATA = Path(v4tool.__file__).parent / "data"
RATIOS = (0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0)

FLASH = {
    "dim": 4096,
    "n_layers": 43,
    "n_mtp_layers": 1,
    "n_hash_layers": 3,
    "vocab_size": 129280,
    "n_heads": 64,
    "head_dim": 512,
    "rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_inter_dim": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "norm_eps": 1e-6,
    "window_size": 128,
    "compress_ratios": RATIOS,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_type": "yarn",
    "rope_factor": 16.0,
    "original_seq_len": 65536,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "expert_dtype": "fp4",
    "fp8_fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "fp8_block": (128, 128),
    "max_seq_len": 1048576,
}
"""The release's values, from SPEC section 1."""


def release() -> dict[str, Any]:
    """A fresh copy of the shipped release configuration."""
    raw: dict[str, Any] = json.loads((DATA / "flash_config.json").read_text())
    return raw


def changed(path: str, value: object) -> dict[str, Any]:
    """The release's configuration with one field set, or removed for `...`."""
    out = copy.deepcopy(release())
    *parents, leaf = path.split(".")
    node = out
    for parent in parents:
        node = node[parent]
    if value is ...:
        del node[leaf]
    else:
        node[leaf] = value
    return out


def refused(d: object) -> str:
    """The one line with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(d, "here/config.json")
    line = str(caught.value)
    assert line.startswith("here/config.json: ")
    assert "\n" not in line
    return line


def test_release_values() -> None:
    assert ModelConfig.from_file(DATA / "flash_config.json").model_dump() == FLASH


@pytest.mark.parametrize("name", ["flash_config.json", "nano_config.json"])
def test_release_dict_reads_back(name: str) -> None:
    config = ModelConfig.from_file(DATA / name)
    written = json.loads(json.dumps(config.to_release_dict()))
    assert ModelConfig.from_dict(written) == config


def test_shipped_release_is_what_is_written() -> None:
    assert ModelConfig.from_file(DATA / "flash_config.json").to_release_dict() == release()


def test_directory_stands_for_its_config() -> None:
    config = ModelConfig.from_file(GOLDEN_MINI / "ckpt")
    assert (config.dim, config.n_layers, config.compress_ratios) == (128, 5, (0, 4, 128, 4, 128, 0))


def test_unknown_fields_are_ignored() -> None:
    extra = release() | {"initializer_range": 0.02, "transformers_version": "5.0"}
    assert ModelConfig.from_dict(extra).model_dump() == FLASH


@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
@pytest.mark.parametrize("path", RELEASE_NAMES.values())
def test_missing_field_is_named(path: str, value: object) -> None:
    assert f"missing field {path};" in refused(changed(path, value))


def test_all_missing_fields_are_named() -> None:
    raw = changed("swiglu_limit", ...)
    del raw["o_groups"], raw["rope_scaling"]
    line = refused(raw)
    for name in ("o_groups", "swiglu_limit", "rope_scaling"):
        assert name in line


SENSELESS = [
    # field, value, what the line must say
    ("hidden_size", 4096.0, "hidden_size: expected a valid integer, found 4096.0"),
    ("hidden_size", "4096", "hidden_size: expected a valid integer, found '4096'"),
    ("hidden_size", True, "hidden_size: expected a valid integer, found True"),
    ("hidden_size", -4096, "hidden_size: expected greater than 0, found -4096"),
    ("hidden_size", 4160, "hidden_size: expected a multiple of 128"),
    ("q_lora_rank", 1000, "q_lora_rank: expected a multiple of 128"),
    ("moe_intermediate_size", 2049, "moe_intermediate_size: expected a multiple of 128"),
    ("o_lora_rank", 1, "o_groups x o_lora_rank: expected a multiple of 128"),
    ("num_hidden_layers", 0, "num_hidden_layers: expected greater than 0, found 0"),
    ("num_nextn_predict_layers", -1, "num_nextn_predict_layers: expected greater than or equal"),
    ("num_hash_layers", 44, "num_hash_layers: expected at most num_hidden_layers 43, found 44"),
    ("head_dim", 64, "head_dim: expected more than qk_rope_head_dim 64, found 64"),
    ("head_dim", 500, "head_dim: expected qk_rope_head_dim 64 plus a multiple of 64"),
    ("qk_rope_head_dim", 63, "qk_rope_head_dim: expected an even number"),
    ("qk_rope_head_dim", 192, "index_head_dim: expected at least qk_rope_head_dim 192, found 128"),
    ("o_groups", 7, "o_groups: expected a divisor of 64 heads x 512, found 7"),
    ("index_head_dim", 96, "index_head_dim: expected a power of two"),
    ("index_head_dim", 16, "index_head_dim: expected a power of two from 32"),
    ("index_topk", 0, "index_topk: expected greater than 0, found 0"),
    ("num_experts_per_tok", 257, "num_experts_per_tok: expected at most n_routed_experts 256"),
    ("n_shared_experts", 2, "n_shared_experts: expected 1, found 2"),
    ("scoring_func", "sigmoid", "scoring_func: expected 'sqrtsoftplus', found 'sigmoid'"),
    ("expert_dtype", "fp8", "expert_dtype: expected 'fp4', found 'fp8'"),
    ("rms_norm_eps", 0.0, "rms_norm_eps: expected greater than 0"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps: expected a finite number, found nan"),
    ("swiglu_limit", float("inf"), "swiglu_limit: expected a finite number, found inf"),
    ("routed_scaling_factor", "1.5", "routed_scaling_factor: expected a valid number"),
    ("rope_scaling", "yarn", "missing fields rope_scaling.type"),
    ("rope_scaling.type", "linear", "rope_scaling.type: expected 'yarn', found 'linear'"),
    ("rope_scaling.factor", -1, "rope_scaling.factor: expected greater than 0, found -1"),
    ("quantization_config.fmt", "e5m2", "quantization_config.fmt: expected 'e4m3', found 'e5m2'"),
    ("quantization_config.scale_fmt", "f32", "quantization_config.scale_fmt: expected 'ue8m0'"),
    ("quantization_config.weight_block_size", [64, 64], "weight_block_size: expected [128, 128]"),
    ("quantization_config.weight_block_size", [128], "weight_block_size"),
    ("compress_ratios", [0] * 43, "compress_ratios: expected 44 entries (43 layers, then 1"),
    ("compress_ratios", 4, "compress_ratios: expected a valid tuple, found 4"),
    ("compress_ratios", [0, 0, 8, *RATIOS[3:]], "compress_ratios: expected only 0, 4 and 128"),
    ("compress_ratios", [0, -4, *RATIOS[2:]], "compress_ratios[1]: expected greater than or"),
    ("layer_types", ["full"], "layer_types: expected the release's schema"),
    ("rope_parameters", {}, "rope_parameters: expected the release's schema"),
    ("num_key_value_heads", 8, "num_key_value_heads: expected 1, found 8"),
    ("hidden_act", "gelu", 'hidden_act: expected "silu", found "gelu"'),
    ("norm_topk_prob", False, "norm_topk_prob: expected true, found false"),
    ("tie_word_embeddings", True, "tie_word_embeddings: expected false, found true"),
]


@pytest.mark.parametrize(("field", "value", "words"), SENSELESS)
def test_invalid_value_is_refused(field: str, value: object, words: str) -> None:
    assert words in refused(changed(field, value))


def test_all_invalid_values_are_listed() -> None:
    line = refused(release() | {"hidden_size": 0, "o_groups": 1.5, "index_topk": -1})
    assert all(name in line for name in ("hidden_size:", "o_groups:", "index_topk:"))
    line = refused(release() | {"hidden_size": 200, "o_groups": 7, "num_hash_layers": 99})
    assert all(name in line for name in ("hidden_size:", "o_groups:", "num_hash_layers:"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no valid JSON"),
        ('{"hidden_size": 1', "is no valid JSON"),
        ('{"hidden_size": 1, "hidden_size": 2}', "duplicate key hidden_size"),
        ("[1]", "expected a JSON object, found list"),
        ("[" * 100_000, "is no valid JSON"),
    ],
    ids=["empty", "cut", "duplicate", "list", "deep"],
)
def test_unusable_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_byte_order_mark_is_read_and_utf_16_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = (GOLDEN_MINI / "ckpt/config.json").read_text()
    path.write_text(text, encoding="utf-8-sig")
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf"
    assert ModelConfig.from_file(path) == ModelConfig.from_file(GOLDEN_MINI / "ckpt")
    for encoding in ("utf-16", "utf-16-be"):
        path.write_text("\ufeff" * (encoding == "utf-16-be") + text, encoding=encoding)
        with pytest.raises(ConfigError) as e:
            ModelConfig.from_file(path)
        assert str(e.value) == f"{path}: is UTF-16 text, expected UTF-8: save it as UTF-8"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_utf_16_without_a_byte_order_mark_and_utf_32(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "config.json"
    path.write_text((GOLDEN_MINI / "ckpt/config.json").read_text(), encoding=encoding)
    found = encoding[:6].upper()
    with pytest.raises(ConfigError, match=f"is {found} text, expected UTF-8: save it as UTF-8$"):
        ModelConfig.from_file(path)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: there is no such file"):
        ModelConfig.from_file(tmp_path)


@pytest.mark.parametrize(
    ("ratios", "layers", "words"),
    [
        (list(RATIOS), 1, None),
        ([*RATIOS, 0, 0], 3, "46 entries for 43 layers"),
        ([*RATIOS, 0, 0], 1, "46 entries for 43 layers"),
        (list(RATIOS[:43]), 0, "there is no MTP layer"),
        ([*RATIOS[:43], 4], 1, "the MTP layer's compress_ratios entry is 4, not 0"),
    ],
    ids=["release", "dspark", "dspark-1", "none", "compressed"],
)
def test_whether_mtp_can_be_computed(ratios: list[int], layers: int, words: str | None) -> None:
    raw = release() | {"compress_ratios": ratios, "num_nextn_predict_layers": layers}
    config = ModelConfig.from_dict(raw)
    assert config.mtp_supported == (words is None)
    assert (words or "") in (config.mtp_problem or "")


def test_blocks() -> None:
    config = ModelConfig.from_file(DATA / "flash_config.json")
    assert [config.ratio(i) for i in (0, 1, 2, 3, 42, 43)] == [0, 0, 4, 128, 4, 0]
    assert [i for i in range(44) if config.is_hash(i)] == [0, 1, 2]
    assert [i for i in range(44) if config.is_mtp(i)] == [43]
    assert [config.block_path(i) for i in (0, 42, 43)] == ["layers.0", "layers.42", "mtp.0"]


def test_frozen() -> None:
    config = ModelConfig.from_file(DATA / "flash_config.json")
    with pytest.raises(ValidationError):
        config.dim = 1  # type: ignore[misc]


def test_numerics() -> None:
    assert Numerics().acc is torch.float64
    assert Numerics(accumulate="float32").acc is torch.float32
    assert (Numerics().threads, Numerics().backend) == (1, "auto")
    for wrong in ({"accumulate": "bfloat16"}, {"threads": 0}, {"backend": "mkl"}, {"speed": 1}):
        with pytest.raises(ValidationError):
            Numerics.model_validate(wrong)


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, v4tool.config, v4tool.checkpoint.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
