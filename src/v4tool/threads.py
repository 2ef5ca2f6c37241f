"""`parallel_for`, `ordered_map` and per-thread scratch buffers, for code that releases the GIL.

Threads decide who computes a piece and when, never its value, so results have the same bits for any
number of threads. `parallel_for` may be called from inside another pool: the caller works through
the tasks itself and waits for no task that has not begun, so a nested call cannot deadlock.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import count
from threading import local
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")
Result = TypeVar("Result")

RESULTS_AHEAD = 2
"""Pieces per thread that are begun or done before their turn: bounds the memory of their
results.
"""


@cache
def _helper_pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="v4tool-product")


def with_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """The function, to be called in another thread, under this one's inference mode.

    torch keeps the mode by thread, and tensors made under it can be changed only under it.
    """
    mode = torch.is_inference_mode_enabled()

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(mode):
            return function(*args, **kwargs)

    return called


def parallel_for(task: Callable[[int], None], tasks: int, threads: int) -> None:
    """Call task(0) ... task(tasks - 1), in any order, on up to `threads` threads including this
    one."""
    number = count()

    def work() -> None:
        while (i := next(number)) < tasks:
            task(i)

    helpers = min(threads, tasks) - 1
    futures = (
        [_helper_pool(helpers).submit(with_inference_mode(work)) for _ in range(helpers)]
        if helpers > 0
        else []
    )
    try:
        work()
    finally:
        for future in futures:
            if not future.cancel():
                future.result()


class ScratchBuffers(local):
    """Buffers by name, one set per thread, reused because newly allocated memory is slow."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """At least `size` uninitialised elements, valid until the next call with the same name."""
        held = self._held.get(name)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # to be used under either mode
                held = self._held[name] = torch.empty(size, dtype=dtype)
        return held


@cache
def _ordered_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="v4tool-model")


def ordered_map(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> Iterator[Result]:
    """function(item) of every item, in the order of the items, computed on `threads` threads.

    The caller only waits for results, and consumes one while others are being computed; with one
    thread, or one item, it computes them itself. An error of `function` is raised at its item's
    turn.
    """
    if min(threads, len(items)) <= 1:
        yield from map(function, items)
        return
    function, waiting = with_inference_mode(function), deque[Future[Result]]()
    try:
        for item in items:
            waiting.append(_ordered_pool(threads).submit(function, item))
            if len(waiting) > RESULTS_AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
