"""Index of a checkpoint directory: the file of each tensor, from the JSON index and all headers.

Follows SPEC section 2's `model.safetensors.index.json`; without one, the shards' headers are used
alone. Problems are collected, so that a user sees all missing files at once. Left out: whether
these are the tensors that the configuration asks for (`inspection.py`).
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from v4tool.checkpoint.header import Header, read_header
from v4tool.errors import CheckpointError, printable
from v4tool.file_kinds import json_text
from v4tool.safetensors_header import Entry
from v4tool.untrusted import kind_of, parse_json, read_small, shortened

INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors", re.ASCII)
_SHOWN = 4


@dataclass
class TensorIndex:
    """The shards and tensors of a directory.

    headers: by file name. files: file name by tensor. listed: tensor names in the JSON index, none
    without one. problems: reasons to refuse the directory. notes: remarks for the user.
    """

    directory: Path
    headers: dict[str, Header] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    listed: frozenset[str] = frozenset()
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def entry(self, name: str) -> Entry:
        """Dtype, shape and byte range of a tensor in its file."""
        return self.headers[self.files[name]].tensors[name]

    def entries(self) -> dict[str, Entry]:
        """Every tensor that can be read."""
        return {name: self.entry(name) for name in self.files}

    def fingerprint(self) -> str:
        """SHA-256 (hex) over the sorted weight map and each shard's name, size and header digest.

        The payload is left out, so that it takes a second for 149 GiB. The headers are hashed as
        stored, so the same weights under another dtype's name have another fingerprint.
        """
        digest = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            digest.update(f"{name} {file}\n".encode())
        for file, header in sorted(self.headers.items()):
            digest.update(f"{file} {header.size} {header.digest}\n".encode())
        return digest.hexdigest()


def some(names: Iterable[str]) -> str:
    """The first few names and the number of the others in one line, escaped and shortened."""
    names = [shortened(printable(name), 200) for name in names]
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def catalogue(directory: Path | str) -> TensorIndex:
    """Read the index and all headers of a checkpoint directory.

    Raises CheckpointError if nothing can be read (no directory, no shards, an unusable index); all
    other defects are in `problems`.
    """
    directory = Path(directory)
    _require_directory(directory)
    present = sorted(p.name for p in directory.glob("*.safetensors") if p.name[0] != ".")
    out = TensorIndex(directory)
    if (directory / INDEX).exists():
        weight_map, total_size = _read_index(directory / INDEX)
        _read_headers(out, sorted(set(weight_map.values())))
        _assign_files(out, weight_map)
        _note_leftovers(out, present, total_size)
    elif present:
        _read_headers(out, _expected_shards(out, present))
        _assign_files(out, None)
    else:
        raise CheckpointError(_nothing_there(directory))
    return out


def _require_directory(directory: Path) -> None:
    kind = kind_of(directory)
    if kind == "a directory":
        return
    if kind == "nothing":
        raise CheckpointError(f"{directory}: there is no such directory")
    if kind == "a file" and directory.suffix == ".gguf":
        kind = "a GGUF file"
    raise CheckpointError(
        f"{directory}: expected a directory with the release's safetensors shards, found {kind}"
    )


def _nothing_there(directory: Path) -> str:
    gguf = [p.name for p in directory.glob("*.gguf")]
    found = f"only {some(gguf)}" if gguf else "none"
    return f"{directory}: expected {INDEX} and *.safetensors shards, found {found}"


def _read_index(path: Path) -> tuple[dict[str, str], Any]:
    try:
        raw = parse_json(json_text(read_small(path)))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON: {e}") from None
    except ValueError as e:
        raise CheckpointError(f"{path}: {e}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a weight_map of tensor names to files, found none")
    outside = sorted({str(f) for f in weight_map.values() if not _plain_name(f)})
    if outside:
        raise CheckpointError(
            f"{path}: weight_map: expected names of *.safetensors files beside it, "
            f"found {some(outside)}"
        )
    metadata = raw.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _plain_name(name: Any) -> bool:
    """Whether it names a file in the index's own directory; a shard itself may be a link."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    return name.endswith(".safetensors") and not set(name) & {"/", "\\"}


def _expected_shards(out: TensorIndex, present: list[str]) -> list[str]:
    """The shards to read without an index: those present, and those missing of `-of-N`."""
    out.notes.append(f"there is no {INDEX}: the headers of {len(present)} shards were read instead")
    parts = [m for n in present if (m := _NUMBERED.fullmatch(n))]
    wanted = set(present)
    for stem, count in {(m["stem"], m["count"]) for m in parts}:
        wanted |= {f"{stem}-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    return sorted(wanted)


def _read_headers(out: TensorIndex, names: list[str]) -> None:
    missing = [n for n in names if kind_of(out.directory / n) != "a file"]
    if missing:
        # all of them: the list is used to complete a download
        out.problems.append(f"{len(missing)} of {len(names)} shards missing: {', '.join(missing)}")
    unusable: dict[str, list[str]] = {}
    for name in names:
        if name in missing:
            continue
        try:
            out.headers[name] = read_header(out.directory / name)
        except CheckpointError as e:
            unusable.setdefault(str(e).removeprefix(f"{name}: "), []).append(name)
    for reason, files in unusable.items():
        which = files[0] if len(files) == 1 else f"{len(files)} of {len(names)} shards"
        out.problems.append(f"{which}: {reason}" + (f" ({some(files)})" if len(files) > 1 else ""))


def _assign_files(out: TensorIndex, weight_map: dict[str, str] | None) -> None:
    """Assign to each tensor the file that it is read from; index and headers must agree."""
    twice = []
    for file, header in out.headers.items():
        for name, entry in header.tensors.items():
            if name in out.files and entry.nbytes:
                twice.append(f"{name} ({out.files[name]}, {file})")
            out.files[name] = file
    _add_problem(out, "in two shards", twice)
    if weight_map is None:
        return
    out.listed = frozenset(weight_map)
    absent = [
        f"{name} (not in {file})"
        for name, file in weight_map.items()
        if file in out.headers and name not in out.headers[file].tensors
    ]
    _add_problem(out, "in the index but not in their shard", absent)
    extra = [name for name in out.files if name not in weight_map and out.entry(name).nbytes]
    _add_problem(out, "in a shard but not in the index", extra)


def _add_problem(out: TensorIndex, what: str, names: list[str]) -> None:
    if names:
        out.problems.append(f"{len(names)} tensor{'s' * (len(names) > 1)} {what}: {some(names)}")


def _note_leftovers(out: TensorIndex, present: list[str], total_size: Any) -> None:
    unused = sorted(set(present) - set(out.files.values()) - set(out.headers))
    if unused:
        out.notes.append(f"{len(unused)} safetensors files not in the index: {some(unused)}")
    found = sum(e.nbytes for header in out.headers.values() for e in header.tensors.values())
    if total_size != found and not out.problems:
        out.notes.append(f"the index says total_size {total_size}, the tensors have {found} bytes")
