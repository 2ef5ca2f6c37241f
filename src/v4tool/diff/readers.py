"""Reads tensors that other engines wrote, lazily and by name: no value is read before it is asked.

Forms: a safetensors file or a directory of them; `.npz`; directories of `.npy` or of `.pt` (read
with `weights_only`, so that nothing in them is executed); a JSON-lines index beside raw `.bin`
files. Values may be BF16, F16, F32, F64 or integers. Left out: what the names mean (`maps`).
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from v4tool.errors import RecordingError

NUMBER = re.compile(r"^\d+__")
"""A running number before a tensor's name, as some engines' tensor dumps write it."""
BIN_DTYPES = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "i32": "<i4", "i64": "<i8", "bf16": "<u2"}


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor of a candidate: its shape, and how its value is read.

    alias_of: the name under which the same tensor is listed first.
    """

    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    alias_of: str | None = None


@dataclass
class ForeignTensors:
    """All tensors of a candidate by name, and what the files say of themselves."""

    path: Path
    tensors: dict[str, ForeignTensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        load: Callable[[], Tensor],
        alias_of: str | None = None,
    ) -> None:
        """Enter a tensor; RecordingError where the name is there already."""
        if name in self.tensors:
            raise RecordingError(f"{self.path}: expected each name once, found {name} twice")
        self.tensors[name] = ForeignTensor(shape, load, alias_of)


def open_tensors(path: Path) -> ForeignTensors:
    """The tensors of a file or directory; RecordingError, one line, where it cannot be read."""
    if not path.exists():
        raise RecordingError(f"{path}: there is no such file or directory")
    found = ForeignTensors(path)
    if path.is_dir():
        _open_directory(path, found)
    else:
        _reader_of(path)(path, found)
    if not found.tensors:
        raise RecordingError(f"{path}: expected tensors, found none")
    return found


Reader = Callable[[Path, ForeignTensors], None]


def _reader_of(path: Path) -> Reader:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise RecordingError(
            f"{path}: expected {', '.join(sorted(_READERS))} or a directory of them, "
            f"found {path.suffix or 'no suffix'}"
        )
    return reader


def _open_directory(path: Path, found: ForeignTensors) -> None:
    for suffix in (".jsonl", ".safetensors", ".npz", ".npy", ".pt"):
        files = sorted(path.glob(f"*{suffix}"))
        for file in files:
            _READERS[suffix](file, found)
        if files:
            return


def _open_safetensors(path: Path, found: ForeignTensors) -> None:
    try:
        file: Any = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise RecordingError(f"{path}: cannot be read as safetensors: {error}") from None
    found.metadata |= file.metadata() or {}
    for name in file.keys():  # noqa: SIM118  (not a mapping)
        shape = tuple(file.get_slice(name).get_shape())
        found.add(name, shape, partial(file.get_tensor, name))


def _open_npz(path: Path, found: ForeignTensors) -> None:
    try:
        file = np.load(path, allow_pickle=False)
        for name in file.files:
            found.add(name, _npz_shape(file, name), partial(_npz_member, file, name))
    except (OSError, ValueError, BadZipFile) as error:
        raise RecordingError(f"{path}: cannot be read as .npz: {error}") from None


def _npz_member(file: Any, name: str) -> Tensor:
    return _from_numpy(file[name])


def _npz_shape(file: Any, name: str) -> tuple[int, ...]:
    with file.zip.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version == (1, 0):
            return tuple(np.lib.format.read_array_header_1_0(member)[0])
        return tuple(np.lib.format.read_array_header_2_0(member)[0])


def _open_npy(path: Path, found: ForeignTensors) -> None:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path}: cannot be read as .npy: {error}") from None
    found.add(NUMBER.sub("", path.stem), array.shape, lambda: _from_numpy(np.array(array)))


def _open_pt(path: Path, found: ForeignTensors) -> None:
    def load() -> Any:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise RecordingError(f"{path}: cannot be read as tensors alone: {reason}") from None

    stem = NUMBER.sub("", path.stem)

    def member(name: str) -> Tensor:
        return dict(_named(stem, load()))[name]

    for name, value in _named(stem, load()):
        found.add(name, tuple(value.shape), partial(member, name))


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its name; those of a tuple or dictionary under `name.0`, `name.key`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _named(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _named(f"{name}.{number}", inner)


def _open_jsonl(path: Path, found: ForeignTensors) -> None:
    """One line a tensor: name, dtype, shape (or ggml's `ne`), file, offset; `pass`, `occ`.

    A tensor of pass p > 0 gets the name `pass<p>/NAME`; its second occurrence `NAME#1`; and every
    result of an operation OP with a weight W also `OP(W)`, for tensors without a name of their own.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            _enter(json.loads(line), path, found)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordingError(
                f"{path}:{number}: expected name, dtype, shape or ne, file, offset, "
                f"found {type(error).__name__}: {error}"
            ) from None


def _enter(entry: dict[str, Any], index: Path, found: ForeignTensors) -> None:
    shape = tuple(entry["shape"]) if "shape" in entry else tuple(reversed(entry["ne"]))
    dtype, file = BIN_DTYPES[str(entry["dtype"]).lower()], index.parent / entry["file"]
    offset = int(entry["offset"])

    def load() -> Tensor:
        count = int(np.prod(shape, dtype=np.int64))
        try:
            array = np.fromfile(file, dtype, count, offset=offset)
        except OSError as error:
            raise RecordingError(f"{file}: {error.strerror or error}") from None
        if array.size != count:
            raise RecordingError(f"{file}: expected {count} values at {offset}, found {array.size}")
        return _from_numpy(array.reshape(shape), bf16=entry["dtype"] == "bf16")

    prefix = f"pass{entry['pass']}/" if entry.get("pass") else ""
    first = f"{prefix}{entry['name']}"
    name, number = first, int(entry.get("occ", 0))
    while number or name in found.tensors:
        name = f"{first}#{max(number, 1)}"
        if name not in found.tensors:
            break
        number = max(number, 1) + 1
    found.add(name, shape, load)
    if entry.get("src") and str(entry["src"][0]).endswith(".weight"):
        alias = f"{prefix}{entry['op']}({entry['src'][0]})"
        if alias not in found.tensors:
            found.add(alias, shape, load, alias_of=name)


def _from_numpy(array: np.ndarray[Any, Any], *, bf16: bool = False) -> Tensor:
    """A NumPy array as a tensor; 16 bits that stand for BF16 as such."""
    if bf16:
        return torch.from_numpy(array.astype(np.int16, copy=False)).view(torch.bfloat16)
    if array.dtype == np.uint16:
        array = array.astype(np.int32)
    return torch.from_numpy(np.ascontiguousarray(array))


_READERS: dict[str, Reader] = {
    ".safetensors": _open_safetensors,
    ".npz": _open_npz,
    ".npy": _open_npy,
    ".pt": _open_pt,
    ".jsonl": _open_jsonl,
}
