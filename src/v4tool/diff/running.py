"""Runs the nodes of `model.vt` on a candidate's own tensors, in the candidate's arithmetic.

Every node starts from what the candidate recorded, where it recorded the node's inputs; what it did
not record is computed under the same arithmetic. Left out: the residues (`judge`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from v4tool.checkpoint.shards import Checkpoint
from v4tool.diff.arithmetic import Arithmetic, axes_of, in_form, longest_sum, replacements
from v4tool.diff.faults import Fault
from v4tool.diff.judge import CandidateJudge, Run, error_of, operator_of
from v4tool.diff.trace import Trace, sources_of
from v4tool.diff.weights import CachedWeights, dequantised_once
from v4tool.names import layer_of
from v4tool.verify.compare import Rule
from v4tool.verify.frames import Frame, RunScope
from v4tool.verify.judging import Judge
from v4tool.verify.language import read_description
from v4tool.verify.locations import ENDS
from v4tool.verify.passes import DECODE, MTP, MTP_DECODE, PREFILL
from v4tool.verify.runtime import Runtime
from v4tool.verify.tensors import OWN_DESCRIPTION, Recorded, decode_steps
from v4tool.verify.vt_module import vt_environment

COMBINATIONS_AT_MOST = 6
"""Blocks in which every combination of an operator's options is tried: they are alike."""
THREADS = 1
"""Threads of torch in a process: operators of small tensors lose more by waiting than they gain."""
LAYERS_OF_A_KIND = 2
"""Layers of the same ratio and routing in which the arithmetic is looked for."""


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
        self.namespace["weight_values"] = dequantised_once(self.namespace["weight_values"])
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
class Part:
    """What of the model is run: units (layers, `mtp.0`, `ends`; None: all), the last layer."""

    units: frozenset[str] | None = None
    last_layer: int | None = None
    prefill_only: bool = False


WHOLE = Part()


@dataclass(frozen=True)
class DiffJob:
    """A candidate, the checkpoint that it ran, and how much of the model it recorded."""

    candidate: Recorded
    checkpoint: Checkpoint
    weights: CachedWeights = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", CachedWeights(self.checkpoint))

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

    def sample(self) -> Part:
        """The first layers of every kind, MTP and what is outside of layers, in the prefill."""
        config, kinds = self.checkpoint.config, dict[tuple[int, bool], list[int]]()
        for n in range(config.n_layers):
            kinds.setdefault((config.ratio(n), config.is_hash(n)), []).append(n)
        layers = {n for same in kinds.values() for n in same[:LAYERS_OF_A_KIND]}
        units = frozenset({ENDS, MTP, *(f"layers.{n}" for n in layers)})
        prefill = any(not key.startswith("decode.") for key in self.candidate.specs)
        return Part(units, prefill_only=prefill)

    def at(self, key: str) -> Part:
        """The layer of a key, as far as it is needed for the key's value."""
        layer = layer_of(key)
        if layer is None:
            return Part(frozenset({ENDS, MTP}))
        first = not key.startswith(("decode.", "mtp."))
        return Part(frozenset({f"layers.{layer}"}), layer if first else None, prefill_only=first)


def run(
    job: DiffJob,
    arithmetic: Arithmetic,
    part: Part = WHOLE,
    *,
    fault: Fault | None = None,
    explore: bool = False,
    trace: bool = False,
) -> Run:
    """Run the model on the candidate's tensors under an arithmetic, and a fault if one is given.

    part: what of the model is run; layers outside it are skipped where their result is recorded.
    explore: also try all combinations of options on nodes whose inputs are recorded. trace: find
    out which keys and operators are behind each key.
    """
    scope = replace(job.scope, units=part.units)
    if part.last_layer is not None:
        scope = replace(scope, mtp=False, last_layer=part.last_layer)
    directory = job.checkpoint.directory
    runtime = CandidateRuntime(
        read_description(OWN_DESCRIPTION),
        job.candidate,
        job.weights,
        Rule(0.0, 0.0),
        scope,
        {
            "VT_WEIGHT_FILE": str(directory / "model.safetensors.index.json"),
            "VT_ACTIVATION_FILE": "",
            "VT_NUM_THREADS": str(THREADS),
        },
    )
    terms = longest_sum(job.checkpoint.config)
    runtime.prepare(arithmetic, fault, terms, explore=explore)
    with vt_environment(runtime._module, runtime.environment):
        runtime.load()
    with Trace() if trace or explore else nullcontext():
        for number, node, args in job.passes():
            if number == 0 or not part.prefill_only:
                runtime.start_pass(number)
                runtime.run_pass(number, node, *args)
    return runtime.run
