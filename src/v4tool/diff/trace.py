"""Which recorded keys and unrecorded operators a tensor was computed from.

Every torch function called under `Trace` gives its results the union of its arguments' sources, so
that concatenating, reshaping and caching in a `.vt` file keep them. Left out: values that do not
come from tensors (positions, tables of cosines); they have no sources.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

ATTRIBUTE = "_v4tool_sources"


@dataclass(frozen=True)
class Sources:
    """Keys of the candidate, and operators behind them whose values it did not record."""

    keys: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()

    def __or__(self, other: "Sources") -> "Sources":
        if other is self or other is NOTHING:
            return self
        if self is NOTHING:
            return other
        return Sources(self.keys | other.keys, self.operators | other.operators)


NOTHING = Sources()


def sources_of(value: Any) -> Sources:
    """A tensor's sources; a tuple's or list's together."""
    if isinstance(value, Tensor):
        found: Sources = getattr(value, ATTRIBUTE, NOTHING)
        return found
    together = NOTHING
    if isinstance(value, tuple | list):
        for element in value:
            if isinstance(element, Tensor | tuple | list):
                together |= sources_of(element)
    return together


def set_sources(value: Any, sources: Sources) -> None:
    """Give a tensor, or all tensors of a tuple or list, these sources."""
    for tensor in _tensors(value):
        setattr(tensor, ATTRIBUTE, sources)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tensors(element)


class Trace(TorchFunctionMode):
    """While active, results of torch functions carry the sources of their arguments."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function and pass the sources on."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list):
            sources = sources_of((*args, *kwargs.values()) if kwargs else args)
            if sources is not NOTHING:
                set_sources(result, sources | sources_of(result))
        return result
