"""`v4tool dump`: records the activations of one or several prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from v4tool.commands.options import (
    AccumulateOption,
    AllOption,
    BackendOption,
    CaseOption,
    CkptOption,
    JsonOption,
    ProfileOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    chosen_cases,
    open_checkpoint,
    print_json,
    resolve_profile,
    say,
    selection_of,
)
from v4tool.errors import InputError

if TYPE_CHECKING:
    from v4tool.profiles import Case, Profile


def dump(
    case: CaseOption = None,
    every: AllOption = False,
    text: Annotated[str | None, typer.Option("--text", help="Text to use as the prompt.")] = None,
    input_ids: Annotated[
        str | None, typer.Option("--input-ids", help="Token ids to use as the prompt: 1,2,3.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option("--decode", help="Number of greedy decode steps.")
    ] = None,
    decode_ids: Annotated[
        str | None, typer.Option("--decode-ids", help="Token ids of the decode steps: 5,6,7.")
    ] = None,
    ckpt: CkptOption = None,
    profile: ProfileOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    accumulate: AccumulateOption = None,
    backend: BackendOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A .safetensors file, or a directory.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Shell pattern of keys, as '*.attn.out'.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Record these layers only: 0,2-5.")
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="Record the MTP block.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Record NaN and infinity instead of stopping.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record every module's output for one or several prompts, all in one pass over the weights."""
    from v4tool import dumping
    from v4tool.profiles import parse_ids, with_decode
    from v4tool.report.progress import DumpProgress

    resolved = resolve_profile(
        profile, ckpt=ckpt, threads=threads, seed=seed, accumulate=accumulate, backend=backend
    )
    checkpoint = open_checkpoint(resolved, mtp=mtp, allow_nan=keep_going, quiet=quiet)
    vocab_size = checkpoint.config.vocab_size
    prompts = prompts_of(resolved, case, every, text, input_ids, vocab_size)
    ids = parse_ids(decode_ids, vocab_size, where="--decode-ids") if decode_ids is not None else ()
    cases = [with_decode(prompt, decode, ids) for prompt in prompts]
    selection = selection_of(only, layers, mtp)
    paths = dumping.output_paths(cases, out, resolved.out_dir, force=force)
    steps = dumping.steps(checkpoint.config, cases, selection)
    with DumpProgress(
        steps, lambda: checkpoint.bytes_read, dumping.peak_rss, quiet=quiet
    ) as progress:
        results = dumping.dump_cases(
            resolved, checkpoint, cases, paths,
            selection=selection, force=force, keep_going=keep_going, progress=progress,
        )  # fmt: skip
    if not dumping.is_one_file(out):
        dumping.enter_in_manifest(resolved, checkpoint.config, results)
    show_dump(results, as_json, quiet)


def prompts_of(
    profile: "Profile",
    ids: list[str] | None,
    every: bool,
    text: str | None,
    input_ids: str | None,
    vocab_size: int,
) -> list["Case"]:
    """The cases named by --case or --all, or a case of --text or --input-ids."""
    from v4tool.profiles import custom_case, parse_ids

    if text is None and input_ids is None:
        return chosen_cases(profile, ids, every)
    if ids or every:
        raise InputError("--text and --input-ids go without --case and --all")
    given = parse_ids(input_ids, vocab_size) if input_ids is not None else None
    return [custom_case(text, given, profile.ckpt)]


def show_dump(results: list[Any], as_json: bool, quiet: bool) -> None:
    """Print the results of a dump as a table or JSON to stdout, and the totals to stderr."""
    from v4tool.report import tables

    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        tables.show(tables.dump_table(results))
    if not quiet:
        for line in tables.not_finite_lines(results):
            say(f"note: {line}")
        say(tables.dump_line(results))
