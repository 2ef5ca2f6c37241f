"""Reading untrusted input: strict JSON, files up to a size, kinds of paths, sizes of tensors.

For any text or path, the functions here return within bounded memory and stack depth, or raise
ValueError (OSError from the system), whose message the caller puts behind the file's name. Left
out: what the values mean.
"""

import errno
import json
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAX_TEXT = 100_000_000
"""Bytes of a text that is read as a whole; the safetensors format allows a header as much."""
MAX_DIGITS = 20
"""Digits of a whole number in JSON: as many as 2^64 has."""
MAX_ELEMENTS = 2**63 - 1
"""Elements of a tensor: what an int64 can count."""

Pairs = list[tuple[str, Any]]


def kind_of(path: Path) -> str:
    """The kind of what is at a path: "a directory", "a file", "a pipe or device", "nothing".

    Any text can be asked for: a name that the system refuses is "nothing usable (...)".
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return "nothing" if absent else f"nothing usable ({error.strerror})"
    except ValueError as error:
        return f"nothing usable ({error})"
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "a pipe or device"


def read_small(path: Path) -> bytes:
    """All bytes of a regular file. OSError where it cannot be read; ValueError for a pipe or a
    device, and for more than MAX_TEXT bytes.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError("expected a file, found a pipe or device")
    if found.st_size > MAX_TEXT:
        raise ValueError(f"expected at most {MAX_TEXT} bytes, found {found.st_size}")
    return path.read_bytes()


def parse_json(text: str, pairs_hook: Callable[[Pairs], Any] | None = None) -> Any:
    """The value of a JSON text. ValueError for what JSON forbids, and for what no file of ours
    holds: a key twice (unless `pairs_hook` takes the pairs), numbers of more than MAX_DIGITS
    digits, nesting beyond Python's stack.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs_hook or unique_keys, parse_int=_whole)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(
            f"expected numbers of at most {MAX_DIGITS} digits, found {shortened(digits)}"
        )
    return int(digits)


def unique_keys(pairs: Pairs) -> dict[str, Any]:
    """`object_pairs_hook` for JSON: a dict, or ValueError when a key comes twice."""
    if twice := repeated_keys(pairs):
        raise ValueError(f"duplicate key {shortened(', '.join(twice))}")
    return dict(pairs)


def repeated_keys(pairs: Pairs) -> list[str]:
    """The keys that come twice or more, each once."""
    if len(dict(pairs)) == len(pairs):
        return []
    return [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def element_count(shape: Sequence[int]) -> int:
    """The product of a shape. ValueError above MAX_ELEMENTS, before it takes time to compute."""
    count = 1
    for size in shape:
        count *= size
        if count > MAX_ELEMENTS:
            raise ValueError(f"more than {MAX_ELEMENTS} elements")
    return count


def shortened(text: str, most: int = 80) -> str:
    """A text for an error's line, cut at `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
