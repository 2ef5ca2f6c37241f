"""`v4tool diff`: another engine's tensors, operator by operator, in that engine's arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from v4tool.commands.options import (
    CkptOption,
    JsonOption,
    ProfileOption,
    QuietOption,
    open_checkpoint,
    print_json,
    resolve_profile,
)
from v4tool.errors import InputError

if TYPE_CHECKING:
    from v4tool.diff.results import DiffResult


def diff(
    candidate: Annotated[
        Path, typer.Argument(help="A file or directory of tensors that another engine wrote.")
    ],
    map_name: Annotated[
        str, typer.Option("--map", help="Names of which engine: a shipped map or a TOML file.")
    ] = "v4tool",
    case: Annotated[
        str | None, typer.Option("--case", help="The prompt, where the tensors hold no ids.")
    ] = None,
    input_ids: Annotated[
        str | None, typer.Option("--input-ids", help="Its ids: 1,2,3, where they hold none.")
    ] = None,
    decode_ids: Annotated[
        str | None, typer.Option("--decode-ids", help="Ids of the decode steps: 5,6,7.")
    ] = None,
    ckpt: CkptOption = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Name the first operator of another engine that is wrong, judged in its own arithmetic."""
    from v4tool import profiles
    from v4tool.diff.candidate import open_candidate
    from v4tool.diff.compare import diff_candidate

    if case and input_ids:
        raise InputError("--case and --input-ids: expected one of them, found both")
    resolved = resolve_profile(profile, ckpt=ckpt)
    with open_checkpoint(resolved, quiet=quiet) as checkpoint:
        vocab = checkpoint.config.vocab_size
        ids = profiles.parse_ids(input_ids, vocab) if input_ids else None
        if case is not None:
            ids = resolved.case(case).input_ids
        steps = profiles.parse_ids(decode_ids, vocab, where="--decode-ids") if decode_ids else ()
        found = open_candidate(candidate, map_name, checkpoint.config, ids, steps)
        result = diff_candidate(found, checkpoint, name=str(candidate), map_name=map_name)
    show(result, as_json)
    if not result.ok:
        raise typer.Exit(1)


def show(result: "DiffResult", as_json: bool) -> None:
    """Verdict, arithmetic and what was not matched, or all of it as JSON."""
    from v4tool.report import diff as report
    from v4tool.report import terminal

    if as_json:
        print_json(result.as_dict())
        return
    for line in report.verdict_lines(result):
        print(line)
    terminal.show(report.operators_table(result))
    for line in report.unmatched_lines(result):
        print(line)
