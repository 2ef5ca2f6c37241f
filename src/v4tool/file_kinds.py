"""Recognises other file formats by their first bytes where safetensors or JSON is expected.

Covers what a failed download leaves: a Git LFS pointer, an HTML page, another format, zeros. Each
result names the format and what to do. Left out: whether other files are well formed (see their
parsers).
"""

import json

PEEK = 4096
"""Number of bytes at the start of a file that the functions here need."""

_AGAIN = "download the file again"
_SHARDS = "v4tool reads the release's safetensors shards"
_UNPACK = "unpack it first"
_MAGIC = (
    (b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull` in its directory"),
    (b"GGUF", "a GGUF file (llama.cpp)", _SHARDS),
    (b"PK\3\4", "a zip archive, perhaps by torch.save (.pt, .bin)", _SHARDS),
    (b"\x80\2", "a Python pickle, perhaps by torch.save (.pt, .bin)", _SHARDS),
    (b"\x80\4", "a Python pickle", _SHARDS),
    (b"\x89HDF", "an HDF5 file", _SHARDS),
    (b"\x93NUMPY", "a NumPy file", _SHARDS),
    (b"\x1f\x8b", "a gzip file", _UNPACK),
    (b"\xfd7zXZ", "an xz file", _UNPACK),
    (b"BZh", "a bzip2 file", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", _UNPACK),
)
_MARKUP = (
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML message"),
)


def other_kind(head: bytes) -> str | None:
    """Format and advice for a file that begins with `head` (PEEK bytes or all), None if unknown."""
    if len(head) >= 8 and not any(head):
        return f"a file that begins with {len(head)} zero bytes: {_AGAIN}"
    for magic, kind, advice in _MAGIC:
        if head.startswith(magic):
            return f"{kind}: {advice}"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:20].lower()
    for markup, kind in _MARKUP:
        if start.startswith(markup):
            return f"{kind}, as from a login, a proxy or an error: {_AGAIN}"
    return None


def json_text(data: bytes) -> str:
    """Decode a JSON file as UTF-8, without a byte order mark.

    Raises UnicodeDecodeError, or ValueError that names a recognised other format.
    """
    if other := other_kind(data[:PEEK]):
        raise ValueError(f"is {other}")
    encoding = json.detect_encoding(data)
    if not encoding.startswith("utf-8"):
        raise ValueError(f"is {encoding[:6].upper()} text, expected UTF-8: save it as UTF-8")
    return data.decode("utf-8-sig")


def not_safetensors(head: bytes) -> str | None:
    """As `other_kind`, but recognises any text too; None for a possible safetensors file."""
    if head[4:8] == bytes(4) and head[8:9] == b"{":
        return None  # a header's length below 4 GiB and its first character
    return other_kind(head) or _text(head)


def _text(head: bytes) -> str | None:
    """A description of `head` if it is text, which no safetensors header length is; else None."""
    text = head.decode("utf-8", errors="replace")
    if not text or any(not (c.isprintable() or c.isspace()) for c in text[:16]):
        return None
    line = " ".join(text.split())
    shown = line if len(line) <= 60 else f"{line[:60]}..."
    return f"the text {shown!a}: {_AGAIN}"
