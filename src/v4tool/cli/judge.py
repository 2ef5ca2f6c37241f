"""`v4tool check` and `v4tool verify`: recordings held against rules, and against a second model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from v4tool.cli.options import (
    AllOption,
    BackendOption,
    CaseOption,
    CkptOption,
    FromOption,
    JsonOption,
    ProfileOption,
    QuietOption,
    ThreadsOption,
    checkpoint_directory,
    chosen_cases,
    model_config,
    open_checkpoint,
    print_json,
    say,
    settle,
)
from v4tool.errors import CheckpointError, InputError, ProfileError

if TYPE_CHECKING:
    from v4tool.check.recording import CheckResult
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.config import ModelConfig
    from v4tool.profiles import Case, Profile
    from v4tool.record.manifest import Entry
    from v4tool.verify.results import VerifyResult

DumpOption = Annotated[
    list[Path] | None, typer.Option("--dump", help="A recording's file, instead of a case.")
]
PartialOption = Annotated[
    bool, typer.Option("--partial", help="Keys may be missing: judge what is there.")
]


@dataclass(frozen=True)
class Subject:
    """One recording to judge, and the case that it should be of (None: whatever it says)."""

    path: Path
    case: "Case | None"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The ids that it must be a recording of, where a case says so."""
        return self.case.input_ids if self.case else None

    def entry(self) -> "Entry | None":
        """Its entry in the manifest beside it."""
        from v4tool.record.manifest import Manifest

        manifest = Manifest.load(self.path.parent)
        named = (id for id, entry in manifest.cases.items() if entry.file == self.path.name)
        case_id = self.case.id if self.case is not None else next(named, None)
        return None if case_id is None else manifest.entry_of(case_id, self.path)


def subjects(
    profile: "Profile",
    cases: list[str] | None,
    every: bool,
    files: list[Path] | None,
    directory: Path | None,
) -> list[Subject]:
    """What --case, --all and --dump name; with --all only the cases that have been dumped."""
    if files:
        if cases or every:
            raise InputError("--dump goes without --case and --all")
        return [Subject(path, None) for path in files]
    folder = directory or profile.out_dir
    found = [Subject(folder / case.file, case) for case in chosen_cases(profile, cases, every)]
    if every:
        found = [subject for subject in found if subject.path.exists()]
    if not found:
        raise InputError(f"{folder}: expected recordings of the profile's cases, found none")
    return found


def weights_of(profile: "Profile", wanted: bool, quiet: bool) -> "Checkpoint | None":
    """The profile's checkpoint; None where none is wanted, or where none was named or found."""
    from v4tool.checkpoint.shards import Checkpoint

    if not wanted:
        return None
    try:
        return Checkpoint.open(checkpoint_directory(profile, quiet=quiet))
    except (ProfileError, CheckpointError) as problem:
        if profile.ckpt is not None:
            raise
        say(f"note: checked without weights: {problem}")
        return None


def check(
    case: CaseOption = None,
    every: AllOption = False,
    file: DumpOption = None,
    directory: FromOption = None,
    ckpt: CkptOption = None,
    profile: ProfileOption = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Also what takes the checkpoint.")
    ] = True,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also recompute every product with its weights.")
    ] = False,
    partial: PartialOption = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="List the identities and the keys they tie.")
    ] = False,
    port: Annotated[
        bool, typer.Option("--port", help="Check the port on the checkpoint, not a recording.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --port: samples only.")] = False,
    layer: Annotated[
        int | None, typer.Option("--layer", help="With --port: run this layer only.")
    ] = None,
    anchors: Annotated[
        bool, typer.Option("--anchors", help="Check the released weights' published next tokens.")
    ] = False,
    threads: ThreadsOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say of a recording whether it is whole, well formed, of its input, and true to itself."""
    settled = settle(profile, ckpt=ckpt, threads=threads, backend=backend)
    if explain:
        show_explanation(settled, case, as_json)
        return
    if port:
        check_the_port(settled, quick, layer, as_json, quiet)
        return
    if anchors:
        check_the_anchors(settled, case, as_json, quiet)
        return
    chosen = subjects(settled, case, every, file, directory)
    checkpoint = weights_of(settled, weights, quiet)
    config = checkpoint.config if checkpoint else model_config(settled)
    results = []
    for subject in chosen:
        results.append(
            check_one(subject, config, checkpoint, partial=partial, deep=deep, quiet=quiet)
        )
    show_checks(results, as_json)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def check_one(
    subject: Subject,
    config: "ModelConfig",
    checkpoint: "Checkpoint | None",
    *,
    partial: bool = False,
    deep: bool = False,
    quiet: bool = True,
) -> "CheckResult":
    """Check one recording, with a bar over the bytes read."""
    from v4tool.check.recording import check_recording
    from v4tool.report.progress import bytes_progress

    total = subject.path.stat().st_size if subject.path.is_file() else 0
    with bytes_progress(total, quiet=quiet) as progress:
        return check_recording(
            subject.path,
            config=config,
            ids=subject.ids,
            case=subject.case.id if subject.case else "",
            manifest=subject.entry(),
            checkpoint=checkpoint,
            deep=deep,
            partial=partial,
            progress=progress,
        )


def show_checks(results: list["CheckResult"], as_json: bool) -> None:
    """Findings and a summary, a line a recording."""
    from v4tool.report import check as report
    from v4tool.report import tables

    if as_json:
        print_json([result.as_dict() for result in results])
        return
    for result in results:
        for line in report.finding_lines(result):
            print(line)
    tables.show(report.summary_table(results))


def show_explanation(profile: "Profile", case: list[str] | None, as_json: bool) -> None:
    """The identities for a case's length (default: baseline6's)."""
    from dataclasses import asdict

    from v4tool.check.explain import explain
    from v4tool.report import check as report
    from v4tool.report import tables

    chosen = profile.case(case[0] if case else "prompt32")
    explanation = explain(model_config(profile), len(chosen.input_ids), chosen.decode)
    if as_json:
        print_json(asdict(explanation))
        return
    tables.show(report.identities_table(explanation))
    tables.show(report.loose_table(explanation))


def check_the_port(
    profile: "Profile", quick: bool, layer: int | None, as_json: bool, quiet: bool
) -> None:
    """The port's self-check on the profile's checkpoint; exit 1 where a row fails."""
    from dataclasses import asdict

    from v4tool.check.port import check_port, weight_bytes
    from v4tool.dump import numerics_of
    from v4tool.report import check as report
    from v4tool.report import tables
    from v4tool.report.progress import bytes_progress

    directory = checkpoint_directory(profile, quiet=quiet)
    total = weight_bytes(model_config(profile), quick=quick)
    with bytes_progress(total, quiet=quiet) as progress:
        rows = check_port(
            directory, quick=quick, layer=layer, numerics=numerics_of(profile), progress=progress
        )
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        tables.show(report.port_table(rows))
    if any(row.status != "ok" for row in rows):
        raise typer.Exit(1)


def check_the_anchors(
    profile: "Profile", cases: list[str] | None, as_json: bool, quiet: bool
) -> None:
    """The published next tokens of the released weights; exit 1 where they do not hold or apply."""
    from dataclasses import asdict

    from v4tool.check.anchors import check_anchors
    from v4tool.dump import numerics_of, peak_rss
    from v4tool.report import check as report
    from v4tool.report import tables
    from v4tool.report.progress import DumpProgress

    chosen = [profile.case(name) for name in cases] if cases else list(profile.cases)
    chosen = [case for case in chosen if case.expect is not None]
    with open_checkpoint(profile, quiet=quiet) as checkpoint:
        steps = checkpoint.config.n_layers + 2
        with DumpProgress(steps, lambda: checkpoint.bytes_read, peak_rss, quiet=quiet) as progress:
            result = check_anchors(checkpoint, chosen, numerics_of(profile), progress.watch)
    if as_json:
        print_json(asdict(result))
    elif result.does_not_apply is not None:
        print(f"the anchors do not apply to this checkpoint: {result.does_not_apply}")
    else:
        tables.show(report.anchors_table(result.rows))
    if not result.ok:
        raise typer.Exit(1)


def verify(
    case: CaseOption = None,
    every: AllOption = False,
    file: DumpOption = None,
    directory: FromOption = None,
    ckpt: CkptOption = None,
    profile: ProfileOption = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Judge this kind of node only (`list nodes`).")
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", help="Judge this layer only.")] = None,
    chained: Annotated[
        bool, typer.Option("--chained", help="Let values flow from the ids alone.")
    ] = False,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance.")] = 1e-4,
    rtol: Annotated[float, typer.Option("--rtol", help="Relative tolerance.")] = 1e-4,
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--tolerant", help="Ask for equal bits [default: of float64]."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Processes over layers [default: threads].")
    ] = None,
    vt: Annotated[
        Path | None,
        typer.Option(
            "--vt", help="Your own description. It is Python and will be EXECUTED as you."
        ),
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
    """Judge a recording node by node by a second, independent description of the model."""
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.report.verify import check_report_path, write_report

    settled = settle(profile, ckpt=ckpt, threads=threads)
    if report is not None:
        check_report_path(report)
    chosen = subjects(settled, case, every, file, directory)
    weights = checkpoint_directory(settled, quiet=quiet)
    with Checkpoint.open(weights) as checkpoint:
        checks = [
            check_one(subject, checkpoint.config, None, partial=partial, quiet=quiet)
            for subject in chosen
        ]
    results = [
        verify_one(
            subject, weights, quiet=quiet, chained=chained, node=node, layer=layer, atol=atol,
            rtol=rtol, exact=exact, jobs=jobs or settled.threads, vt_file=vt, partial=partial,
            fail_fast=fail_fast,
        )
        for subject in chosen
    ]  # fmt: skip
    show_verified(checks, results, as_json)
    if report is not None:
        write_report(results, report)
    for subject, checked, result in zip(chosen, checks, results, strict=True):
        keep_evidence(subject, checked, result)
    if not all(checked.ok for checked in checks) or not all(r.passed for r in results):
        raise typer.Exit(1)


def verify_one(
    subject: Subject, weights: Path, *, quiet: bool, **options: object
) -> "VerifyResult":
    """Verify one recording, with a bar over its layers."""
    from v4tool.report.progress import count_progress
    from v4tool.verify.walk import verify_file

    with count_progress(subject.path.name, quiet=quiet) as progress:
        return verify_file(subject.path, weights, progress=progress, **options)  # type: ignore[arg-type]


def show_verified(
    checks: list["CheckResult"], results: list["VerifyResult"], as_json: bool
) -> None:
    """What was found: findings of the check, a tree of what is wrong, a summary."""
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


def keep_evidence(subject: Subject, checked: "CheckResult", result: "VerifyResult") -> None:
    """Write what verifying found into the manifest beside the recording, where it has an entry."""
    from v4tool.record.manifest import record_verification

    entry = subject.entry()
    if entry is not None and not result.restricted and not result.stopped:
        record_verification(
            subject.path.parent, entry.id, checked.payload_sha256, result.evidence()
        )


def regen(
    case: CaseOption = None,
    directory: FromOption = None,
    ckpt: CkptOption = None,
    profile: ProfileOption = None,
    threads: ThreadsOption = None,
    backend: BackendOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make the manifest's references anew from their frozen ids; replace those that pass."""
    from v4tool import dump as dumping
    from v4tool import regen as making
    from v4tool.report import check as report
    from v4tool.report import tables
    from v4tool.report.progress import DumpProgress

    settled = settle(profile, ckpt=ckpt, threads=threads, backend=backend)
    folder = directory or settled.out_dir
    planned = making.plan(folder, case or None)
    cases = [making.frozen_case(p.entry) for p in planned if p.left_alone is None]
    if dry_run or not cases:
        if as_json:
            print_json([{"case": p.entry.id, "left_alone": p.left_alone} for p in planned])
        else:
            tables.show(report.plan_table(planned))
        return
    with open_checkpoint(settled, quiet=quiet) as checkpoint:
        judge = making.verifier(checkpoint.directory, jobs=settled.threads)
        steps = dumping.steps(checkpoint.config, cases, dumping.Selection())
        with DumpProgress(
            steps, lambda: checkpoint.bytes_read, dumping.peak_rss, quiet=quiet
        ) as progress:
            results = making.regenerate(
                settled, checkpoint, planned, folder, verify=judge, progress=progress
            )
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        tables.show(report.regen_table(results))
    if not all(result.replaced for result in results):
        raise typer.Exit(1)
