"""Fault localisation: the first executed node whose inputs are right and whose output is wrong.

An isolated run hands on recorded values, so the inputs of a node are right and a wrong key is that
node's own error, unless an input is an unkeyed value: one that is recorded under no key (the
streams behind an attention's hc_post, the scores of a gate, ...). Whether such a value is wrong is
concluded from the errors of the nodes that use it:

* It is wrong if two users are wrong at the same token, unless one user is grossly wrong at a token
  where another one is right. An error of the value of that size would show in both, so that user
  has an error of its own.
* With one user, which is wrong, the two cannot be told apart: the verdict names the user and lists
  the node that made the value as a suspect.
* If the value is also the output of an enclosing node, the key of that output decides.
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
"""The largest error of each token, relative to the key's largest value; 0 where it is right."""

GROSS = 2.0**-7
"""At least one BF16 unit in the last place: every user of a value shows an error of this size."""


def errors_of(comparisons: Iterable[Comparison]) -> Errors:
    """Each token's largest error over the failing comparisons; () if none fails."""
    return largest_errors(c.per_token or (math.inf,) for c in comparisons if c.fails)


def largest_errors(several: Iterable[Errors]) -> Errors:
    """The elementwise maximum; errors with fewer tokens than the longest are ignored."""
    every = [errors for errors in several if errors]
    longest = max(map(len, every), default=0)
    same = [errors for errors in every if len(errors) == longest]
    return tuple(max(column) for column in zip(*same, strict=True))


def common_error(a: Errors, b: Errors) -> bool:
    """Whether two users are wrong at the same token; at any token if their lengths differ.

    Gross errors must begin at the first token: the nodes that make unkeyed values treat all tokens
    alike. A rotation leaves position 0 unchanged, so errors of two users behind a wrong rotation
    are no error of their common input.
    """
    if len(a) != len(b):
        return bool(a and b)
    both = [min(x, y) for x, y in zip(a, b, strict=True)]
    return any(error > 0 for error in both) and (both[0] > 0 or max(both) < GROSS)


def own_error(wrong: Errors, right: Errors) -> bool:
    """Whether the first user is grossly wrong at a token where the second one is right."""
    if len(right) != len(wrong):
        return not right and any(error >= GROSS for error in wrong)
    return any(x == 0 and y >= GROSS for x, y in zip(right, wrong, strict=True))


@dataclass
class DataFlow:
    """The nodes of a run, and which nodes use which unkeyed values."""

    nodes: tuple[NodeResult, ...]
    _user_errors: dict[ValueRef, tuple[Errors, ...]] = field(default_factory=dict)

    @cached_property
    def by_order(self) -> dict[Order, NodeResult]:
        """Every node by its position in the execution."""
        return {node.order: node for node in self.nodes}

    @cached_property
    def users(self) -> dict[ValueRef, list[NodeResult]]:
        """The nodes that take a value and compute with it themselves (composite nodes do not)."""
        users: dict[ValueRef, list[NodeResult]] = defaultdict(list)
        for node in self.nodes:
            for ref in node.unkeyed_inputs if not node.composite else ():
                users[ref].append(node)
        return users

    @cached_property
    def enclosing(self) -> dict[ValueRef, list[Comparison]]:
        """Comparisons of an enclosing node's output that is this value."""
        enclosing: dict[ValueRef, list[Comparison]] = defaultdict(list)
        for node in self.nodes:
            for comparison, ref in zip(node.comparisons, node.judges, strict=True):
                if ref is not None and comparison.judged:
                    enclosing[ref].append(comparison)
        return enclosing

    def user_errors(self, value: ValueRef) -> tuple[Errors, ...]:
        """The errors of every user of a value; the enclosing nodes' comparisons count as users."""
        if value not in self._user_errors:
            users = [self._node_errors(node) for node in self.users.get(value, [])]
            direct = [errors_of([c]) for c in self.enclosing.get(value, [])]
            self._user_errors[value] = (*direct, *users)
        return self._user_errors[value]

    def _node_errors(self, node: NodeResult) -> Errors:
        """The errors of a node's keys and those of its unkeyed outputs."""
        values = [ValueRef(node.order, p) for p in node.unkeyed_outputs]
        return largest_errors([errors_of(node.comparisons), *map(self._value_errors, values)])

    def _value_errors(self, value: ValueRef) -> Errors:
        """The errors of a value that is wrong, or may be because it has one user; else ()."""
        if value in self.enclosing:
            return errors_of(self.enclosing[value])
        errors = self.user_errors(value)
        if self.is_wrong(value) or len(errors) == 1:
            return largest_errors(errors)
        return ()

    def is_wrong(self, value: ValueRef) -> bool:
        """Whether two users have a common error and none has one of its own."""
        errors = self.user_errors(value)
        if any(own_error(wrong, right) for right, wrong in permutations(errors, 2) if wrong):
            return False
        return any(common_error(a, b) for a, b in combinations(errors, 2))


def first_wrong(nodes: tuple[NodeResult, ...], rule: Rule) -> Verdict | None:
    """The verdict over nodes in order of completion, or None if no key is wrong."""
    flow = DataFlow(nodes)
    for node in nodes:
        for comparison, judged in zip(node.comparisons, node.judges, strict=True):
            if comparison.fails:
                return _verdict(flow, node, comparison, judged, rule)
    return None


def _verdict(
    flow: DataFlow,
    seen_in: NodeResult,
    comparison: Comparison,
    judged: ValueRef | None,
    rule: Rule,
) -> Verdict:
    node, because = seen_in, ""
    if judged is not None:
        node = flow.by_order.get(judged.order, seen_in)
    producer, suspects = _upstream(flow, node)
    while producer is not None:
        node, because = producer, "its value has no key of its own, but those who use it are wrong"
        producer, suspects = _upstream(flow, node)
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


def _upstream(flow: DataFlow, node: NodeResult) -> tuple[NodeResult | None, list[str]]:
    """The producer of a wrong unkeyed value that `node` depends on, or None and the labels of
    producers that cannot be told apart from `node`.
    """
    suspects: list[str] = []
    for value in node.unkeyed_inputs:
        producer = flow.by_order.get(value.order)
        if producer is None:
            continue
        if flow.is_wrong(value):
            return producer, []
        if all(flow.user_errors(value)):
            further, more = _upstream(flow, producer)
            if further is not None:
                return further, []
            suspects += [producer.label, *more]
    return None, suspects
