"""Applies the steps of a map's rule to tensors: another engine's layout becomes a key's.

Left out: the steps as text (`steps`).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from v4tool.diff.steps import Sizes, Step
from v4tool.errors import InputError

Others = Callable[[str], Tensor]
"""Other tensors of the candidate, by name."""


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
