"""`diff` on our own tensors in other containers, and its one-line errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli import Cli, one_line
from tests.conftest import GOLDEN_MINI
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.diff.arithmetic import RELEASE
from v4tool.diff.candidate import open_candidate
from v4tool.diff.compare import diff_candidate
from v4tool.diff.layout import apply_steps
from v4tool.diff.maps import shipped_maps
from v4tool.diff.readers import open_tensors
from v4tool.diff.steps import Sizes, parse_step
from v4tool.names import Step

LEN3 = GOLDEN_MINI / "len3.safetensors"
CKPT = GOLDEN_MINI / "ckpt"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    with Checkpoint.open(CKPT) as checkpoint:
        return checkpoint.config


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(LEN3)


def as_npz(path: Path, tensors: dict[str, Tensor]) -> Path:
    np.savez(path / "all.npz", **{key: as_numpy(value) for key, value in tensors.items()})
    return path / "all.npz"


def as_npy(path: Path, tensors: dict[str, Tensor]) -> Path:
    for key, value in tensors.items():
        np.save(path / f"{key}.npy", as_numpy(value))
    return path


def as_pt(path: Path, tensors: dict[str, Tensor]) -> Path:
    for number, (key, value) in enumerate(tensors.items()):
        torch.save(value, path / f"{number:05}__{key}.pt")
    return path


def as_jsonl(path: Path, tensors: dict[str, Tensor]) -> Path:
    """BF16 as raw 16 bits, every second shape in ggml's order."""
    lines, data = [], b""
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32"}
    for number, (key, value) in enumerate(tensors.items()):
        shape = list(value.shape)
        order = {"ne": shape[::-1]} if number % 2 else {"shape": shape}
        line = {"name": key, "dtype": names[value.dtype], "file": "all.bin", "offset": len(data)}
        lines.append(json.dumps(line | order))
        data += value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    (path / "all.bin").write_bytes(data)
    (path / "index.jsonl").write_text("\n".join(lines))
    return path / "index.jsonl"


def as_shards(path: Path, tensors: dict[str, Tensor]) -> Path:
    items = list(tensors.items())
    save_file(dict(items[::2]), path / "a.safetensors")
    save_file(dict(items[1::2]), path / "b.safetensors")
    return path


def as_numpy(value: Tensor) -> np.ndarray:
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


@pytest.mark.parametrize("write", [as_npz, as_npy, as_pt, as_jsonl, as_shards])
def test_our_recording_is_read_exactly_from_every_form(
    write, tmp_path: Path, recorded: dict[str, Tensor]
) -> None:
    found = open_tensors(write(tmp_path, recorded))
    assert set(found.tensors) == set(recorded)
    for key, tensor in found.tensors.items():
        assert tensor.shape == tuple(recorded[key].shape)
        assert torch.equal(tensor.load().double(), recorded[key].double()), key


def test_our_own_recording_is_in_the_release_arithmetic_and_nothing_is_at_fault() -> None:
    with Checkpoint.open(CKPT) as checkpoint:
        candidate = open_candidate(LEN3, "v4tool", checkpoint.config)
        result = diff_candidate(candidate, checkpoint, map_name="v4tool")
    assert result.ok
    assert result.arithmetic == RELEASE
    assert result.unmatched == ()
    assert result.unjudged == ()
    # 1 unit in the last place of FP32: values that the reference computes in binary64 and stores
    assert max(residue.error for residue in result.residues) < 2.0**-23


def test_a_wrong_element_is_named_with_its_key(tmp_path: Path, recorded: dict[str, Tensor]) -> None:
    changed = recorded["layers.1.attn.wo_b.out"].clone()
    changed[0, 1, 7] += 1
    path = tmp_path / "mine.safetensors"
    ids = json.dumps(json.loads(metadata()["input_ids"]))
    save_file({**recorded, "layers.1.attn.wo_b.out": changed}, path, {"input_ids": ids})
    with Checkpoint.open(CKPT) as checkpoint:
        candidate = open_candidate(path, "v4tool", checkpoint.config)
        verdict = diff_candidate(candidate, checkpoint).verdict
    assert verdict is not None
    assert verdict.residue.key == "layers.1.attn.wo_b.out"
    assert verdict.residue.operator == "q_linear[attn.wo_b]"
    assert verdict.residue.worst == {"0": 0, "1": 1, "2": 7}


def metadata() -> dict[str, str]:
    return open_tensors(LEN3).metadata


STEPS = [
    ("transpose 1,0,2", (2, 3, 4), lambda x: x.permute(1, 0, 2)),
    ("squeeze 0", (1, 3, 4), lambda x: x[0]),
    ("take 1 -1:", (2, 3, 4), lambda x: x[:, -1:]),
    ("split -1 1/2", (2, 6), lambda x: x[:, 3:]),
    ("deinterleave -1", (2, 6), lambda x: x[:, [0, 2, 4, 1, 3, 5]]),
    ("heads", (1, 2, 3, 4), lambda x: x.transpose(1, 2)),
]


@pytest.mark.parametrize(("text", "shape", "expected"), STEPS, ids=lambda x: str(x)[:16])
def test_a_step_does_what_its_words_say(text, shape, expected, config: ModelConfig) -> None:
    value = torch.arange(float(np.prod(shape))).reshape(shape)
    found = apply_steps(value, [parse_step(text)], Sizes.of(config, Step("", 3, 0)), "rule")
    assert torch.equal(found, expected(value))


def test_reshape_takes_letters_of_the_model(config: ModelConfig) -> None:
    value = torch.arange(float(3 * config.n_heads * config.head_dim))
    found = apply_steps(
        value, [parse_step("reshape 1,s,H,HD")], Sizes.of(config, Step("", 3, 0)), "rule"
    )
    assert found.shape == (1, 3, config.n_heads, config.head_dim)


def test_an_offset_leaves_minus_one_as_it_is(config: ModelConfig) -> None:
    found = apply_steps(
        torch.tensor([[-1, 0, 5]]),
        [parse_step("offset s")],
        Sizes.of(config, Step("", 3, 0)),
        "rule",
    )
    assert found.tolist() == [[-1, 3, 8]]


OTHERS = {
    "mask": torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf]]),
    "scores": torch.tensor([[1.0, -torch.inf, 3.0], [-torch.inf, 2.0, 0.5]]),
    "experts": torch.tensor([[0, 2], [1, 0]]),
}
OTHER_STEPS = [
    ("append 1 mask", [[7.0, 8.0], [9.0, 6.0]], [[7, 8, 0, -torch.inf, -torch.inf],
                                                [9, 6, 0, 0, -torch.inf]]),
    ("append 1 mask 0:1", [[7.0, 8.0], [9.0, 6.0]], [[7, 8, 0], [9, 6, 0]]),
    ("prepend 1 mask 0:1", [[7.0, 8.0], [9.0, 6.0]], [[0, 7, 8], [0, 9, 6]]),
    ("after 1 mask", [[1, 2, 3, 4], [5, 6, 7, 8]], [[4], [8]]),
    ("unmasked scores", [[2, 1, 0], [1, 2, -1]], [[2, -1, 0], [1, 2, -1]]),
    ("rows experts", [[[1], [2]], [[3], [4]]], [[1], [4]]),
    ("sorted 3", [[5, -1, 2, -1], [-1, 4, 3, 1]], [[2, 5, -1], [1, 3, 4]]),
    ("indices 2", OTHERS["mask"].tolist(), [[0, -1], [0, 1]]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value", "expected"), OTHER_STEPS, ids=lambda x: str(x)[:16])
def test_a_step_takes_what_it_needs_from_other_tensors(
    text: str, value: list, expected: list, config: ModelConfig
) -> None:
    sizes = Sizes.of(config, Step("", 3, 0), expert=0)
    found = apply_steps(torch.tensor(value), [parse_step(text)], sizes, "rule", OTHERS.__getitem__)
    assert found.tolist() == expected


LETTERS = [
    (Step("", 3, 0), 4, {"s": 3, "t": 0, "k": 0, "w": 3, "n": 3, "o": 3}),
    (Step("", 9, 0), 4, {"s": 9, "t": 2, "k": 2, "w": 9, "n": 11, "o": 9}),
    (Step("", 9, 0), 0, {"s": 9, "t": 0, "k": 0, "w": 9, "n": 9, "o": 9}),
    (Step("decode.1.", 1, 11), 4, {"s": 1, "t": 1, "k": 3, "w": 128, "n": 131, "o": 128}),
]


@pytest.mark.parametrize(("step", "ratio", "expected"), LETTERS)
def test_letters_are_sizes_of_the_pass_and_the_layer(step, ratio, expected, config) -> None:
    sizes = Sizes.of(config, step, ratio)
    assert {letter: sizes.value(letter) for letter in expected} == expected
    assert sizes.value("s+t-2*w") == expected["s"] + expected["t"] - 2 * expected["w"]


BAD_MAPS = {
    "transpos 0": "transpos",
    "reshape": "reshape: expected 1 words, found 0",
}


@pytest.mark.parametrize("step", BAD_MAPS)
def test_a_broken_step_of_a_map_is_one_line(step: str, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f'summary = "mine"\nrules = [{{ name = "a", key = "embed.out", steps = ["{step}"] }}]\n'
    )
    message = one_line(cli("diff", LEN3, "--map", path, "--ckpt", CKPT))
    assert BAD_MAPS[step] in message
    assert str(path) in message


def test_a_step_that_does_not_fit_names_the_rule(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'summary = "mine"\n'
        'rules = [{ name = "embed.out", key = "embed.out", steps = ["reshape 1,s,7"] }]\n'
    )
    message = one_line(
        cli("diff", LEN3, "--map", path, "--ckpt", CKPT, "--input-ids", ids_of(LEN3))
    )
    assert "rule embed.out for embed.out: reshape 1,s,7 does not fit shape" in message


def ids_of(path: Path) -> str:
    return ",".join(map(str, json.loads(open_tensors(path).metadata["input_ids"])))


def test_a_map_without_a_match_is_one_line(cli: Cli) -> None:
    message = one_line(cli("diff", LEN3, "--map", "transformers", "--ckpt", CKPT))
    assert "expected names of the map, found none that matches" in message


def test_an_unknown_map_is_one_line_with_the_known_ones(cli: Cli) -> None:
    message = one_line(cli("diff", LEN3, "--map", "llama", "--ckpt", CKPT))
    assert "expected a file or one of" in message
    assert "transformers" in message


def test_other_ids_than_recorded_are_one_line(cli: Cli) -> None:
    message = one_line(cli("diff", LEN3, "--ckpt", CKPT, "--input-ids", "1,2,3"))
    assert "expected the ids [1, 2, 3], found" in message


def test_a_pickle_that_would_execute_something_is_one_line(cli: Cli, tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path, ("never made",))

    (tmp_path / "embed.out.pt").write_bytes(pickle.dumps(Evil()))
    message = one_line(cli("diff", tmp_path, "--ckpt", CKPT, "--input-ids", "1,2,3"))
    assert "embed.out.pt: cannot be read as tensors alone" in message


def test_nan_in_the_candidate_names_the_first_operator_that_made_one(
    cli: Cli, tmp_path: Path, recorded: dict[str, Tensor]
) -> None:
    changed = recorded["layers.0.ffn_norm.out"].clone()
    changed[0, 0, 0] = float("nan")
    path = tmp_path / "mine.safetensors"
    save_file({**recorded, "layers.0.ffn_norm.out": changed}, path, metadata())
    ran = cli("diff", path, "--ckpt", CKPT, "-q")
    assert ran.status == 1
    assert "first operator at fault: layers.0.ffn_norm.out: holds NaN or infinity" in ran.out


def test_list_maps_shows_every_shipped_map_and_its_rules(cli: Cli) -> None:
    shown = cli("list", "maps").out.splitlines()[1:]
    assert [line.split()[0] for line in shown] == list(shipped_maps())
    found = json.loads(cli("list", "maps", "llama.cpp", "--json").out)
    assert found["decode"] == "pass{i+1}/"
    assert found["rules"][0] == {
        "name": "inp_tokens", "key": "input_ids", "steps": ["reshape 1,-1"], "ratios": None,
        "passes": None,
    }  # fmt: skip
    assert "lid_top_k-{n}" in cli("list", "maps", "llama.cpp").out


def test_the_rules_of_a_map_of_ones_own_are_listed_with_their_limits(
    cli: Cli, tmp_path: Path
) -> None:
    rule = '{ name = "x.{n}", key = "layers.{n}.out", ratios = [0, 4], passes = "decode" }'
    path = tmp_path / "mine.toml"
    path.write_text(f'summary = "mine"\nrules = [{rule}]\n')
    line = cli("list", "maps", path).out.splitlines()[1]
    assert line.split() == ["x.{n}", "layers.{n}.out", "ratio", "0/4,", "decode"]


def test_rows_of_experts_need_a_table(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    rule = '{ name = "x.{n}", key = "layers.{n}.ffn.experts.{e}.out" }'
    path.write_text(f'summary = "mine"\nrules = [{rule}]\n')
    message = one_line(cli("list", "maps", path))
    assert "{e} in the key: expected it in the name or a step rows, found neither" in message
