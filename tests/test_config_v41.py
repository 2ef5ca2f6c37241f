"""V41Config: both forms, relations between fields, what they mean for a layer (SPEC41 1)."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import v4tool
from v4tool.architecture import V4, V41
from v4tool.config import ModelConfig
from v4tool.config_v41 import V41Config
from v4tool.errors import ConfigError, UnsupportedError

RELEASE = Path(v4tool.__file__).parent / "data" / "v4.1-flash_config.json"
RATIOS = [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0]


def text(**changes: object) -> dict[str, Any]:
    """The release's configuration with some fields of `text_config` changed, `...` removes."""
    raw: dict[str, Any] = json.loads(RELEASE.read_text())
    for name, value in changes.items():
        if value is ...:
            del raw["text_config"][name]
        else:
            raw["text_config"][name] = copy.deepcopy(value)
    return raw


def config(**changes: object) -> V41Config:
    found = ModelConfig.from_dict(text(**changes))
    assert isinstance(found, V41Config)
    return found


def refused(**changes: object) -> str:
    """The one line with which the changed configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(text(**changes), "config.json")
    line = str(caught.value)
    assert line.startswith("config.json: ")
    assert "\n" not in line
    return line.removeprefix("config.json: ")


def test_release_values() -> None:
    c = config()
    assert (c.dim, c.n_layers, c.n_mtp_layers, c.q_lora_rank) == (5120, 40, 3, 1280)
    assert (c.moe_inter_dim, c.n_routed_experts, c.norm_eps) == (2304, 384, 1e-20)
    assert (c.fp8_block, c.index_n_heads, c.hc_mult) == ((32, 32), 32, 4)
    assert c.engram_num_embeddings == (384006168, 384016682)
    assert c.architecture is V41


def test_short_names_of_the_inference_code() -> None:
    """The flat form has short names, and says nothing of what has one value alone."""
    short = config().model_dump() | {"engram_pad_id": 2}
    del short["engram_pad_token_id"], short["fp8_block"], short["fp8_fmt"], short["rope_type"]
    flat = json.loads(json.dumps(short))
    assert "model_type" not in flat
    assert ModelConfig.from_dict(flat) == config()


def test_release_dict_reads_back() -> None:
    written = json.loads(json.dumps(config().to_release_dict()))
    assert ModelConfig.from_dict(written) == config()


def test_sources_of_layers() -> None:
    """A layer reads the rows and the table of the last source at or before it (SPEC41 4)."""
    c = config()
    assert [c.kv_source(n) for n in (1, 2, 7, 8, 19, 20, 39)] == [None, 2, 2, 8, 14, 20, 20]
    assert [c.index_source(n) for n in (2, 13, 20, 23, 24, 39)] == [2, 8, 20, 20, 24, 36]


def test_draft_blocks_have_their_own_experts() -> None:
    c = config()
    assert [c.experts_of(n) for n in (0, 39, 40, 42)] == [(384, 6), (384, 6), (128, 3), (128, 3)]
    assert [c.block_path(n) for n in (39, 40, 42)] == ["layers.39", "mtp.0", "mtp.2"]


REFUSED = [
    # field, value, the line
    ("compress_ratios", RATIOS[:-1],
     "compress_ratios: expected 43 entries (40 layers, then 3 draft blocks), found 42"),
    ("compress_ratios", [*RATIOS[:-1], 2],
     "compress_ratios: expected 0 for the draft blocks, found [0, 0, 2]"),
    ("compress_ratios", [0, 2, *RATIOS[2:]],
     "kv_source_layer_ids: expected a source at or before layer 1 (its compress_ratios entry is 2)"
     ", found [2, 8, 14, 20]"),
    ("compress_ratios", [*RATIOS[:10], 4, *RATIOS[11:]],
     "compress_ratios: expected 2 in layer 10, as its source layer 8 has, found 4"),
    ("kv_source_layer_ids", [0, 2, 8, 14, 20],
     "kv_source_layer_ids: expected layers with a compress_ratios entry above 0, found 0"),
    ("kv_source_layer_ids", [2, 8, 14, 40],
     "kv_source_layer_ids: expected ascending numbers of main layers (0 to 39), "
     "found [2, 8, 14, 40]"),
    ("index_source_layer_ids", [2, 8, 20, 24],
     "index_source_layer_ids: expected every layer of kv_source_layer_ids among them, "
     "found [2, 8, 20, 24]"),
    ("index_source_layer_ids", [1, 2, 8, 14, 20],
     "index_source_layer_ids: expected layers with a compress_ratios entry above 0, found [1]"),
    ("index_source_layer_ids", [2, 8, 14, 20, 20],
     "index_source_layer_ids: expected ascending numbers of main layers (0 to 39), "
     "found [2, 8, 14, 20, 20]"),
    ("candidate_source_layer_id", 21,
     "candidate_source_layer_id: expected -1 or one of index_source_layer_ids "
     "[2, 8, 14, 20, 24, 28, 32, 36], found 21"),
    ("candidate_source_layer_id", 14,
     "candidate_source_layer_id: expected a layer whose rows all later index sources read, "
     "found 14"),
    ("engram_num_embeddings", [384006168, 384016681],
     "engram_num_embeddings: expected [384006168, 384016682], the sums of the primes of layers "
     "[1, 14], found [384006168, 384016681]"),
    ("engram_layer_ids", [1, 40],
     "engram_layer_ids: expected ascending numbers of main layers (0 to 39), found [1, 40]"),
    ("engram_max_ngram_size", 1, "engram_max_ngram_size: expected at least 2, found 1"),
    ("engram_pad_token_id", 129280,
     "engram_pad_token_id: expected a token id below vocab_size 129280, found 129280"),
    ("engram_head_dim", 250,
     "engram_head_dim: expected a multiple of 32 (block of the activations), found 250"),
    ("dspark_target_layer_ids", [37, 38, 40],
     "dspark_target_layer_ids: expected ascending numbers of main layers (0 to 39), "
     "found [37, 38, 40]"),
    ("dspark_noise_token_id", 129280,
     "dspark_noise_token_id: expected a token id below vocab_size 129280, found 129280"),
    ("dspark_num_experts_per_tok", 129,
     "dspark_num_experts_per_tok: expected at most dspark_n_routed_experts 128, found 129"),
    ("hidden_size", 5130,
     "hidden_size: expected a multiple of 32 (block of the activations), found 5130"),
    ("index_head_dim", 100,
     "index_head_dim: expected a multiple of 32 (block of the activations), found 100"),
    ("hidden_size", ..., "missing field hidden_size; no value is assumed for it"),
    ("engram_pad_token_id", ..., "missing field engram_pad_token_id; no value is assumed for it"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "line"), REFUSED)
def test_one_line_says_what_is_wrong(field: str, value: object, line: str) -> None:
    assert refused(**{field: value}) == line


def test_blocks_of_scales_are_those_of_the_architecture() -> None:
    raw = text()
    raw["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(ConfigError, match=r"weight_block_size: expected \[32, 32\], found"):
        ModelConfig.from_dict(raw)


def test_a_model_without_engram_needs_no_tables() -> None:
    c = config(engram_layer_ids=[], engram_num_embeddings=[])
    assert c.engram_layer_ids == ()


def test_what_is_not_built_is_refused_by_name() -> None:
    assert V4.commands >= {"check", "dump", "regen", "synth", "verify"}
    V4.require("verify")
    with pytest.raises(UnsupportedError, match=r"^verify: DeepSeek-V4\.1 is not supported"):
        V41.require("verify")
