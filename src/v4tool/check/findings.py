"""Thread-safe collection of findings, with a count of keys and values per rule.

The counts show which rules were applied, so that a check without any comparison does not look like
a passed one. There is one finding per key and rule, with the first wrong value, its indices and the
number of wrong values.
"""

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import Bits, equal_values, format_number, to_f32, unravel
from v4tool.check.rules import RULES
from v4tool.errors import Finding


@dataclass
class Tally:
    """Use of one rule: the keys and the number of values it was applied to, and its findings."""

    keys: set[str] = field(default_factory=set)
    values: int = 0
    findings: int = 0


class Findings:
    """Findings and tallies of one check; safe for use from several threads.

    items: the findings; tallies: by rule; shapes: of the recorded keys, for indices in messages.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.items: list[Finding] = []
        self.tallies: dict[str, Tally] = {}
        self.shapes = shapes or {}
        self._lock = threading.Lock()

    def applied(self, rule: str, keys: Iterable[str] = (), values: int = 0) -> Tally:
        """Count keys and values that a rule was applied to, and return its tally."""
        assert rule in RULES, rule
        with self._lock:
            tally = self.tallies.setdefault(rule, Tally())
            tally.keys.update(keys)
            tally.values += values
        return tally

    def report(
        self, key: str, rule: str, expected: object, found: object, *, note: bool = False
    ) -> None:
        """Add a finding; note: it does not make the check fail."""
        tally = self.applied(rule)
        with self._lock:
            tally.findings += not note
        severity: Literal["error", "note"] = "note" if note else "error"
        self.items.append(Finding(key, rule, str(expected), str(found), severity))

    def compare(
        self, rule: str, key: str, found: Bits, expected: Bits, sources: Sequence[str]
    ) -> None:
        """Report where BF16 values differ; sources: the keys that the expected values come from."""
        with Comparison(self, rule, key, sources) as comparison:
            comparison.add(0, found, expected)

    def equal(
        self,
        rule: str,
        key: str,
        found: npt.NDArray[np.generic],
        expected: npt.NDArray[np.generic],
        sources: Sequence[str],
    ) -> None:
        """Report where integers differ; FP32 values are passed as words."""
        self.applied(rule, [key, *sources], found.size)
        wrong = np.flatnonzero((found != expected).reshape(-1))
        if wrong.size:
            where = self.indices(key, int(wrong[0]), found.shape)
            self.report(
                key,
                rule,
                f"{expected.reshape(-1)[wrong[0]]} at {where}{_from(sources)}",
                f"{found.reshape(-1)[wrong[0]]}; {wrong.size} of {found.size} values differ",
            )

    def indices(self, key: str, index: int, shape: tuple[int, ...] = ()) -> list[int]:
        """A flat index as indices of the key's recorded shape; shape: used if it is unknown."""
        recorded = self.shapes.get(key, shape)
        return unravel(index, recorded if math.prod(recorded) > index else shape)


def _from(sources: Sequence[str]) -> str:
    return f" (from {', '.join(sources)})" if sources else ""


class Comparison:
    """Compares BF16 values of one key in pieces; a context manager that reports when it is left.

    sources: the keys that the expected values come from.
    """

    def __init__(self, findings: Findings, rule: str, key: str, sources: Sequence[str]) -> None:
        self.findings, self.rule, self.key, self.sources = findings, rule, key, sources
        self.count = self.wrong = 0
        self.first: tuple[int, np.uint16, np.uint16] | None = None

    def add(self, start: int, found: Bits, expected: Bits) -> None:
        """Compare some values; `start`: flat index of the first one in the key."""
        bad = np.flatnonzero(~equal_values(found, expected).reshape(-1))
        self.count += found.size
        self.wrong += bad.size
        if bad.size and self.first is None:
            i = bad[0]
            self.first = (start + int(i), found.reshape(-1)[i], expected.reshape(-1)[i])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self.findings.applied(self.rule, [self.key, *self.sources], self.count)
        if self.first is not None:
            index, found, expected = self.first
            where = self.findings.indices(self.key, index, (self.count,))
            self.findings.report(
                self.key,
                self.rule,
                f"{format_number(value_of(expected))} at {where}{_from(self.sources)}",
                f"{format_number(value_of(found))}; {self.wrong} of {self.count} values differ",
            )


def value_of(bits: np.uint16) -> float:
    """The value of one BF16 bit pattern."""
    return float(to_f32(np.array([bits], np.uint16))[0])
