"""Random access to the tensors of one recording, with a bounded in-memory cache.

BF16-valued keys are kept as 16 bits a value. The cache has a budget of bytes; what does not fit is
read from the file again, some rows at a time, so that memory does not grow with the recording.
Only keys with the right dtype and shape can be read (`specification.check_keys` selects them).
"""

import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import F32, Bits, Ints, upper_halves
from v4tool.errors import RecordingError
from v4tool.names import EXPERT, Kind
from v4tool.record.scan import Header

Array = npt.NDArray[Any]

CACHE_BYTES = 96 << 20
LARGEST_CACHED = 48 << 20
"""Bytes of the largest tensor that is cached."""
STORED = {"F32": np.float32, "I32": np.int32, "I64": np.int64}


class FileTensors:
    """The usable tensors of one file; safe for use from several threads.

    kinds: the usable keys and the kind of their values; budget: bytes of the cache; experts:
    numbers of the recorded experts by the prefix before `experts.` in their keys.
    """

    def __init__(self, header: Header, kinds: dict[str, Kind], budget: int = CACHE_BYTES) -> None:
        self.header, self.kinds, self.budget = header, kinds, budget
        self._cache: OrderedDict[str, Array] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()
        self._fd = os.open(header.path, os.O_RDONLY)
        self.experts: dict[str, list[int]] = {}
        for key in kinds:
            if key.endswith("w2.out") and (match := EXPERT.search(key)):
                self.experts.setdefault(key[: match.start()], []).append(int(match[1]))

    def close(self) -> None:
        """Close the file and empty the cache."""
        os.close(self._fd)
        self._cache.clear()

    def __contains__(self, key: str) -> bool:
        return key in self.kinds

    def has(self, *keys: str) -> bool:
        """Whether all of the keys are usable."""
        return all(key in self.kinds for key in keys)

    def shape(self, key: str) -> tuple[int, ...]:
        """The key's shape as recorded."""
        return self.header.entries[key].shape

    def count(self, key: str) -> int:
        """Number of rows: tokens, blocks, or rows of keys and values."""
        return _rows(self.shape(key))[0]

    def bits(self, key: str, start: int = 0, stop: int | None = None) -> Bits:
        """Rows of a BF16-valued key: uint16 [rows, ...], the recorded shape without the batch."""
        return self._get(key, start, stop)

    def floats(self, key: str, start: int = 0, stop: int | None = None) -> F32:
        """Rows of an acc-valued key: F32 [rows, ...]."""
        return self._get(key, start, stop)

    def ints(self, key: str, start: int = 0, stop: int | None = None) -> Ints:
        """Rows of an integer key: int64 [rows, ...]."""
        return self._get(key, start, stop)

    def put(self, key: str, values: Array) -> None:
        """Add a whole tensor, as `packed` returns it, to the cache; the oldest ones are dropped."""
        if values.nbytes > LARGEST_CACHED:
            return
        with self._lock:
            if key in self._cache:
                return
            self._cache[key] = values
            self._held += values.nbytes
            while self._held > self.budget:
                _, oldest = self._cache.popitem(last=False)
                self._held -= oldest.nbytes

    def forget(self, prefix: str, keep: str) -> None:
        """Drop all keys with this prefix except one from the cache."""
        with self._lock:
            for key in [k for k in self._cache if k.startswith(prefix) and k != keep]:
                self._held -= self._cache.pop(key).nbytes

    def _get(self, key: str, start: int, stop: int | None) -> Array:
        rows, rest = _rows(self.shape(key))
        stop = rows if stop is None else min(stop, rows)
        with self._lock:
            whole = self._cache.get(key)
        if whole is None:
            part = self._read(key, start, stop, rows)
            if stop - start < rows:
                return part.reshape(stop - start, *rest)
            self.put(key, part)
            whole = part
        return whole.reshape(rows, *rest)[start:stop]

    def _read(self, key: str, start: int, stop: int, rows: int) -> Array:
        entry = self.header.entries[key]
        width = entry.nbytes // max(rows, 1)
        raw = np.empty((stop - start) * width, np.uint8)
        done, position = 0, entry.start + start * width
        while done < raw.nbytes:
            got = os.preadv(self._fd, [raw[done:].data], position + done)
            if not got:
                raise RecordingError(f"{self.header.path}: became shorter while it was read")
            done += got
        return packed(raw, entry.dtype, self.kinds[key])


def packed(raw: npt.NDArray[np.uint8], dtype: str, kind: Kind) -> Array:
    """Stored bytes as an array: BF16 values as uint16, integers as int64, others as F32."""
    values: Array = raw.view(STORED[dtype])
    if kind == "bf16":
        return upper_halves(values)
    return values.astype(np.int64) if kind == "int" else values


def _rows(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Number of rows and shape of one row, without the batch dimension of 1 if there is one."""
    if len(shape) >= 3 and shape[0] == 1:
        shape = shape[1:]
    return shape[0], shape[1:]
