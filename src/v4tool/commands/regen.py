"""`v4tool regen`: records a manifest's cases again, verifies them and replaces the files."""

from typing import Annotated

import typer

from v4tool.commands.options import (
    BackendOption,
    CaseOption,
    CkptOption,
    FromOption,
    JsonOption,
    ProfileOption,
    QuietOption,
    ThreadsOption,
    open_checkpoint,
    print_json,
    resolve_profile,
)


def regen(
    case: CaseOption = None,
    directory: FromOption = None,
    ckpt: CkptOption = None,
    profile: ProfileOption = None,
    threads: ThreadsOption = None,
    backend: BackendOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, change nothing.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record a manifest's cases again from their frozen ids; replace the files that pass."""
    from v4tool import dumping
    from v4tool import regen as making
    from v4tool.report import check as report
    from v4tool.report import tables
    from v4tool.report.progress import DumpProgress
    from v4tool.selection import EVERYTHING

    resolved = resolve_profile(profile, ckpt=ckpt, threads=threads, backend=backend)
    folder = directory or resolved.out_dir
    planned = making.plan(folder, case or None)
    cases = [making.frozen_case(p.entry) for p in planned if p.left_alone is None]
    if dry_run or not cases:
        if as_json:
            print_json([{"case": p.entry.id, "left_alone": p.left_alone} for p in planned])
        else:
            tables.show(report.plan_table(planned))
        return
    with open_checkpoint(resolved, quiet=quiet) as checkpoint:
        judge = making.verifier(checkpoint.directory, jobs=resolved.threads)
        steps = dumping.steps(checkpoint.config, cases, EVERYTHING)
        with DumpProgress(
            steps, lambda: checkpoint.bytes_read, dumping.peak_rss, quiet=quiet
        ) as progress:
            results = making.regenerate(
                resolved, checkpoint, planned, folder, verify=judge, progress=progress
            )
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        tables.show(report.regen_table(results))
    if not all(result.replaced for result in results):
        raise typer.Exit(1)
