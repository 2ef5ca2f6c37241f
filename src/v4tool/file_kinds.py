"""Recognises by its first bytes what a file is that should be safetensors or JSON.

For what people find in place of a downloaded file: a Git LFS pointer, a login page, another
format, zeros. Each answer says what it is and what to do. Left out: whether a file that is none of
these is well formed (its parser decides).
"""

PEEK = 4096
"""Bytes of a file that are enough to recognise it."""

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16, little and big endian."""

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
    """What a file of this beginning (`PEEK` bytes, or all) is, and what to do; else None."""
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
    """A JSON file's text: UTF-8, a byte order mark removed.

    Raises UnicodeDecodeError, and ValueError that says what the file is where that can be told.
    """
    if data[:2] in _UTF16_MARKS:
        raise ValueError("is UTF-16 text, expected UTF-8: save it as UTF-8")
    if other := other_kind(data[:PEEK]):
        raise ValueError(f"is {other}")
    return data.decode("utf-8-sig")


def not_safetensors(head: bytes) -> str | None:
    """As `other_kind`, any text included; None for what may be a safetensors file, or a cut one."""
    if head[4:8] == bytes(4) and head[8:9] == b"{":
        return None  # a header's length below 4 GiB and its first character
    return other_kind(head) or _text(head)


def _text(head: bytes) -> str | None:
    """What a server or a script wrote in place of data; a header's length is never text."""
    text = head.decode("utf-8", errors="replace")
    if not text or any(not (c.isprintable() or c.isspace()) for c in text[:16]):
        return None
    line = " ".join(text.split())
    shown = line if len(line) <= 60 else f"{line[:60]}..."
    return f"the text {shown!a}: {_AGAIN}"
