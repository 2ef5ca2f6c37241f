"""A candidate's tensors under our keys: which rule of a map gives which name a key.

Left out: the rules (`maps`), their steps (`layout`), reading the tensors (`readers`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.diff.layout import apply_steps
from v4tool.diff.maps import MapRule, TensorMap, filled, pattern
from v4tool.diff.readers import ForeignTensors
from v4tool.diff.steps import Sizes, Step, is_empty, parse_step
from v4tool.errors import InputError
from v4tool.names import Step as Pass
from v4tool.names import layer_of


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
    values that do not come from the tensors; shapes: of keys whose shape no routing decides.
    """

    tensors: ForeignTensors
    config: ModelConfig
    tokens: int = 1
    matched: dict[str, Binding] = field(default_factory=dict)
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
        value = apply_steps(self._load(binding.name), binding.steps, sizes, where, self._load)
        shape = self.shapes.get(key)
        return value if shape is None or value.numel() != prod(shape) else value.reshape(shape)

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


def sizes_of(config: ModelConfig, key: str, tokens: int, expert: int | None = None) -> Sizes:
    """The sizes of a key's pass and layer behind a prompt of `tokens` tokens."""
    found = re.match(r"decode\.(\d{1,9})\.", key)
    step = Pass("", tokens, 0)
    if found:
        step = Pass("", 1, tokens + int(found[1]))
    elif key.startswith("mtp.0.decode."):
        step = Pass("", 1, tokens)
    layer = config.n_layers if key.startswith("mtp.") else layer_of(key)
    known = layer is not None and layer < len(config.compress_ratios)
    return Sizes.of(config, step, config.ratio(layer or 0) if known else 0, expert)


def match(tensors: ForeignTensors, rules: TensorMap, config: ModelConfig) -> Candidate:
    """Bind names to keys. InputError where no name matches any rule."""
    candidate = Candidate(tensors, config)
    matcher = _Matcher(candidate, rules)
    found = {name for name in tensors.tensors if matcher.bind(name)}
    found |= {tensors.tensors[name].alias_of or name for name in found}
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
            if (
                hit is None
                or (rule.passes == "prefill" and ours)
                or (rule.passes == "decode" and not ours)
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
        name = next(step.other for step in steps if step.verb == "rows") or ""
        table = self.tensors[name].load()
        if table.is_floating_point():
            raise InputError(f"{name}: expected numbers of experts, found {table.dtype}")
        return sorted({int(e) for e in table.flatten()})


def _right_layer(rule: MapRule, fields: Mapping[str, str], config: ModelConfig) -> bool:
    if rule.ratios is None or "n" not in fields:
        return True
    return int(fields["n"]) < config.n_layers and config.ratio(int(fields["n"])) in rule.ratios
