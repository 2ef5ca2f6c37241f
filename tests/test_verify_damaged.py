"""`verify` on damaged and foreign recordings: findings and verdicts, no tracebacks."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import GOLDEN, GOLDEN_MINI, MINI_FILES, needs_golden
from v4tool.errors import CheckpointError, InputError, RecordingError
from v4tool.verify.recording import verify_file
from v4tool.verify.results import VerifyResult

LEN3, LEN6 = MINI_FILES[:2]
Tensors = dict[str, torch.Tensor]


def damaged(
    tmp_path: Path,
    change: Callable[[Tensors], object],
    metadata: dict[str, str] | None = None,
    **options: object,
) -> VerifyResult:
    """The verdict on the three-token golden recording after a change."""
    tensors = dict(LEN3.tensors())
    change(tensors)
    path = tmp_path / "damaged.safetensors"
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(path), metadata)
    return verify_file(path, LEN3.ckpt, **options)  # type: ignore[arg-type]


def rules(result: VerifyResult) -> dict[str, str]:
    return {f.key: f.rule for f in result.findings}


@pytest.mark.parametrize(
    "key",
    [
        "embed.out",
        "layers.0.hc_attn.post",
        "layers.1.attn.indexer.out",
        "layers.2.ffn.gate.out.1",
        "layers.4.out",
        "mtp.0.prefill.attn.sparse_attn.in.kv",
        "decode.0.layers.1.attn.compressor.norm.out",
        "head.out",
    ],
)
def test_missing_key(tmp_path: Path, key: str) -> None:
    """A finding for that key alone; everything else is judged as before."""
    result = damaged(tmp_path, lambda t: t.pop(key))
    assert rules(result) == {key: "every output of a node is recorded"}
    assert not result.passed
    assert not result.failures


def test_many_missing_keys(tmp_path: Path) -> None:
    """A whole layer is gone: its values are computed, so the layers behind it are still judged."""

    def change(tensors: Tensors) -> None:
        for key in [k for k in tensors if k.startswith("layers.2.")]:
            del tensors[key]

    result = damaged(tmp_path, change)
    assert not result.failures
    assert all(f.key.startswith("layers.2.") for f in result.findings)
    assert len(result.findings) > 33
    assert result.coverage.compared == result.coverage.recorded


def test_unknown_key(tmp_path: Path) -> None:
    result = damaged(tmp_path, lambda t: t.update({"layers.9.attn.out": torch.zeros(1, 3, 128)}))
    assert rules(result) == {"layers.9.attn.out": "every recorded key is the output of a node"}


def test_no_ids(tmp_path: Path) -> None:
    result = damaged(tmp_path, lambda t: t.pop("input_ids"))
    assert rules(result)["input_ids"] == "the prompt's ids are needed"
    assert not result.passed


@pytest.mark.parametrize(
    "ids", [torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)]
)
def test_ids_of_another_shape(tmp_path: Path, ids: torch.Tensor) -> None:
    result = damaged(tmp_path, lambda t: t.update({"input_ids": ids}))
    assert rules(result)["input_ids"] == "the prompt's ids are needed"


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    result = damaged(tmp_path, lambda t: t["input_ids"].fill_(100_000))
    assert result.verdict is not None
    assert (result.verdict.operator, result.verdict.status) == ("embedding", "error")


def test_other_ids(tmp_path: Path) -> None:
    """Another input is called another input, with the ids that the recording was made from."""
    result = damaged(tmp_path, lambda t: t["input_ids"].copy_(torch.tensor([[35, 12, 74]])))
    verdict = result.verdict
    assert verdict is not None
    assert (verdict.operator, verdict.status) == ("embedding", "input")
    assert verdict.rule == "the embeddings of other ids: 12 -> 11"
    assert verdict.sentence().startswith("another input: embedding: embed.out holds")


WRONG_SHAPES = [
    ("layers.0.attn.wq_a.out", "q_linear[attn.wq_a]"),
    ("layers.1.attn.sparse_attn.in.topk_idxs", "attn_table"),
    ("layers.2.hc_ffn.comb", "hc_split[hc_ffn]"),
    ("layers.3.ffn.gate.out.1", "gate_select"),
]


@pytest.mark.parametrize(("key", "operator"), WRONG_SHAPES)
def test_wrong_shape(tmp_path: Path, key: str, operator: str) -> None:
    """Named with both shapes; the computed value goes on, so nothing else is accused."""
    result = damaged(tmp_path, lambda t: t.update({key: t[key][:, :1].clone()}))
    assert [n.label for n in result.failures] == [operator]
    (found,) = [c for c in result.comparisons if c.fails]
    assert (found.key, found.status) == (key, "shape")
    assert "expected [" in found.note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_wrong_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    key = "layers.0.attn_norm.out"
    result = damaged(tmp_path, lambda t: t.update({key: t[key].to(dtype)}))
    found = {c.key: c for c in result.comparisons if c.fails}
    assert found[key].status == "dtype"
    assert "expected float32" in found[key].note
    assert result.verdict is not None
    assert result.verdict.key == key


def test_integers_of_another_width(tmp_path: Path) -> None:
    key = "layers.0.ffn.gate.out.1"
    result = damaged(tmp_path, lambda t: t.update({key: t[key].long()}))
    assert [(c.key, c.status) for c in result.comparisons if c.fails] == [(key, "dtype")]


def test_indices_out_of_range(tmp_path: Path) -> None:
    """The table is wrong; the attention that cannot follow it is an error, not a crash."""
    key = "layers.0.attn.sparse_attn.in.topk_idxs"
    result = damaged(tmp_path, lambda t: t[key].fill_(10**6))
    statuses = {c.key: c.status for c in result.comparisons if c.fails}
    assert statuses == {key: "outside", "layers.0.attn.sparse_attn.out": "error"}
    assert result.verdict is not None
    assert result.verdict.operator == "attn_table"


def test_experts_that_do_not_exist(tmp_path: Path) -> None:
    """The gate is wrong; what cannot be computed behind it is not judged, the rest is."""
    key = "layers.0.ffn.gate.out.1"
    result = damaged(tmp_path, lambda t: t[key].fill_(99))
    assert result.verdict is not None
    assert (result.verdict.operator, result.verdict.key) == ("gate_hash", key)
    assert not result.passed
    assert result.coverage.uncovered, "the experts that were computed are nobody's now"


def test_not_a_number(tmp_path: Path) -> None:
    key = "layers.1.attn.wkv.out"
    result = damaged(tmp_path, lambda t: t[key][0, 1:].fill_(math.nan))
    verdict = result.verdict
    assert verdict is not None
    assert (verdict.key, verdict.status) == (key, "nan")
    assert verdict.rule.endswith("not finite, from token 1 on")


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_the_streams_are_not_finite(tmp_path: Path, value: float) -> None:
    """Whatever the next layers make of it, the layer that gave it is named."""
    result = damaged(tmp_path, lambda t: t["layers.0.out"].fill_(value))
    assert result.verdict is not None
    assert result.verdict.key == "layers.0.out"
    assert result.verdict.operator == "hc_post"


def test_one_bit(tmp_path: Path) -> None:
    """The lowest bit of one BF16 value, in a key that only one node sees."""

    def change(tensors: Tensors) -> None:
        bits = tensors["layers.3.attn.wo_b.in"].view(torch.int32)
        bits[0, 2, 77] ^= 1 << 16

    result = damaged(tmp_path, change)
    verdict = result.verdict
    assert verdict is not None
    assert (verdict.operator, verdict.block) == ("output_groups", "layers.3")
    found = next(c for c in result.comparisons if c.fails)
    assert (found.ulps, found.count - found.bits_equal) == (1, 1)
    assert found.worst is not None
    assert found.worst.where == {"token": 2, "channel": 77}


def test_of_another_checkpoint(tmp_path: Path) -> None:
    """The fingerprint in the metadata is a finding of its own."""
    metadata = {"checkpoint_fingerprint": "00ff", "input_ids": "[35, 11, 74]"}
    result = damaged(tmp_path, lambda t: None, metadata)
    assert rules(result) == {"checkpoint_fingerprint": "the recording is of this checkpoint"}
    assert not result.failures


@needs_golden
def test_against_another_model() -> None:
    """Other sizes throughout: shapes are wrong everywhere, and every layer says so."""
    result = verify_file(LEN6.path, GOLDEN / "ckpt")
    assert not result.passed
    assert result.verdict is not None
    assert (result.verdict.key, result.verdict.status) == ("embed.out", "shape")


def test_declared_parts(tmp_path: Path) -> None:
    """A recording that says it holds some layers only is partial without being told."""

    def change(tensors: Tensors) -> None:
        keep = ("input_ids", "embed.out", "layers.1.")
        for key in [k for k in tensors if not k.removeprefix("decode.").startswith(keep)]:
            del tensors[key]
        for key in [k for k in tensors if k.startswith("decode.")]:
            del tensors[key]

    result = damaged(tmp_path, change, {"layers": json.dumps([1])})
    assert result.passed
    assert result.partial
    assert result.coverage.compared == result.coverage.recorded > 45
    blocks = {node.block for node in result.nodes}
    assert blocks == {"", "layers.0", "layers.1"}, "deeper layers are not run"


def test_fail_fast(tmp_path: Path) -> None:
    """Ends with the first layer that fails and says so."""
    key = "layers.1.attn.out"
    result = damaged(tmp_path, lambda t: t[key].mul_(2), fail_fast=True)
    assert result.stopped
    assert {n.block for n in result.failures} == {"layers.1"}
    assert not any(n.block == "layers.2" for n in result.nodes)


# ------------------------------------------------------------------ what cannot be used at all


def test_no_recording(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no such recording"):
        verify_file(tmp_path / "x.safetensors", LEN3.ckpt)


def test_no_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not one")
    with pytest.raises(RecordingError, match="not a readable safetensors file"):
        verify_file(path, LEN3.ckpt)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        verify_file(LEN3.path, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node": "nonsense"}, "--node: expected one of embedding, "),
        ({"layer": 5}, "--layer: expected 0 to 4, found 5"),
        ({"layer": -1}, "--layer: expected 0 to 4, found -1"),
        ({"jobs": 0}, "--jobs: expected at least 1, found 0"),
    ],
)
def test_invalid_requests(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        verify_file(GOLDEN_MINI / "len3.safetensors", LEN3.ckpt, **options)  # type: ignore[arg-type]
