"""Runs the nodes of `model.vt` on a candidate's own tensors, in the candidate's arithmetic.

Every node starts from what the candidate recorded, where it recorded the node's inputs; what it did
not record is computed under the same arithmetic. Each recorded key gives one residue. Left out:
which arithmetic that is (`search`) and what residues mean (`verdict`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v4tool.checkpoint.shards import Checkpoint
from v4tool.diff.arithmetic import (
    Arithmetic,
    Option,
    axes_of,
    bound,
    in_form,
    longest_sum,
    replacements,
)
from v4tool.diff.choices import choice_error
from v4tool.diff.faults import Fault
from v4tool.diff.results import Residue
from v4tool.diff.trace import Sources, Trace, set_sources, sources_of
from v4tool.names import layer_of
from v4tool.verify.compare import Rule
from v4tool.verify.frames import Frame, Judged, RunScope
from v4tool.verify.judging import Judge
from v4tool.verify.language import read_description
from v4tool.verify.passes import DECODE, MTP_DECODE, PREFILL
from v4tool.verify.provenance import Provenance
from v4tool.verify.results import Comparison
from v4tool.verify.runtime import Runtime
from v4tool.verify.tensors import OWN_DESCRIPTION, CheckpointWeights, Recorded, decode_steps
from v4tool.verify.vt_module import vt_environment

Combination = tuple[Option, ...]
Errors = dict[tuple[str, str], dict[Combination, list[float]]]
"""(operator, node) -> options on the node's axes -> errors, one a block."""

COMBINATIONS_AT_MOST = 6
"""Blocks in which every combination of an operator's options is tried: they are alike."""


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


class CandidateRuntime(Runtime):
    """Runs nodes with the helpers that an arithmetic, or a fault, puts in place of the file's."""

    arithmetic: Arithmetic
    fault: Fault | None
    run: Run
    explore: bool

    def prepare(
        self, arithmetic: Arithmetic, fault: Fault | None, terms: int, *, explore: bool
    ) -> None:
        """Set what the nodes are run with, before `load`."""
        self.arithmetic, self.fault, self.explore, self.run = arithmetic, fault, explore, Run()
        self._judge: Judge = CandidateJudge(self.recording, self.run, arithmetic, terms)
        self._replaced: set[str] = set()

    def load(self) -> None:
        """Execute the file; keep its own helpers."""
        super().load()
        self._own = dict(self.namespace)

    def start_pass(self, number: int) -> None:
        """Residues that follow belong to this pass."""
        self._judge.number = number  # type: ignore[attr-defined]

    def _compute(self, frame: Frame, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        node, operator = frame.spec.name, operator_of(frame.label)
        chosen = self.arithmetic.options(node, operator)
        own = function
        function = in_form(own, self.namespace, chosen)
        if self.fault is not None:
            function = self.fault.applied(node, function, self._own)
        with self._helpers(self._with_fault(node, replacements(self._own, chosen))):
            result = function(*frame.args, **kwargs)
        if self.explore and not frame.called and len(chosen):
            self._try_combinations(frame, own, kwargs, operator)
        return result

    def _with_fault(self, node: str, found: dict[str, Any]) -> dict[str, Any]:
        if self.fault is None:
            return found
        return found | self.fault.replaced(node, {**self._own, **found})

    @contextmanager
    def _helpers(self, found: Mapping[str, Any]) -> Iterator[None]:
        """The file's own helpers but for these, also inside a node that replaces others."""
        self._replaced |= set(found)
        values = {name: self._own[name] for name in self._replaced} | dict(found)
        with self._bound(values):
            yield

    def _try_combinations(
        self, frame: Frame, function: Callable[..., Any], kwargs: dict[str, Any], operator: str
    ) -> None:
        """The error of every combination of options on the node's own axes."""
        keys = [key for key in frame.keys if key in self._judge.keys]
        if len(keys) != len(frame.keys) or any(o.operators for o in map(sources_of, frame.args)):
            return
        node = frame.spec.name
        errors = self.run.explored.setdefault((operator, node), {})
        recorded = [self.recording.read(key) for key in keys]
        for combination in product(*(axis.options for axis in axes_of(node))):
            found = errors.setdefault(combination, [])
            if len(found) >= COMBINATIONS_AT_MOST:
                return
            with self._helpers(replacements(self._own, combination)):
                result = in_form(function, self.namespace, combination)(*frame.args, **kwargs)
            values = result if isinstance(result, tuple) else (result,)
            pairs = zip(values, recorded, strict=True)
            found.append(max(error_of(frame, value, r, {})[0] for value, r in pairs))


@dataclass(frozen=True)
class DiffJob:
    """A candidate, the checkpoint that it ran, and how much of the model it recorded."""

    candidate: Recorded
    checkpoint: Checkpoint
    threads: int = 1

    @property
    def scope(self) -> RunScope:
        """Which passes and layers have to run."""
        keys = list(self.candidate.specs)
        mtp = any(key.startswith("mtp.") for key in keys)
        behind = mtp or any(key.endswith(("norm.out", "head.out")) and layer_of(key) is None
                            for key in keys)  # fmt: skip
        layers = [n for n in map(layer_of, keys) if n is not None]
        last = None if behind else max(layers, default=-1)
        return RunScope(mtp=mtp, partial=True, last_layer=last)

    def passes(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Number, node and arguments of every pass that the candidate recorded."""
        yield 0, PREFILL, ()
        if self.scope.mtp:
            yield 1, MTP_DECODE, ()
        for step in range(decode_steps(self.candidate.specs)):
            yield 2 + step, DECODE, (step,)


def run(
    job: DiffJob,
    arithmetic: Arithmetic,
    *,
    fault: Fault | None = None,
    explore: bool = False,
    trace: bool = False,
    last_layer: int | None = None,
) -> Run:
    """Run the model on the candidate's tensors under an arithmetic, and a fault if one is given.

    explore: also try all combinations of options on nodes whose inputs are recorded. trace: find
    out which keys and operators are behind each key. last_layer: end the prefill behind it.
    """
    scope = job.scope
    if last_layer is not None:
        scope = RunScope(mtp=False, partial=True, last_layer=last_layer)
    directory: Path = job.checkpoint.directory
    runtime = CandidateRuntime(
        read_description(OWN_DESCRIPTION),
        job.candidate,
        CheckpointWeights(job.checkpoint),
        Rule(0.0, 0.0),
        scope,
        {
            "VT_WEIGHT_FILE": str(directory / "model.safetensors.index.json"),
            "VT_ACTIVATION_FILE": "",
            "VT_NUM_THREADS": str(job.threads),
        },
    )
    terms = longest_sum(job.checkpoint.config)
    runtime.prepare(arithmetic, fault, terms, explore=explore)
    with vt_environment(runtime._module, runtime.environment):
        runtime.load()
    with Trace() if trace or explore else nullcontext():
        for number, node, args in job.passes():
            if last_layer is None or number == 0:
                runtime.start_pass(number)
                runtime.run_pass(number, node, *args)
    return runtime.run
