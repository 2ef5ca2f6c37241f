"""`v4tool verify`: compares a recording, node by node, with the second model description."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from v4tool.commands.options import (
    AllOption,
    CaseOption,
    CkptOption,
    FromOption,
    JsonOption,
    ProfileOption,
    QuietOption,
    ThreadsOption,
    checkpoint_directory,
    print_json,
    resolve_profile,
)
from v4tool.commands.recordings import (
    DumpOption,
    PartialOption,
    RecordingToJudge,
    check_one,
    recordings_to_judge,
)
from v4tool.errors import RecordingError

if TYPE_CHECKING:
    from v4tool.check.recording import CheckResult
    from v4tool.verify.results import VerifyResult


def verify(
    case: CaseOption = None,
    every: AllOption = False,
    file: DumpOption = None,
    directory: FromOption = None,
    ckpt: CkptOption = None,
    profile: ProfileOption = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Report this kind of node only (`list nodes`).")
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", help="Report this layer only.")] = None,
    chained: Annotated[
        bool, typer.Option("--chained", help="Nodes take computed inputs, not recorded ones.")
    ] = False,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance.")] = 1e-4,
    rtol: Annotated[float, typer.Option("--rtol", help="Relative tolerance.")] = 1e-4,
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--tolerant", help="Require equal bits [default: if float64]."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Processes, by layers [default: --threads].")
    ] = None,
    vt: Annotated[
        Path | None,
        typer.Option("--vt", help="Another description: Python code that will be EXECUTED."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write FILE.json, .html or .xml (JUnit).")
    ] = None,
    partial: PartialOption = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop after the first layer with a failure.")
    ] = False,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare a recording, node by node, with a second, independent description of the model."""
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.report.verify import check_report_path, write_report

    resolved = resolve_profile(profile, ckpt=ckpt, threads=threads)
    if report is not None:
        check_report_path(report)
    chosen = recordings_to_judge(resolved, case, every, file, directory)
    weights = checkpoint_directory(resolved, quiet=quiet)
    with Checkpoint.open(weights) as checkpoint:
        checks = [
            check_one(recording, checkpoint.config, None, partial=partial, quiet=quiet)
            for recording in chosen
        ]
    require_our_form(checks)
    results = [
        verify_one(
            recording, weights, quiet=quiet, chained=chained, node=node, layer=layer, atol=atol,
            rtol=rtol, exact=exact, jobs=jobs or resolved.threads, vt_file=vt, partial=partial,
            fail_fast=fail_fast,
        )
        for recording in chosen
    ]  # fmt: skip
    show_verified(checks, results, as_json)
    if report is not None:
        write_report(results, report)
    for recording, checked, result in zip(chosen, checks, results, strict=True):
        keep_evidence(recording, checked, result)
    if not all(checked.ok for checked in checks) or not all(r.passed for r in results):
        raise typer.Exit(1)


def require_our_form(checks: list["CheckResult"]) -> None:
    """RecordingError, one line, where a file's tensors have another form than a recording's."""
    for checked in checks:
        forms = [f for f in checked.findings if f.rule == "form"]
        if forms:
            texts = [f"expected {f.expected}, found {f.found}" for f in forms]
            raise RecordingError(f"{checked.path}: {'; '.join(texts)}")


def verify_one(
    recording: RecordingToJudge, weights: Path, *, quiet: bool, **options: object
) -> "VerifyResult":
    """Verify one recording, with a progress bar over the nodes."""
    from v4tool.report.progress import count_progress
    from v4tool.verify.recording import verify_file

    with count_progress(recording.path.name, quiet=quiet) as progress:
        return verify_file(recording.path, weights, progress=progress, **options)  # type: ignore[arg-type]


def show_verified(
    checks: list["CheckResult"], results: list["VerifyResult"], as_json: bool
) -> None:
    """Print the check's findings, a tree of failures per recording, and a summary; or JSON."""
    from v4tool.report import check as report
    from v4tool.report import tables
    from v4tool.report.verify import result_tree, summary_table

    if as_json:
        print_json(
            [
                {"check": checked.as_dict(), **result.as_dict()}
                for checked, result in zip(checks, results, strict=True)
            ]
        )
        return
    for checked, result in zip(checks, results, strict=True):
        for line in report.finding_lines(checked):
            print(line)
        if not result.passed:
            tables.show(result_tree(result))
    tables.show(summary_table(results))


def keep_evidence(
    recording: RecordingToJudge, checked: "CheckResult", result: "VerifyResult"
) -> None:
    """Store a complete verification's result in the recording's manifest entry, if it has one."""
    from v4tool.record.manifest import record_verification

    entry = recording.entry()
    if entry is not None and not result.restricted and not result.stopped:
        record_verification(
            recording.path.parent, entry.id, checked.payload_sha256, result.evidence()
        )
