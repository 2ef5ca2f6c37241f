"""Keys, dtypes and shapes of a recording, from configuration and length (SPEC section 6)."""

import pytest
import torch

from tests.conftest import GOLDEN_DSPARK, GOLDEN_MINI, GoldenFile, every_golden
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.names import (
    KeySpec,
    Step,
    base_keys,
    complete_blocks,
    generic,
    is_draft,
    is_expert,
    layer_keys,
    layer_of,
    matches,
    most_tensors,
    parse_layers,
    pass_of,
    payload_bytes,
    recording_keys,
    routed_rows,
)
from v4tool.profiles import load


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return ModelConfig.from_file(load("flash", options={}, environ={}).config)


@pytest.fixture(scope="module")
def nano() -> ModelConfig:
    return ModelConfig.from_file(load("nano", options={}, environ={}).config)


@pytest.mark.parametrize(
    ("tokens", "base", "mebibytes"), [(6, 1749, 256.47), (32, 1749, 1347.88), (129, 1809, 5422.18)]
)
def test_known_totals_of_the_real_model(
    flash: ModelConfig, tokens: int, base: int, mebibytes: float
) -> None:
    """SPEC 6, known totals: base keys of the whole recording and payload, whatever the routing."""
    keys = recording_keys(flash, tokens)
    assert len(base_keys(keys)) == base
    assert round(payload_bytes(flash, keys, tokens) / 2**20, 2) == mebibytes


@pytest.mark.parametrize(("tokens", "base"), [(6, 1749), (32, 1749), (129, 1809)])
def test_nano_has_as_many_base_keys_as_the_release(
    nano: ModelConfig, tokens: int, base: int
) -> None:
    assert len(base_keys(recording_keys(nano, tokens))) == base


BASE_KEYS = [
    # layer, tokens, start, base keys, which row of SPEC 6's table
    (0, 6, 0, 31, "ratio 0"),
    (0, 1, 6, 31, "ratio 0, decode"),
    (3, 127, 0, 33, "ratio 128, s < 128"),
    (3, 128, 0, 36, "ratio 128, s >= 128"),
    (3, 1, 128, 33, "ratio 128, decode without a block"),
    (3, 1, 127, 36, "ratio 128, decode that completes one"),
    (2, 4, 0, 45, "ratio 4, s >= 4"),
    (2, 3, 0, 39, "ratio 4, s < 4"),
    (2, 1, 4, 39, "ratio 4, decode without a block"),
    (2, 1, 7, 45, "ratio 4, decode that completes one"),
]


@pytest.mark.parametrize(("layer", "tokens", "start", "count", "row"), BASE_KEYS)
def test_base_keys_of_a_layer(
    flash: ModelConfig, layer: int, tokens: int, start: int, count: int, row: str
) -> None:
    keys = layer_keys(flash, layer, Step("", tokens, start))
    assert sum(not is_expert(key) for key in keys) == count, row


def test_base_keys_of_an_mtp_pass(flash: ModelConfig) -> None:
    assert len(base_keys(layer_keys(flash, flash.n_layers, Step("mtp.0.decode.", 1, 6)))) == 39


DRAFT_KEYS = [
    # layer, tokens, start, base keys, what (SPEC41 5)
    (5, 6, 0, 3, "draft block in a prefill"),
    (6, 1, 6, 34, "draft block in a step"),
]


@pytest.mark.parametrize(("layer", "tokens", "start", "count", "what"), DRAFT_KEYS)
def test_base_keys_of_a_draft_block(
    layer: int, tokens: int, start: int, count: int, what: str
) -> None:
    config = ModelConfig.from_file(GOLDEN_DSPARK / "ckpt")
    assert len(base_keys(layer_keys(config, layer, Step("", tokens, start)))) == count, what


def test_drafts_are_recorded_inside_their_pass() -> None:
    """3 + 3 each in the prefill, 5 + 34 each + 8 in a step (SPEC41 5); experts in addition."""
    config = ModelConfig.from_file(GOLDEN_DSPARK / "ckpt")
    keys = recording_keys(config, 6, 2)
    drafts = [key for key in base_keys(keys) if is_draft(key)]
    assert [sum(pass_of(key) == p for key in drafts) for p in ("", "decode.0.", "decode.1.")] == [
        3 + 2 * 3, 5 + 2 * 34 + 8, 5 + 2 * 34 + 8
    ]  # fmt: skip
    assert not any(map(is_draft, recording_keys(config, 6, 2, mtp=False)))
    assert routed_rows(config, "decode.1.mtp.1.ffn.experts.<E>.out", 6) == 4 * 2
    assert routed_rows(config, "decode.1.layers.3.ffn.experts.<E>.out", 6) == 2


DTYPES = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}


def fits(spec: KeySpec | None, dtype: str, shape: torch.Size) -> bool:
    """Whether a tensor is what its key must be; None in the spec stands for any number of rows."""
    if spec is None or spec.dtype != dtype or len(spec.shape) != len(shape):
        return False
    return all(n in (None, m) for n, m in zip(spec.shape, shape, strict=True))


@pytest.mark.parametrize("golden", every_golden())
def test_golden_files_hold_what_is_expected(golden: GoldenFile) -> None:
    """Names, dtypes and shapes; every key where the file is complete."""
    with Checkpoint.open(golden.ckpt) as checkpoint:
        specs = golden.specs(checkpoint)
    tensors = {key: (DTYPES[value.dtype], value.shape) for key, value in golden.tensors()}
    assert [
        key for key, found in tensors.items() if not fits(specs.get(generic(key)), *found)
    ] == []
    if golden.complete:
        assert {generic(key) for key in tensors} == set(specs)


def test_complete_blocks() -> None:
    cases = [
        # tokens, start, ratio, blocks that the pass completes
        (3, 0, 4, 0),
        (4, 0, 4, 1),
        (129, 0, 4, 32),
        (1, 3, 4, 1),
        (1, 4, 4, 0),
        (1, 127, 128, 1),
    ]
    found = [complete_blocks(Step("", s, p), r) for s, p, r, _ in cases]
    assert found == [blocks for *_, blocks in cases]


def test_most_tensors_bounds_every_golden_file() -> None:
    config = ModelConfig.from_file(GOLDEN_MINI / "ckpt" / "config.json")
    golden = GoldenFile(GOLDEN_MINI, "len33", True)
    keys = recording_keys(config, 33, 3)
    assert sum(1 for _ in golden.tensors()) == 1114 <= most_tensors(config, keys, 33)


def test_parts_of_a_name() -> None:
    expert = "decode.2.layers.41.ffn.experts.17.w1.out"
    assert generic(expert) == "decode.2.layers.41.ffn.experts.<E>.w1.out"
    assert layer_of(expert) == 41
    assert pass_of(expert) == "decode.2."
    assert pass_of("mtp.0.prefill.norm.out") == "mtp.0.prefill."
    assert layer_of("mtp.0.prefill.norm.out") is None
    assert not is_expert("layers.0.ffn.shared_experts.w1.out")


def test_patterns_know_what_a_generic_expert_stands_for() -> None:
    key = "layers.0.ffn.experts.<E>.out"
    assert matches(key, ["*.experts.7.out"], experts=8)
    assert not matches(key, ["*.experts.7.out"], experts=7)


def test_parse_layers() -> None:
    assert list(parse_layers("0, 2-4,7")) == [0, 2, 3, 4, 7]
    with pytest.raises(ValueError, match="invalid literal"):
        list(parse_layers("0,two"))
