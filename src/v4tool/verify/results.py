"""What verifying finds, as plain data: comparisons, nodes, coverage, verdict.

Everything here can be pickled, compared and written as JSON. Left out: how it is computed
(`compare`, `runtime`, `verdict`) and how it is shown (`report`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from v4tool.errors import Finding

Status = Literal[
    "equal", "ulp", "zero", "order", "rounding", "close",
    "differs", "outside", "nan", "input", "shape", "dtype", "missing", "error",
    "unrecorded", "unjudged",
]  # fmt: skip
PASSING = frozenset({"equal", "ulp", "zero", "order", "rounding", "close"})
FAILING = frozenset({"differs", "outside", "nan", "input", "shape", "dtype", "error"})
STATUS_MEANING: Mapping[str, str] = {
    "equal": "bit for bit",
    "ulp": "kept in acc: within 1 unit in the last place of FP32",
    "zero": "bit for bit but for the sign of zeros",
    "order": "another order, or another pick among equal scores",
    "rounding": "BF16 neighbours, explained by inputs that the recording holds rounded to FP32",
    "close": "within the tolerance (exactness is not asked for)",
    "differs": "within the tolerance, but other bits than the exact arithmetic gives",
    "outside": "outside the tolerance",
    "nan": "not a number, or infinite",
    "input": "the embeddings of other token ids: another input, not wrong arithmetic",
    "shape": "another shape",
    "dtype": "another dtype",
    "missing": "not in the recording",
    "error": "the node cannot be computed from the recorded inputs",
    "unrecorded": "not in this partial recording: not judged",
    "unjudged": "not judged, because a node before it could not be computed",
}

Order = tuple[int, int, int]
"""Place in the execution: pass, ordinal of the outermost node, ordinal of completion inside."""


@dataclass(frozen=True)
class Worst:
    """The element that is farthest off: where it is, and both values."""

    index: tuple[int, ...]
    where: dict[str, int]
    recorded: float
    computed: float


@dataclass(frozen=True)
class Comparison:
    """One recorded key held against what its node gives.

    kind: bf16 (values are BF16), acc (kept in the accumulation dtype) or int. count, bits_equal:
    elements, and those equal bit for bit. max_rel: relative to the recorded value. ulps: largest
    distance in units of the last place, of BF16 for kind bf16, of FP32 for acc. cosine: of the two
    tensors taken as vectors. share_outside: of elements that the rule does not admit.
    least_tolerance: the least atol = rtol under which allclose passes. per_token: for a failing
    key, the largest relative error of each token (row, block), 0 where all is right.
    """

    key: str
    status: Status
    kind: str = ""
    shape: tuple[int, ...] = ()
    count: int = 0
    bits_equal: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    ulps: int = 0
    cosine: float = 1.0
    share_outside: float = 0.0
    least_tolerance: float = 0.0
    worst: Worst | None = None
    axis: str = "token"
    per_token: tuple[float, ...] = ()
    note: str = ""

    @property
    def fails(self) -> bool:
        """Whether the key counts as a mismatch."""
        return self.status in FAILING

    @property
    def judged(self) -> bool:
        """Whether the key was compared at all."""
        return self.status in PASSING or self.status in FAILING

    @property
    def wrong_from_start(self) -> bool:
        """Whether the first token of the pass is wrong already."""
        return self.fails and (not self.per_token or self.per_token[0] > 0)


@dataclass(frozen=True)
class ValueRef:
    """One value that a node gave: the node's order and the position in its outputs."""

    order: Order
    position: int


@dataclass(frozen=True)
class NodeResult:
    """One run of one node.

    label: the node's kind with what tells its uses apart, `q_linear[attn.wq_a]`; block: where its
    keys lie (`layers.3`, `mtp.0.prefill`, ...); composite: it called other nodes. unkeyed_inputs:
    inputs that no key judges; unkeyed_outputs: positions of such outputs. judges: values of inner
    nodes, without keys of their own, that this node's comparisons are about, by comparison.
    """

    order: Order
    kind: str
    label: str
    block: str
    line: int
    comparisons: tuple[Comparison, ...] = ()
    composite: bool = False
    unkeyed_inputs: tuple[ValueRef, ...] = ()
    unkeyed_outputs: tuple[int, ...] = ()
    judges: tuple[ValueRef | None, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def fails(self) -> bool:
        """Whether any of its keys is wrong."""
        return any(c.fails for c in self.comparisons)

    @property
    def place(self) -> str:
        """`hc_post in layers.0`: what a person calls it."""
        return f"{self.label} in {self.block}" if self.block else self.label


@dataclass(frozen=True)
class Verdict:
    """The first wrong operator.

    operator, kind, block: the node; key: the first key that shows it; status, rule: how that key
    was judged. because: why this node and not the one that computes the key, where they differ.
    suspects: nodes in front of it that have no key of their own and no second witness, so that they
    may be at fault instead.
    """

    operator: str
    kind: str
    block: str
    line: int
    key: str
    status: Status
    rule: str
    because: str = ""
    suspects: tuple[str, ...] = ()

    def sentence(self) -> str:
        """The verdict in one line."""
        place = f" of {self.block}" if self.block else ""
        if self.status == "input":
            text = f"another input: {self.operator}{place}: {self.key} holds {self.rule}"
        else:
            text = f"first wrong operator: {self.operator}{place}, seen in {self.key} ({self.rule})"
        if self.because:
            text += f"; {self.because}"
        if self.suspects:
            text += f"; not told apart from {', '.join(self.suspects)}, without keys of their own"
        return text


@dataclass(frozen=True)
class Coverage:
    """Which recorded keys some node compared.

    recorded: keys to compare (the ids are inputs); compared; uncovered: recorded, but no node's
    output; missing: a node's output, but not recorded; not_judged: allowed to be absent (partial)
    or unreachable.
    """

    recorded: int = 0
    compared: int = 0
    uncovered: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()

    @property
    def total(self) -> bool:
        """Whether every recorded key was compared."""
        return not self.uncovered


@dataclass(frozen=True)
class VerifyResult:
    """All that one recording's verification found.

    nodes: in order of completion. restricted: only some nodes or layers were asked for, so coverage
    is not judged. stopped: ended at the first failure. seconds, jobs: how long and with how many
    processes.
    """

    recording: str
    checkpoint: str
    description: str
    mode: Literal["isolated", "chained"]
    exact: bool
    partial: bool
    restricted: bool
    stopped: bool
    tokens: int
    decode: int
    nodes: tuple[NodeResult, ...]
    findings: tuple[Finding, ...]
    coverage: Coverage
    verdict: Verdict | None
    jobs: int = field(default=1, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every comparison, in order of execution."""
        return tuple(c for node in self.nodes for c in node.comparisons)

    @property
    def failures(self) -> tuple[NodeResult, ...]:
        """The nodes with a wrong key, in order of execution."""
        return tuple(node for node in self.nodes if node.fails)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong: no failing key, no finding that is an error."""
        return not self.failures and not any(f.severity == "error" for f in self.findings)

    def evidence(self) -> dict[str, Any]:
        """The figures for the manifest: checks passed, keys compared, bit-equal share, time."""
        judged = [c for c in self.comparisons if c.judged]
        bf16 = [c for c in judged if c.kind == "bf16"]
        elements = sum(c.count for c in bf16)
        equal = sum(c.bits_equal for c in bf16)
        return {
            "mode": self.mode,
            "description": self.description,
            "passed": self.passed,
            "node_checks": len(judged),
            "node_checks_passed": sum(not c.fails for c in judged),
            "node_runs": len(self.nodes),
            "keys_recorded": self.coverage.recorded,
            "keys_compared": self.coverage.compared,
            "bf16_elements": elements,
            "bf16_bit_equal": equal,
            "bf16_bit_equal_share": equal / elements if elements else 1.0,
            "jobs": self.jobs,
            "seconds": round(self.seconds, 3),
        }

    def as_dict(self) -> dict[str, Any]:
        """The whole result as plain data for JSON; what is not finite becomes null."""
        data = asdict(self)
        data["passed"] = self.passed
        data["evidence"] = self.evidence()
        data["verdict_sentence"] = self.verdict.sentence() if self.verdict else None
        return finite(data)  # type: ignore[no-any-return]


def finite(value: Any) -> Any:
    """Nested data with None in place of numbers that JSON does not know."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def counted(nodes: Iterable[NodeResult]) -> dict[str, int]:
    """How many comparisons have each status."""
    counts: dict[str, int] = {}
    for node in nodes:
        for comparison in node.comparisons:
            counts[comparison.status] = counts.get(comparison.status, 0) + 1
    return counts
