"""A recording's bytes, once and in order: header, then pieces of payload with hashes taken on the
way.

Follows the safetensors format (8 bytes of header length, JSON padded with spaces, payload without
gaps). Nothing here raises for a damaged file: what is wrong with header or offsets is a `Finding`,
so that `check` can name all of it, and what can still be read is read. Memory is a few chunks,
whatever the size of the file. Left out: what the tensors mean (`check`), and access by name with
decoded tensors (`reader`).
"""

import hashlib
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from v4tool.errors import Finding, RecordingError
from v4tool.untrusted import element_count, kind_of, parse_json, shortened

Bytes = npt.NDArray[np.uint8]

HEADER_LIMIT = 100_000_000
"""The format's own limit; it keeps a damaged length from asking for all memory."""
CHUNK = 2 << 20
"""Bytes read and hashed at a time: small enough to stay in the cache between the two."""
BUFFERS = 12
"""Chunks in flight: how far reading may run ahead of hashing."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F16": 2, "BF16": 2, "U16": 2, "I16": 2,
    "F32": 4, "U32": 4, "I32": 4, "F64": 8, "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of the format's dtypes; any other name is a finding."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: key, safetensors dtype, shape, byte range in the file (absolute)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.stop - self.start


@dataclass
class Header:
    """What a file says of itself.

    entries: in file order, those that make sense; payload: where it starts; sha256: of all bytes
    before it; findings: everything that the format forbids.
    """

    path: Path
    size: int
    payload: int = 0
    sha256: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def readable(self, key: str) -> bool:
        """Whether the file really has all of the tensor's bytes."""
        return self.entries[key].stop <= self.size

    def report(self, key: str, rule: str, expected: object, found: object) -> None:
        """Add a finding."""
        self.findings.append(Finding(key, rule, str(expected), str(found)))


def read_header(path: Path | str) -> Header:
    """Read and judge a file's header; RecordingError only where there is no file to be read."""
    path = Path(path)
    if kind_of(path) == "a pipe or device":
        raise RecordingError(f"{path}: expected a file, found a pipe or device")
    try:
        with path.open("rb") as file:
            header = Header(path, os.fstat(file.fileno()).st_size)
            raw = _raw(header, file.read(8))
            text = file.read(raw)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    if raw:
        header.payload = 8 + raw
        header.sha256 = hashlib.sha256(raw.to_bytes(8, "little") + text).hexdigest()
        _parse(header, text)
        _check_ranges(header)
    return header


def _raw(header: Header, first: bytes) -> int:
    """The header's length in bytes, or 0 with a finding."""
    if len(first) < 8:
        header.report("header", "header length", "a file of 8 bytes or more", f"{len(first)} bytes")
        return 0
    length, rest = int.from_bytes(first, "little"), header.size - 8
    if not 2 <= length <= min(rest, HEADER_LIMIT):
        limit = min(rest, HEADER_LIMIT)
        header.report("header", "header length", f"2 to {limit} bytes", f"{length}")
        return 0
    return length


def _parse(header: Header, text: bytes) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                header.report(key, "one entry a key", "one", "two or more")
            out[key] = value
        return out

    try:
        parsed = parse_json(text.decode("utf-8"), unique)
    except ValueError:
        header.report("header", "header is JSON", "a JSON object padded with spaces", "other text")
        return
    if not isinstance(parsed, dict):
        header.report("header", "header is JSON", "a JSON object", type(parsed).__name__)
        return
    _take_metadata(header, parsed.pop("__metadata__", None))
    found = [e for key, value in parsed.items() if (e := _entry(header, key, value)) is not None]
    header.entries = {e.key: e for e in sorted(found, key=lambda e: (e.start, e.stop))}


def _take_metadata(header: Header, metadata: object) -> None:
    if (
        isinstance(metadata, dict)
        and metadata
        and all(isinstance(value, str) for value in metadata.values())
    ):
        header.metadata = dict(metadata)
        return
    found = "none" if metadata in (None, {}) else "something else"
    header.report("__metadata__", "metadata present", "an object of strings", found)


def _entry(header: Header, key: str, value: object) -> Entry | None:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        header.report(key, "header entry", "shape and data_offsets", "none or senseless ones")
        return None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        header.report(key, "dtype known", "a dtype of the format", shortened(str(dtype)))
        return None
    shown, given = f"{dtype} {shortened(str(shape))}", offsets[1] - offsets[0]
    try:
        needed = element_count(shape) * ITEM_BYTES[dtype]
    except ValueError as error:
        header.report(key, "byte range", "a size that fits a file", f"{error} for {shown}")
        return None
    if needed != given:
        header.report(key, "byte range", f"{needed} bytes for {shown}", f"{given} bytes")
        return None
    start = header.payload
    return Entry(key, dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def _check_ranges(header: Header) -> None:
    """Tensors must follow each other without gap or overlap, from the header to the end of the
    file.
    """
    end, before = header.payload, "the header"
    for entry in header.entries.values():
        if entry.start != end:
            header.report(
                entry.key, "offsets contiguous",
                f"byte {end - header.payload}, right after {before}", entry.start - header.payload,
            )  # fmt: skip
        end, before = max(end, entry.stop), entry.key
    cut = [e.key for e in header.entries.values() if e.stop > header.size]
    if cut:
        header.report(
            cut[0], "payload complete", f"a file of {end} bytes",
            f"{header.size} bytes, {len(cut)} tensors are cut",
        )  # fmt: skip
    elif end < header.size:
        header.report(before, "payload complete", f"a file of {end} bytes", f"{header.size} bytes")


@dataclass(frozen=True)
class Piece:
    """Some bytes of a tensor: `data` starts at byte `offset` of it and holds until the next
    piece.
    """

    entry: Entry
    offset: int
    data: Bytes

    @property
    def whole(self) -> bool:
        """Whether this is all of the tensor."""
        return len(self.data) == self.entry.nbytes

    @property
    def last(self) -> bool:
        """Whether the tensor ends here."""
        return self.offset + len(self.data) == self.entry.nbytes


class FileScan:
    """Reads a file from its payload to its end, hashing in threads of its own.

    After `pieces` is exhausted: `payload_sha256` and, if asked for, `file_sha256`.
    """

    def __init__(self, header: Header, *, hash_file: bool = False) -> None:
        self.header = header
        self.bytes_read = 0
        self.payload_sha256 = self.file_sha256 = ""
        self._hashers = [hashlib.sha256()]
        if hash_file:
            head = header.path.open("rb")
            with head:
                self._hashers.append(hashlib.sha256(head.read(header.payload)))

    def pieces(self) -> Iterator[Piece]:
        """All tensors' bytes in file order; tensors without elements give one empty piece."""
        workers = [_Hasher(hasher) for hasher in self._hashers]
        try:
            entries = iter(self.header.entries.values())
            yield from self._scan(workers, _Cursor(entries))
        finally:
            digests = [worker.close() for worker in workers]
        self.payload_sha256 = digests[0]
        if len(digests) > 1:
            self.file_sha256 = digests[1]

    def _scan(self, workers: list["_Hasher"], cursor: "_Cursor") -> Iterator[Piece]:
        buffers = [np.empty(CHUNK, np.uint8) for _ in range(BUFFERS)]
        used: list[threading.Semaphore] = []
        with self.header.path.open("rb", buffering=0) as file:
            start = self.header.payload
            for number, position in enumerate(range(start, self.header.size, CHUNK)):
                if number >= BUFFERS:
                    for _ in workers:
                        used[number - BUFFERS].acquire()
                chunk = self._read(file.fileno(), position, buffers[number % BUFFERS])
                used.append(threading.Semaphore(0))
                for worker in workers:
                    worker.put(chunk, used[-1])
                self.bytes_read += len(chunk)
                yield from cursor.pieces(position, chunk)
        yield from cursor.rest()

    def _read(self, fd: int, position: int, buffer: Bytes) -> Bytes:
        wanted = min(CHUNK, self.header.size - position)
        done = 0
        try:
            while done < wanted:
                got = os.preadv(fd, [buffer[done:wanted].data], position + done)
                if not got:
                    break
                done += got
        except OSError as error:
            raise RecordingError(f"{self.header.path}: cannot be read: {error.strerror}") from None
        if done < wanted:
            raise RecordingError(f"{self.header.path}: became shorter while it was read")
        return buffer[:done]


class _Cursor:
    """Cuts chunks into pieces of the entries, which come ordered by their start."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries
        self._open: list[Entry] = []
        self._next = next(entries, None)

    def pieces(self, position: int, chunk: Bytes) -> Iterator[Piece]:
        end = position + len(chunk)
        while self._next is not None and self._next.start < end:
            self._open.append(self._next)
            self._next = next(self._entries, None)
        for entry in self._open:
            first, last = max(entry.start, position), min(entry.stop, end)
            if last >= first:
                yield Piece(entry, first - entry.start, chunk[first - position : last - position])
        self._open = [entry for entry in self._open if entry.stop > end]

    def rest(self) -> Iterator[Piece]:
        """Tensors without elements that stand at the very end."""
        while self._next is not None:
            if not self._next.nbytes:
                yield Piece(self._next, 0, np.empty(0, np.uint8))
            self._next = next(self._entries, None)


class _Hasher:
    """Feeds one hash from a thread; `put` returns at once."""

    def __init__(self, hasher: Any) -> None:
        self._hasher = hasher
        self._queue: queue.SimpleQueue[tuple[Bytes, threading.Semaphore] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, chunk: Bytes, done: threading.Semaphore) -> None:
        self._queue.put((chunk, done))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            chunk, done = item
            self._hasher.update(chunk.data)
            done.release()

    def close(self) -> str:
        self._queue.put(None)
        self._thread.join()
        return str(self._hasher.hexdigest())
