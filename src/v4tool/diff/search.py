"""Finds the arithmetic of a candidate: which honest options fit its own tensors best.

First whole presets are compared on all recorded keys. Then every operator whose inputs are recorded
takes the combination of options that fits best in most blocks. Operators whose values are not
recorded are tried one option at a time, judged by the keys behind them. Left out: what residues
under the arithmetic mean (`verdict`).
"""

import math
from collections.abc import Iterable
from statistics import median

from v4tool.diff.arithmetic import PRESETS, Arithmetic, Axis, Option, axes_of
from v4tool.diff.judge import Run
from v4tool.diff.results import Residue
from v4tool.diff.running import DiffJob, run

BETTER = 2.0
"""An option must lower the median residue by this factor to replace what is simpler."""
EXACT = 1e-9
"""Residues below this are those of binary64 and are not told apart."""


def find_arithmetic(job: DiffJob) -> tuple[str, Arithmetic]:
    """The preset that fits best, and the arithmetic refined from it."""
    part = job.sample()
    runs = {name: run(job, Arithmetic(options, {}), part) for name, options in PRESETS.items()}
    name = min(runs, key=lambda name: _score(runs[name].residues))
    arithmetic = Arithmetic(PRESETS[name], {})
    arithmetic = _fit_direct(arithmetic, run(job, arithmetic, part, explore=True))
    return name, _fit_spans(job, arithmetic)


def _score(residues: Iterable[Residue]) -> float:
    """The mean over operators of the logarithm of the median residue; lower fits better."""
    medians = medians_of(residues)
    return sum(math.log10(max(m, EXACT)) for m in medians.values()) / max(len(medians), 1)


def medians_of(residues: Iterable[Residue]) -> dict[str, float]:
    """The median error of every operator; what cannot be compared counts as 1."""
    errors: dict[str, list[float]] = {}
    for residue in residues:
        error = residue.error if math.isfinite(residue.error) else 1.0
        errors.setdefault(residue.operator, []).append(error)
    return {operator: median(found) for operator, found in errors.items()}


def _fit_direct(arithmetic: Arithmetic, explored: Run) -> Arithmetic:
    """The combination of options that fits best, for operators whose inputs are recorded."""
    for (operator, node), combinations in explored.explored.items():
        axes = axes_of(node)
        chosen = _best(arithmetic.options(node, operator), combinations)
        for axis, option in zip(axes, chosen, strict=True):
            if option is not arithmetic.option(operator, axis):
                arithmetic = arithmetic.with_option(operator, axis, option)
    return arithmetic


def _best(
    current: tuple[Option, ...], combinations: dict[tuple[Option, ...], list[float]]
) -> tuple[Option, ...]:
    medians = {options: _finite(median(found)) for options, found in combinations.items()}
    best = min(medians, key=lambda options: (medians[options], _distance(options, current)))
    good_enough = medians.get(current, math.inf) <= max(BETTER * medians[best], EXACT)
    return current if good_enough else best


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1.0


def _distance(options: tuple[Option, ...], current: tuple[Option, ...]) -> int:
    return sum(a is not b for a, b in zip(options, current, strict=True))


def _fit_spans(job: DiffJob, arithmetic: Arithmetic) -> Arithmetic:
    """Options of operators that are not recorded, one at a time, by the keys behind them."""
    part = job.sample()
    base = run(job, arithmetic, part, trace=True)
    for operator, axis in _unexplained(base, arithmetic):
        before = medians_of(base.residues)
        for option in axis.options:
            if option is arithmetic.option(operator, axis):
                continue
            tried = arithmetic.with_option(operator, axis, option)
            found = run(job, tried, part, trace=True)
            if _improves(before, medians_of(found.residues), base, operator):
                arithmetic, base, before = tried, found, medians_of(found.residues)
    return arithmetic


def _unexplained(base: Run, arithmetic: Arithmetic) -> list[tuple[str, Axis]]:
    """Operators inside the spans of keys that are wrong so far, with their axes."""
    medians = medians_of(base.residues)
    inner = {
        operator
        for residue in base.residues
        if residue.wrong and medians[residue.operator] > residue.bound
        for operator in residue.span
    }
    ordered = [operator for operator in base.nodes if operator in inner]
    return [(operator, axis) for operator in ordered for axis in axes_of(base.nodes[operator])]


def _improves(before: dict[str, float], after: dict[str, float], base: Run, operator: str) -> bool:
    """Whether the keys behind an operator fit better, and none of them worse."""
    behind = {r.operator for r in base.residues if operator in r.span}
    ratios = [max(after[o], EXACT) / max(before[o], EXACT) for o in behind if o in after]
    return bool(ratios) and min(ratios) < 1 / BETTER and max(ratios) < BETTER
