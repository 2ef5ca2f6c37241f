"""Maps from another engine's tensor names to keys: which tensor is which, and in what layout.

A map is a TOML file of rules; each has a pattern of names, a template of keys and the steps that
turn the tensor into the key's layout. Shipped maps lie in `engine_maps`. Left out: reading the
tensors (`readers`) and judging them (`judge`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.diff.layout import Sizes, Step, apply_steps, is_empty, parse_step
from v4tool.diff.readers import ForeignTensors
from v4tool.errors import InputError
from v4tool.names import Step as Pass
from v4tool.names import layer_of
from v4tool.profiles import toml_files

SHIPPED = Path(__file__).parent / "engine_maps"


def _steps(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        parse_step(text)
    return texts


class MapRule(BaseModel):
    """One rule. name: pattern with `{n}` for a layer and `{e}` for an expert; key: ours.

    A key with `{n}` whose name has none is of every layer; one with `{e}` of every expert whose
    rows the step `rows` takes. steps: see `layout`. ratios: layers with these compression ratios
    only. passes: "prefill" or "decode" where the layout is that of one of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    key: str
    steps: Annotated[tuple[str, ...], AfterValidator(_steps)] = ()
    ratios: tuple[int, ...] | None = None
    passes: Literal["prefill", "decode"] | None = None

    @model_validator(mode="after")
    def _experts_have_rows(self) -> "MapRule":
        rows = any(text.startswith("rows ") for text in self.steps)
        if "{e}" in self.key and "{e}" not in self.name and not rows:
            raise ValueError("{e} in the key: expected it in the name or a step rows, found neither")
        return self


class TensorMap(BaseModel):
    """A map. decode: pattern of what stands before the names of decode step `{i}`, or `{i+1}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    summary: str
    engine: str = ""
    decode: str | None = None
    rules: tuple[MapRule, ...]


def shipped_maps() -> dict[str, Path]:
    """The shipped maps' names and files."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_map(name: str) -> TensorMap:
    """A shipped map, or one of the user's by its path. InputError where there is none."""
    known = shipped_maps()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise InputError(f"--map {name}: expected a file or one of {', '.join(known)}, found none")
    return toml_files.read(path, str(path), TensorMap)


@dataclass(frozen=True)
class Binding:
    """Which tensor is a key. steps: with the full names of other tensors; expert: of `rows`."""

    name: str
    rule: MapRule
    steps: tuple[Step, ...]
    expert: int | None = None


@dataclass
class Candidate:
    """A candidate's tensors under our keys, each read and laid out when it is asked for.

    tokens: of the prompt; matched: key -> its tensor; unmatched: names without a rule; given:
    values that do not come from the tensors.
    """

    tensors: ForeignTensors
    config: ModelConfig
    tokens: int = 1
    matched: dict[str, Binding] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, str]:
        """What the files say of themselves."""
        return self.tensors.metadata

    @property
    def specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Key -> (dtype, shape as captured)."""
        found = {key: ("", tuple(value.shape)) for key, value in self.given.items()}
        for key, binding in self.matched.items():
            found.setdefault(key, ("", self.tensors.tensors[binding.name].shape))
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.given or key in self.matched

    def read(self, key: str) -> Tensor:
        """The key's value in our layout. KeyError where there is none; InputError for a step that
        does not fit, with the rule."""
        if key in self.given:
            return self.given[key].clone()
        binding = self.matched[key]
        where = f"rule {binding.rule.name} for {binding.name}"
        sizes = self.sizes_of(key, binding.expert)
        return apply_steps(self._load(binding.name), binding.steps, sizes, where, self._load)

    def _load(self, name: str) -> Tensor:
        return self.tensors.tensors[name].load()

    def sizes_of(self, key: str, expert: int | None = None) -> Sizes:
        """The sizes of a key's pass and layer."""
        return sizes_of(self.config, key, self.tokens, expert)

    def has_tokens(self, tokens: int) -> None:
        """Set the prompt's length, and drop keys that hold nothing in such a prompt."""
        self.tokens = tokens
        empty = [k for k, b in self.matched.items() if is_empty(b.steps, self.sizes_of(k))]
        for key in empty:
            del self.matched[key]


def sizes_of(
    config: ModelConfig, key: str, tokens: int, expert: int | None = None
) -> Sizes:
    """The sizes of a key's pass and layer behind a prompt of `tokens` tokens."""
    step = Pass("", tokens, 0)
    if key.startswith("decode."):
        step = Pass("", 1, tokens + int(key.split(".")[1]))
    elif key.startswith("mtp.0.decode."):
        step = Pass("", 1, tokens)
    layer = layer_of(key)
    layer = config.n_layers if layer is None and key.startswith("mtp.") else layer
    known = layer is not None and layer < len(config.compress_ratios)
    return Sizes.of(config, step, config.ratio(layer or 0) if known else 0, expert)


def match(tensors: ForeignTensors, rules: TensorMap, config: ModelConfig) -> Candidate:
    """Bind names to keys. InputError where no name matches any rule."""
    candidate = Candidate(tensors, config)
    matcher = _Matcher(candidate, rules)
    found = {name for name in tensors.tensors if matcher.bind(name)}
    found |= {tensors.tensors[name].alias_of for name in found} - {None}
    candidate.unmatched = [
        name
        for name, tensor in tensors.tensors.items()
        if name not in found and tensor.alias_of is None
    ]
    if not candidate.matched:
        raise InputError(
            f"{tensors.path}: expected names of the map, found none that matches, for instance "
            f"{next(iter(tensors.tensors))}"
        )
    return candidate


class _Matcher:
    """Gives names the keys that the rules of a map have for them."""

    def __init__(self, candidate: Candidate, rules: TensorMap) -> None:
        self.candidate, self.tensors = candidate, candidate.tensors.tensors
        self.config = candidate.config
        self.rules = [(pattern(rule.name), rule) for rule in rules.rules]
        self.decode_text = rules.decode or ""
        self.decode = pattern(rules.decode) if rules.decode else None

    def bind(self, name: str) -> bool:
        """Enter a name under its keys; False where no rule has one."""
        ours, theirs = self._pass_of(name)
        found = False
        for compiled, rule in self.rules:
            hit = compiled.fullmatch(name, len(theirs))
            if hit is None or (rule.passes == "prefill" and ours) or (
                rule.passes == "decode" and not ours
            ):
                continue
            for fields in self._layers(rule, hit.groupdict()):
                found |= self._enter(name, rule, fields, ours, theirs)
        return found

    def _pass_of(self, name: str) -> tuple[str, str]:
        """The pass prefix of our keys, and the engine's."""
        hit = self.decode.match(name) if self.decode is not None else None
        if hit is None:
            return "", ""
        number = int(hit["i"]) - ("{i+1}" in self.decode_text)
        return (f"decode.{number}." if number >= 0 else ""), hit[0]

    def _layers(self, rule: MapRule, fields: dict[str, str]) -> list[dict[str, str]]:
        """The fields for each layer that a rule is about."""
        if "{n" in rule.key and "n" not in fields:
            every = [fields | {"n": str(n)} for n in range(self.config.n_layers)]
        else:
            every = [fields]
        return [f for f in every if _right_layer(rule, f, self.config)]

    def _enter(
        self, name: str, rule: MapRule, fields: dict[str, str], ours: str, theirs: str
    ) -> bool:
        steps = []
        for text in rule.steps:
            step = parse_step(text)
            if step.other is not None:
                other = theirs + (filled(step.other, fields) or "")
                if other not in self.tensors:
                    return False
                step = step.with_other(other)
            steps.append(step)
        experts = self._experts(steps) if "{e}" in rule.key and "e" not in fields else [None]
        for expert in experts:
            key = filled(rule.key, fields if expert is None else fields | {"e": str(expert)})
            if key is not None and self.tensors[name].shape.count(0) == 0:
                binding = Binding(name, rule, tuple(steps), expert)
                self.candidate.matched.setdefault(ours + key, binding)
        return True

    def _experts(self, steps: list[Step]) -> list[int]:
        """The experts that any token was routed to, by the table that `rows` names."""
        table = next(step.other for step in steps if step.verb == "rows")
        return sorted({int(e) for e in self.tensors[table or ""].load().flatten()})


def _right_layer(rule: MapRule, fields: Mapping[str, str], config: ModelConfig) -> bool:
    if rule.ratios is None or "n" not in fields:
        return True
    return int(fields["n"]) < config.n_layers and config.ratio(int(fields["n"])) in rule.ratios


def pattern(text: str) -> re.Pattern[str]:
    """The regular expression of a pattern with `{n}`, `{i}`, `{i+1}`, or `{key}` for any name."""
    escaped = re.escape(text)
    escaped = escaped.replace(r"\{key\}", "(?P<key>.+)")
    escaped = re.sub(r"\\\{(n|i|e)(?:\\\+1)?\\\}", r"(?P<\1>\\d+)", escaped)
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
