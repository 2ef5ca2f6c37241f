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

import torch
from torch import Tensor


@cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="v4tool-product")


def spread(task: Callable[[int], None], tasks: int, threads: int) -> None:
    """Call task(0) ... task(tasks - 1), in any order, on up to `threads` threads including this
    one."""
    number = count()

    def work() -> None:
        while (i := next(number)) < tasks:
            task(i)

    helpers = min(threads, tasks) - 1
    futures = [_pool(helpers).submit(work) for _ in range(helpers)] if helpers > 0 else []
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
            held = self._held[name] = torch.empty(size, dtype=dtype)
        return held
