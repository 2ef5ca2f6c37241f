"""Location of a profile's checkpoint: given, generated, or in the local Hugging Face cache."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from v4tool.errors import CheckpointError, ProfileError
from v4tool.profiles import Profile, SynthRequest, load, locate_checkpoint

RELEASE = "deepseek-ai/DeepSeek-V4-Flash"
COMMIT, OTHER = "a" * 40, "b" * 40


def profile_file(directory: Path, text: str) -> Path:
    """A profile of the user's own."""
    path = directory / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def settle(
    name_or_file: str | Path | None = None,
    options: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Profile:
    """`load` with nothing given unless the test gives it."""
    return load(name_or_file, options=options or {}, environ=environ or {})


def test_nano_is_to_be_made_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = locate_checkpoint(settle("nano", {"seed": 5}))
    assert isinstance(request, SynthRequest)
    assert (request.config.name, request.seed) == ("nano_config.json", 5)
    assert request.directory(1).name.startswith("nano-")
    if sys.platform == "linux":
        assert request.directory(1).parent == tmp_path / "v4tool" / "checkpoints"
    assert not list(tmp_path.iterdir())


def test_a_changed_checkpoint_is_another_directory(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    first = SynthRequest(config, 0, tmp_path)
    names = [first.directory(1), first.directory(2), SynthRequest(config, 1, tmp_path).directory(1)]
    assert first.directory(1) == names[0]
    config.write_text('{"n": 1}')
    assert len({*names, first.directory(1)}) == 4


def test_a_request_without_its_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        SynthRequest(tmp_path / "none.json", 0, tmp_path).directory(1)


def test_a_named_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate_checkpoint(settle("flash", {"ckpt": tmp_path})) == tmp_path
    assert locate_checkpoint(settle("nano", environ={"V4TOOL_CKPT": str(tmp_path)})) == tmp_path


def test_a_named_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    file = profile_file(tmp_path, "")
    for ckpt, found in ((tmp_path / "none", "nothing"), (file, "a file")):
        with pytest.raises(CheckpointError) as caught:
            locate_checkpoint(settle("flash", {"ckpt": ckpt}))
        assert str(caught.value) == (
            f"option --ckpt: expected a checkpoint directory, found {found} at {ckpt}"
        )


def hub_snapshot(cache: Path, commit: str, *, main: bool, leave_out: str = "") -> Path:
    """A snapshot laid out as the Hugging Face cache does it: refs, blobs, links to the blobs."""
    repo = cache / f"models--{RELEASE.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for directory in (repo / "refs", repo / "blobs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    if main:
        (repo / "refs" / "main").write_text(commit)
    for name in {"config.json", "model.safetensors.index.json", "tokenizer.json"} - {leave_out}:
        blob = repo / "blobs" / f"{name}-{commit}"
        blob.write_text("{}")
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    return snapshot


def test_flash_is_found_in_the_hub_cache(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, COMMIT, main=True)
    hub_snapshot(tmp_path, OTHER, main=False)
    assert locate_checkpoint(settle("flash"), hub_cache=tmp_path) == snapshot


def test_a_snapshot_without_a_branch_is_found(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, COMMIT, main=False)
    assert locate_checkpoint(settle("flash"), hub_cache=tmp_path) == snapshot


def test_of_several_snapshots_one_must_be_named(tmp_path: Path) -> None:
    hub_snapshot(tmp_path, COMMIT, main=False)
    other = hub_snapshot(tmp_path, OTHER, main=False)
    with pytest.raises(ProfileError, match=f"found {COMMIT}, {OTHER}: name one as `revision`"):
        locate_checkpoint(settle("flash"), hub_cache=tmp_path)
    text = f'[checkpoint]\nconfig = "flash"\nrepo = "{RELEASE}"\nrevision = "{OTHER}"\n'
    assert locate_checkpoint(settle(profile_file(tmp_path, text)), hub_cache=tmp_path) == other


@pytest.mark.parametrize("leave_out", ["config.json", "model.safetensors.index.json"])
def test_a_snapshot_without_index_or_config_is_none(tmp_path: Path, leave_out: str) -> None:
    hub_snapshot(tmp_path, COMMIT, main=True, leave_out=leave_out)
    with pytest.raises(ProfileError, match="no checkpoint found"):
        locate_checkpoint(settle("flash"), hub_cache=tmp_path)


def test_a_missing_checkpoint_names_three_ways_to_give_one(tmp_path: Path) -> None:
    for cache in (tmp_path, tmp_path / "none"):
        with pytest.raises(ProfileError) as caught:
            locate_checkpoint(settle("flash"), hub_cache=cache)
        assert str(caught.value) == (
            "profile flash: no checkpoint found: give its directory with --ckpt DIR, set "
            f"V4TOOL_CKPT=DIR, or download {RELEASE} into the local Hugging Face cache yourself "
            "(v4tool never downloads)"
        )


def run_python(code: str, **environ: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


LOCATE = """
import sys
def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        print("network:", event)
sys.addaudithook(watch)
from v4tool.errors import ProfileError
from v4tool.profiles import load, locate_checkpoint
try:
    print(locate_checkpoint(load("flash", options={}, environ={})))
except ProfileError as error:
    print("refused:", error)
"""


def test_the_hub_cache_is_where_the_environment_says_and_the_network_is_left_alone(
    tmp_path: Path,
) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    snapshot = hub_snapshot(full, COMMIT, main=True)
    home = {"HOME": str(tmp_path)}
    assert run_python(LOCATE, HF_HUB_CACHE=str(full), **home) == str(snapshot)
    out = run_python(LOCATE, HF_HUB_CACHE=str(empty), **home)
    assert out.startswith("refused: profile flash: no checkpoint found")
    assert "network" not in out


def test_importing_profiles_loads_nothing_heavy() -> None:
    code = (
        "import sys; from v4tool.profiles import load; load(options={}, environ={}); "
        "print([m for m in ('torch', 'tokenizers', 'huggingface_hub') if m in sys.modules])"
    )
    assert run_python(code) == "[]"
