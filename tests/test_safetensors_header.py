"""The safetensors header parser: the shard reader raises for the first defect, the recording scan
reports all of them."""

import json
from pathlib import Path

import pytest

from tests.conftest import GOLDEN_MINI
from tests.shard_files import write
from v4tool.checkpoint import header as strict
from v4tool.errors import CheckpointError
from v4tool.record import scan

SHARD = GOLDEN_MINI / "ckpt" / "model-00003-of-00008.safetensors"
METADATA = '"__metadata__": {"seed": "7"}'


def f32(key: str, first: int, last: int, *shape: int) -> str:
    """The header's entry of an F32 tensor."""
    fields = {"dtype": "F32", "shape": list(shape), "data_offsets": [first, last]}
    return f"{json.dumps(key)}: {json.dumps(fields)}"


def text(*entries: str, metadata: str = METADATA) -> bytes:
    return ("{" + ", ".join(filter(None, (metadata, *entries))) + "}").encode()


def strict_message(path: Path) -> str:
    """The strict reader's line without the file's name; "" where it accepts the file."""
    try:
        strict.read_header(path)
    except CheckpointError as error:
        return str(error).removeprefix(f"{path.name}: ")
    return ""


A = f32("a", 0, 8, 2)
WHOLE = text(A)
SIZE = 8 + len(WHOLE) + 8

BOTH_REFUSE = [
    # what, header, bytes of payload, the strict reader's message, all findings
    (
        "a list",
        b"[]",
        0,
        "its header is not a JSON object",
        ["header: header is JSON: expected a JSON object, found list"],
    ),
    (
        "no JSON, and a payload that nothing describes",
        b"{]",
        8,
        "its header is not JSON",
        [
            "header: header is JSON: expected a JSON object padded with spaces, found other text",
            "the header: payload complete: expected a file of 10 bytes, found 18 bytes",
        ],
    ),
    (
        "an entry that is a number",
        text('"a": 5'),
        0,
        "tensor a: its entry lacks a shape or a byte range",
        ["a: header entry: expected shape and data_offsets, found none or senseless ones"],
    ),
    (
        "an unknown dtype",
        text(A.replace("F32", "F3")),
        0,
        "tensor a: unknown dtype F3",
        ["a: dtype known: expected a dtype of the format, found F3"],
    ),
    (
        "half a byte",
        text(A.replace("F32", "F4").replace("[2]", "[15]")),
        0,
        "tensor a: F4 [15] takes 60 bits, not whole bytes",
        ["a: byte range: expected 60 bits for F4 [15], found 8 bytes"],
    ),
    (
        "a range of another size",
        text(f32("a", 0, 8, 3)),
        0,
        "tensor a: F32 [3] takes 12 bytes, its range 8",
        ["a: byte range: expected 12 bytes for F32 [3], found 8 bytes"],
    ),
    (
        "2^63 elements",
        text(f32("a", 0, 8, 2**61, 4)),
        0,
        f"tensor a: F32 [{2**61}, 4] has more than {2**63 - 1} elements",
        [
            "a: byte range: expected a size that fits a file, "
            f"found more than {2**63 - 1} elements for F32 [{2**61}, 4]"
        ],
    ),
    (
        "a number of 21 digits",
        text(A.replace("[2]", f"[{'9' * 21}]")),
        0,
        f"expected numbers of at most 20 digits, found {'9' * 21}",
        [
            "header: header is JSON: expected a JSON object padded with spaces, found other text",
        ],
    ),
    (
        "a gap",
        text(A, f32("b", 12, 16, 1)),
        16,
        "tensor b: its byte range leaves a gap after a",
        ["b: offsets contiguous: expected byte 8, right after a, found 12"],
    ),
    (
        "a gap in front of the first",
        text(f32("a", 4, 8, 1)),
        8,
        "tensor a: its byte range leaves a gap after the header",
        ["a: offsets contiguous: expected byte 0, right after the header, found 4"],
    ),
    (
        "a payload cut by one byte",
        WHOLE,
        7,
        f"cut short: its header describes {SIZE} bytes, the file has {SIZE - 1} (1 missing)",
        [
            f"a: payload complete: expected a file of {SIZE} bytes, "
            f"found {SIZE - 1} bytes, 1 tensors are cut"
        ],
    ),
    (
        "trailing bytes",
        WHOLE,
        11,
        "3 trailing bytes follow its last tensor",
        [f"a: payload complete: expected a file of {SIZE} bytes, found {SIZE + 3} bytes"],
    ),
]

DIFFERENCES = [
    # as above; what the two readers do differently
    (
        "no byte of header: only a recording's must have two",
        b"",
        8,
        "its header is not JSON",
        ["header: header length: expected 2 to 8 bytes, found 0"],
    ),
    (
        "one byte of header",
        b"5",
        8,
        "its header is not a JSON object",
        ["header: header length: expected 2 to 9 bytes, found 1"],
    ),
    (
        "no metadata: only a recording must have some",
        text(A, metadata=""),
        8,
        "",
        ["__metadata__: metadata present: expected an object of strings, found none"],
    ),
    (
        "metadata that are no strings",
        text(A, metadata='"__metadata__": {"seed": 7}'),
        8,
        "",
        ["__metadata__: metadata present: expected an object of strings, found something else"],
    ),
    (
        "an unprintable name: only a shard's must be printable",
        text(f32("a\nb", 0, 8, 2)),
        8,
        "unprintable tensor name 'a\\nb'",
        [],
    ),
    (
        "a dimension of 2^62: only a recording's must be below",
        text(f32("a", 0, 0, 0, 2**62)),
        0,
        "",
        ["a: header entry: expected shape and data_offsets, found none or senseless ones"],
    ),
    ("a dimension below 2^62", text(f32("a", 0, 0, 0, 2**62 - 1)), 0, "", []),
    (
        "a key twice: the last one counts in a recording",
        text(f32("a", 0, 4, 1), A),
        8,
        "duplicate key a",
        ["a: one entry a key: expected one, found two or more"],
    ),
    (
        "a field twice",
        text(A.replace('{"dtype"', '{"dtype": "I64", "dtype"')),
        8,
        "duplicate key dtype",
        ["dtype: one entry a key: expected one, found two or more"],
    ),
    (
        "two keys twice: named in order of the keys, or reported in order of the repetitions",
        text('"a": 1', '"b": 2', '"b": 3', '"a": 4'),
        0,
        "duplicate key a, b",
        [
            "b: one entry a key: expected one, found two or more",
            "a: one entry a key: expected one, found two or more",
            "a: header entry: expected shape and data_offsets, found none or senseless ones",
            "b: header entry: expected shape and data_offsets, found none or senseless ones",
        ],
    ),
    (
        "a field twice, and no JSON behind it",
        b'{"a": {"x": 1, "x": 2}]',
        0,
        "duplicate key x",
        [
            "x: one entry a key: expected one, found two or more",
            "header: header is JSON: expected a JSON object padded with spaces, found other text",
        ],
    ),
    (
        "an overlap: a recording is read on from the larger end",
        text(f32("a", 0, 16, 4), f32("b", 4, 8, 1), f32("c", 16, 20, 1)),
        20,
        "tensor b: its byte range overlaps a",
        ["b: offsets contiguous: expected byte 16, right after a, found 4"],
    ),
    (
        "several defects: the first one in order of the header, or all",
        text(f32("z", 4, 12, 2), f32("a", 0, 9, 2), '"b": 5', metadata=""),
        8,
        "tensor a: F32 [2] takes 8 bytes, its range 9",
        [
            "__metadata__: metadata present: expected an object of strings, found none",
            "a: byte range: expected 8 bytes for F32 [2], found 9 bytes",
            "b: header entry: expected shape and data_offsets, found none or senseless ones",
            "z: offsets contiguous: expected byte 0, right after the header, found 4",
            "z: payload complete: expected a file of 151 bytes, found 147 bytes, 1 tensors are cut",
        ],
    ),
]


@pytest.mark.parametrize(
    ("what", "header", "payload", "message", "findings"),
    BOTH_REFUSE + DIFFERENCES,
    ids=[row[0] for row in BOTH_REFUSE + DIFFERENCES],
)
def test_a_header_in_both_readers(
    tmp_path: Path, what: str, header: bytes, payload: int, message: str, findings: list[str]
) -> None:
    path = tmp_path / "a.safetensors"
    write(path, header, b"\1" * payload)
    assert strict_message(path) == message, what
    assert [finding.line() for finding in scan.read_header(path).findings] == findings, what


@pytest.mark.parametrize(
    ("length", "message", "limit"),
    [
        (SIZE - 7, f"its header should take {SIZE - 7} bytes, only {SIZE - 8} follow", SIZE - 8),
        (2**63, f"its header should take {2**63} bytes, only {SIZE - 8} follow", SIZE - 8),
    ],
)
def test_a_length_beyond_the_file(tmp_path: Path, length: int, message: str, limit: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + WHOLE + bytes(8))
    assert strict_message(path) == message
    (finding,) = scan.read_header(path).findings
    assert finding.line() == f"header: header length: expected 2 to {limit} bytes, found {length}"


def test_a_length_beyond_the_format(tmp_path: Path) -> None:
    """100,000,000 bytes are the format's limit; the file is sparse."""
    path = tmp_path / "a.safetensors"
    length = 100_000_001
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + WHOLE)
        file.truncate(2 * length)
    assert strict_message(path) == (
        "its header should take 100000001 bytes, more than the format allows"
    )
    (finding,) = scan.read_header(path).findings
    assert finding.line() == (
        "header: header length: expected 2 to 100000000 bytes, found 100000001"
    )


def test_fewer_bytes_than_a_length(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x01\x02\x03")
    assert strict_message(path) == "expected a safetensors file, found 3 bytes"
    (finding,) = scan.read_header(path).findings
    assert finding.line() == (
        "header: header length: expected a file of 8 bytes or more, found 3 bytes"
    )


def test_two_elements_in_a_byte(tmp_path: Path) -> None:
    """F4 counts elements of 4 bits: 16 of them take 8 bytes."""
    path = tmp_path / "a.safetensors"
    write(path, text(A.replace("F32", "F4").replace("[2]", "[16]")), bytes(8))
    recording = scan.read_header(path)
    assert recording.findings == []
    assert strict.read_header(path).tensors == recording.entries
    assert recording.entries["a"].nbytes == 8


def test_both_readers_find_the_same_tensors() -> None:
    shard, recording = strict.read_header(SHARD), scan.read_header(SHARD)
    assert recording.findings == []
    assert (shard.digest, shard.length, shard.size) == (
        recording.sha256,
        recording.payload,
        recording.size,
    )
    found = [{name: (e.dtype, e.shape, e.start, e.stop) for name, e in entries.items()}
             for entries in (shard.tensors, recording.entries)]  # fmt: skip
    assert found[0] == found[1]


def test_tensors_come_in_order_of_the_header_or_of_the_payload(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, text(f32("late", 8, 12, 1), f32("early", 0, 8, 2)), bytes(12))
    assert list(strict.read_header(path).tensors) == ["late", "early"]
    assert list(scan.read_header(path).entries) == ["early", "late"]
