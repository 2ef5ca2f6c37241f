"""The first operator at fault, and which known fault it is.

An operator is at fault where its residue, under the candidate's own arithmetic, exceeds what a
right result may show (`arithmetic.bound`), or is an outlier among the candidate's residues. The
first such key in execution order is named; if values before it were not recorded, the fault is in
the span between the recorded keys. Left out: running operators (`running`) and residues (`judge`).
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from v4tool.diff.arithmetic import Arithmetic
from v4tool.diff.faults import FAULTS, Fault
from v4tool.diff.results import DiffVerdict, NamedFault, OperatorRow, Residue
from v4tool.diff.running import DiffJob, run
from v4tool.diff.search import medians_of

OUTLIER = 32.0
"""A residue this many times the typical one is an outlier: on sound ports in FP32 the largest of
all residues is within 4 times the median.
"""
NAMED = 8.0
"""A fault is named where it lowers the residue by at least this factor, to within the bound."""


def judged(residues: Iterable[Residue]) -> tuple[Residue, ...]:
    """The residues with bounds lowered where the candidate's own are far below what is allowed.

    Results that fall on no steps have residues of one size, that of the candidate's accumulation.
    """
    every = tuple(residues)
    smooth = [r.error for r in every if not r.steps and 0 < r.error <= r.bound]
    if not smooth:
        return every
    typical = OUTLIER * median(smooth)
    return tuple(r if r.steps else replace(r, bound=min(r.bound, typical)) for r in every)


def find_verdict(
    job: DiffJob, arithmetic: Arithmetic, residues: tuple[Residue, ...], nodes: dict[str, str]
) -> DiffVerdict | None:
    """The first operator at fault with the faults that reproduce it; None where nothing is."""
    first = next((residue for residue in residues if residue.wrong), None)
    if first is None:
        return None
    if math.isnan(first.error) or math.isinf(first.error):
        return DiffVerdict(first, first.span)
    suspects = {nodes[operator] for operator in first.span if operator in nodes}
    found = []
    for fault in FAULTS:
        if not fault.nodes.isdisjoint(suspects):
            named = _tried(job, arithmetic, fault, first)
            if named is not None:
                found.append(named)
    found.sort(key=lambda named: named.error)
    best = [named for named in found if named.error <= 4 * found[0].error]
    return DiffVerdict(first, first.span, tuple(best))


def _tried(job: DiffJob, arithmetic: Arithmetic, fault: Fault, at: Residue) -> NamedFault | None:
    """The fault, if the candidate's value is what the operator gives with it."""
    found = run(job, arithmetic, job.at(at.key), fault=fault)
    error = next((r.error for r in found.residues if r.key == at.key), math.inf)
    if not error <= at.bound or error * NAMED > at.error:
        return None
    return NamedFault(fault.name, fault.summary, error, at.error)


def operator_rows(
    arithmetic: Arithmetic, residues: Iterable[Residue], nodes: dict[str, str]
) -> tuple[OperatorRow, ...]:
    """One row an operator: its options and its residues over all blocks."""
    every = list(residues)
    medians, rows = medians_of(every), []
    for operator in dict.fromkeys(residue.operator for residue in every):
        own = [residue for residue in every if residue.operator == operator]
        largest = max(own, key=lambda r: math.inf if math.isnan(r.error) else r.error)
        options = arithmetic.options(nodes[operator], operator)
        rows.append(
            OperatorRow(
                operator=operator,
                options=tuple(option.name for option in options),
                count=len(own),
                median=medians[operator],
                largest=largest.error,
                key=largest.key,
                bound=largest.bound,
            )
        )
    return tuple(rows)
