"""What comparing another engine's tensors finds, as plain data.

Left out: how it is computed (`judge`, `search`, `verdict`) and how it is shown (`report`).
"""

from dataclasses import asdict, dataclass, field
from typing import Any

Order = tuple[int, int]
"""Place in the execution: number of the pass, ordinal of the comparison in it."""


@dataclass(frozen=True)
class Residue:
    """One key of the candidate against its operator, computed from the candidate's own inputs.

    operator: the node's label with routed experts as `<E>`. error: relative L2, for integers the
    share of entries that differ. inputs: the candidate's keys that the value was computed from;
    span: operators between those and the key, its own last. bound: what a right result may show.
    steps: whether a result of the span falls on BF16's steps. worst: index of the element
    that is farthest off; found, expected: both values there.
    """

    order: Order
    key: str
    operator: str
    error: float
    bound: float
    inputs: tuple[str, ...] = ()
    span: tuple[str, ...] = ()
    steps: bool = False
    worst: dict[str, int] = field(default_factory=dict)
    found: float = 0.0
    expected: float = 0.0
    note: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the error exceeds what a right result may show."""
        return not self.error <= self.bound


@dataclass(frozen=True)
class OperatorRow:
    """One operator over all blocks: its options, the median and largest error, and where."""

    operator: str
    options: tuple[str, ...]
    count: int
    median: float
    largest: float
    key: str
    bound: float


@dataclass(frozen=True)
class NamedFault:
    """A fault of the catalogue that reproduces the candidate's value: error with it and without."""

    name: str
    summary: str
    error: float
    without: float


@dataclass(frozen=True)
class DiffVerdict:
    """The first operator at fault.

    span: operators among which the fault is, if the candidate recorded no value between them.
    faults: what of the catalogue reproduces the value.
    """

    residue: Residue
    span: tuple[str, ...]
    faults: tuple[NamedFault, ...] = ()

    def sentence(self) -> str:
        """The verdict in one sentence."""
        at = self.residue
        if at.note:
            return f"{at.key}: {at.note}"
        what = f"{at.key}: relative L2 {at.error:.2g}, a right result stays below {at.bound:.1g}"
        if len(self.span) > 1:
            between = ", ".join(at.inputs) or "the ids"
            what += f"; the fault is between {between} and {at.key} ({' → '.join(self.span)})"
        if self.faults:
            named = " or ".join(
                f"{f.name} ({f.summary}; residue {f.error:.1g})" for f in self.faults
            )
            what += f"; reproduced by {named}"
        return what


@dataclass(frozen=True)
class DiffResult:
    """The comparison of one candidate.

    arithmetic: the name of the preset it starts from, and a row an operator. verdict: None where
    nothing is at fault.
    """

    candidate: str
    map: str
    tokens: int
    decode: int
    arithmetic: str
    operators: tuple[OperatorRow, ...]
    residues: tuple[Residue, ...]
    verdict: DiffVerdict | None
    unmatched: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no operator is at fault."""
        return self.verdict is None

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data for JSON."""
        found = asdict(self)
        found["ok"] = self.ok
        if self.verdict is not None:
            found["verdict"]["sentence"] = self.verdict.sentence()
        return found
