"""Single-pass scan of a recording: its header, then the payload in pieces, hashed while reading.

Nothing here raises for a damaged file: defects of the header (`safetensors_header`) are findings,
so that `check` can report all of them, and every tensor with a valid entry is read. Memory is a few
chunks for a file of any size. Left out: what the tensors mean (`check`), and access by key to whole
tensors (`reader`).
"""

import hashlib
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from v4tool.errors import Finding, RecordingError
from v4tool.safetensors_header import (
    Entry,
    HeaderFields,
    HeaderRules,
    in_file_order,
    parse_header,
)
from v4tool.untrusted import kind_of

Bytes = npt.NDArray[np.uint8]

CHUNK = 2 << 20
"""Bytes read and hashed at a time: small enough to stay in the cache between the two."""
BUFFERS = 12
"""Number of chunks in memory: how far reading may run ahead of hashing."""
RULES = HeaderRules(min_length=2, integer_limit=1 << 62, metadata=True)
"""What a recording's header must fulfil beside the format; the limit keeps sums within 64 bits."""


@dataclass(kw_only=True)
class Header(HeaderFields):
    """The header of a recording, with its defects.

    entries: the valid ones, in order of their byte ranges; findings: whatever the format forbids.
    """

    path: Path
    findings: list[Finding] = field(default_factory=list)

    def readable(self, key: str) -> bool:
        """Whether the file has all of the tensor's bytes."""
        return self.entries[key].stop <= self.size


def read_header(path: Path | str) -> Header:
    """Read and check a file's header; RecordingError only if the file cannot be read."""
    path = Path(path)
    if kind_of(path) == "a pipe or device":
        raise RecordingError(f"{path}: expected a file, found a pipe or device")
    try:
        with path.open("rb") as file:
            header = Header(path=path, size=os.fstat(file.fileno()).st_size)
            header.findings = [d.finding for d in parse_header(file, header, RULES)]
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    header.entries = in_file_order(header.entries)
    return header


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
