"""Maps from another engine's tensor names to keys: which tensor is which, and in what layout.

A map is a TOML file of rules; each has a pattern of names, a template of keys and the steps that
turn the tensor into the key's layout. Shipped maps lie in `engine_maps`. Left out: reading the
tensors (`readers`) and judging them (`judge`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.diff.layout import Sizes, apply_steps, parse_step
from v4tool.diff.readers import ForeignTensors
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
    """One rule. name: pattern with `{n}` for a layer, `{i}` for a number of a pass; key: ours.

    ratios: layers with these compression ratios only. steps: see `layout`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(_pattern)]
    key: str
    steps: Annotated[tuple[str, ...], AfterValidator(_steps)] = ()
    ratios: tuple[int, ...] | None = None


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


@dataclass
class Candidate:
    """A candidate's tensors under our keys, each read and laid out when it is asked for.

    matched: key -> (name, rule); unmatched: names without a rule. given: values that come from
    elsewhere; shapes: those of keys whose shape does not depend on routing.
    """

    tensors: ForeignTensors
    sizes: Sizes
    matched: dict[str, tuple[str, MapRule]] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, str]:
        """What the files say of themselves."""
        return self.tensors.metadata

    @property
    def specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Key -> (dtype, shape as captured)."""
        found = {key: ("", tuple(value.shape)) for key, value in self.given.items()}
        for key, (name, _) in self.matched.items():
            found.setdefault(key, ("", self.tensors.tensors[name].shape))
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.given or key in self.matched

    def read(self, key: str) -> Tensor:
        """The key's value in our layout. KeyError where there is none; InputError for a step that
        does not fit, with the rule."""
        if key in self.given:
            return self.given[key].clone()
        name, rule = self.matched[key]
        value = self.tensors.tensors[name].load()
        steps = [parse_step(text) for text in rule.steps]
        value = apply_steps(value, steps, self._sizes_of(key), f"rule {rule.name} for {name}")
        shape = self.shapes.get(key)
        fits = shape is not None and value.numel() == prod(shape)
        return value.reshape(shape) if shape is not None and fits else value

    def _sizes_of(self, key: str) -> Sizes:
        return self.sizes.of_one_token() if key.startswith("decode.") else self.sizes


def match(tensors: ForeignTensors, rules: TensorMap, config: ModelConfig) -> Candidate:
    """Bind names to keys. InputError where no name matches any rule."""
    compiled = [(pattern(rule.name), rule) for rule in rules.rules]
    decode = pattern(rules.decode) if rules.decode else None
    candidate = Candidate(tensors, Sizes.of(config, tokens=1))
    for name in tensors.tensors:
        prefix, inner = _pass_of(name, decode, rules.decode)
        if not _bind(candidate, compiled, config, name, inner, prefix):
            candidate.unmatched.append(name)
    if not candidate.matched:
        raise InputError(
            f"{tensors.path}: expected names of the map, found none that matches, for instance "
            f"{next(iter(tensors.tensors))}"
        )
    return candidate


def _bind(
    candidate: Candidate,
    rules: list[tuple[re.Pattern[str], MapRule]],
    config: ModelConfig,
    name: str,
    inner: str,
    prefix: str,
) -> bool:
    """Give a name every key that a rule has for it."""
    found = False
    for compiled, rule in rules:
        hit = compiled.fullmatch(inner)
        if hit is None or not _right_layer(rule, hit.groupdict(), config):
            continue
        found = True
        key = filled(rule.key, hit.groupdict())
        if key is not None and candidate.tensors.tensors[name].shape.count(0) == 0:
            candidate.matched.setdefault(prefix + key, (name, rule))
    return found


def _right_layer(rule: MapRule, fields: Mapping[str, str], config: ModelConfig) -> bool:
    if rule.ratios is None or "n" not in fields:
        return True
    return int(fields["n"]) < config.n_layers and config.ratio(int(fields["n"])) in rule.ratios


def _pass_of(name: str, decode: re.Pattern[str] | None, text: str | None) -> tuple[str, str]:
    """The pass prefix of our keys, and the name without the engine's own."""
    hit = decode.match(name) if decode is not None else None
    if hit is None:
        return "", name
    number = int(hit["i"]) - ("{i+1}" in (text or ""))
    return (f"decode.{number}." if number >= 0 else ""), name[hit.end() :]


def pattern(text: str) -> re.Pattern[str]:
    """The regular expression of a pattern with `{n}`, `{i}`, `{i+1}`, or `{key}` for any name."""
    escaped = re.escape(text)
    escaped = escaped.replace(r"\{key\}", "(?P<key>.+)")
    escaped = re.sub(r"\\\{(n|i|e)(?:\\\+1)?\\\}", r"(?P<\1>\\d{1,9})", escaped)
    return re.compile(escaped)


def filled(template: str, fields: Mapping[str, str]) -> str | None:
    """A key's template with its fields filled in; None where `{n-1}` is before the first layer."""
    values: dict[str, Any] = dict(fields)
    key = template.replace("{key}", values.get("key", ""))
    for name in ("n", "i"):
        if name in values:
            before = int(values[name]) - 1
            if f"{{{name}-1}}" in key and before < 0:
                return None
            key = key.replace(f"{{{name}-1}}", str(before)).replace(f"{{{name}}}", values[name])
    return key
