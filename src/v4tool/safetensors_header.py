"""Parser of safetensors headers: tensor entries, metadata, and every defect as a finding.

The format: 8 bytes, little endian, give the length of the header; JSON, padded with spaces, maps
each tensor's name to its dtype, shape and byte range, and `__metadata__` to strings; the payload
follows, which the ranges must fill without gap, overlap or remainder. The parser continues after a
defect as far as it can, so that one reader may report all of them (`record.scan`) and another raise
for the first (`checkpoint.header`). Left out: the payload, and which tensors a file should hold.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeGuard

from v4tool.errors import Finding
from v4tool.untrusted import Pairs, element_count, parse_json, repeated_keys, shortened

HEADER_LIMIT = 100_000_000
"""The format's limit in bytes; it keeps a damaged length from allocating all memory."""

DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "U16": 16, "I16": 16,
    "F32": 32, "U32": 32, "I32": 32,
    "F64": 64, "U64": 64, "I64": 64, "C64": 64,
}  # fmt: skip
"""Bits per element by safetensors dtype; any other name is a defect."""


@dataclass(frozen=True, slots=True)
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

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class HeaderRules:
    """Rules of one reader beside those of the format.

    min_length: fewest bytes of the header. integer_limit: dimensions and offsets must be below it.
    printable_names: tensor names must be printable. metadata: `__metadata__` must be an object of
    strings, and not empty.
    """

    min_length: int = 0
    integer_limit: float = math.inf
    printable_names: bool = False
    metadata: bool = False


@dataclass(frozen=True)
class HeaderDefect:
    """One defect, in two wordings: a finding, and the message of an exception about the file."""

    finding: Finding
    message: str


@dataclass(kw_only=True)
class HeaderFields:
    """The contents of a header, as far as they are valid; `parse_header` sets all but the size.

    size: bytes of the whole file. payload: offset of the payload, 0 for an invalid length. sha256:
    of all bytes before the payload, hexadecimal. entries: in the order of the header.
    """

    size: int
    payload: int = 0
    sha256: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def parse_header(
    file: BinaryIO, header: HeaderFields, rules: HeaderRules
) -> Iterator[HeaderDefect]:
    """Read the header of a file, opened at its start, into `header`; yields the defects in order.

    A caller that stops at a defect leaves `header` incomplete.
    """
    first = file.read(8)
    invalid_length = _length_defect(first, header.size, rules)
    if invalid_length is not None:
        yield invalid_length
        return
    text = file.read(int.from_bytes(first, "little"))
    header.payload = len(first) + len(text)
    header.sha256 = hashlib.sha256(first + text).hexdigest()
    parsed, defects = _parse_json(text)
    yield from defects
    if parsed is not None:
        yield from _parse_fields(header, parsed, rules)
    yield from _range_defects(header)


def in_file_order(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries sorted by their byte ranges."""
    return dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))


def _length_defect(first: bytes, size: int, rules: HeaderRules) -> HeaderDefect | None:
    """The defect of the length field, if it has one; first: the file's first bytes, 8 at most."""
    if len(first) < 8:
        finding = _length_finding("a file of 8 bytes or more", f"{len(first)} bytes")
        return HeaderDefect(finding, f"expected a safetensors file, found {len(first)} bytes")
    length, rest = int.from_bytes(first, "little"), size - 8
    limit = min(rest, HEADER_LIMIT)
    if rules.min_length <= length <= limit:
        return None
    finding = _length_finding(f"{rules.min_length} to {limit} bytes", f"{length}")
    problem = f"only {rest} follow" if length > rest else "more than the format allows"
    return HeaderDefect(finding, f"its header should take {length} bytes, {problem}")


def _length_finding(expected: str, found: str) -> Finding:
    return Finding("header", "header length", expected, found)


def _parse_json(text: bytes) -> tuple[dict[str, Any] | None, list[HeaderDefect]]:
    """The header's JSON object (the last of repeated keys counts), or None; and the defects."""
    defects: list[HeaderDefect] = []

    def collect(pairs: Pairs) -> dict[str, Any]:
        defects.extend(_repetitions(pairs))
        return dict(pairs)

    try:
        parsed = parse_json(text.decode("utf-8"), collect)
    except ValueError as error:
        no_json = isinstance(error, UnicodeDecodeError | json.JSONDecodeError)
        finding = _json_finding("a JSON object padded with spaces", "other text")
        message = "its header is not JSON" if no_json else str(error)
        return None, [*defects, HeaderDefect(finding, message)]
    if isinstance(parsed, dict):
        return parsed, defects
    finding = _json_finding("a JSON object", type(parsed).__name__)
    return None, [*defects, HeaderDefect(finding, "its header is not a JSON object")]


def _json_finding(expected: str, found: str) -> Finding:
    return Finding("header", "header is JSON", expected, found)


def _repetitions(pairs: Pairs) -> Iterator[HeaderDefect]:
    """One defect for each repetition of a key; the message names all repeated keys."""
    repeated = repeated_keys(pairs)
    message, seen = f"duplicate key {shortened(', '.join(repeated))}", set[str]()
    for key, _ in pairs if repeated else ():
        if key in seen:
            yield HeaderDefect(Finding(key, "one entry a key", "one", "two or more"), message)
        seen.add(key)


def _parse_fields(
    header: HeaderFields, parsed: dict[str, Any], rules: HeaderRules
) -> Iterator[HeaderDefect]:
    """Take metadata and entries from the JSON object."""
    yield from _parse_metadata(header, parsed.pop("__metadata__", None), rules)
    for key in parsed if rules.printable_names else ():
        if not key.isprintable():
            name = shortened(ascii(key))
            finding = Finding(key, "key printable", "printable characters", name)
            yield HeaderDefect(finding, f"unprintable tensor name {name}")
    for key, value in parsed.items():
        entry = _parse_entry(key, value, header.payload, rules)
        if isinstance(entry, Entry):
            header.entries[key] = entry
        else:
            yield entry


def _parse_metadata(
    header: HeaderFields, metadata: Any, rules: HeaderRules
) -> Iterator[HeaderDefect]:
    values = metadata.values() if isinstance(metadata, dict) else [None]
    if metadata and all(isinstance(value, str) for value in values):
        header.metadata = dict(metadata)
    elif rules.metadata:
        found = "none" if metadata in (None, {}) else "something else"
        finding = Finding("__metadata__", "metadata present", "an object of strings", found)
        yield HeaderDefect(finding, f"expected metadata with strings, found {found}")


def _parse_entry(key: str, value: object, payload: int, rules: HeaderRules) -> Entry | HeaderDefect:
    """One entry, or its defect; payload: offset of the payload in the file."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    limit, tensor = rules.integer_limit, f"tensor {shortened(key)}"
    if not _naturals(shape, limit) or not _naturals(offsets, limit) or len(offsets) != 2:
        expected, found = "shape and data_offsets", "none or senseless ones"
        finding = Finding(key, "header entry", expected, found)
        return HeaderDefect(finding, f"{tensor}: its entry lacks a shape or a byte range")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        found = shortened(str(dtype))
        finding = Finding(key, "dtype known", "a dtype of the format", found)
        return HeaderDefect(finding, f"{tensor}: unknown dtype {found}")
    given = offsets[1] - offsets[0]
    if problem := _size_problem(dtype, shape, given):
        expected, found, message = problem
        return HeaderDefect(Finding(key, "byte range", expected, found), f"{tensor}: {message}")
    return Entry(key, dtype, tuple(shape), payload + offsets[0], payload + offsets[1])


def _size_problem(dtype: str, shape: list[int], given: int) -> tuple[str, str, str] | None:
    """Expected, found and message for a tensor whose range of `given` bytes does not fit it."""
    what = f"{dtype} {shortened(str(shape))}"
    try:
        bits = element_count(shape) * DTYPE_BITS[dtype]
    except ValueError as error:
        return "a size that fits a file", f"{error} for {what}", f"{what} has {error}"
    if bits % 8:
        size, rest = f"{bits} bits", "not whole bytes"
    else:
        size, rest = f"{bits // 8} bytes", f"its range {given}"
    if bits == 8 * given:
        return None
    return f"{size} for {what}", f"{given} bytes", f"{what} takes {size}, {rest}"


def _naturals(value: object, limit: float) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < limit for v in value)


def _range_defects(header: HeaderFields) -> Iterator[HeaderDefect]:
    """Byte ranges must follow each other from the header to the end of the file."""
    end, last = header.payload, "the header"
    entries = in_file_order(header.entries)
    for key, entry in entries.items():
        if entry.start != end:
            expected = f"byte {end - header.payload}, right after {last}"
            found = f"{entry.start - header.payload}"
            finding = Finding(key, "offsets contiguous", expected, found)
            what = "overlaps" if entry.start < end else "leaves a gap after"
            yield HeaderDefect(finding, f"tensor {key}: its byte range {what} {last}")
        end, last = max(end, entry.stop), key
    cut = [key for key, entry in entries.items() if entry.stop > header.size]
    if end != header.size:
        yield _size_defect(header.size, end, last, cut)


def _size_defect(size: int, end: int, last: str, cut: list[str]) -> HeaderDefect:
    """The defect of a file with more or fewer bytes than its header describes.

    cut: keys of the tensors that lack some of their bytes.
    """
    expected = f"a file of {end} bytes"
    if not cut:
        finding = Finding(last, "payload complete", expected, f"{size} bytes")
        return HeaderDefect(finding, f"{size - end} trailing bytes follow its last tensor")
    found = f"{size} bytes, {len(cut)} tensors are cut"
    finding = Finding(cut[0], "payload complete", expected, found)
    missing = f"the file has {size} ({end - size} missing)"
    return HeaderDefect(finding, f"cut short: its header describes {end} bytes, {missing}")
