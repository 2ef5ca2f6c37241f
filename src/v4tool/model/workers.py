"""Whole pieces of work on several threads, results in order.

The threads decide who computes a piece and when, never what is computed: whoever consumes the
results sees them one after the other, as if there were one thread. `by_tokens` and the products
share out smaller pieces by themselves; left out here.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from v4tool.quant._workers import as_here

Item = TypeVar("Item")
Result = TypeVar("Result")

RESULTS_AHEAD = 2
"""Pieces per thread that are begun or done before their turn: bounds the memory of their
results.
"""


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="v4tool-model")


def in_order(
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
    function, waiting = as_here(function), deque[Future[Result]]()
    try:
        for item in items:
            waiting.append(_pool(threads).submit(function, item))
            if len(waiting) > RESULTS_AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
