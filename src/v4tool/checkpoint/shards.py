"""Reader of a checkpoint: whole tensors, or some of their rows (SPEC section 2).

Headers and trailing zeros of the files are checked on opening; NaN scales, tensors of zeros and
invalid routing tables when a tensor is read. `pread` reads into the tensor's own memory, so peak
memory is what the caller holds, for files of any size. Left out: decoding the number formats
(`quant`), NaN codes in weights (`v4tool check --port`).
"""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from v4tool.checkpoint.inspection import compare
from v4tool.checkpoint.layout import TensorSpec, layout
from v4tool.checkpoint.payload import (
    PROBE,
    check_bias,
    check_experts,
    never_zero,
    scale_codes,
    zero_tails,
)
from v4tool.checkpoint.tensor_index import TensorIndex, catalogue
from v4tool.config import ModelConfig
from v4tool.errors import CheckpointError
from v4tool.page_cache import dont_need, memory, will_need
from v4tool.safetensors_header import Entry

TORCH_DTYPES = {
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "U8": torch.uint8,
    "F4": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
_MAX_READ = 1 << 30
"""Linux transfers at most 2 GiB a call."""


class Checkpoint:
    """An open checkpoint; several threads may read at once; a context manager.

    config: its ModelConfig; directory; fingerprint: hex, see `TensorIndex.fingerprint`; notes:
    remarks for the user; specs: name -> TensorSpec of what may be read; bytes_read: bytes taken
    from the files.
    """

    def __init__(
        self,
        found: TensorIndex,
        config: ModelConfig,
        specs: dict[str, TensorSpec],
        notes: list[str],
        *,
        drop_pages: bool,
        allow_nan: bool,
    ) -> None:
        self.config = config
        self.directory = found.directory
        self.fingerprint = found.fingerprint()
        self.notes = notes
        self.specs = specs
        self.drop_pages = drop_pages
        self.allow_nan = allow_nan
        self.bytes_read = 0
        self._found = found
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._not_zero: set[str] = set()

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        mtp: bool = True,
        drop_pages: bool | None = None,
        config: ModelConfig | None = None,
        allow_nan: bool = False,
    ) -> Self:
        """Open and check a checkpoint directory.

        mtp: without it, `mtp.*` is neither checked nor readable (other designs of MTP can be left
        out). drop_pages: take a tensor's pages out of the page cache once read; by default when
        the checkpoint is larger than half of the memory, where keeping them would only push out
        others. allow_nan: scales and biases may be NaN when they are read. Raises ConfigError or
        CheckpointError, one line that names all problems found.
        """
        found = catalogue(directory)
        config = config or ModelConfig.from_file(found.directory / "config.json")
        if not found.problems:
            found.problems += zero_tails(found, layout(config))
        result = compare(found, config, mtp=mtp)
        # the tensors of a missing or damaged file are not reported a second time
        problems = found.problems or result.problems
        if problems:
            raise CheckpointError(f"{found.directory}: {'; '.join(problems)}")
        if drop_pages is None:
            drop_pages = sum(h.size for h in found.headers.values()) > memory() // 2
        notes = found.notes + result.notes
        return cls(found, config, result.specs, notes, drop_pages=drop_pages, allow_nan=allow_nan)

    def __contains__(self, name: str) -> bool:
        return name in self.specs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        with self._lock:
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor on disk."""
        return self._entry(name).nbytes

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """A whole tensor in the layout's shape.

        F8_E4M3, F8_E8M0 and I8 come as uint8 codes (two FP4 codes to a byte; stored as U8 or F4
        they are the same), BF16, F32, I32 and I64 as they are. buffer: a contiguous uint8 tensor
        to read into (fresh memory is slow); the result is then a view of it. Raises
        CheckpointError when the values cannot be right.
        """
        entry = self._entry(name)
        return self._load(name, entry, entry.start, self.specs[name].shape, buffer)

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """Rows start ... stop-1 of the first dimension; otherwise as `read`."""
        entry = self._entry(name)
        rows, row_bytes = _rows(entry)
        if not 0 <= start <= stop <= rows:
            raise CheckpointError(
                f"{name}: expected rows within 0 ... {rows}, found {start}:{stop}"
            )
        shape = (stop - start, *self.specs[name].shape[1:])
        return self._load(name, entry, entry.start + start * row_bytes, shape, buffer)

    def gather_rows(self, name: str, rows: Tensor | Sequence[int]) -> Tensor:
        """The given rows, `[*rows.shape, ...]`; each is read once, consecutive ones together."""
        entry = self._entry(name)
        count, row_bytes = _rows(entry)
        wanted, inverse = torch.unique(
            torch.as_tensor(rows, dtype=torch.int64), return_inverse=True
        )
        if wanted.numel() and (wanted[0] < 0 or wanted[-1] >= count):
            raise CheckpointError(
                f"{name}: expected rows 0 ... {count - 1}, found {wanted[0]} ... {wanted[-1]}"
            )
        raw = torch.empty(wanted.numel() * row_bytes, dtype=torch.uint8)
        done = 0
        for first, length in _runs(wanted.tolist()):
            part = raw[done * row_bytes : (done + length) * row_bytes]
            self._fill(name, entry.start + first * row_bytes, part)
            done += length
        values = self._interpret(name, entry, raw, (wanted.numel(), *self.specs[name].shape[1:]))
        return values[inverse]

    def advise(self, names: Iterable[str]) -> None:
        """Ask the kernel to read these tensors into the page cache; returns at once."""
        for name in names:
            entry = self._entry(name)
            will_need(self._fd(name), entry.start, entry.nbytes)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from the page cache, whatever `drop_pages` says."""
        entry = self._entry(name)
        dont_need(self._fd(name), entry.start, entry.nbytes)

    def _entry(self, name: str) -> Entry:
        if name not in self.specs:
            raise CheckpointError(f"{self.directory}: there is no tensor {name}")
        return self._found.entry(name)

    def _fd(self, name: str) -> int:
        file = self._found.files[name]
        with self._lock:
            if file not in self._fds:
                try:
                    self._fds[file] = os.open(self.directory / file, os.O_RDONLY)
                except OSError as e:
                    raise CheckpointError(f"{self.directory / file}: {e.strerror}") from None
            return self._fds[file]

    def _load(
        self,
        name: str,
        entry: Entry,
        offset: int,
        shape: tuple[int, ...],
        buffer: Tensor | None,
    ) -> Tensor:
        nbytes = entry.nbytes if shape == self.specs[name].shape else shape[0] * _rows(entry)[1]
        raw = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer[:nbytes]
        self._fill(name, offset, raw)
        return self._interpret(name, entry, raw, shape)

    def _fill(self, name: str, offset: int, raw: Tensor) -> None:
        """Read raw.numel() bytes from `offset` of the tensor's file."""
        fd, view, done = self._fd(name), raw.numpy().data, 0
        while done < len(view):
            try:
                got = os.preadv(fd, [view[done : done + _MAX_READ]], offset + done)
            except OSError as e:
                raise CheckpointError(f"{self._found.files[name]}: {name}: {e.strerror}") from None
            if not got:
                raise CheckpointError(f"{self._found.files[name]}: {name}: the file ends early")
            done += got
        with self._lock:
            self.bytes_read += done
        if self.drop_pages:
            dont_need(fd, offset, done)

    def _interpret(self, name: str, entry: Entry, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Bytes as values in the layout's form; CheckpointError for invalid ones."""
        spec = self.specs[name]
        dtype = TORCH_DTYPES[entry.dtype]
        values = (raw if dtype == raw.dtype else raw.view(dtype)).view(shape)
        if never_zero(name, spec):
            self._require_not_zero(name, entry, raw)
        if spec.dtype == "F8_E8M0":
            values = scale_codes(name, values, allow_nan=self.allow_nan)
        if name.endswith(".gate.bias") and not self.allow_nan:
            check_bias(name, values)
        if name.endswith(".tid2eid"):
            check_experts(name, values, self.config.n_routed_experts)
        return values

    def _require_not_zero(self, name: str, entry: Entry, raw: Tensor) -> None:
        """CheckpointError if all of a tensor is zero; `raw`, the part that was read, may be."""
        if name in self._not_zero or any(raw.numpy().data[:PROBE]) or raw.any():
            self._not_zero.add(name)
            return
        piece = torch.empty(min(entry.nbytes, 1 << 24), dtype=torch.uint8)
        for start in range(entry.start, entry.stop, len(piece)):
            part = piece[: entry.stop - start]
            self._fill(name, start, part)
            if part.any():
                self._not_zero.add(name)
                return
        raise CheckpointError(
            f"{self._found.files[name]}: {name}: all {entry.nbytes} bytes are zero, "
            "as after a download that was not finished"
        )


def _rows(entry: Entry) -> tuple[int, int]:
    """Number of rows and bytes per row."""
    return entry.shape[0], entry.nbytes // max(entry.shape[0], 1)


def _runs(rows: list[int]) -> Iterable[tuple[int, int]]:
    """Ascending numbers as (first, length) of consecutive ones."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield rows[start], i - start
            start = i
