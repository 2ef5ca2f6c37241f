"""`check --port`: passes on a valid checkpoint and port, and names defects of others."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import GOLDEN, GOLDEN_MINI, needs_golden
from tests.recordings import Copy
from v4tool.check import kernels, port
from v4tool.check.port import PortRow, check_port, weight_bytes
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig, Numerics
from v4tool.errors import InputError
from v4tool.model import hyper, layers
from v4tool.quant import activation, formats

CKPT = GOLDEN_MINI / "ckpt"


def failed(rows: list[PortRow]) -> dict[str, str]:
    return {row.name: row.detail for row in rows if row.status == "failed"}


@pytest.mark.parametrize("quick", [True, False])
def test_a_sound_checkpoint_passes(quick: bool) -> None:
    looked: list[int] = []
    rows = check_port(CKPT, quick=quick, progress=looked.append)
    assert failed(rows) == {}
    names = [row.name for row in rows]
    assert names[0] == "structure"
    assert set(kernels.TASKS) < set(names)
    assert names[-5:] == [
        "layer of ratio 0, hash routing",
        "layer of ratio 4, hash routing",
        "layer of ratio 128, score routing",
        "layer of ratio 4, score routing",
        "MTP block",
    ]
    config = ModelConfig.from_file(CKPT)
    assert sum(looked) == weight_bytes(config, quick=quick)


@needs_golden
def test_the_larger_golden_checkpoint_passes() -> None:
    assert failed(check_port(GOLDEN / "ckpt", quick=True)) == {}


def test_one_layer_alone() -> None:
    rows = check_port(CKPT, quick=True, layer=3)
    assert rows[-1].name == "layer 3"
    assert rows[-1].status == "ok"
    with pytest.raises(InputError, match="--layer: expected 0 to 4, found 5"):
        check_port(CKPT, quick=True, layer=5)


def copy_of_checkpoint(tmp_path: Path) -> Path:
    target = tmp_path / "ckpt"
    shutil.copytree(CKPT, target)
    for path in target.iterdir():
        path.chmod(0o644)
    target.chmod(0o755)
    return target


def shard_of(directory: Path, tensor: str) -> Path:
    return next(p for p in directory.glob("*.safetensors") if tensor in Copy.of(p).header)


def with_byte(directory: Path, tensor: str, place: int, value: int) -> None:
    path = shard_of(directory, tensor)
    copy = Copy.of(path)
    copy.payload[copy.span(tensor)[0] + place] = value
    copy.write(path)


@pytest.mark.parametrize(
    ("tensor", "place", "byte", "row"),
    [
        ("layers.2.attn.wq_a.weight", 77, 0x7F, "weights"),
        ("layers.2.attn.wq_a.weight", 78, 0xFF, "weights"),
        ("layers.1.ffn.experts.3.w2.scale", 5, 0xFF, "weights"),
        ("layers.0.attn_norm.weight", 3, 0x7F, "weights"),
    ],
)
def test_a_nan_in_a_weight(tmp_path: Path, tensor: str, place: int, byte: int, row: str) -> None:
    directory = copy_of_checkpoint(tmp_path)
    with_byte(directory, tensor, place, byte)
    if tensor.endswith("norm.weight"):
        with_byte(directory, tensor, place - 1, 0xC0)
    found = failed(check_port(directory, layer=4))
    assert row in found
    assert tensor in found[row]


def test_a_missing_tensor_and_a_foreign_one(tmp_path: Path) -> None:
    directory = copy_of_checkpoint(tmp_path)
    path = shard_of(directory, "layers.2.attn.attn_sink")
    copy = Copy.of(path)
    copy.rename("layers.2.attn.attn_sink", "layers.2.attn.sinks")
    copy.write(path)
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.2.attn.attn_sink", "layers.2.attn.sinks"))
    rows = check_port(directory, quick=True)
    assert rows[0].status == "failed"
    assert "layers.2.attn.attn_sink" in rows[0].detail
    assert rows[-1].status == "skipped"
    assert all(row.status == "ok" for row in rows[1:-1]), "kernels need no weights"


def test_a_directory_without_checkpoint(tmp_path: Path) -> None:
    rows = check_port(tmp_path, quick=True)
    assert (rows[0].status, rows[-1].status) == ("failed", "skipped")
    assert str(tmp_path) in rows[0].detail


def half_split(x: Tensor, tables: tuple[Tensor, Tensor], *, inverse: bool = False) -> Tensor:
    """The rotation of pairs (i, i + 32): a fault of real ports."""
    width = 2 * tables[0].shape[-1]
    mixed = x[..., -width:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    turned = layers.rotate(torch.cat([x[..., :-width], mixed], -1), tables, inverse=inverse)
    back = turned[..., -width:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([x[..., :-width], back], -1)


def no_eps(logits: Tensor, iterations: int, eps: float) -> Tensor:
    return hyper.sinkhorn(logits, iterations, 0.0)


def three_rounds(logits: Tensor, iterations: int, eps: float) -> Tensor:
    return hyper.sinkhorn(logits, 3, eps)


def sink_missing(q: Tensor, kv: Tensor, table: Tensor, sink: Tensor, numerics: Numerics) -> Tensor:
    from v4tool.model.attention import sparse_attn

    return sparse_attn(q, kv, table, torch.full_like(sink, -1e4), numerics)


SOUND_HADAMARD, SOUND_SCALE = activation.hadamard, activation.fp8_scale


def unscaled(x: Tensor, acc: torch.dtype = torch.float64) -> Tensor:
    return SOUND_HADAMARD(x, acc) * 2


def nearest_scale(amax: Tensor) -> Tensor:
    return SOUND_SCALE(amax * 0.75)


FAULTS: list[tuple[str, str, Callable[..., Tensor]]] = [
    ("rotation", "rotate", half_split),
    ("Sinkhorn", "sinkhorn", no_eps),
    ("Sinkhorn", "sinkhorn", three_rounds),
    ("sparse attention", "sparse_attn", sink_missing),
]


@pytest.mark.parametrize(("row", "name", "fault"), FAULTS, ids=[f[2].__name__ for f in FAULTS])
def test_a_faulty_kernel_fails_its_row(
    monkeypatch: pytest.MonkeyPatch, row: str, name: str, fault: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(kernels, name, fault)
    found = port.run_row(row, lambda: kernels.TASKS[row](Numerics()))
    assert found.status == "failed"


@pytest.mark.parametrize(
    ("row", "module", "name", "fault"),
    [
        ("Hadamard", activation, "hadamard", unscaled),
        ("scale tables", activation, "fp8_scale", nearest_scale),
        ("codes", formats, "unpack_fp4", lambda x: torch.stack([x >> 4, x & 15], -1).flatten(-2)),
        ("codes", formats, "E4M3", formats.E4M3.flip(0)),
    ],
)
def test_a_faulty_format_fails_its_row(
    monkeypatch: pytest.MonkeyPatch, row: str, module: object, name: str, fault: object
) -> None:
    monkeypatch.setattr(module, name, fault)
    found = port.run_row(row, lambda: kernels.TASKS[row](Numerics()))
    assert found.status == "failed"


def test_a_layer_that_leaves_a_weight_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that skips its sub-layers reads too little and says nothing of it."""
    with Checkpoint.open(CKPT) as checkpoint:
        numerics = Numerics()
        monkeypatch.setattr(port, "layer_keys", lambda *_: {})
        monkeypatch.setattr(port, "_judge_outputs", lambda *_: None)
        monkeypatch.setattr(port, "block", lambda scope, x, layer: x)
        found = port.run_row("layer", lambda: port.one_layer(checkpoint, 1, numerics, quick=True))
    assert found.status == "failed"
    assert "was never read" in found.detail


def test_outputs_that_are_not_finite_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_nan(scope: object, x: Tensor, layer: int) -> Tensor:
        out = sound(scope, x, layer)
        out[0, 0, 0] = torch.nan
        return out

    sound = port.block
    monkeypatch.setattr(port, "block", with_nan)
    with Checkpoint.open(CKPT) as checkpoint:
        found = port.run_row("layer", lambda: port.one_layer(checkpoint, 0, Numerics(), quick=True))
    assert (found.status, found.detail) == ("failed", "out: 1 of 4608 values are NaN or infinite")
