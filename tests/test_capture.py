"""`v4tool.capture`: what hooks on a running torch model write, and what `diff` makes of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import v4tool
from tests.conftest import MINI_FILES, GoldenFile
from tests.replay import fill, names_of, tree
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.diff.arithmetic import RELEASE
from v4tool.diff.candidate import open_candidate
from v4tool.diff.compare import diff_candidate
from v4tool.diff.maps import load_map

TRANSFORMERS = load_map("transformers")
LEN33 = MINI_FILES[2]


def passes(file: GoldenFile) -> list[dict[str, Tensor]]:
    """The prefill and the decode steps of a recording, each under keys without prefix."""
    found: list[dict[str, Tensor]] = [{} for _ in range(1 + len(file.metadata("decode_ids")))]
    for key, value in file.tensors():
        if not key.startswith("decode."):
            found[0][key] = value
        else:
            _, step, inner = key.split(".", 2)
            found[1 + int(step)][inner] = value
    return found


def replayed(file: GoldenFile, config: ModelConfig) -> list[dict[str, Tensor]]:
    """The values of each pass under the names of `transformers`."""
    tokens = len(file.metadata("input_ids"))
    steps = ["", *(f"decode.{i}." for i in range(len(file.metadata("decode_ids"))))]
    return [
        names_of(TRANSFORMERS, config, values, tokens, step)
        for step, values in zip(steps, passes(file), strict=True)
    ]


def capture_passes(path: Path, calls: list[dict[str, Tensor]]) -> None:
    model = tree(name for values in calls for name in values)
    with v4tool.capture(model, path, map="transformers"):
        for values in calls:
            fill(model, values)
            model()


@pytest.fixture
def checkpoint() -> Checkpoint:
    with Checkpoint.open(LEN33.ckpt) as opened:
        yield opened


@pytest.mark.parametrize("file", MINI_FILES[:3], ids=lambda file: file.name)
def test_what_is_captured_of_a_replayed_recording_is_the_recording(
    file: GoldenFile, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    calls = replayed(file, checkpoint.config)
    path = tmp_path / "mine.safetensors"
    capture_passes(path, calls)
    candidate = open_candidate(path, "transformers", checkpoint.config)
    assert candidate.unmatched == []
    # a prompt that is shorter than a block has compressed rows with no element: nothing to compare
    assert len(candidate.matched) == sum(v.numel() > 0 for values in calls for v in values.values())
    recorded = dict(file.tensors())
    for key in candidate.matched:
        found, expected = candidate.read(key), recorded[key].float()
        assert torch.equal(found.float().reshape(expected.shape), expected), key
    assert json.loads(candidate.metadata["input_ids"]) == file.metadata("input_ids")
    assert json.loads(candidate.metadata["decode_ids"]) == file.metadata("decode_ids")


def test_diff_finds_nothing_at_fault_in_the_captured_file(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    path = tmp_path / "mine.safetensors"
    capture_passes(path, replayed(MINI_FILES[0], checkpoint.config)[:1])
    candidate = open_candidate(path, "transformers", checkpoint.config)
    result = diff_candidate(candidate, checkpoint, map_name="transformers")
    assert (result.ok, result.arithmetic, result.decode) == (True, RELEASE, 0)
    assert (result.unmatched, result.unjudged) == ((), ())


class Attention(nn.Module):
    """Returns a tuple with a nested one, a dictionary, None and a number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.o_b_proj = nn.Linear(4, 4, bias=False, dtype=dtype)

    def forward(self, x: Tensor, scale: float, *, mask: Tensor) -> tuple[object, ...]:
        out = self.o_b_proj(x * scale)
        x.zero_()  # what is captured must be what was passed, not what becomes of it
        return out, None, (mask, {"rows": out + 1}), 3


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(dtype)

    def forward(self, x: Tensor) -> Tensor:
        found = self.self_attn(x.clone(), 2.0, mask=torch.tensor([[True, False]]))
        return x + found[0]


class Engine(nn.Module):
    """A tree with some of the names of `transformers`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(9, 4, dtype=dtype)
        self.model.layers = nn.ModuleList([Layer(dtype), Layer(dtype)])
        self.activation = nn.SiLU()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = self.activation(layer(x))
        return x


IDS = torch.tensor([[3, 1, 8]])


def captured(model: nn.Module, path: Path, *calls: Tensor, map: str | None) -> dict[str, Tensor]:
    with torch.inference_mode(), v4tool.capture(model, path, map=map):
        for ids in calls:
            model(ids)
    return load_file(path)


def test_a_map_s_names_alone_are_recorded(tmp_path: Path) -> None:
    found = captured(Engine(), tmp_path / "a.safetensors", IDS, map="transformers")
    assert sorted(found) == [
        "model.embed_tokens",
        "model.embed_tokens.in0",
        "model.layers.0.in0",
        "model.layers.0.self_attn.0",
        "model.layers.0.self_attn.o_b_proj",
        "model.layers.0.self_attn.o_b_proj.in0",
        "model.layers.1.in0",
        "model.layers.1.self_attn.0",
        "model.layers.1.self_attn.o_b_proj",
        "model.layers.1.self_attn.o_b_proj.in0",
    ]
    assert found["model.embed_tokens.in0"].tolist() == IDS.tolist()


def test_without_a_map_every_module_s_tensors_are_recorded(tmp_path: Path) -> None:
    """Tuples and dictionaries by element, keywords after positions, a shared module's second call
    as NAME#1; what a module changes in place as it was when it was called.
    """
    model = Engine()
    found = captured(model, tmp_path / "a.safetensors", IDS, map=None)
    layer0 = {name for name in found if name.startswith("model.layers.0.self_attn")}
    elements = {".0", ".2.0", ".2.1.rows", ".in0", ".in2", ".o_b_proj", ".o_b_proj.in0"}
    assert layer0 == {f"model.layers.0.self_attn{element}" for element in elements}
    assert found["model.layers.0.self_attn.in2"].tolist() == [[1, 0]]
    embedded = model.model.embed_tokens.weight[IDS].detach()
    assert torch.equal(found["model.layers.0.self_attn.in0"], embedded)
    assert torch.equal(found["activation.in0#1"], found["model.layers.1"])
    assert torch.equal(found["activation"], found["model.layers.1.in0"])


def test_each_call_of_the_model_is_a_pass(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    steps = [torch.tensor([[token]]) for token in (2, 5)]
    found = captured(Engine(), path, IDS, *steps, map="transformers")
    assert len(found) == 30
    assert found["step1.model.layers.0.self_attn.o_b_proj"].shape == (1, 1, 4)
    metadata = v4tool.open_recording(path).metadata
    assert json.loads(metadata["input_ids"]) == [3, 1, 8]
    assert json.loads(metadata["decode_ids"]) == [2, 5]
    assert (metadata["calls"], metadata["model"], metadata["map"]) == (
        "3",
        "Engine",
        "transformers",
    )


def test_the_map_says_what_stands_before_a_decode_step(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'summary = "mine"\ndecode = "call{i+1}/"\n'
        'rules = [{ name = "model.embed_tokens", key = "embed.out" }]\n'
    )
    path, map_file = tmp_path / "a.safetensors", str(tmp_path / "mine.toml")
    found = captured(Engine(), path, IDS, IDS[:, :1], IDS[:, 1:2], map=map_file)
    assert list(found) == [
        "model.embed_tokens",
        "call1/model.embed_tokens",
        "call2/model.embed_tokens",
    ]


def test_tensors_that_a_rule_s_steps_need_are_recorded_too(tmp_path: Path) -> None:
    rule = '{ name = "model.layers.{n}.in0", key = "layers.{n-1}.out", steps = ["append 1 OTHER"] }'
    text = rule.replace("OTHER", "model.layers.{n}.self_attn.2.0")
    (tmp_path / "mine.toml").write_text(f'summary = "mine"\nrules = [{text}]\n')
    path, map_file = tmp_path / "a.safetensors", str(tmp_path / "mine.toml")
    found = captured(Engine(), path, IDS, map=map_file)
    names = ("in0", "self_attn.2.0")
    assert set(found) == {f"model.layers.{n}.{name}" for n in (0, 1) for name in names}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_recorded_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Engine(dtype)
    found = captured(model, tmp_path / "a.safetensors", IDS, map="transformers")
    embedded = model.model.embed_tokens.weight[IDS].detach()
    assert torch.equal(found["model.embed_tokens"], embedded.float())


def test_integers_wider_than_32_bits_stay_wide(tmp_path: Path) -> None:
    model = tree(["a", "b"])
    fill(model, {"a": torch.tensor([2**40]), "b": torch.tensor([2**31 - 1, -(2**31)])})
    with v4tool.capture(model, tmp_path / "a.safetensors"):
        model()
    found = load_file(tmp_path / "a.safetensors")
    assert (found["a"].dtype, found["a"].tolist()) == (torch.int64, [2**40])
    assert (found["b"].dtype, found["b"].tolist()) == (torch.int32, [2**31 - 1, -(2**31)])


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_an_exception_in_the_block_leaves_no_file_and_no_hook(tmp_path: Path) -> None:
    model, path = Engine(), tmp_path / "a.safetensors"
    with pytest.raises(IndexError):
        captured(model, path, IDS, torch.tensor([[9]]), map="transformers")
    assert list(tmp_path.iterdir()) == []
    assert hooks_of(model) == 0


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = Engine()
    before = model(IDS)
    captured(model, tmp_path / "a.safetensors", IDS, map="transformers")
    assert hooks_of(model) == 0
    assert torch.equal(model(IDS), before)


def refused(model: nn.Module, path: Path, *calls: Tensor, map: str | None = None) -> str:
    with pytest.raises(v4tool.V4ToolError) as caught:
        captured(model, path, *calls, map=map)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_mistake_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    other = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert refused(other, path, map="transformers") == (
        "capture: expected modules that map transformers names, such as model.embed_tokens, "
        "found none among 2 modules of Sequential, such as 1"
    )
    assert "found none among 2 modules" in refused(other, path, map="v4tool")
    assert "expected a file or one of" in refused(Engine(), path, map="llama")
    assert refused(Engine(), path, map="transformers") == (
        f"{path}: expected a call of the model inside the block, found none"
    )
    batch = IDS.expand(2, 3)
    assert refused(Engine(), path, batch, map="transformers") == (
        f"{path}: expected one prompt in a call, found a batch of 2"
    )
    assert "expected a name that ends in .safetensors" in refused(Engine(), tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    assert "exists already" in refused(Engine(), path, IDS)
    assert path.read_bytes() == b"old"
    model = Engine()
    with v4tool.capture(model, path, force=True) as open_capture:
        model(IDS)
    assert (open_capture.path, open_capture.calls) == (path, 1)
    assert set(open_capture.names) == set(load_file(path))


RANK = """
import sys, torch, v4tool
from torch import distributed, nn
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(2, 1, bias=False))
nn.init.constant_(model[0].weight, rank + 1)
with v4tool.capture(model, sys.argv[3]):
    model(torch.ones(1, 2))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_of_a_process_group_writes_a_file(tmp_path: Path) -> None:
    out = tmp_path / "out" / "mine.safetensors"
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "store", out], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [(rank.communicate(timeout=60)[1], rank.returncode)[1] for rank in ranks] == [0, 0]
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "mine.rank0.safetensors",
        "mine.rank1.safetensors",
    ]
    for rank in range(2):
        recording = v4tool.open_recording(out.parent / f"mine.rank{rank}.safetensors")
        assert (recording.metadata["rank"], recording.metadata["world_size"]) == (str(rank), "2")
        assert recording["0"].tolist() == [[2.0 * (rank + 1)]]
