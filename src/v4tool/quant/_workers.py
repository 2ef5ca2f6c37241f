"""Worker threads for code that leaves the interpreter lock: a few tasks, the caller takes part.

The threads only decide who computes a task, never what is computed. A product may be asked for from
within another pool: since the caller works through the tasks itself and waits for no task that
has not begun, nothing can wait for itself.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from threading import local
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="v4tool-product")


def as_here(function: Callable[P, R]) -> Callable[P, R]:
    """The function, to be called in another thread, under this one's inference mode.

    torch keeps the mode by thread, and tensors made under it can be changed only under it.
    """
    mode = torch.is_inference_mode_enabled()

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(mode):
            return function(*args, **kwargs)

    return called


def spread(task: Callable[[int], None], tasks: int, threads: int) -> None:
    """Call task(0) ... task(tasks - 1), in any order, on up to `threads` threads including this
    one."""
    number = count()

    def work() -> None:
        while (i := next(number)) < tasks:
            task(i)

    helpers = min(threads, tasks) - 1
    futures = [_pool(helpers).submit(as_here(work)) for _ in range(helpers)] if helpers > 0 else []
    try:
        work()
    finally:
        for future in futures:
            if not future.cancel():
                future.result()


class Scratch(local):
    """Buffers that a thread uses again and again: fresh memory is slow to come by."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """At least `size` elements of no known value, until the next call with the same name."""
        held = self._held.get(name)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # to be used under either mode
                held = self._held[name] = torch.empty(size, dtype=dtype)
        return held
