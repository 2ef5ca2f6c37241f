"""Verifies one recording: every pass, every node, in one process or in several.

The prefill (`llm`), the MTP decode step (`mtp_decode`) and the main stack's decode steps
(`llm_decode`) are called in that order. In an isolated run every layer starts from recorded values,
so layers can be shared out over processes: each runs the same passes, takes what belongs to other
layers from the recording, and the results are put together in order of execution. Left out:
comparing (`compare`), running a node (`runtime`), blame (`verdict`).
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.errors import Finding, InputError, VtError
from v4tool.names import Keys, layer_of, recording_keys
from v4tool.verify.compare import Rule
from v4tool.verify.language import Description, read_description
from v4tool.verify.results import Coverage, NodeResult, VerifyResult
from v4tool.verify.runtime import ENDS, Runtime, Scope
from v4tool.verify.sources import (
    OWN_DESCRIPTION,
    CheckpointWeights,
    Recorded,
    decode_steps,
    is_input,
)
from v4tool.verify.verdict import first_wrong

PREFILL, MTP_DECODE, DECODE = "llm", "mtp_decode", "llm_decode"
TASKS_PER_JOB = 3
SELECTED = ("only", "layers", "mtp")
"""Metadata of a recording that says that it holds a part only."""

Progress = Callable[[int, int, str], None]
"""Told (units done, units in all, the key just judged)."""


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to verify some units of one recording."""

    recording: Path
    checkpoint: Path
    description: Path
    rule: Rule
    scope: Scope
    threads: int
    tokens: int
    decode: int


def verify_file(
    recording_path: Path | str,
    checkpoint_dir: Path | str,
    *,
    chained: bool = False,
    node: str | None = None,
    layer: int | None = None,
    atol: float = 1e-4,
    rtol: float = 1e-4,
    jobs: int = 1,
    threads: int = 1,
    vt_file: Path | str | None = None,
    partial: bool = False,
    fail_fast: bool = False,
    exact: bool | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Verify a recording against a description of the model and a checkpoint.

    chained: values flow from the ids alone, instead of each node starting from recorded inputs.
    node, layer: report only these. jobs: processes over layers (isolated runs only). vt_file:
    somebody's own description, which is executed. partial: keys may be absent (understood where the
    recording's metadata says so). exact: bits must be equal (default: for the own description and
    recordings accumulated in binary64); otherwise atol and rtol decide. progress: told after each
    layer.

    Raises CheckpointError, RecordingError, VtError, InputError for what cannot be used at all;
    everything that is wrong in the recording is in the result.
    """
    started = time.perf_counter()
    path, directory = Path(recording_path), Path(checkpoint_dir)
    description = read_description(vt_file or OWN_DESCRIPTION)
    recording = Recorded(path)
    checkpoint = _open_checkpoint(directory, recording)
    config = checkpoint.config
    partial = partial or any(name in recording.metadata for name in SELECTED)
    _check_request(description, config, node, layer, jobs)
    rule = _rule(recording, atol, rtol, exact, own=vt_file is None)
    keys = list(recording.specs)
    tokens, decode = _tokens(recording), decode_steps(keys)
    mtp = config.mtp_supported and (not partial or any(k.startswith("mtp.") for k in keys))
    known = _known(config, tokens, decode, mtp=mtp)
    scope = Scope(
        units=_units_of(layer),
        last_layer=_last_layer(config, keys, layer, partial=partial),
        mtp=mtp and layer is None,
        chained=chained,
        partial=partial,
        known=frozenset(known) if vt_file is not None else None,
        fail_fast=fail_fast,
    )
    job = Job(path, directory, description.path, rule, scope, threads, tokens, decode)
    if tokens:
        found = _run(job, description, recording, checkpoint, jobs, progress)
    else:
        found = _Found([], [_no_ids(recording)])
    checkpoint.close()
    nodes = tuple(sorted(found.nodes, key=lambda result: result.order))
    restricted = node is not None or layer is not None
    stopped = fail_fast and any(result.fails for result in nodes)
    coverage = _coverage(keys, nodes)
    findings = [*_checkpoint_findings(recording, checkpoint), *found.findings]
    if not restricted and not stopped:
        findings += _coverage_findings(coverage)
    verdict = first_wrong(nodes, rule)
    if node is not None:
        nodes = tuple(result for result in nodes if result.kind == node)
        verdict = first_wrong(nodes, rule)
    return VerifyResult(
        recording=str(path),
        checkpoint=str(directory),
        description=description.path.name,
        mode="chained" if chained else "isolated",
        exact=rule.exact,
        partial=partial,
        restricted=restricted,
        stopped=stopped,
        tokens=tokens,
        decode=decode,
        nodes=nodes,
        findings=tuple(findings),
        coverage=coverage,
        verdict=verdict,
        jobs=jobs,
        seconds=time.perf_counter() - started,
    )


# -------------------------------------------------------------------- what is asked for


def _open_checkpoint(directory: Path, recording: Recorded) -> Checkpoint:
    """The checkpoint; one whose MTP is of another design will do for a recording without MTP."""
    selected = not set(SELECTED).isdisjoint(recording.metadata)
    recorded = any(key.startswith("mtp.") for key in recording.specs)
    return Checkpoint.open(directory, mtp=recorded or not selected)


def _check_request(
    description: Description, config: ModelConfig, node: str | None, layer: int | None, jobs: int
) -> None:
    if node is not None and node not in description.nodes:
        names = ", ".join(description.nodes)
        raise InputError(f"--node: expected one of {names}, found {node}")
    if layer is not None and not 0 <= layer < config.n_layers:
        raise InputError(f"--layer: expected 0 to {config.n_layers - 1}, found {layer}")
    if jobs < 1:
        raise InputError(f"--jobs: expected at least 1, found {jobs}")
    if PREFILL not in description.nodes:
        raise VtError(f"{description.path.name}: no node {PREFILL}, which runs the whole prefill")


def _rule(recording: Recorded, atol: float, rtol: float, exact: bool | None, *, own: bool) -> Rule:
    """Exact by default where the arithmetic leaves no freedom (SPEC 4): binary64 and the own
    description."""
    binary64 = recording.metadata.get("accumulate", "float64") == "float64"
    exact = own and binary64 if exact is None else exact
    return Rule(atol, rtol, exact=exact, float32=own and not binary64)


def _tokens(recording: Recorded) -> int:
    """Length of the prompt, 0 where the recording does not hold its ids."""
    if "input_ids" not in recording:
        return 0
    shape = recording.specs["input_ids"][1]
    return shape[1] if len(shape) == 2 and shape[0] == 1 else 0


def _no_ids(recording: Recorded) -> Finding:
    found = "none"
    if "input_ids" in recording:
        found = str(list(recording.specs["input_ids"][1]))
    return Finding("input_ids", "the prompt's ids are needed", "I64 [1, tokens]", found)


def _known(config: ModelConfig, tokens: int, decode: int, *, mtp: bool) -> Keys:
    return recording_keys(config, max(tokens, 1), decode, mtp=mtp)


def _units_of(layer: int | None) -> frozenset[str] | None:
    return None if layer is None else frozenset({f"layers.{layer}"})


def _last_layer(
    config: ModelConfig, keys: Iterable[str], layer: int | None, *, partial: bool
) -> int | None:
    """The last main layer that has to run, None for the whole model."""
    if layer is not None:
        return layer
    if not partial:
        return None
    keys = list(keys)
    ends = re.compile(r"(decode\.\d+\.)?(norm|head)\.out|mtp\.")
    if any(ends.match(key) for key in keys):
        return None
    return max((n for n in map(layer_of, keys) if n is not None), default=-1)


# -------------------------------------------------------------------- running


@dataclass
class _Found:
    nodes: list[NodeResult]
    findings: list[Finding]


def _run(
    job: Job,
    description: Description,
    recording: Recorded,
    checkpoint: Checkpoint,
    jobs: int,
    progress: Progress | None,
) -> _Found:
    config = checkpoint.config
    every = [f"layers.{n}" for n in range(config.n_layers)]
    units = list(job.scope.units or [ENDS, *every, *(["mtp.0"] if job.scope.mtp else [])])
    if jobs == 1 or job.scope.chained or len(units) < 2:
        done = _Counter(_total(job, config), progress)
        return _passes(job, description, recording, checkpoint, done)
    return _share_out(job, units, jobs, _Counter(_total(job, config), progress))


class _Counter:
    """Turns the ends of units into progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, place: str, count: int = 1) -> None:
        self.done = min(self.done + count, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total, place)


def _total(job: Job, config: ModelConfig) -> int:
    """How many outermost nodes there are about: layers, MTP and embedding, norm and head of each
    pass."""
    if job.scope.units is not None:
        return len(job.scope.units) * (1 + job.decode)
    return (config.n_layers + 3) * (1 + job.decode) + 2 * job.scope.mtp


def _share_out(job: Job, units: list[str], jobs: int, done: _Counter) -> _Found:
    """Groups of units, each in a process of a pool; who takes which makes no difference."""
    ends = [u for u in units if not u.startswith("layers.")]
    layers = [u for u in units if u.startswith("layers.")]
    size = -(-len(layers) // (jobs * TASKS_PER_JOB))
    groups = [ends, *(layers[i : i + size] for i in range(0, len(layers), size))]
    tasks = [_restricted(job, group) for group in groups if group]
    found = _Found([], [])
    with ProcessPoolExecutor(jobs, mp_context=_context()) as pool:
        futures = {pool.submit(_task, task): task for task in tasks}
        for future in as_completed(futures):
            part = future.result()
            found.nodes += part.nodes
            found.findings += part.findings
            done(str(len(part.nodes)), len(futures[future].scope.units or ()) * (1 + job.decode))
            if job.scope.fail_fast and any(result.fails for result in part.nodes):
                pool.shutdown(cancel_futures=True)
                break
    found.findings = list(dict.fromkeys(sorted(found.findings, key=lambda f: f.key)))
    return found


def _restricted(job: Job, units: list[str]) -> Job:
    """The job for some units: it ends behind the last layer among them where it can."""
    layers = [int(u.removeprefix("layers.")) for u in units if u.startswith("layers.")]
    last = max(layers) if len(layers) == len(units) else job.scope.last_layer
    mtp = job.scope.mtp and "mtp.0" in units
    scope = replace(job.scope, units=frozenset(units), last_layer=last, mtp=mtp)
    return replace(job, scope=scope)


def _context() -> BaseContext:
    """Processes that start quickly and share no threads with this one."""
    if "forkserver" in get_all_start_methods():
        context = get_context("forkserver")
        context.set_forkserver_preload(["v4tool.verify.walk"])
        return context
    return get_context("spawn")


def _task(job: Job) -> _Found:
    """One group of units, in a process of its own."""
    description = read_description(job.description)
    recording = Recorded(job.recording)
    with _open_checkpoint(job.checkpoint, recording) as checkpoint:
        return _passes(job, description, recording, checkpoint, lambda place: None)


def _passes(
    job: Job,
    description: Description,
    recording: Recorded,
    checkpoint: Checkpoint,
    watch: Callable[[str], None],
) -> _Found:
    """Every pass, in order of execution, as far as the scope asks for it."""
    runtime = Runtime(
        description,
        recording,
        CheckpointWeights(checkpoint),
        job.rule,
        job.scope,
        _environment(job),
        watch,
    )
    threads = torch.get_num_threads()
    try:
        runtime.load()
        findings = [
            Finding(name, "the pass cannot be run to its end", "all its inputs", problem)
            for name, problem in _run_passes(job, description, runtime)
        ]
    finally:
        torch.set_num_threads(threads)
    return _Found(runtime.results, findings)


def _run_passes(job: Job, description: Description, runtime: Runtime) -> Iterator[tuple[str, str]]:
    """Run them; yields (pass, reason) for those that could not be run."""
    calls: list[tuple[str, tuple[int, ...]]] = [(PREFILL, ())]
    if job.scope.mtp and MTP_DECODE in description.nodes:
        calls.append((MTP_DECODE, ()))
    if job.scope.units is None or job.scope.units != {"mtp.0"}:
        calls += [(DECODE, (step,)) for step in range(job.decode)]
    for number, (name, args) in enumerate(calls):
        if name not in description.nodes:
            yield name, f"{description.path.name} has no node {name}"
            continue
        number = number if name != DECODE else 2 + args[0]
        problem = runtime.run_pass(number, name, *args)
        if job.scope.fail_fast and any(result.fails for result in runtime.results):
            return
        if problem:
            yield name + "".join(f"({a})" for a in args), problem


def _environment(job: Job) -> dict[str, str]:
    return {
        "VT_WEIGHT_FILE": str(job.checkpoint / "model.safetensors.index.json"),
        "VT_ACTIVATION_FILE": str(job.recording),
        "VT_NUM_THREADS": str(job.threads),
    }


# -------------------------------------------------------------------- what was covered


def _coverage(keys: Iterable[str], nodes: Iterable[NodeResult]) -> Coverage:
    recorded = {key for key in keys if not is_input(key)}
    compared, missing, absent = set(), set(), set()
    for node in nodes:
        for comparison in node.comparisons:
            if comparison.judged:
                compared.add(comparison.key)
            elif comparison.status == "missing":
                missing.add(comparison.key)
            else:
                absent.add(comparison.key)
    return Coverage(
        recorded=len(recorded),
        compared=len(recorded & compared),
        uncovered=tuple(sorted(recorded - compared - absent)),
        missing=tuple(sorted(missing)),
        not_judged=tuple(sorted(absent - compared)),
    )


def _coverage_findings(coverage: Coverage) -> list[Finding]:
    """Keys that are there and nobody's output, and keys that are an output and not there."""
    uncovered = [
        Finding(key, "every recorded key is the output of a node", "a node", "none")
        for key in coverage.uncovered
    ]
    missing = [
        Finding(key, "every output of a node is recorded", "the key (or --partial)", "nothing")
        for key in coverage.missing
    ]
    return uncovered + missing


def _checkpoint_findings(recording: Recorded, checkpoint: Checkpoint) -> list[Finding]:
    recorded = recording.metadata.get("checkpoint_fingerprint")
    if recorded is None or recorded == checkpoint.fingerprint:
        return []
    rule = "the recording is of this checkpoint"
    return [Finding("checkpoint_fingerprint", rule, checkpoint.fingerprint, recorded)]
