"""Dataclasses of a verification's results: comparisons, node results, coverage, verdict.

All of them can be pickled, compared and written as JSON. Left out: how they are computed
(`compare`, `runtime`, `coverage`, `verdict`) and how they are shown (`report`).
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
"""Position in the execution: pass, index of the outermost node, index of completion inside it."""


@dataclass(frozen=True)
class Worst:
    """The element with the largest difference.

    index: in the tensor; where: the same by name of the dimension (token, channel, ...).
    """

    index: tuple[int, ...]
    where: dict[str, int]
    recorded: float
    computed: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of one recorded key with its node's output.

    kind: bf16 (values are BF16), acc (kept in the accumulation dtype) or int. count, bits_equal:
    number of elements, and of those with equal bits. max_rel: largest difference relative to the
    recorded value. ulps: largest difference in units in the last place, of BF16 for kind bf16, of
    FP32 for acc. relative_l2: norm of the difference relative to the norm of the node's output.
    cosine: cosine similarity of the flattened tensors, which no common factor changes.
    share_outside: share of elements that break the rule. least_tolerance: the least atol = rtol
    under which allclose passes. axis: name of the dimension of per_token. per_token: for a failing
    key, the largest error of each token (row, block), relative to the key's largest value; 0 where
    all is right.
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
    relative_l2: float = 0.0
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
        """Whether the key was compared."""
        return self.status in PASSING or self.status in FAILING

    @property
    def wrong_from_start(self) -> bool:
        """Whether the first token of the pass is wrong."""
        return self.fails and (not self.per_token or self.per_token[0] > 0)


@dataclass(frozen=True)
class ValueRef:
    """One returned value of a node: the node's order and the position in its outputs."""

    order: Order
    position: int


@dataclass(frozen=True)
class NodeResult:
    """One run of one node.

    kind: the node's name. label: the name with the template values that distinguish its uses,
    `q_linear[attn.wq_a]`. block: pass and block of its keys (`layers.3`, `mtp.0.prefill`, ...).
    line: in the `.vt` file. composite: it called other nodes. unkeyed_inputs: inputs that are
    recorded under no key; unkeyed_outputs: positions of such outputs. judges: for each comparison
    the unkeyed value of an inner node that was compared, if it was one. seconds: time of the run.
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


@dataclass(frozen=True)
class Verdict:
    """The first wrong operator.

    operator, kind, block: label, name and block of the node. key: the first key with an error;
    status, rule: of its comparison. because: why this node and not the one that outputs the key, if
    they differ. suspects: labels of nodes before it whose unkeyed value only it uses, so that the
    error may be theirs.
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
        block = f" of {self.block}" if self.block else ""
        if self.status == "input":
            text = f"another input: {self.operator}{block}: {self.key} holds {self.rule}"
        else:
            text = f"first wrong operator: {self.operator}{block}, seen in {self.key} ({self.rule})"
        if self.because:
            text += f"; {self.because}"
        if self.suspects:
            text += f"; not told apart from {', '.join(self.suspects)}, without keys of their own"
        return text


@dataclass(frozen=True)
class Coverage:
    """Number of recorded and of compared keys, and the names of keys that were not compared.

    recorded: without the token ids, which are inputs. uncovered: recorded, but no node's output.
    missing: a node's output, but not recorded. not_judged: absent from a partial recording, or not
    computed because a node before it failed.
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
    """The result of verifying one recording.

    exact: BF16 bits had to be equal. tokens, decode: length of the prompt, number of decode steps.
    nodes: in order of completion. restricted: only some nodes or layers were asked for, so coverage
    gives no findings. stopped: ended at the first failure. jobs: number of processes.
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
        """All comparisons, in order of execution."""
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
        """Figures for the manifest: checks passed, keys compared, share of equal bits, time."""
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
        """The result as plain data for JSON; NaN and infinities become null."""
        data = asdict(self)
        data["passed"] = self.passed
        data["evidence"] = self.evidence()
        data["verdict_sentence"] = self.verdict.sentence() if self.verdict else None
        return finite(data)  # type: ignore[no-any-return]


def finite(value: Any) -> Any:
    """Nested data with None in place of NaN and infinities, which JSON has no form for."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def counted(nodes: Iterable[NodeResult]) -> dict[str, int]:
    """Number of comparisons by status."""
    counts: dict[str, int] = {}
    for node in nodes:
        for comparison in node.comparisons:
            counts[comparison.status] = counts.get(comparison.status, 0) + 1
    return counts
