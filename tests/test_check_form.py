"""Recordings in another form: float types, no batch dimension, another order of axes or tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli import Cli, one_line
from tests.conftest import GOLDEN_MINI
from v4tool.check.recording import check_recording
from v4tool.config import ModelConfig
from v4tool.diff.candidate import open_candidate

CKPT = GOLDEN_MINI / "ckpt"
LEN3 = GOLDEN_MINI / "len3.safetensors"
CONFIG = ModelConfig.from_file(CKPT)
METADATA = {"input_ids": "[35, 11, 74]", "decode_ids": "[181, 265]"}
READS = "; v4tool diff reads such files"


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype) if x.is_floating_point() else x


def without_batch(x: Tensor) -> Tensor:
    return x[0].clone() if x.dim() > 2 else x


def channels_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1).contiguous() if x.dim() == 3 else x


FORMS = {
    "F16": (cast(torch.float16), f"F32, found F16 in 776 of 776 tensors of floats{READS}"),
    "BF16": (cast(torch.bfloat16), f"F32, found BF16 in 776 of 776 tensors of floats{READS}"),
    "F64": (cast(torch.float64), f"F32, found F64 in 776 of 776 tensors of floats{READS}"),
    "batch": (
        without_batch,
        "a first dimension of 1, the batch, found another shape in 513 of 819 tensors, "
        f"norm.out [3, 128] for [1, 3, 128]{READS}",
    ),
    "axes": (
        channels_first,
        "dimensions in the order of SPEC section 6, found another shape in 382 of 819 tensors, "
        f"norm.out [128, 1, 3] for [1, 3, 128]{READS} with a map that has `transpose`",
    ),
}


def saved(path: Path, change: Callable[[Tensor], Tensor]) -> Path:
    save_file({k: change(v) for k, v in load_file(LEN3).items()}, path, metadata=METADATA)
    return path


@pytest.mark.parametrize("name", FORMS)
def test_another_form_is_one_line(cli: Cli, tmp_path: Path, name: str) -> None:
    change, text = FORMS[name]
    path = saved(tmp_path / "x.safetensors", change)
    [finding] = check_recording(path, config=CONFIG).findings
    assert finding.line() == f"tensors: form: expected {text}"
    assert one_line(cli("verify", "--dump", path, "--ckpt", CKPT, "-q")) == (
        f"v4tool: {path}: expected {text}"
    )


@pytest.mark.parametrize("name", ["F16", "BF16", "F64", "batch"])
def test_diff_reads_it(tmp_path: Path, name: str) -> None:
    change, _ = FORMS[name]
    candidate = open_candidate(saved(tmp_path / "x.safetensors", change), "v4tool", CONFIG)
    for key, value in load_file(LEN3).items():
        if value.numel() and key != "input_ids":
            found = candidate.read(key).reshape(value.shape)
            assert torch.equal(found, change(value).reshape(value.shape)), key


def test_single_tensors_of_another_form_are_named(tmp_path: Path) -> None:
    tensors = load_file(LEN3)
    tensors["embed.out"] = tensors["embed.out"].half()
    tensors["norm.out"] = tensors["norm.out"][0]
    save_file(tensors, tmp_path / "x.safetensors", metadata=METADATA)
    found = check_recording(tmp_path / "x.safetensors", config=CONFIG, identities=False).findings
    assert [finding.line() for finding in found] == [
        "norm.out: shape: expected [1, 3, 128], found [3, 128]",
        "embed.out: dtype: expected F32, found F16",
    ]


def test_the_same_values_in_another_order_of_tensors(cli: Cli, tmp_path: Path) -> None:
    """The order is free, but another writer's file has another payload hash than it states."""
    dumped, resaved = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert cli("dump", "--ckpt", CKPT, "--input-ids", "1,2,3", "--out", dumped).status == 0
    tensors = load_file(dumped)
    metadata = {"input_ids": "[1, 2, 3]"}
    save_file(tensors, resaved, metadata=metadata)
    assert check_recording(resaved, config=CONFIG).findings == []
    save_file(tensors, resaved, metadata={**metadata, "payload_sha256": "0" * 64})
    [finding] = check_recording(resaved, config=CONFIG).findings
    assert finding.rule == "payload sha256"
    assert finding.found.endswith(
        " (tensors sorted by name as other writers do: the same values have another hash)"
    )
