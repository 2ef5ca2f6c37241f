"""Wraps a weight reader and issues read-ahead for the next tensors from a background thread.

A read-ahead call can block: the kernel allocates the pages, and waits while the disk's queue is
full (a second for a gigabyte); compute threads should not wait for that. Left out: which weights
are prefetched, and when (`Scope.upcoming`).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Self

from torch import Tensor

from v4tool.model.scope import Weights


class PrefetchingWeights:
    """A `Weights` that wraps another one; its `advise` returns at once.

    A context manager: on exit, read-ahead that has not started is cancelled, a running one awaited.
    Weights that were read before their read-ahead started are skipped: they are not needed again.
    Errors of `advise` are ignored: the read raises them.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._pending: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="v4tool-ahead")

    def nbytes(self, name: str) -> int:
        """Bytes of a weight as stored."""
        return self._weights.nbytes(name)

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """A whole weight."""
        self._pending.discard(name)
        return self._weights.read(name, buffer)

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """Some rows of a weight."""
        self._pending.discard(name)
        return self._weights.read_rows(name, start, stop, buffer)

    def gather_rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a weight by number."""
        return self._weights.gather_rows(name, ids)

    def advise(self, names: list[str]) -> None:
        """Start read-ahead of these weights, in this order."""
        self._pending.update(names)
        self._thread.submit(self._prefetch, names)

    def _prefetch(self, names: list[str]) -> None:
        pending = [name for name in names if name in self._pending]
        self._pending.difference_update(pending)
        self._weights.advise(pending)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
