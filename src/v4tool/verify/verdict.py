"""Who is to blame: the first node executed whose inputs were good and whose output is not.

Isolated runs hand on recorded values, so a node with a wrong key had good inputs and is wrong by
itself, unless one of its inputs has no key of its own (the streams behind an attention's hc_post,
the scores of a gate, ...). Such a value is judged by all who use it. It is accused when two of them
are wrong at the same token, unless one is grossly wrong at a token where another one is right: a
value as wrong as that would have shown there too, so that user is wrong by itself. A value with one
user that is wrong cannot be told apart from that user: the user is named, the value's node is a
suspect. When a value is the very output of an enclosing node, that output is its key.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations

from v4tool.verify.compare import Rule
from v4tool.verify.results import Comparison, NodeResult, Order, ValueRef, Verdict

Errors = tuple[float, ...]
"""Of each token the largest error, relative to the key's largest value; 0 where it is right."""

GROSS = 2.0**-7
"""An error of one unit in the last place of BF16 at least: no user of a value could hide it."""


def errors_of(comparisons: Iterable[Comparison]) -> Errors:
    """How wrong some comparisons say their node is; () where nothing is wrong."""
    return worst_of(c.per_token or (math.inf,) for c in comparisons if c.fails)


def worst_of(several: Iterable[Errors]) -> Errors:
    """Token by token the largest of several errors; of the longest form where they do not match."""
    every = [errors for errors in several if errors]
    longest = max(map(len, every), default=0)
    same = [errors for errors in every if len(errors) == longest]
    return tuple(max(column) for column in zip(*same, strict=True))


def agree(a: Errors, b: Errors) -> bool:
    """Whether two users are wrong at the same token, as far as their tokens can be matched.

    Gross errors must begin at the first token: whatever has no key treats all tokens alike,
    whereas a rotation, whose users may both be wrong behind it, leaves position 0 as it is.
    """
    if len(a) != len(b):
        return bool(a and b)
    both = [min(x, y) for x, y in zip(a, b, strict=True)]
    return any(error > 0 for error in both) and (both[0] > 0 or max(both) < GROSS)


def acquits(right: Errors, wrong: Errors) -> bool:
    """Whether `wrong` is grossly wrong at a token where `right` is right."""
    if len(right) != len(wrong):
        return not right and any(y >= GROSS for y in wrong)
    return any(x == 0 and y >= GROSS for x, y in zip(right, wrong, strict=True))


@dataclass
class Evidence:
    """The nodes of a run and who uses whose unkeyed values."""

    nodes: tuple[NodeResult, ...]
    _memo: dict[ValueRef, tuple[Errors, ...]] = field(default_factory=dict)

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
                if ref is not None and comparison.judged:
                    judges[ref].append(comparison)
        return judges

    def branches(self, value: ValueRef) -> tuple[Errors, ...]:
        """How wrong every user of a value is."""
        if value not in self._memo:
            users = [self._user_errors(node) for node in self.users.get(value, [])]
            direct = [errors_of([c]) for c in self.judges.get(value, [])]
            self._memo[value] = (*direct, *users)
        return self._memo[value]

    def _user_errors(self, node: NodeResult) -> Errors:
        """A user is wrong by its own keys, or by its values without keys as far as these are."""
        values = [ValueRef(node.order, p) for p in node.unkeyed_outputs]
        return worst_of([errors_of(node.comparisons), *map(self._value_errors, values)])

    def _value_errors(self, value: ValueRef) -> Errors:
        """How wrong a value is by the word of its users: two of them, or the only one."""
        if value in self.judges:
            return errors_of(self.judges[value])
        branches = self.branches(value)
        if self.accused(value) or len(branches) == 1:
            return worst_of(branches)
        return ()

    def accused(self, value: ValueRef) -> bool:
        """Whether two users are wrong at the same token, and no third acquits the value."""
        branches = self.branches(value)
        if any(acquits(a, b) for a, b in permutations(branches, 2) if b):
            return False
        return any(agree(a, b) for a, b in combinations(branches, 2))


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
    culprit, suspects = _upstream(evidence, node)
    while culprit is not None:
        node, because = culprit, "its value has no key of its own, but those who use it are wrong"
        culprit, suspects = _upstream(evidence, node)
    return Verdict(
        operator=node.label,
        kind=node.kind,
        block=node.block,
        line=node.line,
        key=comparison.key,
        status=comparison.status,
        rule=comparison.note or rule.text(comparison.kind),
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
        if all(evidence.branches(value)):
            culprit, more = _upstream(evidence, maker)
            if culprit is not None:
                return culprit, []
            suspects += [maker.label, *more]
    return None, suspects
