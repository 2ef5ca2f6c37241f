"""Thread pools for code that releases the GIL: `parallel_for`, `ordered_map`, scratch buffers.

Scheduling does not affect values: results have the same bits for any number of threads.
`parallel_for` may be called inside another pool: the caller runs tasks itself and does not wait for
tasks that have not started, so nested calls cannot deadlock.
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
"""Items per thread that may be computed before their results are consumed: bounds memory."""


@cache
def _helper_pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="v4tool-product")


def with_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that another thread calls it under this thread's inference mode.

    torch's inference mode is per thread, and inference tensors can be modified only under it.
    """
    mode = torch.is_inference_mode_enabled()

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(mode):
            return function(*args, **kwargs)

    return called


def parallel_for(task: Callable[[int], None], tasks: int, threads: int) -> None:
    """Call task(0) ... task(tasks - 1) in any order on up to `threads` threads, with this one."""
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
    """Reusable named buffers, one set per thread; avoids the page faults of new memory."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """A buffer of at least `size` uninitialised elements, valid until `name` is taken again."""
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
    """Yield function(item) of every item, in the items' order, computed on `threads` threads.

    At most RESULTS_AHEAD results per thread are computed ahead of the consumer. With one thread or
    one item the caller computes. An exception of `function` is raised when its item is due.
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
