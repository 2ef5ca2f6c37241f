"""Verifies one recording: resolves the options, runs the passes, assembles a `VerifyResult`.

Left out: running nodes (`runtime`, `passes`), comparing (`compare`), fault localisation
(`verdict`).
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.errors import InputError, VtError
from v4tool.names import layer_of, recording_keys
from v4tool.verify.compare import Rule
from v4tool.verify.coverage import (
    checkpoint_findings,
    coverage_findings,
    coverage_of,
    no_ids,
)
from v4tool.verify.frames import RunScope
from v4tool.verify.language import Description, read_description
from v4tool.verify.passes import PREFILL, Found, Job, Progress, run
from v4tool.verify.results import NodeResult, Verdict, VerifyResult
from v4tool.verify.tensors import OWN_DESCRIPTION, RecordedTensors, decode_steps
from v4tool.verify.verdict import first_wrong

SELECTED = frozenset({"only", "layers", "mtp"})
"""Metadata fields of a recording that holds only part of the keys."""
AFTER_THE_LAYERS = re.compile(r"(decode\.\d+\.)?(norm|head)\.out|mtp\.")


@dataclass(frozen=True)
class Request:
    """The options of `verify_file`; own: the description is `OWN_DESCRIPTION`."""

    chained: bool
    node: str | None
    layer: int | None
    partial: bool
    fail_fast: bool
    own: bool

    def refuse(self, description: Description, config: ModelConfig, jobs: int) -> None:
        """Raise InputError for an unknown node or layer, VtError for a file without prefill.

        UnsupportedError where our own description is not one of the checkpoint's architecture.
        """
        if self.own:
            config.architecture.require("verify")
        if self.node is not None and self.node not in description.nodes:
            names = ", ".join(description.nodes)
            raise InputError(f"--node: expected one of {names}, found {self.node}")
        if self.layer is not None and not 0 <= self.layer < config.n_layers:
            last = config.n_layers - 1
            raise InputError(f"--layer: expected 0 to {last}, found {self.layer}")
        if jobs < 1:
            raise InputError(f"--jobs: expected at least 1, found {jobs}")
        if PREFILL not in description.nodes:
            name = description.path.name
            raise VtError(f"{name}: no node {PREFILL}, which runs the whole prefill")

    @property
    def restricted(self) -> bool:
        """Whether only one node or layer is reported."""
        return self.node is not None or self.layer is not None

    def wants(self, result: NodeResult) -> bool:
        """Whether a node's result is reported."""
        in_layer = self.layer is None or layer_of(f"{result.block}.") == self.layer
        return in_layer and self.node in (None, result.kind)


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

    chained: nodes get computed values, from the token ids on; default: each node gets recorded
    inputs. node, layer: report only these. jobs: number of processes that divide the layers (one
    for chained and fail-fast runs). threads: of torch, in each process. vt_file: a user's
    description, which is executed; default: `model.vt`. partial: keys may be absent (implied by the
    recording's metadata). exact: BF16 bits must be equal (default: True with `model.vt` and a
    recording accumulated in binary64); otherwise atol and rtol decide. fail_fast: end with the
    first layer that fails. progress: called after each outermost node.

    Raises CheckpointError, RecordingError, VtError or InputError for files and options that cannot
    be used; defects of the recording's data are in the result.
    """
    started = time.perf_counter()
    description = read_description(vt_file or OWN_DESCRIPTION)
    recording = RecordedTensors(Path(recording_path))
    selected = not SELECTED.isdisjoint(recording.metadata)
    request = Request(chained, node, layer, partial or selected, fail_fast, vt_file is None)
    rule = _rule(recording, atol, rtol, exact, own=request.own)
    has_mtp = any(key.startswith("mtp.") for key in recording.specs)
    with Checkpoint.open(checkpoint_dir, mtp=has_mtp or not selected) as checkpoint:
        request.refuse(description, checkpoint.config, jobs)
        job = _job(request, recording, checkpoint, description, rule, threads)
        found = run(job, checkpoint, jobs, progress) if job.tokens else Found()
        result = _result(request, job, recording, checkpoint, found)
    return replace(result, jobs=jobs, seconds=time.perf_counter() - started)


def _rule(
    recording: RecordedTensors, atol: float, rtol: float, exact: bool | None, *, own: bool
) -> Rule:
    """The comparison rule; exact by default for binary64 (SPEC 4) and the own description."""
    binary64 = recording.metadata.get("accumulate", "float64") == "float64"
    exact = own and binary64 if exact is None else exact
    return Rule(atol, rtol, exact=exact, float32=own and not binary64)


def _job(
    request: Request,
    recording: RecordedTensors,
    checkpoint: Checkpoint,
    description: Description,
    rule: Rule,
    threads: int,
) -> Job:
    config, keys = checkpoint.config, list(recording.specs)
    tokens, decode = _tokens(recording), decode_steps(keys)
    has_mtp = any(key.startswith("mtp.") for key in keys)
    mtp = config.mtp_supported and (has_mtp or not request.partial) and request.layer is None
    alone = request.layer is not None and not request.chained
    scope = RunScope(
        units=frozenset({f"layers.{request.layer}"}) if alone else None,
        last_layer=_last_layer(config, keys, request),
        mtp=mtp,
        chained=request.chained,
        partial=request.partial,
        known=None if request.own else _known(config, tokens, decode),
        fail_fast=request.fail_fast,
    )
    return Job(
        recording=recording.path,
        checkpoint=checkpoint.directory,
        description=description.path,
        rule=rule,
        scope=scope,
        threads=threads,
        tokens=tokens,
        decode=decode,
        layers=config.n_layers,
        mtp_weights=any(name.startswith("mtp.") for name in checkpoint.specs),
    )


def _tokens(recording: RecordedTensors) -> int:
    """Length of the prompt; 0 if the recording has no `input_ids` of shape [1, tokens]."""
    if "input_ids" not in recording:
        return 0
    shape = recording.specs["input_ids"][1]
    return shape[1] if len(shape) == 2 and shape[0] == 1 else 0


def _known(config: ModelConfig, tokens: int, decode: int) -> frozenset[str]:
    """Every key, with experts as `<E>`, that a recording of this length may have."""
    keys = recording_keys(config, max(tokens, 1), decode, mtp=config.mtp_supported)
    return frozenset(keys)


def _last_layer(config: ModelConfig, keys: Iterable[str], request: Request) -> int | None:
    """The last main layer that has to run; None for the whole model, -1 for no layer."""
    if request.layer is not None:
        return request.layer
    if not request.partial or any(AFTER_THE_LAYERS.match(key) for key in keys):
        return None
    return max((n for n in map(layer_of, keys) if n is not None), default=-1)


def _result(
    request: Request, job: Job, recording: RecordedTensors, checkpoint: Checkpoint, found: Found
) -> VerifyResult:
    every = tuple(sorted(found.nodes, key=lambda result: result.order))
    coverage = coverage_of(recording.specs, every)
    stopped = request.fail_fast and any(result.fails for result in every)
    findings = checkpoint_findings(recording, checkpoint) + found.findings
    if not job.tokens:
        findings.append(no_ids(recording))
    if not request.restricted and not stopped:
        findings += coverage_findings(coverage)
    nodes = tuple(result for result in every if request.wants(result))
    return VerifyResult(
        recording=str(job.recording),
        checkpoint=str(job.checkpoint),
        description=job.description.name,
        mode="chained" if request.chained else "isolated",
        exact=job.rule.exact,
        partial=request.partial,
        restricted=request.restricted,
        stopped=stopped,
        tokens=job.tokens,
        decode=job.decode,
        nodes=nodes,
        findings=tuple(findings),
        coverage=coverage,
        verdict=_verdict(request, every, nodes, job.rule),
    )


def _verdict(
    request: Request, every: tuple[NodeResult, ...], nodes: tuple[NodeResult, ...], rule: Rule
) -> Verdict | None:
    """The first wrong operator among the reported nodes, located with the results of all nodes."""
    if not any(node.fails for node in nodes):
        return None
    found = first_wrong(every, rule)
    if found is None or request.node in (None, found.kind):
        return found
    return first_wrong(nodes, rule)
