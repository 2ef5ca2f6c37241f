"""The commands `list` and `synth`: their output and exit status."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli import Cli, one_line
from tests.conftest import GOLDEN_MINI
from tests.shard_files import copy, edit
from v4tool import __version__
from v4tool.checkpoint.shards import Checkpoint

CKPT = GOLDEN_MINI / "ckpt"


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"v4tool {__version__}\n"
    words = {line.split()[0]: line.split()[1] for line in cli("--version", "-v").out.splitlines()}
    assert words["product"] in ("c", "numpy")
    assert words.keys() == {"v4tool", "python", "torch", "product"}


def test_unknown_options_and_commands_end_with_status_2(cli: Cli) -> None:
    assert cli("dump", "--nonsense").status == 2
    assert cli("dunp").status == 2


@pytest.mark.parametrize(
    ("case", "base", "payload"),
    [
        ("baseline6", 1749, "256.5 MiB"),
        ("prompt32", 1749, "1.3 GiB"),
        ("prompt129", 1809, "5.3 GiB"),
    ],
)
def test_list_keys_of_the_release(cli: Cli, case: str, base: int, payload: str) -> None:
    """SPEC 6, known totals; 1347.88 MiB are 1.3 GiB, 5422.18 MiB are 5.3 GiB."""
    ran = cli("list", "keys", "--profile", "flash", "--case", case, "--json")
    keys = [row["key"] for row in json.loads(ran.out)]
    assert sum("<E>" not in key for key in keys) == base
    shown = cli("list", "keys", "--profile", "flash", "--case", case)
    assert shown.err == f"{base} keys besides the routed experts', payload {payload}\n"
    assert len(shown.out.splitlines()) == 1 + len(keys)


def test_list_keys_of_one_layer(cli: Cli) -> None:
    ran = cli("list", "keys", "--profile", "flash", "--layer", "2", "--json")
    rows = {row["key"]: row for row in json.loads(ran.out)}
    assert len([key for key in rows if "<E>" not in key]) == 45
    assert rows["layers.2.attn.indexer.out"] == {
        "key": "layers.2.attn.indexer.out", "dtype": "I64", "shape": [1, 6, 1], "kind": "int",
    }  # fmt: skip
    assert rows["layers.2.ffn.experts.<E>.w1.out"]["shape"] == [None, 2048]


def test_list_keys_by_pattern(cli: Cli) -> None:
    ran = cli(
        "list", "keys", "--ckpt", CKPT, "--length", "8", "--glob", "*.compressor.out", "--json"
    )
    assert [row["key"] for row in json.loads(ran.out)] == [
        "layers.1.attn.indexer.compressor.out",
        "layers.1.attn.compressor.out",
        "layers.3.attn.indexer.compressor.out",
        "layers.3.attn.compressor.out",
    ]
    assert "no key matches" in one_line(cli("list", "keys", "--glob", "nothing"))
    assert "--length: expected at least 1" in one_line(cli("list", "keys", "--length", "0"))


def test_list_cases(cli: Cli) -> None:
    cases = {c["id"]: c for c in json.loads(cli("list", "cases", "--json").out)}
    lengths = {
        "baseline6": 6, "prompt32": 32, "prompt129": 129, "prompt2100": 2100,
        "prompt3": 3, "prompt4": 4, "prompt127": 127, "prompt128": 128,
    }  # fmt: skip
    assert {case: len(cases[case]["input_ids"]) for case in lengths} == lengths
    assert cases["baseline6"]["input_ids"] == [30594, 303, 6573, 70979, 36005, 320]
    table = cli("list", "cases").out
    assert all(case in table for case in lengths)


def test_list_profiles_says_where_values_come_from(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("V4TOOL_SEED", "7")
    ran = cli("list", "profiles", "-v", "--profile", "nano", "--threads", "3", "--json")
    (nano,) = json.loads(ran.out)
    origin = {row["key"]: (row["value"], row["from"]) for row in nano["settings"]}
    assert origin["threads"] == ("3", "option --threads")
    assert origin["seed"] == ("7", "environment V4TOOL_SEED")
    assert origin["out_dir"][1].endswith("nano.toml")
    assert "environment V4TOOL_SEED" in cli("list", "profiles", "-v").out


def test_list_layers(cli: Cli) -> None:
    rows = [line.split() for line in cli("list", "layers", "--profile", "flash").out.splitlines()]
    assert len(rows) == 1 + 43 + 1
    by_layer = {row[0]: row for row in rows}
    assert by_layer["layers.0"][1] == "0"
    assert by_layer["layers.0"][-1] == "31"
    assert by_layer["layers.2"][-1] == "45"
    assert by_layer["layers.3"][-1] == "36"
    assert by_layer["mtp.0"][-1] == "39"


def test_list_tensors(cli: Cli) -> None:
    rows = json.loads(cli("list", "tensors", "--profile", "flash", "--layer", "3", "--json").out)
    by_name = {row["name"]: row for row in rows}
    assert by_name["layers.3.attn.compressor.ape"]["shape"] == [128, 512]
    assert by_name["layers.3.ffn.experts.255.w2.weight"] == {
        "name": "layers.3.ffn.experts.255.w2.weight",
        "dtype": "I8", "shape": [4096, 1024], "shard": 5,
    }  # fmt: skip


def test_list_tensors_marks_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    assert cli("list", "tensors", "--ckpt", CKPT).status == 0
    ckpt = tmp_path / "ckpt"
    shutil.copytree(CKPT, ckpt)
    index = json.loads((ckpt / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["norm.weight"]
    (ckpt / shard).unlink()
    ran = cli("list", "tensors", "--ckpt", ckpt, "--glob", "*norm.weight", "--json")
    assert ran.status == 1
    missing = [row["name"] for row in json.loads(ran.out) if row["status"] == "missing"]
    assert missing == ["norm.weight"]


def test_list_tensors_takes_harmless_extra_tensors(cli: Cli, tmp_path: Path) -> None:
    ckpt = copy(CKPT, tmp_path / "ckpt")
    edit(ckpt, lambda name, t: {name: t, f"{name}.zero": t} if name == "norm.weight" else {name: t})
    ran = cli("list", "tensors", "--ckpt", ckpt, "--glob", "norm*")
    assert ran.status == 0
    assert [line.split()[:2] for line in ran.out.splitlines()[1:]] == [
        ["norm.weight", "ok"],
        ["norm.weight.zero", "extra"],
    ]


def test_synth_dry_run_of_the_release(cli: Cli) -> None:
    """SPEC 2: the four figures of the real checkpoint."""
    assert cli("synth", "--like", "flash", "--dry-run").out.splitlines() == [
        "tensors      69187",
        "mtp tensors  1575",
        "bytes        159609485896",
        "parameters   290942289362",
    ]


def test_synth_writes_what_the_reader_opens(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "small"
    ran = cli(
        "synth", target, "--like", CKPT / "config.json", "--layers", "0-2", "--experts", "4",
        "--seed", "5", "--quiet", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    with Checkpoint.open(target) as checkpoint:
        assert checkpoint.config.n_layers == 3
        assert checkpoint.config.n_routed_experts == 4
        assert json.loads(ran.out)["tensors"] == len(checkpoint.specs)
    assert "this one exists" in one_line(cli("synth", target, "--like", CKPT / "config.json"))


def test_synth_mistakes(cli: Cli, tmp_path: Path) -> None:
    assert "expected a directory" in one_line(cli("synth", "--like", "nano"))
    assert "--layers" in one_line(cli("synth", tmp_path / "x", "--layers", "one"))
    assert "nowhere.json" in one_line(cli("synth", tmp_path / "x", "--like", "nowhere.json"))
    assert list(tmp_path.iterdir()) == []
