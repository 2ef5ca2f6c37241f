"""A cached random checkpoint of another version or a damaged one is generated again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import Cli
from tests.conftest import GOLDEN_MINI
from tests.shard_files import edit_config
from v4tool.checkpoint import random_values
from v4tool.checkpoint.outdated import outdated
from v4tool.checkpoint.synth import synth
from v4tool.config import ModelConfig

MINI = ModelConfig.from_file(GOLDEN_MINI / "ckpt")
GENERATOR = [
    # a constant of the generator, another value
    ("GAINS", random_values.GAINS | {"w2": 0.2}),
    ("GAINS", random_values.GAINS | {"h_proj": 0.8}),
    ("DEVIATIONS", random_values.DEVIATIONS | {"embed": 2.0}),
    ("DEVIATIONS", random_values.DEVIATIONS | {"ape": 0.25}),
    ("DEVIATIONS", random_values.DEVIATIONS | {"_scale": 0.5}),
    ("FP8_SPREAD", 100.0),
    ("RARE_CODES", 32),
    ("SCALE_STEPS", (0,) * 16),
]


def digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "mini"
    synth(directory, MINI, seed=0)
    return directory


def test_a_fresh_one_is_not_outdated(made: Path) -> None:
    assert outdated(made, MINI, 0) is None


def test_another_seed(made: Path) -> None:
    assert outdated(made, MINI, 1) == "model-00001-of-00008.safetensors has another header"


@pytest.mark.parametrize(("constant", "value"), GENERATOR)
def test_another_generator(
    made: Path, monkeypatch: pytest.MonkeyPatch, constant: str, value: object
) -> None:
    """Every constant of the generator shows in some tensor of the sample."""
    random_values._quantiles.cache_clear()
    random_values._code_rms.cache_clear()
    monkeypatch.setattr(random_values, constant, value)
    found = outdated(made, MINI, 0)
    random_values._code_rms.cache_clear()
    assert found is not None
    assert found.endswith(" has other values")


def test_another_hash_table(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_values, "_hash_table", lambda *args: b"other")
    assert outdated(made, MINI, 0) == "layers.0.ffn.gate.tid2eid has other values"


SHARD = "model-00003-of-00008.safetensors"


def cut(directory: Path) -> None:
    data = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(data[:-1])


def overwrite_header(directory: Path) -> None:
    data = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(data.replace(b"wq_a", b"wq_c", 1))


def overwrite_values(directory: Path) -> None:
    """Zeros in place of all values, but the same header."""
    data = (directory / SHARD).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    (directory / SHARD).write_bytes(data[:begin] + bytes(len(data) - begin))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("cut", cut, f"{SHARD}: "),
    ("header", overwrite_header, f"{SHARD} has another header"),
    ("values", overwrite_values, " has other values"),
    ("missing", lambda d: (d / SHARD).unlink(), f"{SHARD}: No such file or directory"),
    ("config", lambda d: edit_config(d, swiglu_limit=9.0), "config.json is another one"),
    (
        "index",
        lambda d: (d / "model.safetensors.index.json").unlink(),
        "model.safetensors.index.json: No such file or directory",
    ),
]


@pytest.mark.parametrize(("damage", "words"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_damage(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    directory = tmp_path / "mini"
    synth(directory, MINI, seed=0)
    damage(directory)
    assert words in (outdated(directory, MINI, 0) or "")
    synth(directory, MINI, seed=0, replace=True)
    assert outdated(directory, MINI, 0) is None
    assert [p.name for p in tmp_path.iterdir()] == ["mini"]


@pytest.fixture
def dump(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, list[str]]]:
    """Dumps from a profile whose checkpoint is cached below tmp_path: payload hash and remarks."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    profile = tmp_path / "tiny.toml"
    profile.write_text(f'[checkpoint]\nconfig = "{GOLDEN_MINI}/ckpt/config.json"\nsynth = true\n')

    def call(*args: object) -> tuple[str, list[str]]:
        ran = cli(
            "dump", "--profile", profile, "--input-ids", "1,2,3", "--json", "--force",
            "--out", tmp_path / "a.safetensors", *args,
        )  # fmt: skip
        assert ran.status == 0, ran.err
        remarks = [line for line in ran.err.splitlines() if "making" in line or "tensors" in line]
        return json.loads(ran.out)[0]["payload_sha256"], remarks

    return call


def test_a_stale_cache_is_made_anew_with_one_line(
    dump: Callable[..., tuple[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier generator of the same version has left other values under the same name."""
    with monkeypatch.context() as earlier:
        earlier.setattr(random_values, "GAINS", {})
        stale, [making, _] = dump()
    [directory] = (tmp_path / "v4tool" / "checkpoints").iterdir()
    assert making == f"making the checkpoint of profile tiny in {directory}"

    right, remarks = dump()
    assert right != stale
    [line] = remarks
    assert line.startswith(f"making the checkpoint of profile tiny anew in {directory}: what is ")
    assert line.endswith(" has other values)")
    synth(tmp_path / "fresh", MINI, seed=0)
    assert digests(directory) == digests(tmp_path / "fresh")
    assert list(directory.parent.iterdir()) == [directory]

    before = directory.stat().st_ino
    assert dump() == (right, [])
    assert directory.stat().st_ino == before


def test_quietly(dump: Callable[..., tuple[str, list[str]]], tmp_path: Path) -> None:
    first, _ = dump()
    [directory] = (tmp_path / "v4tool" / "checkpoints").iterdir()
    cut(directory)
    assert dump("--quiet") == (first, [])
