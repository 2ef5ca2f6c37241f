"""`regen`: equal payloads from frozen ids; a file is replaced only if the new one passes."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import GOLDEN_MINI
from tests.recordings import Copy
from v4tool import profiles
from v4tool.check.recording import check_recording
from v4tool.checkpoint.shards import Checkpoint
from v4tool.dumping import dump_cases, enter_in_manifest
from v4tool.errors import Finding, InputError, OutputError
from v4tool.profiles import Case, Profile
from v4tool.record.manifest import MANIFEST, Manifest, update_entry
from v4tool.regen import Verified, Verify, frozen_case, plan, regenerate, verifier

CKPT = GOLDEN_MINI / "ckpt"
CASES = [
    Case(id="baseline6", input_ids=(251, 247, 122), text="one"),
    Case(id="short", input_ids=(35, 11, 74), decode=1, text="two"),
    Case(id="long", input_ids=(5, 6, 7, 8, 9), text="three"),
]


def profile(threads: int = 1) -> Profile:
    return profiles.load("nano", options={"ckpt": CKPT, "threads": threads}, environ={})


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(CKPT)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Path:
    """The references of all cases, as `v4tool dump` leaves them."""
    directory = tmp_path_factory.mktemp("refs")
    paths = [directory / case.file for case in CASES]
    results = dump_cases(profile(), checkpoint, CASES, paths, force=True)
    enter_in_manifest(profile(), checkpoint.config, results)
    return directory


@pytest.fixture
def references(tmp_path: Path, dumped: Path) -> Path:
    """A copy of them for one test."""
    return Path(shutil.copytree(dumped, tmp_path / "refs"))


def state(directory: Path) -> dict[str, str]:
    """Every file's hash, by name."""
    files = [path for path in directory.iterdir() if path.is_file() and path.suffix != ".lock"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def passes(recording: Path) -> Verified:
    return Verified(True, {"node_checks": 1})


def test_the_same_bits_come_out_again(references: Path, checkpoint: Checkpoint) -> None:
    """Check and verification pass, the payload is the one of the manifest, the evidence is kept."""
    before = Manifest.load(references).cases
    results = regenerate(
        profile(), checkpoint, plan(references, None), references, verify=verifier(CKPT)
    )
    assert [r.case for r in results] == ["short", "long"]
    assert all(r.same_payload and r.replaced and r.check.ok for r in results)
    after = Manifest.load(references).cases
    for case in ("short", "long"):
        evidence = after[case].verification
        assert evidence is not None
        assert evidence["passed"]
        assert after[case].payload_sha256 == before[case].payload_sha256
        path = references / after[case].file
        assert check_recording(path, config=checkpoint.config, manifest=after[case]).ok
    assert after["baseline6"] == before["baseline6"]
    assert sorted(p.name for p in references.iterdir() if p.is_dir()) == []


def test_baseline6_is_skipped_unless_named(references: Path, checkpoint: Checkpoint) -> None:
    everything = {p.entry.id: p.left_alone for p in plan(references, None)}
    assert everything == {
        "baseline6": "recorded again only when it is named", "short": None, "long": None
    }  # fmt: skip
    named = plan(references, ["baseline6"])
    assert [(p.entry.id, p.left_alone) for p in named] == [("baseline6", None)]
    results = regenerate(profile(), checkpoint, named, references, verify=passes)
    assert [r.case for r in results] == ["baseline6"]


def test_a_plan_changes_nothing(references: Path) -> None:
    before = state(references)
    plan(references, None)
    assert state(references) == before


def test_incomplete_recordings_are_skipped(references: Path, checkpoint: Checkpoint) -> None:
    entry = Manifest.load(references).cases["short"]
    update_entry(references, "short", entry.model_copy(update={"complete": False}))
    planned = plan(references, ["short"])
    assert planned[0].left_alone == "recorded only in part; dump it again"
    assert regenerate(profile(), checkpoint, planned, references, verify=passes) == []


def test_ids_come_from_the_manifest_and_never_from_text(references: Path) -> None:
    entry = Manifest.load(references).cases["short"]
    told = entry.model_copy(update={"text": "This text has other ids."})
    case = frozen_case(told)
    assert case.input_ids == (35, 11, 74)
    assert (case.decode, case.decode_ids) == (1, entry.decode_ids)
    assert len(entry.decode_ids) == 1


def test_unknown_cases_and_empty_directories(references: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no case lang in its manifest; it has baseline6, short"):
        plan(references, ["short", "lang"])
    with pytest.raises(InputError, match="make references with `v4tool dump`"):
        plan(tmp_path, None)


def refuses(recording: Path) -> Verified:
    return Verified(False, {}, [Finding("layers.0.out", "verify", "1", "2")])


def test_what_does_not_pass_replaces_nothing(references: Path, checkpoint: Checkpoint) -> None:
    before = state(references)
    results = regenerate(
        profile(threads=2), checkpoint, plan(references, None), references, verify=refuses
    )
    assert [r.replaced for r in results] == [False, False]
    assert results[0].as_dict()["findings"][0]["key"] == "layers.0.out"
    assert state(references) == before


def test_a_damaged_reference_is_repaired(references: Path, checkpoint: Checkpoint) -> None:
    entry = Manifest.load(references).cases["long"]
    path = references / entry.file
    copy = Copy.of(path)
    copy.flip("layers.1.ffn.out", 3, 20)
    copy.write(path)
    assert not check_recording(path, config=checkpoint.config, manifest=entry).ok
    results = regenerate(
        profile(), checkpoint, plan(references, ["long"]), references, verify=passes
    )
    assert results[0].same_payload
    entry = Manifest.load(references).cases["long"]
    assert check_recording(path, config=checkpoint.config, manifest=entry).ok


def test_another_checkpoint_gives_another_hash(references: Path, checkpoint: Checkpoint) -> None:
    entry = Manifest.load(references).cases["long"]
    update_entry(references, "long", entry.model_copy(update={"payload_sha256": "0" * 64}))
    result = regenerate(
        profile(), checkpoint, plan(references, ["long"]), references, verify=passes
    )[0]
    assert not result.same_payload
    assert result.as_dict()["expected_sha256"] == "0" * 64


def test_two_at_once_are_refused(references: Path, checkpoint: Checkpoint) -> None:
    def second(recording: Path) -> Verified:
        with pytest.raises(OutputError, match="another regen is running here"):
            regenerate(profile(), checkpoint, plan(references, ["long"]), references, verify=passes)
        return Verified(True, {})

    first: Verify = second
    assert regenerate(profile(), checkpoint, plan(references, ["long"]), references, verify=first)[
        0
    ].replaced


KILLED = """
import os, signal, sys
from pathlib import Path
from v4tool import profiles, regen
from v4tool.checkpoint.shards import Checkpoint
from v4tool.record import manifest, writer

directory, moment, ckpt = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def dying_after(count, function):
    calls = 0
    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > count:
            die()
        return function(*args, **kwargs)
    return call

verify = lambda recording: regen.Verified(True, {"node_checks": 1})
if moment == "while recording":
    writer.RecordingWriter.put = dying_after(200, writer.RecordingWriter.put)
elif moment == "before the check":
    regen.check_recording = die
elif moment == "while verifying":
    verify = die
elif moment == "before anything is renamed":
    manifest.replace_recording = regen.replace_recording = die
elif moment == "with the new entry pending":
    replace = Path.replace
    def dying(self, target):
        fresh = self.parent.name == ".regen" and self.suffix == ".safetensors"
        return die() if fresh else replace(self, target)
    Path.replace = dying
elif moment == "after the recording is renamed":
    manifest.update_entry = die
profile = profiles.load("nano", options={"ckpt": ckpt, "threads": 2}, environ={})
planned = regen.plan(directory, ["long"])
regen.regenerate(profile, Checkpoint.open(ckpt), planned, directory, verify=verify)
print("not killed")
"""

MOMENTS = [
    ("while recording", "old"),
    ("before the check", "old"),
    ("while verifying", "old"),
    ("before anything is renamed", "old"),
    ("with the new entry pending", "old"),
    ("after the recording is renamed", "new"),
]


@pytest.mark.parametrize(("moment", "reference"), MOMENTS, ids=[m for m, _ in MOMENTS])
def test_killed_at_any_moment(
    references: Path, checkpoint: Checkpoint, moment: str, reference: str
) -> None:
    """The reference is the old one or, in one moment, the new one that has passed; the manifest
    fits.
    """
    before, entries = state(references), Manifest.load(references).cases
    file = entries["long"].file
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(references), moment, str(CKPT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, ""), ran.stderr
    after = state(references)
    assert (after[file] == before[file]) == (reference == "old")
    assert {n: h for n, h in after.items() if n not in (file, MANIFEST)} == {
        n: h for n, h in before.items() if n not in (file, MANIFEST)
    }
    found = Manifest.load(references)
    assert found.cases == entries
    entry = found.entry_of("long", references / file)
    assert entry is not None
    result = check_recording(
        references / file, config=checkpoint.config, manifest=entry, checkpoint=checkpoint
    )
    assert result.findings == []
    # and the next run tidies up
    again = regenerate(profile(), checkpoint, plan(references, ["long"]), references, verify=passes)
    assert again[0].replaced
    assert Manifest.load(references).pending == {}
    assert not (references / ".regen").exists()
    assert json.loads((references / MANIFEST).read_text())["cases"].keys() == entries.keys()
