"""Reads a TOML file into a pydantic model, with one-line errors.

An error reads `file: dotted key: expected ..., found ...`. Left out: the models (`schema`).
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from v4tool.errors import ProfileError
from v4tool.profiles.setting_values import close, short
from v4tool.untrusted import read_small, shortened

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Model = TypeVar("Model", bound=BaseModel)

# pydantic's wording -> ours
WORDING = (
    ("Value error, ", ""),
    ("Input should be", "expected"),
    ("valid tuple", "list"),
    ("String should", "expected to"),
)


def read(path: Path, shown: str, model: type[Model]) -> Model:
    """Read a file as `model`; shown: its name in messages. ProfileError if it is invalid."""
    raw = _parse(path, shown)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ProfileError(_one_line(error, shown, raw, model)) from error


def _parse(path: Path, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(path).decode("utf-8"))
    except OSError as error:
        raise ProfileError(f"{shown}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{shown}: expected UTF-8, found none at byte {error.start}") from error
    except RecursionError as error:
        raise ProfileError(f"{shown}: not valid TOML: nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{shown}: not valid TOML: {error}") from error
    except ValueError as error:
        raise ProfileError(f"{shown}: {_too_large(error)}") from error


def _too_large(error: ValueError) -> str:
    """Message for a file that is too large or not regular, or has too long numbers."""
    return (
        "not valid TOML: a number of thousands of digits" if "digits" in str(error) else str(error)
    )


def _one_line(
    error: ValidationError, shown: str, raw: Mapping[str, Any], model: type[BaseModel]
) -> str:
    """The first error, and the number of others."""
    errors = error.errors(include_url=False)
    where = _dotted(errors[0]["loc"], raw)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return ": ".join(filter(None, (shown, where, _complaint(errors[0], model)))) + more


def _dotted(location: Sequence[int | str], raw: Mapping[str, Any]) -> str:
    """Dotted key of an error: `cases.prompt32.decode` for ("cases", 1, "decode"); cases by id."""
    parts = [shortened(str(part)) for part in location]
    if len(location) > 1 and location[0] == "cases" and isinstance(location[1], int):
        case = raw["cases"][location[1]]
        if isinstance(case, dict) and isinstance(case.get("id"), str):
            parts[1] = shortened(case["id"])
    return ".".join(parts)


def _complaint(error: "ErrorDetails", model: type[BaseModel]) -> str:
    """One pydantic error as "expected ..., found ..."."""
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "model_type":
        return f"expected a table, found {short(error['input'])}"
    if error["type"] == "extra_forbidden":
        return _unknown_key(error["loc"], model)
    message = error["msg"]
    for theirs, ours in WORDING:
        message = message.replace(theirs, ours)
    if ", found" in message or (
        error["type"] == "value_error" and isinstance(error["input"], dict)
    ):
        return message
    return f"{message}, found {short(error['input'])}"


def _unknown_key(location: Sequence[int | str], model: type[BaseModel]) -> str:
    for part in location[:-1]:
        if isinstance(part, str):
            model = next(_tables(model.model_fields[part].annotation))
    known = list(model.model_fields)
    return f"unknown key{close(str(location[-1]), known)}, known are {', '.join(known)}"


def _tables(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a field's type, as in `tuple[Case, ...]` or `Expect | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _tables(inner)
