"""Provenance of unkeyed values: which node computed a value that is recorded under no key.

A value is identified by the address of its storage, so its views count as the value. Left out:
conclusions from it (`verdict`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from v4tool.verify.results import ValueRef

OUTERMOST = 2
"""Depth of the nodes that a pass calls itself: their values are kept until the pass ends."""


def memory(value: Tensor) -> int:
    """The address of a tensor's storage, which its views share."""
    return value.untyped_storage().data_ptr()


@dataclass
class Provenance:
    """The unkeyed values of a running pass, kept alive so that their memory is not reused."""

    _known: dict[int, tuple[Tensor, ValueRef, int]] = field(default_factory=dict)

    def of(self, value: Any) -> ValueRef | None:
        """The node output that an unkeyed value is; None for any other value."""
        if not isinstance(value, Tensor) or not value.numel():
            return None
        entry = self._known.get(memory(value))
        return entry[1] if entry else None

    def of_all(self, values: Iterable[Any]) -> tuple[ValueRef, ...]:
        """The results of `of` for several values, without None and repetitions."""
        found = map(self.of, values)
        return tuple(dict.fromkeys(ref for ref in found if ref is not None))

    def add(self, value: Tensor, ref: ValueRef, depth: int) -> None:
        """Remember a value that a node at this depth has computed."""
        if value.numel():
            self._known[memory(value)] = (value, ref, depth)

    def drop_inner(self) -> None:
        """Drop the values made inside an outermost node, which nothing can use after its end."""
        self._known = {k: v for k, v in self._known.items() if v[2] <= OUTERMOST}
