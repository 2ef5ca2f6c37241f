"""Nodes of `model.vt` in forms that other engines compute them in, where helpers are not enough.

A form takes a node's function and the file's names, and gives a function with the same signature.
Left out: choosing a form (`arithmetic`, `search`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Namespace = Mapping[str, Any]
Function = Callable[..., Any]


class InPlace:
    """A node's function in another form; its globals are the file's, as for the function itself."""

    def __init__(self, function: Function, form: Function) -> None:
        self.__globals__: Namespace = function.__globals__
        self._form = form

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the node returns in this form."""
        return self._form(*args, **kwargs)


def weight_after_down(function: Function, namespace: Namespace) -> Function:
    """The gate weight multiplies an expert's result instead of its input: w2 is linear."""

    def call(gate: Tensor, up: Tensor, weight: Any, **kwargs: Any) -> Tensor:
        found: Tensor = function(gate, up, 1, **kwargs)
        if isinstance(weight, Tensor):
            found = namespace["bf16"](namespace["acc"](found) * weight)
        return found

    return call


def _half(x: Tensor) -> Tensor:
    return x.to(torch.float16).double()


def half_attention(lanes: int, *, sums: bool = True) -> Callable[[Function, Namespace], Function]:
    """Attention over a cache in FP16, row after row, as ggml's CPU kernel for it.

    Queries and rows are rounded to FP16. sums: so is the running sum of weighted rows, after every
    row; then the weights are rounded to FP16 as well in as many columns as fill vectors of `lanes`.
    In a decode step the window's rows and the compressed ones are summed apart, by two threads.
    """

    def wrapped(function: Function, namespace: Namespace) -> Function:
        def call(q: Tensor, kv: Tensor, table: Tensor, **kwargs: Any) -> Tensor:
            if not sums:
                found: Tensor = function(_half(q), _half(kv), table, **kwargs)
                return found
            rows, index = _half(kv[0]), table[0].long()
            window = namespace["WINDOW"] if q.shape[1] == 1 else len(rows)
            width = rows.shape[-1] // lanes * lanes if lanes else 0
            halves = (torch.where(part, index, -1) for part in (index < window, index >= window))
            first, second = (_running_sum(_half(q[0]), rows, half, width) for half in halves)
            sink = namespace["sink_w"].double().reshape(1, -1, 1)
            last = (sink, torch.ones_like(sink), torch.zeros_like(sink))
            _, below, above = _joined(_joined(first, second), last)
            return torch.stack([namespace["bf16"](above / below)])

        return call

    return wrapped


Sums = tuple[Tensor, Tensor, Tensor]
"""Largest score, sum of weights relative to it: [s, H, 1]; sum of weighted rows [s, H, d]."""


def _running_sum(q: Tensor, rows: Tensor, index: Tensor, width: int) -> Sums:
    """Softmax-weighted sum of rows, rounded to FP16 after each: q [s, H, d], index [s, n], -1 for
    none. width: columns with FP16 weights.
    """
    none = len(rows)
    top = torch.full((*q.shape[:2], 1), -torch.inf, dtype=torch.float64)
    below, above = torch.zeros_like(top), torch.zeros_like(q)
    half_weight = torch.arange(q.shape[-1]) < width
    for column in torch.where(index < 0, none, index).sort(-1).values.unbind(-1):
        if bool((column == none).all()):
            break
        row = rows[column.clamp(max=none - 1)][:, None]
        score = (q * row).sum(-1, keepdim=True) * q.shape[-1] ** -0.5
        score = torch.where((column == none)[:, None, None], -torch.inf, score)
        higher, shrink, weight = _weights(top, score)
        factors = [torch.where(half_weight, _half(x), x) for x in (shrink, weight)]
        above = _half(_half(above * factors[0]) + factors[1] * row)
        below, top = below * shrink + weight, higher
    return top, below, above


def _weights(top: Tensor, score: Tensor) -> Sums:
    """The larger of two scores, and the weights of both relative to it; 1 and 0 where none is."""
    higher = torch.maximum(top, score)
    shrink = torch.exp(top - higher).nan_to_num(1.0)
    return higher, shrink, torch.exp(score - higher).nan_to_num(0.0)


def _joined(one: Sums, two: Sums) -> Sums:
    """Two sums over different rows as one."""
    top, first, second = _weights(one[0], two[0])
    return top, one[1] * first + two[1] * second, one[2] * first + two[2] * second
