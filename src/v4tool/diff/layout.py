"""Steps that bring another engine's tensor into a key's layout.

A step is a line of words: `reshape 1,s,H*HD`, `transpose 1,0,2`, `squeeze 0`, `take -1 -R:`,
`split -1 0/2` (part 0 of 2), `deinterleave -1`, `heads` ([1, H, s, d] to [1, s, H, d]), `offset s`
(added to indices that are not negative). Sizes are written with the letters of `model.vt` and `s`
for the tokens of the pass, products with `*`, a negative one with `-`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.errors import InputError


@dataclass(frozen=True)
class Sizes:
    """The values of the letters; tokens: those of the pass."""

    letters: tuple[tuple[str, int], ...]
    tokens: int

    @classmethod
    def of(cls, config: ModelConfig, tokens: int) -> "Sizes":
        """The sizes of a model and a pass of `tokens` tokens."""
        letters = {
            "D": config.dim,
            "M": config.hc_mult,
            "H": config.n_heads,
            "HD": config.head_dim,
            "R": config.rope_head_dim,
            "QL": config.q_lora_rank,
            "OL": config.o_lora_rank,
            "G": config.o_groups,
            "IH": config.index_n_heads,
            "ID": config.index_head_dim,
            "I": config.moe_inter_dim,
            "E": config.n_routed_experts,
            "K": config.n_activated_experts,
            "V": config.vocab_size,
            "W": config.window_size,
        }
        return cls(tuple(letters.items()), tokens)

    def of_one_token(self) -> "Sizes":
        """The sizes of a decode step."""
        return replace(self, tokens=1)

    def value(self, text: str) -> int:
        """The number that an expression stands for; ValueError where it is none."""
        known = {**dict(self.letters), "s": self.tokens}
        sign, text = (-1, text[1:]) if text.startswith("-") else (1, text)
        product = sign
        for factor in text.split("*"):
            product *= known[factor] if factor in known else int(factor)
        return product


@dataclass(frozen=True)
class Step:
    """One step: its verb and its arguments as written."""

    verb: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.verb, *self.arguments))


ARGUMENTS = {
    "reshape": 1,
    "transpose": 1,
    "squeeze": 1,
    "take": 2,
    "split": 2,
    "deinterleave": 1,
    "heads": 0,
    "offset": 1,
}


def parse_step(text: str) -> Step:
    """A step from its words; ValueError where the verb or the number of words is wrong."""
    verb, *arguments = text.split() or [""]
    if verb not in ARGUMENTS:
        raise ValueError(f"expected one of {', '.join(ARGUMENTS)}, found {verb!r}")
    if len(arguments) != ARGUMENTS[verb]:
        raise ValueError(f"{verb}: expected {ARGUMENTS[verb]} words, found {len(arguments)}")
    return Step(verb, tuple(arguments))


def apply_steps(value: Tensor, steps: Iterable[Step], sizes: Sizes, where: str) -> Tensor:
    """The tensor after all steps. InputError, with the rule, for a step that does not fit."""
    for step in steps:
        before = list(value.shape)
        try:
            value = _apply(value, step, sizes)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{where}: {step} does not fit shape {before}: {reason}") from None
    return value


def _apply(value: Tensor, step: Step, sizes: Sizes) -> Tensor:
    given = step.arguments
    match step.verb:
        case "reshape":
            return value.reshape([sizes.value(text) for text in given[0].split(",")])
        case "transpose":
            return value.permute([int(text) for text in given[0].split(",")]).contiguous()
        case "squeeze":
            return value.squeeze(int(given[0]))
        case "take":
            return _take(value, int(given[0]), given[1], sizes)
        case "split":
            part, parts = map(int, given[1].split("/"))
            return value.chunk(parts, dim=int(given[0]))[part]
        case "deinterleave":
            axis = int(given[0])
            even, odd = (value.index_select(axis, torch.arange(i, value.shape[axis], 2))
                         for i in (0, 1))  # fmt: skip
            return torch.cat([even, odd], dim=axis)
        case "heads":
            return value.transpose(1, 2).contiguous()
        case _:
            return torch.where(value < 0, value, value + sizes.value(given[0]))


def _take(value: Tensor, axis: int, text: str, sizes: Sizes) -> Tensor:
    """A slice START:STOP of an axis, either side may be empty."""
    start, _, stop = text.partition(":")
    index = [slice(None)] * value.ndim
    bounds = [sizes.value(x) if x else None for x in (start, stop)]
    index[axis] = slice(*bounds)
    return value[tuple(index)]
