"""Maps from another engine's tensor names to keys: which tensor is which, and in what layout.

A map is a TOML file of rules; each has a pattern of names, a template of keys and the steps that
turn the tensor into the key's layout. Shipped maps lie in `engine_maps`. Left out: applying a map
to tensors (`matching`).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from v4tool.diff.steps import parse_step
from v4tool.errors import InputError
from v4tool.profiles import toml_files
from v4tool.untrusted import kind_of

SHIPPED = Path(__file__).parent / "engine_maps"


def _steps(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        parse_step(text)
    return texts


def _pattern(text: str) -> str:
    """A rule's pattern, as it is. ValueError where it has a field twice."""
    try:
        pattern(text)
    except re.error:
        raise ValueError("expected each field once") from None
    return text


def _decode_pattern(text: str) -> str:
    if "{i}" not in text and "{i+1}" not in text:
        raise ValueError("expected a pattern with {i} or {i+1}")
    return _pattern(text)


class MapRule(BaseModel):
    """One rule. name: pattern with `{n}` for a layer and `{e}` for an expert; key: ours.

    A key with `{n}` whose name has none is of every layer; one with `{e}` of every expert whose
    rows the step `rows` takes. steps: see `layout`. ratios: layers with these compression ratios
    only. passes: "prefill" or "decode" where the layout is that of one of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(_pattern)]
    key: str
    steps: Annotated[tuple[str, ...], AfterValidator(_steps)] = ()
    ratios: tuple[int, ...] | None = None
    passes: Literal["prefill", "decode"] | None = None

    @model_validator(mode="after")
    def _experts_have_rows(self) -> "MapRule":
        rows = any(parse_step(text).verb == "rows" for text in self.steps)
        if "{e}" in self.key and "{e}" not in self.name and not rows:
            raise ValueError(
                "{e} in the key: expected it in the name or a step rows, found neither"
            )
        return self


class TensorMap(BaseModel):
    """A map. decode: pattern of what stands before the names of decode step `{i}`, or `{i+1}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    summary: str
    engine: str = ""
    decode: Annotated[str, AfterValidator(_decode_pattern)] | None = None
    rules: tuple[MapRule, ...]


def shipped_maps() -> dict[str, Path]:
    """The shipped maps' names and files."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_map(name: str) -> TensorMap:
    """A shipped map, or one of the user's by its path. InputError where there is none."""
    known = shipped_maps()
    path = known.get(name, Path(name))
    if kind_of(path) in ("nothing", "a directory"):
        raise InputError(f"--map {name}: expected a file or one of {', '.join(known)}, found none")
    return toml_files.read(path, str(path), TensorMap)


def pattern(text: str) -> re.Pattern[str]:
    """The regular expression of a pattern with `{n}`, `{i}`, `{i+1}`, or `{key}` for any name."""
    escaped = re.escape(text)
    escaped = escaped.replace(r"\{key\}", "(?P<key>.+)")
    escaped = re.sub(r"\\\{(n|i|e)(?:\\\+1)?\\\}", r"(?P<\1>\\d{1,9})", escaped)
    return re.compile(escaped)


def filled(template: str, fields: Mapping[str, str]) -> str | None:
    """A key's template with its fields filled in; None where `{n-1}` is before the first layer."""
    key = template.replace("{key}", fields.get("key", ""))
    for name in ("n", "i", "e"):
        if name in fields:
            before = int(fields[name]) - 1
            if f"{{{name}-1}}" in key and before < 0:
                return None
            key = key.replace(f"{{{name}-1}}", str(before)).replace(f"{{{name}}}", fields[name])
    return key
