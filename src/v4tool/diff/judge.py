"""Residues of a candidate's keys: its values against the operators run on its own inputs.

Left out: running the operators (`running`), choosing the arithmetic (`search`) and what residues
mean (`verdict`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from v4tool.diff.arithmetic import Arithmetic, Option, bound
from v4tool.diff.choices import choice_error
from v4tool.diff.results import Residue
from v4tool.diff.trace import Sources, set_sources, sources_of
from v4tool.verify.frames import Frame, Judged
from v4tool.verify.provenance import Provenance
from v4tool.verify.results import Comparison
from v4tool.verify.tensors import Recorded

Combination = tuple[Option, ...]
Errors = dict[tuple[str, str], dict[Combination, list[float]]]
"""(operator, node) -> options on the node's axes -> errors, one a block."""


def operator_of(label: str) -> str:
    """A node's label with a routed expert's number as `<E>`."""
    head, found, rest = label.partition("ffn.experts.")
    return (
        f"{head}{found}<E>.{rest.partition('.')[2]}"
        if found and "." in rest
        else (f"{head}{found}<E>]" if found else label)
    )


def relative_error(computed: Tensor, recorded: Tensor) -> float:
    """Relative L2 in binary64: |computed - recorded| / |recorded| as vectors."""
    c, r = computed.detach().double().flatten(), recorded.double().flatten()
    length = float(r.norm())
    distance = float((c - r).norm())
    return distance / length if length else distance


@dataclass
class Run:
    """What one run over the candidate found.

    residues: a key each, in order of execution; operators: arithmetic's operators with their node;
    explored: errors of combinations, where they were asked for.
    """

    residues: list[Residue] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)
    explored: Errors = field(default_factory=dict)


class CandidateJudge:
    """Takes residues of recorded keys and hands recorded values on."""

    def __init__(self, candidate: Recorded, run: Run, arithmetic: Arithmetic, terms: int) -> None:
        self.candidate, self.run, self.arithmetic = candidate, run, arithmetic
        self.terms = terms
        self.keys = frozenset(candidate.specs)
        self.equally_good: Mapping[str, Callable[..., Any]] = {}
        self.number = 0

    def judge_all(
        self, frame: Frame, result: Any, weights: dict[str, Tensor], provenance: Provenance
    ) -> list[Judged]:
        """One residue for every recorded key; recorded values are handed on."""
        values = result if isinstance(result, tuple) else (result,)
        return [
            self._judge(frame, key, value, weights)
            for key, value in zip(frame.keys, values, strict=True)
        ]

    def _judge(
        self, frame: Frame, key: str | None, value: Any, weights: dict[str, Tensor]
    ) -> Judged:
        operator = operator_of(frame.label)
        self.run.nodes[operator] = frame.spec.name
        before = sources_of(value) | sources_of(frame.args)
        if key is None or key not in self.keys:
            if not frame.called:
                set_sources(value, Sources(before.keys, before.operators | {operator}))
            return Judged(None, None, value)
        recorded = self.candidate.read(key)
        self.run.residues.append(self._residue(frame, key, operator, value, recorded, weights))
        handed = handed_on(value, recorded)
        set_sources(handed, Sources(frozenset({key})))
        return Judged(Comparison(key, "equal"), None, handed)

    def _residue(
        self,
        frame: Frame,
        key: str,
        operator: str,
        value: Tensor,
        recorded: Tensor,
        weights: dict[str, Tensor],
    ) -> Residue:
        before = sources_of(value) | sources_of(frame.args)
        inner = before.operators - {operator}
        span = [*(o for o in self.run.nodes if o in inner), operator]
        nodes = self.run.nodes
        options = [self.arithmetic.options(nodes[o], o) for o in span]
        allowed = bound(options, self.terms)
        error, note = error_of(frame, value, recorded, weights)
        worst, found, expected = _worst(value, recorded) if not note else ({}, 0.0, 0.0)
        return Residue(
            order=(self.number, len(self.run.residues)),
            key=key,
            operator=operator,
            error=error,
            bound=allowed,
            inputs=tuple(sorted(before.keys)),
            span=tuple(span),
            steps=any(option.steps for several in options for option in several),
            worst=worst,
            found=found,
            expected=expected,
            note=note,
        )

    def absent(self, frame: Frame, key: str) -> Comparison:
        """A key that the candidate did not record."""
        return Comparison(key, "unrecorded")

    def from_recording(self, keys: tuple[str | None, ...]) -> Any:
        """What the candidate recorded under a node's keys."""
        values = [self._recorded(key) for key in keys]
        return values[0] if len(values) == 1 else tuple(values)

    def _recorded(self, key: str | None) -> Tensor | None:
        if key is None or key not in self.keys:
            return None
        value = self.candidate.read(key)
        value = value.float() if value.is_floating_point() else value
        set_sources(value, Sources(frozenset({key})))
        return value


def error_of(
    frame: Frame, value: Tensor, recorded: Tensor, weights: dict[str, Tensor]
) -> tuple[float, str]:
    """The relative L2 of a value, or the error of a choice, and a note where there is none."""
    if value.numel() != recorded.numel():
        shapes = f"{list(value.shape)}, found {list(recorded.shape)}"
        return float("inf"), f"expected shape {shapes}"
    recorded = recorded.reshape(value.shape)
    if not value.is_floating_point():
        return choice_error(frame, value, recorded, weights), ""
    if not bool(torch.isfinite(recorded).all()):
        return float("nan"), "holds NaN or infinity"
    return relative_error(value, recorded), ""


def handed_on(value: Tensor, recorded: Tensor) -> Tensor:
    """The recorded value in the computed one's shape, in binary64 where the model keeps that."""
    if value.numel() != recorded.numel():
        return value
    recorded = recorded.reshape(value.shape)
    if not value.is_floating_point():
        return recorded.to(value.dtype)
    return recorded.to(torch.float64 if value.dtype == torch.float64 else torch.float32)


def _worst(value: Tensor, recorded: Tensor) -> tuple[dict[str, int], float, float]:
    """The element that is farthest off, by axis number, and both values there."""
    computed, given = value.double().flatten(), recorded.double().flatten()
    if not computed.numel():
        return {}, 0.0, 0.0
    at = int((computed - given).abs().argmax())
    index, rest = {}, at
    for axis in reversed(range(value.ndim)):
        index[str(axis)], rest = rest % value.shape[axis], rest // value.shape[axis]
    return dict(sorted(index.items())), float(given[at]), float(computed[at])
