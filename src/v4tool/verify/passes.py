"""Runs all passes of one recording, in this process or with the layers divided among several.

In an isolated run every layer starts from recorded values. Each process runs the same passes,
reads the outputs of other layers from the recording, and the results are sorted by execution order,
so the number of processes does not change them. Left out: which passes and layers (`recording`).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from pathlib import Path

from v4tool.checkpoint.shards import Checkpoint
from v4tool.errors import Finding
from v4tool.verify.compare import Rule
from v4tool.verify.frames import RunScope
from v4tool.verify.language import Description, read_description
from v4tool.verify.locations import ENDS, layer_number
from v4tool.verify.results import NodeResult
from v4tool.verify.runtime import Runtime
from v4tool.verify.tensors import CheckpointWeights, RecordedTensors

PREFILL, MTP_DECODE, DECODE = "llm", "mtp_decode", "llm_decode"
MTP = "mtp.0"
TASKS_PER_JOB = 3

Progress = Callable[[int, int, str], None]
"""Called with (units done, units in all, block just run)."""


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to verify some units of one recording.

    A unit is a layer, MTP, or `ENDS` (embedding, final norm, head). tokens: length of the prompt.
    decode: number of decode steps. mtp_weights: open the checkpoint with its MTP layer.
    """

    recording: Path
    checkpoint: Path
    description: Path
    rule: Rule
    scope: RunScope
    threads: int
    tokens: int
    decode: int
    layers: int
    mtp_weights: bool

    @property
    def units(self) -> list[str]:
        """Every unit of the model that is run."""
        every = [ENDS, *(f"layers.{n}" for n in range(self.layers))]
        return [*every, MTP] if self.scope.mtp else every

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a `.vt` file reads."""
        return {
            "VT_WEIGHT_FILE": str(self.checkpoint / "model.safetensors.index.json"),
            "VT_ACTIVATION_FILE": str(self.recording),
            "VT_NUM_THREADS": str(self.threads),
        }

    def restricted(self, units: list[str]) -> "Job":
        """The job for some units; if all are main layers, its passes end after the last of them."""
        layers = [n for n in map(layer_number, units) if n is not None]
        last = max(layers) if len(layers) == len(units) else self.scope.last_layer
        mtp = self.scope.mtp and MTP in units
        scope = replace(self.scope, units=frozenset(units), last_layer=last, mtp=mtp)
        return replace(self, scope=scope)


@dataclass
class Found:
    """Results of a run: nodes in any order, and a finding for each pass that could not be run."""

    nodes: list[NodeResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


class Counter:
    """Counts outermost nodes that have ended and calls `Progress`."""

    def __init__(self, job: Job, progress: Progress | None) -> None:
        self.done, self.progress = 0, progress
        others = 3  # embedding, norm and head
        self.total = (job.layers + others) * (1 + job.decode) + 2 * job.scope.mtp
        if job.scope.units is not None:
            self.total = len(job.scope.units) * (1 + job.decode)

    def __call__(self, block: str, count: int = 1) -> None:
        self.done = min(self.done + count, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total, block)


def run(job: Job, checkpoint: Checkpoint, jobs: int, progress: Progress | None) -> Found:
    """Run all that the job asks for; chained, fail-fast and one-layer runs use one process."""
    count = Counter(job, progress)
    one_process = (
        jobs == 1 or job.scope.chained or job.scope.fail_fast or job.scope.units is not None
    )
    if not one_process:
        return _run_in_workers(job, jobs, count)
    return _run_here(job, read_description(job.description), checkpoint, count)


def _run_in_workers(job: Job, jobs: int, count: Counter) -> Found:
    """Divide the units among worker processes: consecutive layers, and the others together."""
    layers = [unit for unit in job.units if layer_number(unit) is not None]
    others = [unit for unit in job.units if layer_number(unit) is None]
    size = -(-len(layers) // (jobs * TASKS_PER_JOB))
    groups = [others, *(layers[i : i + size] for i in range(0, len(layers), size))]
    found = Found()
    with ProcessPoolExecutor(jobs, mp_context=_context()) as pool:
        tasks = {pool.submit(_run_group, job.restricted(group)): group for group in groups}
        for future in as_completed(tasks):
            part, group = future.result(), tasks[future]
            found.nodes += part.nodes
            found.findings += part.findings
            count(group[-1], len(group) * (1 + job.decode))
    found.findings = sorted(set(found.findings), key=lambda finding: finding.key)
    return found


def _context() -> BaseContext:
    """forkserver with this module preloaded, else spawn: fork alone is unsafe beside threads."""
    if "forkserver" in get_all_start_methods():
        context = get_context("forkserver")
        context.set_forkserver_preload(["v4tool.verify.passes"])
        return context
    return get_context("spawn")


def _run_group(job: Job) -> Found:
    """Run one group of units in a worker process."""
    with Checkpoint.open(job.checkpoint, mtp=job.mtp_weights) as checkpoint:
        return _run_here(job, read_description(job.description), checkpoint, lambda key: None)


def _run_here(
    job: Job, description: Description, checkpoint: Checkpoint, watch: Callable[[str], None]
) -> Found:
    """Run every pass that the scope asks for, in order of execution."""
    runtime = Runtime(
        description,
        RecordedTensors(job.recording),
        CheckpointWeights(checkpoint),
        job.rule,
        job.scope,
        job.environment,
        watch,
    )
    runtime.load()
    rule = "the pass can be run to its end"
    stopped = list(_run_passes(job, description, runtime))
    findings = [Finding(name, rule, "all its inputs", problem) for name, problem in stopped]
    return Found(runtime.results, findings)


def _calls(job: Job) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """The passes that the scope asks for: number, node, arguments."""
    yield 0, PREFILL, ()
    if job.scope.mtp:
        yield 1, MTP_DECODE, ()
    if job.scope.units != frozenset({MTP}):
        for step in range(job.decode):
            yield 2 + step, DECODE, (step,)


def _run_passes(job: Job, description: Description, runtime: Runtime) -> Iterator[tuple[str, str]]:
    """Run the passes; yields (pass, reason) for those that could not be run."""
    for number, name, args in _calls(job):
        if name not in description.nodes:
            yield name, f"{description.path.name} has no node {name}"
            continue
        problem = runtime.run_pass(number, name, *args)
        if problem:
            yield name + "".join(f"({a})" for a in args), problem
        if job.scope.fail_fast and any(result.fails for result in runtime.results):
            return
