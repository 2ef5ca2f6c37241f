"""The manifest `prompts.json`: contents, updates that lose nothing, atomic replacement."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.conftest import GOLDEN_MINI
from tests.recordings import Copy, entry_of
from v4tool.config import ModelConfig
from v4tool.errors import OutputError, RecordingError
from v4tool.names import is_expert
from v4tool.record import manifest, statistics
from v4tool.record.manifest import MANIFEST, Entry, Manifest, update_entry
from v4tool.record.statistics import record_dump

CONFIG = ModelConfig.from_file(GOLDEN_MINI / "ckpt")
LEN33 = GOLDEN_MINI / "len33.safetensors"


@pytest.fixture(scope="module")
def entry() -> Entry:
    return entry_of(LEN33, CONFIG)


def test_hashes_are_of_the_file_and_its_parts(entry: Entry) -> None:
    data = LEN33.read_bytes()
    payload = 8 + int.from_bytes(data[:8], "little")
    assert entry.file_sha256 == hashlib.sha256(data).hexdigest()
    assert entry.header_sha256 == hashlib.sha256(data[:payload]).hexdigest()
    assert entry.payload_sha256 == hashlib.sha256(data[payload:]).hexdigest()
    assert (entry.payload_bytes, entry.tensors) == (len(data) - payload, 1114)
    assert (entry.length, entry.mtp_decode_start_pos) == (33, 33)


def test_coverage_is_what_the_recording_shows(entry: Entry) -> None:
    tensors = load_file(LEN33)
    coverage = entry.coverage
    assert {r: (b.complete, b.trailing) for r, b in coverage.blocks.items()} == {
        "4": (8, 1),
        "128": (0, 33),
    }
    assert not coverage.window_exceeded
    assert not coverage.topk_truncated
    expected = {f"{kind}.{name}": 0 for kind in ("routed", "shared") for name in ("w1", "w3")}
    for key, value in tensors.items():
        if ".ffn." in key and key.endswith(("w1.out", "w3.out")):
            name = key.split(".")[-2]
            beyond = value > 10 if name == "w1" else value.abs() > 10
            expected[f"{'routed' if is_expert(key) else 'shared'}.{name}"] += int(beyond.sum())
    assert coverage.clamp_hits == expected
    assert min(expected.values()) > 0
    for place, reached in coverage.experts_reached.items():
        assert reached == len(tensors[f"{place}.ffn.gate.out.1"].unique()), place
    assert len(coverage.experts_reached) == 5 * 4 + 2


@pytest.mark.parametrize(
    ("length", "blocks", "window", "topk", "reason"),
    [
        (3, (0, 3), False, False, "no block of 4"),
        (128, (32, 0), False, True, "exactly the window; 32 blocks, 8 kept"),
        (129, (32, 1), True, True, "one token beyond the window"),
        (35, (8, 3), False, False, "8 blocks, 8 kept"),
    ],
)
def test_path_coverage(
    length: int, blocks: tuple[int, int], window: bool, topk: bool, reason: str
) -> None:
    found = statistics.path_coverage(CONFIG, length)
    assert found["blocks"]["4"] == manifest.Blocks(complete=blocks[0], trailing=blocks[1]), reason
    assert (found["window_exceeded"], found["topk_truncated"]) == (window, topk), reason


@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
    place=st.integers(0, 49),
    bit=st.integers(0, 31),
)
def test_a_checksum_detects_every_flipped_bit(words: list[int], place: int, bit: int) -> None:
    import numpy as np

    before = np.array(words, np.uint32)
    after = before.copy()
    after[place % len(words)] ^= np.uint32(1 << bit)
    assert statistics.checksum(before) != statistics.checksum(after)


def test_checksums_are_one_a_tensor(entry: Entry) -> None:
    copy = Copy.of(LEN33)
    keys = sorted(k for k in copy.header if k != "__metadata__")
    sums = entry.sums()
    assert len(sums) == len(keys)
    start, stop = copy.span("layers.1.ffn.out")
    words = memoryview(bytes(copy.payload[start:stop])).cast("I")
    assert sums[keys.index("layers.1.ffn.out")] == sum(words) % 2**32


def test_it_reads_what_it_writes(tmp_path: Path, entry: Entry) -> None:
    told = entry.model_copy(update={"text": "你好\n“quoted”", "id": "a.b-1"})
    update_entry(tmp_path, "a.b-1", told)
    found = Manifest.load(tmp_path)
    assert found.cases == {"a.b-1": told}
    text = (tmp_path / MANIFEST).read_text(encoding="utf-8")
    assert "你好" in text
    assert json.loads(text)["cases"]["a.b-1"]["input_ids"] == list(entry.input_ids)
    assert len(text.splitlines()) < 60, "one line a field"


def test_it_says_which_semantics_it_follows(tmp_path: Path, entry: Entry) -> None:
    update_entry(tmp_path, "a", entry)
    found = json.loads((tmp_path / MANIFEST).read_text(encoding="utf-8"))["semantics"]
    assert found["model.py"].startswith("ce962f1f")
    assert found["kernel.py"].startswith("59b32508")
    assert "2026-04-27" in found["follows"]
    assert "2026-06-08" in found["follows"]
    assert "DSpark" in found["refuses"]


def test_no_manifest_is_an_empty_one(tmp_path: Path) -> None:
    assert Manifest.load(tmp_path).cases == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "EOF while parsing"),
        ('{"cases": []}', "cases: Input should be an object"),
        ('{"sizes": 1}', "sizes: Extra inputs are not permitted"),
        ('{"cases": {"a": {"id": "a"}}}', r"cases\.a\.\w+: Field required; \d+ problems"),
    ],
)
def test_a_damaged_one_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(RecordingError, match=message) as raised:
        Manifest.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert MANIFEST in str(raised.value)


def test_a_place_that_cannot_be_written(tmp_path: Path, entry: Entry) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OutputError, match=r"prompts\.json: cannot be written: .*file is no directory"
    ):
        update_entry(tmp_path / "file", "a", entry)
    with pytest.raises(
        OutputError, match=r"prompts\.json: cannot be written: .*none is no directory"
    ):
        update_entry(tmp_path / "none", "a", entry)


def test_a_damaged_recording_gets_no_entry(tmp_path: Path, entry: Entry) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(LEN33.read_bytes()[:-1])
    with pytest.raises(RecordingError, match="payload complete: expected a file of"):
        record_dump(tmp_path, cut, CONFIG, run_of(entry))
    assert not (tmp_path / MANIFEST).exists()


def run_of(entry: Entry) -> manifest.Run:
    return manifest.Run(**entry.model_dump(include=set(manifest.Run.model_fields)))


def test_a_new_dump_drops_the_verification(tmp_path: Path, entry: Entry) -> None:
    update_entry(tmp_path, "a", entry)
    digest = entry.payload_sha256
    assert manifest.record_verification(tmp_path, "a", digest, {"node_checks": 3})
    assert Manifest.load(tmp_path).cases["a"].verification == {"node_checks": 3}
    assert not manifest.record_verification(tmp_path, "a", "0" * 64, {"node_checks": 4})
    assert not manifest.record_verification(tmp_path, "b", digest, {"node_checks": 4})
    assert Manifest.load(tmp_path).cases["a"].verification == {"node_checks": 3}
    record_dump(tmp_path, LEN33, CONFIG, run_of(entry))
    assert Manifest.load(tmp_path).cases["a"].verification is None


ADD_ENTRIES = """
import sys
from pathlib import Path
from v4tool.record.manifest import Manifest, update_entry
directory = Path(sys.argv[1])
entry = Manifest.load(directory).cases["a"]
for i in range(5):
    update_entry(directory, f"{sys.argv[2]}{i}", entry)
"""


def test_two_runs_do_not_lose_entries(tmp_path: Path, entry: Entry) -> None:
    update_entry(tmp_path, "a", entry)
    runs = [
        subprocess.Popen([sys.executable, "-c", ADD_ENTRIES, str(tmp_path), name]) for name in "bcd"
    ]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    found = Manifest.load(tmp_path).cases
    assert sorted(found) == ["a", *(f"{name}{i}" for name in "bcd" for i in range(5))]


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from v4tool.record.manifest import Manifest, update_entry
directory = Path(sys.argv[1])
entry = Manifest.load(directory).cases["a"]
print("ready", flush=True)
for i in range(10**6):
    update_entry(directory, f"b{i % 7}", entry.model_copy(update={"seed": i}))
"""


def test_the_manifest_is_complete_after_a_kill(tmp_path: Path, entry: Entry) -> None:
    update_entry(tmp_path, "a", entry)
    for wait in (0.0, 0.013, 0.05):
        command = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(wait)
            os.kill(process.pid, signal.SIGKILL)
        assert Manifest.load(tmp_path).cases["a"] == entry
        update_entry(tmp_path, "after", entry)
