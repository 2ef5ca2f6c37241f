"""Weights whose reader is told in time what comes next, on a thread of its own.

To announce a read is not free: the kernel takes the memory for it and waits where the disk has
enough to do (a second for a gigabyte), which no thread that computes should. Left out: what is
announced, and when.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Self

from torch import Tensor

from v4tool.model.scope import Weights


class PrefetchingWeights:
    """The given weights; `advise` returns at once. A context manager, which waits at the end.

    What was read before its turn is not announced any more: its pages may have left the cache, and
    would be fetched for nothing. An error of `advise` is not seen: the read will meet it again.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._due: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="v4tool-ahead")

    def nbytes(self, name: str) -> int:
        """Bytes of a weight as it is stored."""
        return self._weights.nbytes(name)

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """A whole weight."""
        self._due.discard(name)
        return self._weights.read(name, buffer)

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """Some rows of a weight."""
        self._due.discard(name)
        return self._weights.read_rows(name, start, stop, buffer)

    def gather_rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a weight by number."""
        return self._weights.gather_rows(name, ids)

    def advise(self, names: list[str]) -> None:
        """These weights will be read soon, in this order."""
        self._due.update(names)
        self._thread.submit(self._announce, names)

    def _announce(self, names: list[str]) -> None:
        due = [name for name in names if name in self._due]
        self._due.difference_update(due)
        self._weights.advise(due)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
