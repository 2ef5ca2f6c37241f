"""Streaming safetensors writer: appends tensors as they are computed, from a background thread.

The header precedes the payload but is known only at the end, so space for it is reserved and padded
with spaces, which the format allows. All bytes go to `<name>.partial`, and the SHA-256 of the
payload is computed while writing; `close` writes the header, calls fsync and renames, so a file
under its final name is always complete.

Tensors are stored in the order of `put`, except for alignment: safetensors' readers require each
tensor to be aligned to its element size, so 8-byte tensors are stored last, and 4-byte tensors with
an odd number of elements in pairs. The payload depends on the values alone, not on threads, machine
or time.

Values are converted into a buffer of a fixed size, which is passed to the writing thread when it is
full and reused when it is written: memory is allocated only at the start, and the threads
synchronise once a buffer instead of once a tensor. For the same reason the search for NaN and
infinity is one sum a buffer; only if it is not finite, `inspect` is called with single tensors.
"""

import fcntl
import hashlib
import json
import math
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from v4tool.errors import OutputError
from v4tool.page_cache import write_back

DTYPES = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
BUFFER_BYTES = 4 << 20
"""Size of one buffer; a multiple of every element size."""
BUFFERS = 16
"""Number of buffers: how far computing may run ahead of writing."""
WRITE_BACK = 32 << 20
"""Bytes after which write-back to the disk is started, so that the final fsync has little to do."""
HEADER_BYTES_PER_TENSOR = 176
"""Reserved for one header entry: more than the longest name, shape and offsets of a large model."""


def recorded(value: Tensor) -> torch.dtype:
    """The dtype a value is recorded in: FP32 for floats, integers in their own (SPEC 6)."""
    return torch.float32 if value.is_floating_point() else value.dtype


def _header_room(nbytes: int) -> int:
    """Bytes reserved for a header: with the 8 of its length they end at a page."""
    return -(-(nbytes + 8) // 4096) * 4096 - 8


Inspect = Callable[[str, Tensor], None]
"""Called with a name and a value that may hold NaN or infinity."""


def _ignore(name: str, value: Tensor) -> None:
    """An `Inspect` that accepts everything."""


class _Buffer:
    """One buffer, viewed as bytes and as elements of every recorded dtype; `filled` in bytes.

    floats: the ranges of elements that are floats, adjacent ones merged.
    """

    def __init__(self) -> None:
        memory = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        self.bytes = memory.numpy().data
        self.elements = {dtype: memory.view(dtype) for dtype in DTYPES}
        self.filled = 0
        self.floats: list[list[int]] = []

    def append(self, value: Tensor, dtype: torch.dtype) -> None:
        """Convert a value that fits into the rest of the buffer."""
        start = self.filled // dtype.itemsize
        stop = start + value.numel()
        self.elements[dtype][start:stop].view(value.shape).copy_(value)
        self.filled = stop * dtype.itemsize
        if dtype == torch.float32:
            if self.floats and self.floats[-1][1] == start:
                self.floats[-1][1] = stop
            else:
                self.floats.append([start, stop])

    def all_finite(self) -> bool:
        """Whether the sums of the floats are finite, and so all floats are.

        False may also come from large finite values whose sum overflows.
        """
        values = self.elements[torch.float32]
        return all(math.isfinite(values[a:b].sum().item()) for a, b in self.floats)

    def clear(self) -> None:
        """Empty the buffer for reuse."""
        self.filled = 0
        self.floats.clear()


class RecordingWriter:
    """Writes one recording; as a context manager it discards the file unless `close` was called.

    path: the final name. most_tensors: upper bound of the number of tensors, to reserve space for
    the header; where the header is longer after all, `close` moves the payload. metadata: strings
    of `__metadata__`; `close` adds `payload_sha256`. force: replace an existing file. inspect:
    called, in the order of `put`, with tensors of which a sum is not finite and with those that
    span buffers; `put`, `inspect_new` and `close` raise what it raises.
    Raises OutputError if the file cannot be written, exists, or is being written.
    """

    def __init__(
        self,
        path: Path,
        most_tensors: int,
        metadata: dict[str, str],
        *,
        force: bool = False,
        inspect: Inspect = _ignore,
    ) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.metadata = dict(metadata)
        self._refuse_existing(force)
        room = sum(len(json.dumps([k, v])) + 8 for k, v in metadata.items()) + 512
        self._header_room = _header_room(most_tensors * HEADER_BYTES_PER_TENSOR + room)
        self._names: set[str] = set()
        self._entries: dict[str, dict[str, Any]] = {}
        self._offset = 0
        self._last: list[tuple[str, Tensor]] = []
        self._odd: tuple[str, Tensor] | None = None
        self._sha = hashlib.sha256()
        self._error: OSError | None = None
        self._inspect = inspect
        self._not_inspected: list[tuple[str, int, torch.Size]] = []
        self._buffer = _Buffer()
        self._buffers = 1
        self._full: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._open()
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def _refuse_existing(self, force: bool) -> None:
        if self.path.is_dir():
            raise OutputError(f"{self.path}: expected a file name, found a directory")
        if self.path.exists() and not force:
            raise OutputError(f"{self.path}: exists already; use --force to replace it")

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            if not self._lock():
                self._file.close()
                raise OutputError(f"{self.path}: another run is writing this file")
            self._file.truncate(0)
            self._file.seek(8 + self._header_room)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from None

    def _lock(self) -> bool:
        """Lock the partial file; False if another run holds the lock or has just renamed it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(self._file.fileno()).st_ino == self.partial.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            return False

    def put(self, name: str, value: Tensor) -> None:
        """Append one tensor, any shape: floats are converted to FP32, integers I32 or I64.

        The value is copied and may be changed afterwards. OutputError if writing has failed,
        ValueError for a name that was used before.
        """
        if name in self._names:
            raise ValueError(f"{name} was recorded twice")
        self._names.add(name)
        if recorded(value).itemsize == 8:
            self._last.append((name, value.clone()))
        elif value.numel() % 2 == 0:
            self._write(name, value)
        elif self._odd is None:
            self.inspect_new()
            self._inspect(name, value)
            self._odd = (name, value.clone())
        else:
            pair, self._odd = self._odd, None
            self._write(*pair)
            self._write(name, value)

    def _write(self, name: str, value: Tensor) -> None:
        dtype = recorded(value)
        nbytes = value.numel() * dtype.itemsize
        self._entries[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(value.shape),
            "data_offsets": [self._offset, self._offset + nbytes],
        }
        self._offset += nbytes
        if self._buffer.filled + nbytes <= BUFFER_BYTES:
            if dtype == torch.float32:
                self._not_inspected.append((name, self._buffer.filled // 4, value.shape))
            self._buffer.append(value, dtype)
            return
        self.inspect_new()
        self._inspect(name, value)
        flat = value.flatten()
        while len(flat):
            if self._buffer.filled == BUFFER_BYTES:
                self._submit()
            room = (BUFFER_BYTES - self._buffer.filled) // dtype.itemsize
            self._buffer.append(flat[:room], dtype)
            flat = flat[room:]

    def inspect_new(self) -> None:
        """Call `inspect` for the tensors since the last call, if any may hold NaN or infinity.

        The writer calls it before it submits a buffer; a caller that also inspects values that are
        not recorded calls it before each of them, to keep the order.
        """
        new, self._not_inspected = self._not_inspected, []
        if not new or self._buffer.all_finite():
            return
        values = self._buffer.elements[torch.float32]
        for name, start, shape in new:
            self._inspect(name, values[start : start + shape.numel()].view(shape))

    def _submit(self) -> None:
        """Pass the current buffer to the writing thread and take a free or new one."""
        self._full.put(self._buffer)
        if self._free.empty() and self._buffers < BUFFERS:
            self._buffer = _Buffer()
            self._buffers += 1
        else:
            self._buffer = self._free.get()
        self._raise_error()

    def _write_all(self) -> None:
        begun = 0
        while (buffer := self._full.get()) is not None:
            try:
                if self._error is None:
                    data = buffer.bytes[: buffer.filled]
                    self._file.write(data)
                    self._sha.update(data)
                    begun = self._begin_write_back(begun)
            except OSError as error:
                self._error = error
            buffer.clear()
            self._free.put(buffer)

    def _begin_write_back(self, begun: int) -> int:
        """Start write-back of the bytes since offset `begun`, if enough; the new offset."""
        if (end := self._file.tell()) - begun < WRITE_BACK:
            return begun
        self._file.flush()
        write_back(self._file.fileno(), begun, end - begun)
        return end

    def _raise_error(self) -> None:
        if self._error is not None:
            reason = self._error.strerror or self._error
            raise OutputError(f"{self.path}: cannot be written: {reason}")

    def close(self) -> str:
        """Write the header, rename to the final name; returns the payload's SHA-256, hexadecimal.

        OutputError if writing has failed.
        """
        for name, value in [*self._last, *([self._odd] if self._odd else [])]:
            self._write(name, value)
        self.inspect_new()
        self._full.put(self._buffer)
        self._stop()
        self._raise_error()
        try:
            digest = self._finish()
        except OSError as error:
            self._error = error
            self._raise_error()
            raise AssertionError from error
        return digest

    def _finish(self) -> str:
        digest = self._sha.hexdigest()
        header = {"__metadata__": {**self.metadata, "payload_sha256": digest}, **self._entries}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._header_room:
            self._move_payload(_header_room(len(text)))
        self._file.seek(0)
        self._file.write(self._header_room.to_bytes(8, "little") + text.ljust(self._header_room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.partial.replace(self.path)
        self._file.close()
        return digest

    def _move_payload(self, room: int) -> None:
        """Make room for a header that is longer than the space reserved, from the file's end on."""
        end = self._file.seek(0, os.SEEK_END)
        for start in reversed(range(8 + self._header_room, end, BUFFER_BYTES)):
            self._file.seek(start)
            data = self._file.read(BUFFER_BYTES)
            self._file.seek(start + room - self._header_room)
            self._file.write(data)
        self._header_room = room

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._full.put(None)
            self._thread.join()

    def discard(self) -> None:
        """Remove the partial file; an older file under the final name stays."""
        self._stop()
        self.partial.unlink(missing_ok=True)
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self._file.close()

    @property
    def payload_bytes(self) -> int:
        """Number of payload bytes so far."""
        return self._offset

    @property
    def tensors(self) -> int:
        """Number of tensors in the file so far, without those kept back for alignment."""
        return len(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self.discard()
