"""The checkpoint layout: SPEC section 2's table and figures, the golden checkpoints, `nano`."""

import json
from collections import Counter
from math import ceil
from pathlib import Path

import pytest

import v4tool
from tests.conftest import GOLDEN, GOLDEN_MINI, SHARED, needs_golden, needs_golden41
from v4tool.checkpoint.header import read_header
from v4tool.checkpoint.layout import TensorSpec, Totals, layout, shard_name, totals
from v4tool.config import ModelConfig
from v4tool.errors import ConfigError

DATA = Path(v4tool.__file__).parent / "data"
FLASH = ModelConfig.from_file(DATA / "flash_config.json")
V41_FLASH = ModelConfig.from_file(DATA / "v4.1-flash_config.json")
NANO = ModelConfig.from_file(DATA / "nano_config.json")


def test_release_figures() -> None:
    assert totals(layout(FLASH)) == Totals(
        tensors=69187, mtp_tensors=1575, total_size=159609485896, parameters=290942289362
    )


def test_v41_release_figures() -> None:
    """SPEC41 section 2."""
    specs = layout(V41_FLASH)
    found = totals(specs)
    assert (found.tensors, found.mtp_tensors, found.total_size) == (96085, 2401, 510286023000)
    tables = [spec for name, spec in specs.items() if ".engram.embed." in name]
    assert sum(spec.nbytes for spec in tables) == 202758032400
    drafts = [spec for name, spec in specs.items() if name.startswith("mtp.")]
    assert sum(spec.nbytes for spec in drafts) == 7932874632
    unused = [name for name, spec in specs.items() if not spec.used]
    assert sum(not name.endswith(".bias_vl") for name in unused) == 266
    assert max(spec.shard for spec in specs.values()) == 48


V41_RELEASE = [
    # tensor, dtype, shape
    ("layers.0.attn.wq_a.scale", "F8_E8M0", (40, 160)),
    ("layers.0.ffn.gate.bias", "F32", (384,)),
    ("layers.2.attn.compressor.wgate.weight", "BF16", (512, 5120)),
    ("layers.2.attn.indexer.wk.weight", "BF16", (128, 512)),
    ("layers.2.attn.indexer.k_norm.weight", "BF16", (128,)),
    ("layers.24.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
    ("layers.24.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
    ("layers.1.engram.embed.weight", "F8_E4M3", (384006168, 256)),
    ("layers.1.engram.embed.scale", "F8_E8M0", (384006168, 8)),
    ("layers.14.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
    ("layers.14.engram.q_weight", "BF16", (4, 5120)),
    ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
    ("mtp.2.markov_head.head.weight", "BF16", (129280, 256)),
    ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
    ("mtp.2.ffn.experts.127.w2.weight", "I8", (5120, 1152)),
]
V41_ABSENT = [
    "layers.20.attn.compressor.wgate.weight",
    "layers.24.attn.indexer.wk.weight",
    "layers.3.attn.compressor.wkv.weight",
    "layers.2.attn.compressor.ape",
    "mtp.1.norm.weight",
    "mtp.0.ffn.experts.128.w1.weight",
    "hc_head_fn",
]


def test_v41_release_rows_of_the_table() -> None:
    specs = layout(V41_FLASH)
    found = [(name, specs[name].dtype, specs[name].shape) for name, *_ in V41_RELEASE]
    assert found == V41_RELEASE
    assert [name for name in V41_ABSENT if name in specs] == []


@needs_golden41
@pytest.mark.parametrize("name", ["golden41", "golden41-mini"])
def test_v41_layout_is_that_of_the_golden_checkpoints(name: str) -> None:
    """Names, dtypes, shapes and shards; they have no image part."""
    directory = SHARED / name / "ckpt"
    specs = {n: s for n, s in layout(ModelConfig.from_file(directory)).items() if s.used}
    found = {}
    for shard, path in enumerate(sorted(directory.glob("*.safetensors")), 1):
        for n, entry in read_header(path).tensors.items():
            found[n] = TensorSpec(entry.dtype, entry.shape, shard)
    assert found == specs


RELEASE = [
    # tensor, dtype, shape, shard
    ("embed.weight", "BF16", (129280, 4096), 1),
    ("layers.0.hc_attn_fn", "F32", (24, 16384), 2),
    ("layers.0.hc_ffn_base", "F32", (24,), 2),
    ("layers.0.hc_ffn_scale", "F32", (3,), 2),
    ("layers.0.attn.attn_sink", "F32", (64,), 2),
    ("layers.0.attn.wq_a.weight", "F8_E4M3", (1024, 4096), 2),
    ("layers.0.attn.wq_a.scale", "F8_E8M0", (8, 32), 2),
    ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1024), 2),
    ("layers.0.attn.wkv.weight", "F8_E4M3", (512, 4096), 2),
    ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096), 2),
    ("layers.0.attn.wo_a.scale", "F8_E8M0", (64, 32), 2),
    ("layers.0.attn.wo_b.weight", "F8_E4M3", (4096, 8192), 2),
    ("layers.0.attn.q_norm.weight", "BF16", (1024,), 2),
    ("layers.0.attn.kv_norm.weight", "BF16", (512,), 2),
    ("layers.2.ffn.gate.tid2eid", "I64", (129280, 6), 4),
    ("layers.2.attn.compressor.ape", "F32", (4, 1024), 4),
    ("layers.2.attn.compressor.wkv.weight", "BF16", (1024, 4096), 4),
    ("layers.2.attn.compressor.norm.weight", "BF16", (512,), 4),
    ("layers.2.attn.indexer.wq_b.weight", "F8_E4M3", (8192, 1024), 4),
    ("layers.2.attn.indexer.wq_b.scale", "F8_E8M0", (64, 8), 4),
    ("layers.2.attn.indexer.weights_proj.weight", "BF16", (64, 4096), 4),
    ("layers.2.attn.indexer.compressor.ape", "F32", (4, 256), 4),
    ("layers.2.attn.indexer.compressor.wgate.weight", "BF16", (256, 4096), 4),
    ("layers.2.attn.indexer.compressor.norm.weight", "BF16", (128,), 4),
    ("layers.3.attn.compressor.ape", "F32", (128, 512), 5),
    ("layers.3.attn.compressor.wgate.weight", "BF16", (512, 4096), 5),
    ("layers.3.ffn.gate.weight", "BF16", (256, 4096), 5),
    ("layers.3.ffn.gate.bias", "F32", (256,), 5),
    ("layers.3.ffn.shared_experts.w1.weight", "F8_E4M3", (2048, 4096), 5),
    ("layers.3.ffn.shared_experts.w2.scale", "F8_E8M0", (32, 16), 5),
    ("layers.42.ffn.experts.255.w1.weight", "I8", (2048, 2048), 44),
    ("layers.42.ffn.experts.255.w1.scale", "F8_E8M0", (2048, 128), 44),
    ("layers.42.ffn.experts.255.w2.weight", "I8", (4096, 1024), 44),
    ("layers.42.ffn.experts.255.w2.scale", "F8_E8M0", (4096, 64), 44),
    ("layers.42.ffn.experts.255.w3.scale", "F8_E8M0", (2048, 128), 44),
    ("norm.weight", "BF16", (4096,), 45),
    ("head.weight", "BF16", (129280, 4096), 45),
    ("hc_head_fn", "F32", (4, 16384), 45),
    ("hc_head_base", "F32", (4,), 45),
    ("hc_head_scale", "F32", (1,), 45),
    ("mtp.0.e_proj.weight", "F8_E4M3", (4096, 4096), 46),
    ("mtp.0.h_proj.scale", "F8_E8M0", (32, 32), 46),
    ("mtp.0.enorm.weight", "BF16", (4096,), 46),
    ("mtp.0.hnorm.weight", "BF16", (4096,), 46),
    ("mtp.0.norm.weight", "BF16", (4096,), 46),
    ("mtp.0.hc_head_fn", "F32", (4, 16384), 46),
    ("mtp.0.ffn.gate.bias", "F32", (256,), 46),
]


def test_release_rows_of_the_table() -> None:
    specs = layout(FLASH)
    wrong = [name for name, *spec in RELEASE if specs.get(name) != TensorSpec(*spec)]
    assert wrong == []


def test_what_only_some_layers_have() -> None:
    specs = layout(FLASH)

    def layers_with(ending: str) -> list[str]:
        return [n.removesuffix(ending) for n in specs if n.endswith(ending)]

    assert layers_with("attn.indexer.wq_b.weight") == [f"layers.{i}." for i in range(2, 43, 2)]
    assert layers_with("attn.compressor.ape") == [f"layers.{i}." for i in range(2, 43)]
    assert layers_with("gate.tid2eid") == [f"layers.{i}.ffn." for i in range(3)]
    assert len(layers_with("gate.bias")) == 41
    assert [n for n in specs if n.startswith("mtp.") and "compressor" in n] == []
    assert not {"mtp.0.embed.weight", "mtp.0.head.weight"} & specs.keys()


def test_shards_of_the_release() -> None:
    specs = layout(FLASH)
    assert sorted({s.shard for s in specs.values()}) == list(range(1, 47))
    assert shard_name(3, 46) == "model-00003-of-00046.safetensors"
    per_shard = Counter(s.shard for s in specs.values())
    assert (per_shard[1], per_shard[45], per_shard[46]) == (1, 5, 1575)


@pytest.mark.parametrize(
    "directory",
    [GOLDEN_MINI / "ckpt", pytest.param(GOLDEN / "ckpt", marks=needs_golden)],
    ids=["mini", "golden"],
)
def test_golden_headers(directory: Path) -> None:
    """Every dtype, shape and shard of a checkpoint that this code did not write."""
    found = {}
    for path in directory.glob("*.safetensors"):
        shard = int(path.name.split("-")[1])
        for name, entry in read_header(path).tensors.items():
            found[name] = TensorSpec(entry.dtype, entry.shape, shard)
    specs = layout(ModelConfig.from_file(directory))
    assert specs == found
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert totals(specs).total_size == index["metadata"]["total_size"]


def test_parameters_count_fp4_codes_and_no_scales() -> None:
    specs = {
        "fp4.weight": TensorSpec("I8", (3, 16), 1),
        "fp4.scale": TensorSpec("F8_E8M0", (3, 1), 1),
        "fp8.weight": TensorSpec("F8_E4M3", (3, 5), 1),
        "mtp.0.norm.weight": TensorSpec("BF16", (7,), 2),
        "gate.tid2eid": TensorSpec("I64", (11, 2), 2),
        "base": TensorSpec("F32", (2,), 2),
    }
    assert totals(specs) == Totals(
        tensors=6,
        mtp_tensors=1,
        total_size=48 + 3 + 15 + 14 + 176 + 8,
        parameters=96 + 15 + 7 + 2,
    )


def test_other_designs_of_mtp_are_left_out() -> None:
    fields = FLASH.to_release_dict()
    fields["compress_ratios"] += [0, 0]
    main = {n: s for n, s in layout(FLASH).items() if not n.startswith("mtp.")}
    assert layout(ModelConfig.from_dict(fields)) == main
    assert len(main) == 69187 - 1575


def dspark(**changes: object) -> ModelConfig:
    """The release of 2026-07-31: V4-Flash with three draft blocks (SPEC41 7)."""
    fields = FLASH.to_release_dict() | {
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    fields["compress_ratios"] += [0, 0]
    return ModelConfig.from_dict(fields | changes)


def test_draft_blocks_of_the_release_of_2026_07_31() -> None:
    """4705 `mtp.*` tensors beside the same main stack, in 48 shards."""
    specs = layout(dspark())
    drafts = {name: spec for name, spec in specs.items() if name.startswith("mtp.")}
    main = {n: s for n, s in layout(FLASH).items() if not n.startswith("mtp.")}
    assert {n: s for n, s in specs.items() if n not in drafts} == main
    assert len(drafts) == 4705
    assert {spec.shard for spec in drafts.values()} == {46, 47, 48}
    assert specs["mtp.0.main_proj.weight"] == TensorSpec("F8_E4M3", (4096, 3 * 4096), 46)
    assert specs["mtp.2.markov_head.markov_w2.weight"] == TensorSpec("BF16", (129280, 256), 48)
    assert specs["mtp.2.confidence_head.proj.weight"].shape == (1, 4096 + 256)
    assert "mtp.2.hc_head_fn" in specs
    assert "mtp.1.norm.weight" not in specs
    assert not any("enorm" in name or "e_proj" in name for name in specs)


def test_targets_of_a_draft_head_are_checked() -> None:
    cases = [
        ({"dspark_target_layer_ids": [40, 41, 43]}, "dspark_target_layer_ids: expected ascending"),
        ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id: expected a token id below"),
        ({"compress_ratios": [0] * 45},
         "compress_ratios: expected 46 entries (43 layers, then 3 draft blocks), found 45"),
        ({"dspark_markov_rank": None}, "missing field dspark_markov_rank"),
    ]  # fmt: skip
    for change, line in cases:
        with pytest.raises(ConfigError) as caught:
            dspark(**change)
        assert line in str(caught.value)


def test_nano_is_the_release_made_narrow() -> None:
    same = ("n_layers", "n_mtp_layers", "n_hash_layers", "vocab_size", "compress_ratios")
    same += ("index_topk", "window_size", "rope_head_dim", "hc_mult", "hc_sinkhorn_iters")
    assert [getattr(NANO, f) for f in same] == [getattr(FLASH, f) for f in same]
    assert NANO.to_release_dict().keys() == FLASH.to_release_dict().keys()
    assert totals(layout(NANO)).total_size <= 256 * 2**20


def test_nano_has_two_blocks_along_every_quantised_dimension() -> None:
    narrow = {}
    for name, spec in layout(NANO).items():
        if spec.dtype in ("F8_E4M3", "I8"):
            n, k = spec.shape[0], spec.shape[1] * (2 if spec.dtype == "I8" else 1)
            if min(ceil(n / 128), ceil(k / 128)) < 2:
                narrow[name] = (n, k)
    assert narrow == {}
