"""The header of one safetensors file, parsed and checked before a byte of payload is believed.

The format: 8 bytes little endian give the header's length, then JSON that maps each name to
dtype, shape and byte range, then the payload, which the ranges must fill without gap, overlap or
rest. Left out: what the tensors should be (`inspection.py`) and reading them (`shards.py`).
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from v4tool.errors import CheckpointError
from v4tool.file_kinds import PEEK, not_safetensors
from v4tool.untrusted import element_count, parse_json, shortened

DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "U16": 16, "I16": 16,
    "F32": 32, "U32": 32, "I32": 32,
    "F64": 64, "U64": 64, "I64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element by safetensors dtype; any other name is refused."""

MAX_HEADER = 100_000_000
"""The format's own limit; it keeps a damaged length from asking for all memory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: dtype name, stored shape, byte range in the file (absolute)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Header:
    """A file's header.

    digest: SHA-256 (hex) of its `length` bytes, the length field included; size: of the whole file.
    """

    digest: str
    length: int
    size: int
    tensors: dict[str, Entry]


def read_header(path: Path) -> Header:
    """Parse and check one file's header.

    Raises CheckpointError, one line that begins with the file's name, for whatever the format
    forbids: a cut or padded file, a length or a range that lies, a duplicate name, an unknown
    dtype.
    """
    try:
        raw, size = _raw_header(path)
        tensors = _entries(_parse(raw[8:]), len(raw))
        _check_ranges(tensors, len(raw), size)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path.name}: {e}") from None
    return Header(hashlib.sha256(raw).hexdigest(), len(raw), size, tensors)


def _raw_header(path: Path) -> tuple[bytes, int]:
    size = path.stat().st_size
    with path.open("rb") as f:
        if other := not_safetensors(f.read(PEEK)):
            raise ValueError(f"expected a safetensors file, found {other}")
        if size < 8:
            raise ValueError(f"expected a safetensors file, found {size} bytes")
        f.seek(0)
        length = int.from_bytes(head := f.read(8), "little")
        if length > size - 8:
            raise ValueError(f"its header should take {length} bytes, only {size - 8} follow")
        if length > MAX_HEADER:
            raise ValueError(f"its header should take {length} bytes, more than the format allows")
        return head + f.read(length), size


def _parse(text: bytes) -> dict[str, Any]:
    try:
        parsed = parse_json(text.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("its header is not JSON") from None
    if not isinstance(parsed, dict):
        raise ValueError("its header is not a JSON object")
    parsed.pop("__metadata__", None)
    return parsed


def _entries(parsed: dict[str, Any], payload: int) -> dict[str, Entry]:
    odd = [name for name in parsed if not name.isprintable()]
    if odd:
        raise ValueError(f"unprintable tensor name {shortened(ascii(odd[0]))}")
    return {name: _entry(name, value, payload) for name, value in parsed.items()}


def _entry(name: str, value: Any, payload: int) -> Entry:
    """One entry; `payload` is where the payload begins in the file."""
    fields, name = value if isinstance(value, dict) else {}, shortened(name)
    dtype, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name}: its entry lacks a shape or a byte range")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"tensor {name}: unknown dtype {shortened(str(dtype))}")
    shown, found = f"{dtype} {shortened(str(shape))}", offsets[1] - offsets[0]
    try:
        bits = element_count(shape) * DTYPE_BITS[dtype]
    except ValueError as error:
        raise ValueError(f"tensor {name}: {shown} has {error}") from None
    if bits % 8:
        raise ValueError(f"tensor {name}: {shown} takes {bits} bits, not whole bytes")
    if (nbytes := bits // 8) != found:
        raise ValueError(f"tensor {name}: {shown} takes {nbytes} bytes, its range {found}")
    return Entry(dtype, tuple(shape), payload + offsets[0], payload + offsets[1])


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _check_ranges(tensors: dict[str, Entry], payload: int, size: int) -> None:
    end, before = payload, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a gap after"
            raise ValueError(f"tensor {name}: its byte range {what} {before}")
        end, before = entry.stop, name
    if end > size:
        raise ValueError(
            f"cut short: its header describes {end} bytes, the file has {size} "
            f"({end - size} missing)"
        )
    if end < size:
        raise ValueError(f"{size - end} trailing bytes follow its last tensor")
