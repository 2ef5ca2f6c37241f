"""`v4tool check`: checks a recording (structure, values, identities), or the port itself."""

from typing import TYPE_CHECKING, Annotated

import typer

from v4tool.commands.options import (
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
    model_config,
    open_checkpoint,
    print_json,
    resolve_profile,
    say,
)
from v4tool.commands.recordings import DumpOption, PartialOption, check_one, recordings_to_judge
from v4tool.errors import CheckpointError, ProfileError

if TYPE_CHECKING:
    from v4tool.check.recording import CheckResult
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.profiles import Profile


def weights_of(profile: "Profile", wanted: bool, quiet: bool) -> "Checkpoint | None":
    """Open the profile's checkpoint; None if not wanted, or if none was named and none found."""
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
        bool, typer.Option("--weights/--no-weights", help="Also compare with the checkpoint.")
    ] = True,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also recompute every matrix product from its weights.")
    ] = False,
    partial: PartialOption = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="List the identities and the keys that they cover.")
    ] = False,
    port: Annotated[
        bool, typer.Option("--port", help="Test the model code on the checkpoint, no recording.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --port: samples only.")] = False,
    layer: Annotated[
        int | None, typer.Option("--layer", help="With --port: run this layer only.")
    ] = None,
    anchors: Annotated[
        bool, typer.Option("--anchors", help="Compare next tokens with published ones (release).")
    ] = False,
    threads: ThreadsOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check recordings: file structure, hashes, keys, shapes, token ids, values and identities."""
    resolved = resolve_profile(profile, ckpt=ckpt, threads=threads, backend=backend)
    if explain:
        show_explanation(resolved, case, as_json)
        return
    if port:
        check_the_port(resolved, quick, layer, as_json, quiet)
        return
    if anchors:
        check_the_anchors(resolved, case, as_json, quiet)
        return
    chosen = recordings_to_judge(resolved, case, every, file, directory)
    checkpoint = weights_of(resolved, weights, quiet)
    config = checkpoint.config if checkpoint else model_config(resolved)
    results = []
    for recording in chosen:
        results.append(
            check_one(recording, config, checkpoint, partial=partial, deep=deep, quiet=quiet)
        )
    show_checks(results, as_json)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def show_checks(results: list["CheckResult"], as_json: bool) -> None:
    """Print the findings and a summary table with one row per recording; or JSON."""
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
    """Print the identities for the length of one case (default: prompt32)."""
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
    tables.show(report.weights_only_table(explanation))


def check_the_port(
    profile: "Profile", quick: bool, layer: int | None, as_json: bool, quiet: bool
) -> None:
    """Run and print the port's self-test on the profile's checkpoint; exit 1 if a row fails."""
    from dataclasses import asdict

    from v4tool.check.port import check_port, weight_bytes
    from v4tool.dumping import numerics_of
    from v4tool.report import check as report
    from v4tool.report import tables
    from v4tool.report.progress import bytes_progress
    from v4tool.selftest import payload_row

    directory = checkpoint_directory(profile, quiet=quiet)
    total = weight_bytes(model_config(profile), quick=quick)
    with bytes_progress("weights", total, quiet=quiet) as progress:
        rows = check_port(
            directory, quick=quick, layer=layer, numerics=numerics_of(profile), progress=progress
        )
    rows.append(payload_row(profile.threads, profile.backend))
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        tables.show(report.port_table(rows))
    if any(row.status != "ok" for row in rows):
        raise typer.Exit(1)


def check_the_anchors(
    profile: "Profile", cases: list[str] | None, as_json: bool, quiet: bool
) -> None:
    """Compare next tokens with the published ones; exit 1 if one differs or they do not apply."""
    from dataclasses import asdict

    from v4tool.check.anchors import check_anchors
    from v4tool.dumping import numerics_of, peak_rss
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
