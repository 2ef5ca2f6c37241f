"""Reading and writing of safetensors files, valid and damaged, for tests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """A tensor as it lies in a file."""

    dtype: str
    shape: list[int]
    data: bytes


def load(path: Path) -> dict[str, Stored]:
    """The tensors of a well-formed file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        data = raw[8 + length + first : 8 + length + last]
        out[name] = Stored(entry["dtype"], entry["shape"], data)
    return out


def header_of(tensors: dict[str, Stored]) -> dict[str, Any]:
    """The header that describes these tensors one after the other."""
    out: dict[str, Any] = {}
    offset = 0
    for name, t in tensors.items():
        out[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, 0]}
        offset += len(t.data)
        out[name]["data_offsets"][1] = offset
    return out


def write(path: Path, header: bytes, payload: bytes) -> None:
    """A file from its two parts; the header's length is told truthfully."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def save(path: Path, tensors: dict[str, Stored]) -> None:
    """A well-formed file."""
    payload = b"".join(t.data for t in tensors.values())
    write(path, json.dumps(header_of(tensors)).encode(), payload)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` falsify a file's header, payload untouched."""
    tensors = load(path)
    header = header_of(tensors)
    change(header)
    write(path, json.dumps(header).encode(), b"".join(t.data for t in tensors.values()))


def edit_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Let `change` edit the weight map."""
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def edit_config(directory: Path, **fields: object) -> None:
    """Set fields of config.json; `...` removes one."""
    config = json.loads((directory / "config.json").read_text())
    config |= fields
    kept = {name: value for name, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))


def edit(directory: Path, change: Callable[[str, Stored], dict[str, Stored]]) -> None:
    """Replace every tensor by those that `change(name, tensor)` returns; the index follows."""
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(directory.glob("*.safetensors")):
        tensors: dict[str, Stored] = {}
        for name, tensor in load(path).items():
            tensors |= change(name, tensor)
        save(path, tensors)
        weight_map |= dict.fromkeys(tensors, path.name)
        size += sum(len(t.data) for t in tensors.values())
    if (directory / INDEX).exists():
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index))


def replace(directory: Path, wanted: str, *stored: Any) -> None:
    """Give one tensor another (dtype, shape, data)."""
    edit(directory, lambda name, t: {name: Stored(*stored) if name == wanted else t})


def rename(directory: Path, new_name: Callable[[str], str | None]) -> None:
    """Give tensors other names; None removes one."""
    edit(directory, lambda name, t: {n: t} if (n := new_name(name)) else {})


def copy(source: Path, directory: Path) -> Path:
    """A copy that may be written to."""
    directory.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, directory / path.name)
    return directory
