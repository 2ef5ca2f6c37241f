"""Steps that bring another engine's tensor into a key's layout.

A step is a line of words, for instance `reshape 1,s,H*HD` or `take -1 -R:` (docs/diff.md has them
all). Sizes are sums of products of numbers and letters: those of `model.vt`, and those of the pass:
`s` tokens, `t` compressed blocks that the pass completes, `k` blocks that each token may see (the
indexer's choice), `w` columns of the window, `n` = w + k columns of an index table, `o` the row at
which compressed blocks begin.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.errors import InputError
from v4tool.names import Step as Pass
from v4tool.names import complete_blocks, selected_columns, table_offset, window_columns

Others = Callable[[str], Tensor]
"""Other tensors of the candidate, by name."""


@dataclass(frozen=True)
class Sizes:
    """The values of the letters. expert: the routed expert whose rows are asked for, or None."""

    letters: Mapping[str, int]
    expert: int | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, step: Pass, ratio: int = 0, expert: int | None = None
    ) -> "Sizes":
        """The sizes of a model in one pass, in a layer with this compression ratio."""
        window, seen = window_columns(config, step), selected_columns(config, step, ratio)
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
            "s": step.tokens,
            "t": complete_blocks(step, ratio) if ratio else 0,
            "k": seen,
            "w": window,
            "n": window + seen,
            "o": table_offset(config, step),
        }
        return cls(letters, expert)

    def value(self, text: str) -> int:
        """The number that an expression stands for; ValueError where it is none."""
        terms = re.findall(r"([+-]?)([^+-]+)", text)
        if not terms or "".join(sign + term for sign, term in terms) != text:
            raise ValueError(f"expected a sum of products of numbers and letters, found {text!r}")
        total = 0
        for sign, term in terms:
            product = -1 if sign == "-" else 1
            for factor in term.split("*"):
                product *= self.letters[factor] if factor in self.letters else int(factor)
            total += product
        return total


@dataclass(frozen=True)
class Step:
    """One step: its verb and its arguments as written."""

    verb: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.verb, *self.arguments))

    @property
    def other(self) -> str | None:
        """The name of the other tensor that the step needs."""
        at = OTHER_TENSOR.get(self.verb)
        return None if at is None else self.arguments[at]

    def with_other(self, name: str) -> "Step":
        """The same with another tensor's name."""
        at = OTHER_TENSOR[self.verb]
        return Step(self.verb, (*self.arguments[:at], name, *self.arguments[at + 1 :]))


ARGUMENTS = {
    "reshape": (1,),
    "transpose": (1,),
    "squeeze": (1,),
    "take": (2,),
    "split": (2,),
    "append": (2, 3),
    "prepend": (2, 3),
    "after": (2,),
    "rows": (1,),
    "indices": (1,),
    "unmasked": (1,),
    "sorted": (1,),
    "deinterleave": (1,),
    "heads": (0,),
    "offset": (1,),
}
"""Verb -> numbers of words that may follow it."""
OTHER_TENSOR = {"append": 1, "prepend": 1, "after": 1, "rows": 0, "unmasked": 0}
"""Verb -> which word names another tensor of the candidate."""


def parse_step(text: str) -> Step:
    """A step from its words; ValueError where the verb or the number of words is wrong."""
    verb, *arguments = text.split() or [""]
    if verb not in ARGUMENTS:
        raise ValueError(f"expected one of {', '.join(ARGUMENTS)}, found {verb!r}")
    allowed = ARGUMENTS[verb]
    if len(arguments) not in allowed:
        numbers = " or ".join(map(str, allowed))
        raise ValueError(f"{verb}: expected {numbers} words, found {len(arguments)}")
    return Step(verb, tuple(arguments))


def _no_others(name: str) -> Tensor:
    raise ValueError(f"there is no other tensor {name}")


def apply_steps(
    value: Tensor, steps: Iterable[Step], sizes: Sizes, where: str, others: Others = _no_others
) -> Tensor:
    """The tensor after all steps. InputError, with the rule, for a step that does not fit."""
    for step in steps:
        before = list(value.shape)
        try:
            value = _apply(value, step, sizes, others)
        except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{where}: {step} does not fit shape {before}: {reason}") from None
    return value


def is_empty(steps: Iterable[Step], sizes: Sizes) -> bool:
    """Whether the steps leave no element, as in a pass that completes no compressed block."""
    for step in steps:
        if step.verb == "reshape" and any(_is_zero(x, sizes) for x in step.arguments[0].split(",")):
            return True
        if step.verb in ("sorted", "indices") and _is_zero(step.arguments[0], sizes):
            return True
        if step.verb == "take" and step.arguments[1].startswith("0:"):
            stop = step.arguments[1].removeprefix("0:")
            if stop and _is_zero(stop, sizes):
                return True
    return False


def _is_zero(text: str, sizes: Sizes) -> bool:
    try:
        return sizes.value(text) == 0
    except ValueError:
        return False


def _apply(value: Tensor, step: Step, sizes: Sizes, others: Others) -> Tensor:
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
            return _deinterleave(value, int(given[0]))
        case "heads":
            return value.transpose(1, 2).contiguous()
        case "offset":
            return torch.where(value < 0, value, value + sizes.value(given[0]))
        case "sorted":
            return _sorted(value, sizes.value(given[0]))
        case "indices":
            return _indices(value, sizes.value(given[0]))
        case _:
            return _with_other(value, step, sizes, others)


def _with_other(value: Tensor, step: Step, sizes: Sizes, others: Others) -> Tensor:
    given, other = step.arguments, others(step.other or "")
    if step.verb == "rows":
        chosen = other.reshape(value.shape[:2])
        return value[chosen == sizes.expert]
    if step.verb == "unmasked":
        scores = other.reshape(*value.shape[:-1], -1)
        closed = torch.isneginf(scores.gather(-1, value.long().clamp(min=0)))
        return torch.where(closed, -1, value)
    axis = int(given[0]) % value.ndim
    other = other.reshape(*value.shape[:axis], -1, *value.shape[axis + 1 :])
    if step.verb == "after":
        return value.narrow(axis, other.shape[axis], value.shape[axis] - other.shape[axis])
    if len(given) > 2:
        other = _take(other, axis, given[2], sizes)
    return torch.cat([value, other] if step.verb == "append" else [other, value], dim=axis)


def _take(value: Tensor, axis: int, text: str, sizes: Sizes) -> Tensor:
    """A slice START:STOP of an axis, either side may be empty."""
    start, _, stop = text.partition(":")
    index = [slice(None)] * value.ndim
    bounds = [sizes.value(x) if x else None for x in (start, stop)]
    index[axis] = slice(*bounds)
    return value[tuple(index)]


def _deinterleave(value: Tensor, axis: int) -> Tensor:
    width = value.shape[axis]
    halves = (value.index_select(axis, torch.arange(i, width, 2)) for i in (0, 1))
    return torch.cat(list(halves), dim=axis)


def _sorted(value: Tensor, columns: int) -> Tensor:
    """Indices of the last axis in ascending order, -1 last, in so many columns."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.where(value < 0, last, value.long()).sort(-1).values
    return torch.where(ordered == last, -1, ordered)[..., :columns]


def _indices(mask: Tensor, columns: int) -> Tensor:
    """Where a mask of the last axis is 0 (seen) rather than -inf (not seen), -1 behind them."""
    if columns > mask.shape[-1]:
        raise ValueError(f"expected a mask of at least {columns} columns")
    numbers = torch.arange(mask.shape[-1]).expand(mask.shape)
    return _sorted(torch.where(mask == 0, numbers, -1), columns)
