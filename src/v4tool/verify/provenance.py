"""Provenance of values that no key judges: which node made them; the verdict follows it.

A value is recognised by its memory, so views of it count as itself. Left out: what to conclude.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from v4tool.verify.results import ValueRef

OUTERMOST = 2
"""Depth of the nodes that a pass calls itself: their values live on until the pass ends."""


def memory(value: Tensor) -> int:
    """Where a tensor's storage lies; views have their base's."""
    return value.untyped_storage().data_ptr()


@dataclass
class Provenance:
    """The unjudged values of a running pass, kept alive so that their memory is not another's."""

    _known: dict[int, tuple[Tensor, ValueRef, int]] = field(default_factory=dict)

    def of(self, value: Any) -> ValueRef | None:
        """Which node output a value is, if no key judges it."""
        if not isinstance(value, Tensor) or not value.numel():
            return None
        entry = self._known.get(memory(value))
        return entry[1] if entry else None

    def of_all(self, values: Iterable[Any]) -> tuple[ValueRef, ...]:
        """What `of` gives for several values, each once."""
        found = map(self.of, values)
        return tuple(dict.fromkeys(ref for ref in found if ref is not None))

    def add(self, value: Tensor, ref: ValueRef, depth: int) -> None:
        """Remember a value that a node at this depth made."""
        if value.numel():
            self._known[memory(value)] = (value, ref, depth)

    def forget_inner(self) -> None:
        """An outermost node has ended: nobody can reach what was made inside."""
        self._known = {k: v for k, v in self._known.items() if v[2] <= OUTERMOST}
