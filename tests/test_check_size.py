"""Time and memory of a check on a recording with the release's widths (slow; the real one has
43 layers).

The baseline is a plain loop that reads the file and takes its SHA-256, run alternately with the
checks. The best of three runs counts, since other work on the machine can only make a run
slower.
"""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from v4tool import profiles
from v4tool.checkpoint.shards import Checkpoint
from v4tool.checkpoint.synth import synth
from v4tool.config import ModelConfig
from v4tool.dump import dump_cases

LAYERS, EXPERTS, VOCABULARY = 6, 8, 2048
RUNS = 3
MIB = 1 << 20

CHECK = """
import json, resource, sys, time
from v4tool.check.recording import check_recording
from v4tool.config import ModelConfig
config = ModelConfig.from_file(sys.argv[2])
started = time.monotonic()
result = check_recording(sys.argv[1], config=config, identities=sys.argv[3] == "all")
seconds = time.monotonic() - started
unit = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(json.dumps([seconds, peak, len(result.findings), result.tied]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recording of 129 tokens and its checkpoint: the release's widths, fewer layers and
    experts.
    """
    directory = tmp_path_factory.mktemp("large")
    release = profiles.load("flash", options={}, environ={})
    fields = json.loads(Path(release.config).read_text())
    fields["vocab_size"] = VOCABULARY
    synth(
        directory / "ckpt",
        ModelConfig.from_dict(fields),
        seed=0,
        experts=EXPERTS,
        layers=LAYERS,
    )
    profile = profiles.load("flash", options={"ckpt": directory / "ckpt"}, environ={})
    case = release.case("prompt129")
    ids = tuple(i % VOCABULARY for i in case.input_ids)
    path = directory / case.file
    with Checkpoint.open(directory / "ckpt") as checkpoint:
        dump_cases(profile, checkpoint, [case.model_copy(update={"input_ids": ids})], [path])
    return path, directory / "ckpt"


def read_and_hash(path: Path) -> float:
    started = time.monotonic()
    digest, buffer = hashlib.sha256(), bytearray(4 * MIB)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return time.monotonic() - started


def checked(path: Path, ckpt: Path, what: str) -> Any:
    command = [sys.executable, "-c", CHECK, str(path), str(ckpt), what]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_time_and_memory(large: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Values within 1.3 times, everything within 3 times a plain read with SHA-256, in 400 MiB."""
    path, ckpt = large
    plain, values, every = [], [], []
    for _ in range(RUNS):
        plain.append(read_and_hash(path))
        values.append(checked(path, ckpt, "values"))
        plain.append(read_and_hash(path))
        every.append(checked(path, ckpt, "all"))
    base = min(plain)
    few, many = min(row[0] for row in values), min(row[0] for row in every)
    peak = max(row[1] for row in every + values)
    with capsys.disabled():
        print(
            f"\n{path.stat().st_size / MIB:.0f} MiB: read and hash {base:.2f} s, "
            f"container, specification and values {few / base:.2f} times that, "
            f"everything {many / base:.2f} times; peak {peak / MIB:.0f} MiB"
        )
    assert all(row[2] == 0 for row in every)
    assert all(row[3] > 500 for row in every)
    assert peak <= 400 * MIB
    assert few <= 1.3 * base
    assert many <= 3 * base
