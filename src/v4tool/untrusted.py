"""Bounded reading of untrusted input: strict JSON, small files, kinds of paths, tensor sizes.

For any text or path, the functions here return within bounded memory and stack depth, or raise
ValueError (OSError from the system); the caller prefixes the message with the file's name. Left
out: the meaning of the values.
"""

import errno
import json
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAX_TEXT = 100_000_000
"""Largest text file that is read, in bytes: the safetensors format's limit of a header."""
MAX_DIGITS = 20
"""Most digits of an integer in JSON: as many as 2^64 has."""
MAX_ELEMENTS = 2**63 - 1
"""Most elements of a tensor: the largest int64."""

Pairs = list[tuple[str, Any]]


def kind_of(path: Path) -> str:
    """What a path names: "a directory", "a file", "a pipe or device" or "nothing".

    Raises nothing: a name that the system refuses is "nothing usable (...)".
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
    """All bytes of a regular file of at most MAX_TEXT bytes.

    OSError if it cannot be read; ValueError for a pipe, a device or a larger file.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError("expected a file, found a pipe or device")
    if found.st_size > MAX_TEXT:
        raise ValueError(f"expected at most {MAX_TEXT} bytes, found {found.st_size}")
    return path.read_bytes()


def parse_json(text: str, pairs_hook: Callable[[Pairs], Any] | None = None) -> Any:
    """Parse JSON.

    pairs_hook: converts the pairs of an object (default: `unique_keys`). ValueError for invalid
    JSON, a key given twice, integers of more than MAX_DIGITS digits, and nesting beyond Python's
    stack.
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
    """`object_pairs_hook` for JSON that makes a dict; ValueError if a key occurs twice."""
    if twice := repeated_keys(pairs):
        raise ValueError(f"duplicate key {shortened(', '.join(twice))}")
    return dict(pairs)


def repeated_keys(pairs: Pairs) -> list[str]:
    """The keys that come twice or more, each once."""
    if len(dict(pairs)) == len(pairs):
        return []
    return [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def element_count(shape: Sequence[int]) -> int:
    """The number of elements of a shape. ValueError above MAX_ELEMENTS."""
    count = 1
    for size in shape:
        count *= size
        if count > MAX_ELEMENTS:
            raise ValueError(f"more than {MAX_ELEMENTS} elements")
    return count


def shortened(text: str, most: int = 80) -> str:
    """A text cut to `most` characters, for an error message."""
    return text if len(text) <= most else text[: most - 3] + "..."
