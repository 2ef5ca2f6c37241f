"""Parsers of single settings, shared by the command line, the environment and the file.

Each function takes the raw value (numeric text is converted before, see `from_text`) and returns
the parsed one, or raises ValueError("expected ..."); the caller adds the origin and the raw value.
Left out: precedence of the sources (`resolve`).
"""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

Accumulate = Literal["float64", "float32"]
Backend = Literal["auto", "readable", "numpy", "c"]
MAX_THREADS = 1024
MAX_SEED = 2**63 - 1


def whole(value: object, low: int, high: int | None = None) -> int:
    """`value` if it is a whole number in [low, high] (a bool is none)."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        to = "up" if high is None else f"to {high}"
        raise ValueError(f"expected a whole number from {low} {to}")
    return number


def from_text(value: object) -> object:
    """Convert text of ASCII digits to an integer; other values are returned unchanged."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        return int(value)
    return value


def count(value: object) -> int:
    """A whole number, at least 0."""
    return whole(value, 0)


def seed(value: object) -> int:
    """A seed, from 0 to 2^63 - 1, the range that all random generators accept."""
    return whole(value, 0, MAX_SEED)


def threads(value: object) -> int | Literal["auto"]:
    """A number of threads, or "auto" for the number of usable cores."""
    if value == "auto":
        return "auto"
    try:
        return whole(value, 1, MAX_THREADS)
    except ValueError as error:
        raise ValueError(f'{error} or "auto"') from None


def _one_of(value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"expected one of {', '.join(allowed)}")
    return value


def accumulate(value: object) -> str:
    """The accumulation dtype (SPEC section 4)."""
    return _one_of(value, get_args(Accumulate))


def backend(value: object) -> str:
    """The backend of matrix products; results have the same bits with each."""
    return _one_of(value, get_args(Backend))


def path(value: object) -> Path:
    """A path, with `~` expanded."""
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError("expected a path")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError("expected a path whose ~ is the home of a known user") from None


def path_text(value: object) -> str:
    """A path as written, without expansion; it may be relative to the file that names it."""
    path(value)
    return str(value)


def _matching(value: object, pattern: str, wanted: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"expected {wanted}")
    return value


def case_id(value: object) -> str:
    """A case's id, which is also used in file names and on the command line."""
    return _matching(value, "[a-z0-9][a-z0-9_.-]*", "small letters, digits and - _ .")


def recording_name(value: object) -> str:
    """The name of a safetensors file, without a directory."""
    return _matching(value, r"[^/\\\0]+\.safetensors", "a bare file name ending in .safetensors")


def repository(value: object) -> str:
    """A Hugging Face repository id."""
    return _matching(value, "[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", "a repository ORGANISATION/NAME")


def usable_cores() -> int:
    """Number of cores that this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def short(value: object) -> str:
    """The repr of a value, cut to 60 characters, for an error message."""
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists
        shown = f"a huge {type(value).__name__}"
    return shown if len(shown) <= 60 else shown[:57] + "..."


def close(word: str, known: Iterable[str]) -> str:
    """The text " (did you mean ...?)" if one of `known` is close to `word`, else ""."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""
