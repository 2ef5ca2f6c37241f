"""Who is to blame: the first node in order of execution whose inputs were good and whose output is
not.

Isolated runs hand on recorded values, so a node with a wrong key had good inputs and is wrong by
itself, unless one of its inputs has no key of its own (the streams behind an attention's hc_post,
the scores of a gate, ...). Such a value is judged by all who use it. It is accused when at least
two of them are wrong, at the first token already: the operators without keys treat all tokens
alike, so a fault of theirs shows at once, whereas two users that rotate by position agree on token
0. A value with one user that is wrong cannot be told apart from that user: the user is named, the
value's node is a suspect. When a value is the very output of an enclosing node, that output judges
it directly.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from v4tool.verify.compare import Rule
from v4tool.verify.results import Comparison, NodeResult, Order, ValueRef, Verdict


@dataclass(frozen=True)
class Branch:
    """One user of a value: whether it is wrong, and wrong from the first token on."""

    fails: bool
    from_start: bool

    @staticmethod
    def union(branches: Iterable["Branch"]) -> "Branch":
        """Wrong if any of several pieces of evidence is."""
        every = list(branches)
        return Branch(any(b.fails for b in every), any(b.from_start for b in every))


def branch_of(comparisons: Iterable[Comparison]) -> Branch:
    """What some comparisons say about their node."""
    return Branch.union(Branch(c.fails, c.wrong_from_start) for c in comparisons)


@dataclass
class Evidence:
    """The nodes of a run and who uses whose unkeyed values."""

    nodes: tuple[NodeResult, ...]
    _memo: dict[ValueRef, tuple[Branch, ...]] = field(default_factory=dict)

    @cached_property
    def by_order(self) -> dict[Order, NodeResult]:
        """Every node by its place."""
        return {node.order: node for node in self.nodes}

    @cached_property
    def users(self) -> dict[ValueRef, list[NodeResult]]:
        """The nodes that take a value and compute with it themselves."""
        users: dict[ValueRef, list[NodeResult]] = defaultdict(list)
        for node in self.nodes:
            for ref in node.unkeyed_inputs if not node.composite else ():
                users[ref].append(node)
        return users

    @cached_property
    def judges(self) -> dict[ValueRef, list[Comparison]]:
        """Comparisons of an enclosing node's output that is this very value."""
        judges: dict[ValueRef, list[Comparison]] = defaultdict(list)
        for node in self.nodes:
            for comparison, ref in zip(node.comparisons, node.judges, strict=True):
                if ref is not None:
                    judges[ref].append(comparison)
        return judges

    def branches(self, value: ValueRef) -> tuple[Branch, ...]:
        """Every user of a value, judged."""
        if value not in self._memo:
            self._memo[value] = ()  # a cycle cannot be, but shall not hang
            direct = [branch_of([c]) for c in self.judges[value]] if value in self.judges else []
            users = [self.user_branch(node) for node in self.users.get(value, [])]
            self._memo[value] = (*direct, *users)
        return self._memo[value]

    def user_branch(self, node: NodeResult) -> Branch:
        """A user is wrong by its own keys, or by its values without keys if they are accused."""
        values = [ValueRef(node.order, p) for p in node.unkeyed_outputs]
        return Branch.union([branch_of(node.comparisons), *map(self.value_branch, values)])

    def value_branch(self, value: ValueRef) -> Branch:
        """Whether a value is wrong as far as its users can tell: by two of them, or by its only
        one."""
        branches = self.branches(value)
        wrong = [b for b in branches if b.fails]
        if value in self.judges:
            return branch_of(self.judges[value])
        if self.accused(value) or (wrong and len(branches) == 1):
            return Branch.union(wrong)
        return Branch(False, False)

    def accused(self, value: ValueRef) -> bool:
        """Whether at least two users are wrong, from the first token on."""
        return sum(b.fails and b.from_start for b in self.branches(value)) >= 2


def first_wrong(nodes: tuple[NodeResult, ...], rule: Rule) -> Verdict | None:
    """The verdict over nodes in order of completion, or None where nothing is wrong."""
    evidence = Evidence(nodes)
    for node in nodes:
        for comparison, judged in zip(node.comparisons, node.judges, strict=True):
            if comparison.fails:
                return _blame(evidence, node, comparison, judged, rule)
    return None


def _blame(
    evidence: Evidence,
    seen_in: NodeResult,
    comparison: Comparison,
    judged: ValueRef | None,
    rule: Rule,
) -> Verdict:
    node, because = seen_in, ""
    if judged is not None:
        node = evidence.by_order.get(judged.order, seen_in)
    suspects: list[str] = []
    while True:
        culprit, more = _upstream(evidence, node)
        if culprit is None:
            suspects += more
            break
        node = culprit
        because = "its value has no key of its own, and those who use it are wrong from the start"
    text = comparison.note or rule.text(comparison.kind)
    return Verdict(
        operator=node.label,
        kind=node.kind,
        block=node.block,
        line=node.line,
        key=comparison.key,
        status=comparison.status,
        rule=text,
        because=because,
        suspects=tuple(dict.fromkeys(suspects)),
    )


def _upstream(evidence: Evidence, node: NodeResult) -> tuple[NodeResult | None, list[str]]:
    """The node whose unkeyed value is accused, or None and those that cannot be told apart from
    `node`."""
    suspects: list[str] = []
    for value in node.unkeyed_inputs:
        maker = evidence.by_order.get(value.order)
        if maker is None:
            continue
        if evidence.accused(value):
            return maker, []
        branches = evidence.branches(value)
        if len(branches) == 1 or all(b.fails for b in branches):
            culprit, more = _upstream(evidence, maker)
            if culprit is not None:
                return culprit, []
            suspects += [maker.label, *more]
    return None, suspects
