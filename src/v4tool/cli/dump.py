"""`v4tool dump` and `v4tool synth`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from v4tool.cli.options import (
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
    custom_case,
    open_checkpoint,
    print_json,
    say,
    selection_of,
    settle,
    with_decode,
)
from v4tool.errors import InputError

if TYPE_CHECKING:
    from v4tool.config import ModelConfig


def dump(
    case: CaseOption = None,
    every: AllOption = False,
    text: Annotated[str | None, typer.Option("--text", help="A prompt of your own.")] = None,
    input_ids: Annotated[
        str | None, typer.Option("--input-ids", help="Token ids of your own: 1,2,3.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option("--decode", help="Main-stack decode steps, greedy.")
    ] = None,
    decode_ids: Annotated[
        str | None, typer.Option("--decode-ids", help="Ids of the decode steps: 5,6,7.")
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
        list[str] | None, typer.Option("--only", help="Record keys that match, e.g. '*.attn.out'.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Record these layers only: 0,2-5.")
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="Leave the MTP block out.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record every module's output for one or several prompts, all in one pass over the weights."""
    from v4tool import dump as dumping
    from v4tool.profiles import parse_ids
    from v4tool.report.progress import DumpProgress

    settled = settle(
        profile, ckpt=ckpt, threads=threads, seed=seed, accumulate=accumulate, backend=backend
    )
    checkpoint = open_checkpoint(settled, mtp=mtp, quiet=quiet)
    vocab_size = checkpoint.config.vocab_size
    if text is None and input_ids is None:
        cases = chosen_cases(settled, case, every)
    elif case or every:
        raise InputError("--text and --input-ids go without --case and --all")
    else:
        cases = [custom_case(settled, text, input_ids, vocab_size)]
    ids = parse_ids(decode_ids, vocab_size, where="--decode-ids") if decode_ids is not None else ()
    cases = [with_decode(c, decode, ids) for c in cases]
    selection = selection_of(only, layers, mtp)
    paths = dumping.output_paths(cases, out, settled.out_dir, force=force)
    steps = dumping.steps(checkpoint.config, cases, selection)
    with DumpProgress(
        steps, lambda: checkpoint.bytes_read, dumping.peak_rss, quiet=quiet
    ) as progress:
        results = dumping.dump_cases(
            settled, checkpoint, cases, paths, selection=selection, force=force, progress=progress
        )
    if not dumping.is_one_file(out):
        dumping.enter_in_manifest(settled, checkpoint.config, results)
    show_dump(results, as_json, quiet)


def show_dump(results: list[Any], as_json: bool, quiet: bool) -> None:
    """The results of a dump: a table or JSON on stdout, one closing line on stderr."""
    from v4tool.report import tables

    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        tables.show(tables.dump_table(results))
    if not quiet:
        say(tables.dump_line(results))


def synth(
    directory: Annotated[Path | None, typer.Argument(help="Where to write it.")] = None,
    like: Annotated[
        str, typer.Option("--like", help="A profile's model (nano, flash) or a config.json.")
    ] = "nano",
    experts: Annotated[
        int | None, typer.Option("--experts", help="Routed experts per layer.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Keep these layers of the model: 0,2-5.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how large it would be.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a random checkpoint in the release's layout, of any size, shard by shard."""
    from v4tool.checkpoint import synth as making
    from v4tool.report.progress import bytes_progress

    config = like_config(like)
    kept = list(parse_layer_list(layers)) if layers is not None else None
    totals = making.plan(config, experts=experts, layers=kept)
    if not dry_run:
        if directory is None:
            raise InputError("synth: expected a directory to write to, found none")
        with bytes_progress(totals.total_size, quiet=quiet) as progress:
            making.synth(
                directory, config, seed=seed, experts=experts, layers=kept, progress=progress
            )
    show_totals(totals, as_json)


def like_config(like: str) -> "ModelConfig":
    """The configuration that `synth --like` names."""
    from v4tool import profiles
    from v4tool.config import ModelConfig

    if Path(like).suffix == ".json":
        return ModelConfig.from_file(Path(like))
    return ModelConfig.from_file(profiles.load(like, options={}, environ={}).config)


def parse_layer_list(layers: str) -> Any:
    """Layer numbers of an option; InputError where it is no list of numbers and ranges."""
    from v4tool.names import parse_layers

    try:
        return list(parse_layers(layers))
    except ValueError:
        raise InputError(
            f"--layers: expected numbers and ranges such as 0,2-5, found {layers!r}"
        ) from None


def show_totals(totals: Any, as_json: bool) -> None:
    """Tensor count, MTP count, bytes and parameters of a checkpoint."""
    from dataclasses import asdict

    if as_json:
        print_json(asdict(totals))
        return
    print(f"tensors      {totals.tensors}")
    print(f"mtp tensors  {totals.mtp_tensors}")
    print(f"bytes        {totals.total_size}")
    print(f"parameters   {totals.parameters}")
