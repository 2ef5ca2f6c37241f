"""A torch module tree with the names of another engine that gives out the values of a recording.

`names_of` undoes the steps of a map; the tree's modules then return those values, so that what is
captured of it must be the recording again.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from v4tool.config import ModelConfig
from v4tool.diff.layout import Sizes
from v4tool.diff.maps import TensorMap, filled
from v4tool.diff.matching import sizes_of


class Replay(nn.Module):
    """A module that calls its children and returns what it was given to return."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: tuple[Tensor, ...] = ()
        self.result: Any = None

    def forward(self, *_: Tensor) -> Any:
        for child in self.children():
            child(*child.arguments)  # type: ignore[operator, misc]
        return self.result


def tree(names: Iterable[str]) -> Replay:
    """The modules that names such as `a.b`, `a.b.0` and `a.b.in0` belong to."""
    root = Replay()
    for name in names:
        at = root
        for part in module_of(name).split("."):
            if part not in dict(at.named_children()):
                at.add_module(part, Replay())
            at = at.get_submodule(part)  # type: ignore[assignment]
    return root


def module_of(name: str) -> str:
    """A name without the argument or element of an output at its end."""
    head, _, last = name.rpartition(".")
    numbered = last.isdigit() and not head.endswith(".layers")
    return head if numbered or re.fullmatch(r"in\d+", last) else name


def fill(root: Replay, values: Mapping[str, Tensor]) -> None:
    """Give the modules what they return and what they are called with."""
    for module in root.modules():
        module.arguments, module.result = (), None
    for name, value in values.items():
        module, last = root.get_submodule(module_of(name)), name.rpartition(".")[2]
        if module_of(name) == name:
            module.result = value
        elif last.isdigit():
            # an element that the map does not name stands between
            filled = [*(module.result or ()), *[None] * (int(last) + 1)][: int(last) + 1]
            module.result = (*filled[: int(last)], value)
        else:
            module.arguments = (value,)


def names_of(
    rules: TensorMap, config: ModelConfig, recorded: Mapping[str, Tensor], tokens: int, step: str
) -> dict[str, Tensor]:
    """The engine's name -> value, for one pass of a recording.

    recorded: keys without the pass's prefix, which is `step`; tokens: of the prompt.
    """
    found: dict[str, Tensor] = {}
    for rule in rules.rules:
        for layer in range(config.n_layers):
            name, key = rule.name.replace("{n}", str(layer)), filled(rule.key, {"n": str(layer)})
            if key in recorded and name not in found:
                sizes = sizes_of(config, step + key, tokens)
                found[name] = undone(recorded[key], rule.steps, sizes)
    return found


def undone(value: Tensor, steps: Iterable[str], sizes: Sizes) -> Tensor:
    """The value before the steps of a rule."""
    for step in reversed(tuple(steps)):
        verb, *words = step.split()
        if verb == "offset":
            value = torch.where(value < 0, value, value - sizes.value(words[0]))
        elif (verb, *words) == ("take", "1", "-1:"):
            rows = torch.zeros(1, sizes.value("s") - 1, value.shape[-1])
            value = torch.cat([rows, value[:, None] if value.ndim == 2 else value], 1)
        else:
            raise NotImplementedError(step)
    return value
