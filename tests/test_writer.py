"""The streaming safetensors writer: standard format, atomic, locked."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from v4tool.errors import OutputError
from v4tool.record.reader import Recording
from v4tool.record.writer import BUFFER_BYTES, BUFFERS, WRITE_BACK, RecordingWriter


def write(path: Path, tensors: dict[str, Tensor], *, force: bool = False) -> str:
    with RecordingWriter(path, len(tensors), {"case": "test"}, force=force) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
        return writer.close()


TENSORS = {
    "odd": torch.tensor([1.5, -0.0, 3.0]),
    "wide": torch.tensor([[2**40, -1]]),
    "even": torch.arange(4, dtype=torch.int32),
    "bf16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "acc": torch.tensor([1 / 3], dtype=torch.float64),
    "nothing": torch.empty(1, 3, 0, dtype=torch.int64),
    "odd too": torch.tensor([[[7.0]]]),
}


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", TENSORS)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        expected = tensor.float() if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name


def test_values_across_buffer_boundaries(tmp_path: Path) -> None:
    """What lies between two pieces of memory, or fills several, comes out as it went in."""
    values = {
        "most of one": torch.arange(BUFFER_BYTES // 4 - 2, dtype=torch.int32),
        "over its end": torch.arange(10, dtype=torch.bfloat16),
        "several": torch.arange(BUFFER_BYTES, dtype=torch.float32),
        "turned": torch.arange(BUFFER_BYTES // 2, dtype=torch.float64).view(2, -1).T,
        "wide": torch.arange(BUFFER_BYTES // 4, dtype=torch.int64),
        "odd": torch.arange(BUFFER_BYTES // 4 + 1, dtype=torch.float32),
    }
    digest = write(tmp_path / "a.safetensors", values)
    found = load_file(tmp_path / "a.safetensors")
    for name, value in values.items():
        expected = value.float() if value.is_floating_point() else value
        assert torch.equal(found[name], expected), name
    data = (tmp_path / "a.safetensors").read_bytes()
    header = int.from_bytes(data[:8], "little")
    assert hashlib.sha256(data[8 + header :]).hexdigest() == digest


def test_memory_is_bounded_where_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever computes waits for the writing thread once all pieces are full."""
    go_on = threading.Event()
    with RecordingWriter(tmp_path / "a.safetensors", 1, {}) as writer:
        slow = SimpleNamespace(write=lambda data: go_on.wait(), tell=lambda: 0)
        monkeypatch.setattr(writer, "_file", slow)
        value = torch.zeros(BUFFERS * BUFFER_BYTES // 4)
        caller = threading.Thread(target=writer.put, args=("x", torch.cat([value, value])))
        caller.start()
        caller.join(0.5)
        assert caller.is_alive()
        assert writer._buffers == BUFFERS
        go_on.set()
        caller.join(10)
        assert not caller.is_alive()
        monkeypatch.undo()


def test_payload_hash_is_of_the_bytes_after_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    digest = write(path, TENSORS)
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    assert hashlib.sha256(data[8 + header :]).hexdigest() == digest
    assert Recording.open(path).metadata == {"case": "test", "payload_sha256": digest}


def test_a_header_longer_than_the_space_reserved_moves_the_payload(tmp_path: Path) -> None:
    """More tensors than were announced, a long metadata value, and a payload of several pieces."""
    values = {f"{'long ' * 30}{number}": torch.tensor([float(number)] * 2) for number in range(500)}
    values["several pieces"] = torch.arange(3 * BUFFER_BYTES // 4 + 2, dtype=torch.float32)
    path = tmp_path / "a.safetensors"
    with RecordingWriter(path, 1, {}) as writer:
        for name, value in values.items():
            writer.put(name, value)
        writer.metadata["ids"] = "7" * 100_000
        digest = writer.close()
    found = load_file(path)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    assert (8 + header) % 4096 == 0
    assert hashlib.sha256(data[8 + header :]).hexdigest() == digest
    assert Recording.open(path).metadata["ids"] == "7" * 100_000


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    """An I64 tensor at an offset that is no multiple of 8 cannot be viewed in place."""
    path = tmp_path / "a.safetensors"
    write(path, TENSORS)
    data = path.read_bytes()
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entries.pop("__metadata__")
    for name, entry in entries.items():
        size = 8 if entry["dtype"] == "I64" else 4
        assert entry["data_offsets"][0] % size == 0, name
    spans = sorted(entry["data_offsets"] for entry in entries.values())
    assert spans[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_a_value_may_change_after_put(tmp_path: Path) -> None:
    value = torch.zeros(1000)
    with RecordingWriter(tmp_path / "a.safetensors", 1, {}) as writer:
        writer.put("x", value)
        value.fill_(1.0)
        writer.close()
    assert load_file(tmp_path / "a.safetensors")["x"].sum() == 0


def test_an_existing_file_stays_without_force(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.ones(2)})
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists already; use --force"):
        write(path, {"x": torch.zeros(2)})
    assert path.read_bytes() == before
    write(path, {"x": torch.zeros(2)}, force=True)
    assert load_file(path)["x"].tolist() == [0.0, 0.0]


def write_half(path: Path) -> None:
    with RecordingWriter(path, 2, {}, force=True) as writer:
        writer.put("x", torch.zeros(2))
        raise RuntimeError("midway")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.ones(2)})
    with pytest.raises(RuntimeError, match="midway"):
        write_half(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert load_file(path)["x"].tolist() == [1.0, 1.0]


def test_the_same_key_twice_is_refused(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "a.safetensors", 2, {}) as writer:
        writer.put("x", torch.ones(3))
        with pytest.raises(ValueError, match="recorded twice"):
            writer.put("x", torch.ones(3))


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with (
        RecordingWriter(path, 1, {}),
        pytest.raises(OutputError, match="another run is writing this file"),
    ):
        RecordingWriter(path, 1, {})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """The file size limit of the process stands for the disk: writing beyond it fails alike."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "a.safetensors"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            write(path, {str(i): torch.zeros(1 << 18) for i in range(4)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        write(tmp_path / "a.safetensors", TENSORS)


def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write(tmp_path / "file" / "a.safetensors", TENSORS)


KILLED = """
import os, sys, torch
from pathlib import Path
from v4tool.record.writer import RecordingWriter
writer = RecordingWriter(Path(sys.argv[1]), 2, {}, force=True)
writer.put("x", torch.zeros(1 << 20))
os.kill(os.getpid(), 9)
"""


def test_a_killed_run_leaves_a_partial_file_that_the_next_one_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"x": torch.ones(2)})
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert {p.name for p in tmp_path.iterdir()} == {"a.safetensors", "a.safetensors.partial"}
    assert load_file(path)["x"].tolist() == [1.0, 1.0]
    write(path, {"x": torch.zeros(2)}, force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"a.safetensors"}


def test_write_back_starts_before_the_file_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is handed to the disk once and in order, but for less than WRITE_BACK at the end.

    What the system makes of it cannot be seen from here.
    """
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "v4tool.record.writer.write_back", lambda fd, start, length: begun.append((start, length))
    )
    path = tmp_path / "a.safetensors"
    write(path, {str(i): torch.zeros(5 << 20) for i in range(4)})
    ends = [start + length for start, length in begun]
    assert [start for start, _ in begun] == [0, *ends[:-1]]
    assert all(length >= WRITE_BACK for _, length in begun)
    assert 0 <= path.stat().st_size - ends[-1] < WRITE_BACK
