"""The command line, a table of contents: settle a profile, call one function, show its result.

Exit status: 0 success, 1 a failed check or a mismatch, 2 an input that cannot be used (one line on
stderr). stdout carries results alone; progress and remarks go to stderr. Everything heavy is
imported inside the commands, so that `--help` answers at once.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from v4tool.errors import InputError, V4ToolError

if TYPE_CHECKING:
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.config import ModelConfig
    from v4tool.dump import Selection
    from v4tool.profiles import Case, Profile

app = typer.Typer(
    help="Bit-exact reference activations for DeepSeek-V4-Flash: record, check and verify.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
listing = typer.Typer(help="Show keys, cases, profiles, layers or tensors.", no_args_is_help=True)
app.add_typer(listing, name="list")

ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="A shipped profile (nano, flash) or a TOML file.")
]
CkptOption = Annotated[
    Path | None, typer.Option("--ckpt", help="Directory of the checkpoint to use.")
]
ThreadsOption = Annotated[str | None, typer.Option("--threads", help="Worker threads, or auto.")]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Seed of the weights that `nano` makes.")
]
AccumulateOption = Annotated[
    str | None, typer.Option("--accumulate", help="float64 (the reference) or float32.")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="Matrix product: auto, c, numpy or readable.")
]
CaseOption = Annotated[list[str] | None, typer.Option("--case", help="A case of the profile.")]
AllOption = Annotated[bool, typer.Option("--all", help="All cases of the profile.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def settle(profile: str | None, **options: object) -> "Profile":
    """The profile with options and environment taken in."""
    from v4tool import profiles

    return profiles.load(profile, options=options, environ=os.environ)


def say(line: str) -> None:
    """A remark on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def checkpoint_directory(profile: "Profile", *, quiet: bool = False) -> Path:
    """The profile's checkpoint; a random one is made on first use."""
    from v4tool.checkpoint.synth import SYNTH_VERSION, synth
    from v4tool.config import ModelConfig
    from v4tool.profiles import SynthRequest, locate_checkpoint

    found = locate_checkpoint(profile)
    if not isinstance(found, SynthRequest):
        return found
    directory = found.directory(SYNTH_VERSION)
    if not directory.exists():
        if not quiet:
            say(f"making the checkpoint of profile {profile.name} in {directory}")
        report = synth(directory, ModelConfig.from_file(found.config), seed=found.seed)
        if not quiet:
            say(f"{report.totals.tensors} tensors in {report.seconds:.1f} s")
    return directory


def open_checkpoint(profile: "Profile", *, mtp: bool = True, quiet: bool = False) -> "Checkpoint":
    """The profile's checkpoint, opened; its remarks go to stderr."""
    from v4tool.checkpoint.shards import Checkpoint

    checkpoint = Checkpoint.open(checkpoint_directory(profile, quiet=quiet), mtp=mtp)
    for note in checkpoint.notes if not quiet else ():
        say(f"note: {note}")
    return checkpoint


def model_config(profile: "Profile") -> "ModelConfig":
    """The model's configuration, which needs no weights."""
    from v4tool.config import ModelConfig

    return ModelConfig.from_file(profile.config)


def chosen_cases(profile: "Profile", ids: list[str] | None, every: bool) -> list["Case"]:
    """The cases that --case or --all name; InputError where neither or both are given."""
    if every and ids:
        raise InputError("--case and --all: expected one of them, found both")
    if every:
        return [case for case in profile.cases if case.expect is None]
    if not ids:
        raise InputError("no case: name one with --case ID, or --all (`v4tool list cases`)")
    return [profile.case(case_id) for case_id in dict.fromkeys(ids)]


def custom_case(
    profile: "Profile", text: str | None, input_ids: str | None, vocab_size: int
) -> "Case":
    """The case that --text or --input-ids describe."""
    from v4tool import profiles

    if text is not None and input_ids is not None:
        raise InputError("--text and --input-ids: expected one of them, found both")
    if text is not None:
        ids = tuple(profiles.encode(text, profile.ckpt))
    else:
        ids = profiles.parse_ids(input_ids or "", vocab_size)
    return profiles.Case(id="custom", subject="from the command line", text=text, input_ids=ids)


def with_decode(case: "Case", steps: int | None, ids: tuple[int, ...]) -> "Case":
    """The case with other decode steps, where some are asked for."""
    if steps is None and not ids:
        return case
    if steps is not None and steps < 0:
        raise InputError(f"--decode: expected 0 or more steps, found {steps}")
    if steps is not None and len(ids) > steps:
        raise InputError(f"--decode {steps}: expected at most {steps} ids, found {len(ids)}")
    return case.model_copy(update={"decode": len(ids) if steps is None else steps,
                                   "decode_ids": ids})  # fmt: skip


def selection_of(only: list[str] | None, layers: str | None, mtp: bool) -> "Selection":
    """What --only, --layers and --no-mtp leave to record."""
    from v4tool.dump import Selection
    from v4tool.names import parse_layers

    try:
        numbers = frozenset(parse_layers(layers)) if layers is not None else None
    except ValueError:
        raise InputError(
            f"--layers: expected numbers and ranges such as 0,2-5, found {layers!r}"
        ) from None
    return Selection(tuple(only) if only else None, numbers, mtp)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --version: torch, product in use.")
    ] = False,
) -> None:
    """Record, check and verify reference activations for DeepSeek-V4-Flash on a CPU."""
    if version:
        from v4tool.report.version import version_lines

        print("\n".join(version_lines(verbose)))
        raise typer.Exit


@app.command()
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


@app.command()
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


@listing.command("keys")
def list_keys(
    case: Annotated[str, typer.Option("--case", help="A case of the profile.")] = "baseline6",
    length: Annotated[
        int | None, typer.Option("--length", help="A prompt of so many tokens, not a case.")
    ] = None,
    decode: Annotated[int | None, typer.Option("--decode", help="Decode steps.")] = None,
    layer: Annotated[int | None, typer.Option("--layer", help="One main layer.")] = None,
    glob: Annotated[str | None, typer.Option("--glob", help="Keys that match.")] = None,
    profile: ProfileOption = None,
    ckpt: CkptOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a dump will hold: name, dtype, shape, from the configuration and the length alone."""
    from v4tool import names
    from v4tool.report import tables

    settled = settle(profile, ckpt=ckpt)
    config = model_config(settled)
    chosen = settled.case(case)
    tokens = len(chosen.input_ids) if length is None else length
    if tokens < 1:
        raise InputError(f"--length: expected at least 1 token, found {tokens}")
    steps = (chosen.decode if length is None else 0) if decode is None else decode
    every = names.recording_keys(config, tokens, steps, mtp=config.mtp_supported)
    keys = {
        key: spec
        for key, spec in every.items()
        if (layer is None or names.layer_of(key) == layer)
        and (glob is None or names.matches(key, [glob], config.n_routed_experts))
    }
    if not keys:
        raise InputError("list keys: no key matches --layer and --glob")
    if as_json:
        print_json(
            [
                {"key": k, "dtype": s.dtype, "shape": s.shape, "kind": s.kind}
                for k, s in keys.items()
            ]
        )
        return
    tables.show(tables.keys_table(keys))
    say(tables.keys_line(config, keys, tokens))


@listing.command("cases")
def list_cases(profile: ProfileOption = None, as_json: JsonOption = False) -> None:
    """The cases of a profile."""
    from v4tool.report import tables

    settled = settle(profile)
    if as_json:
        print_json([case.model_dump(mode="json") for case in settled.cases])
    else:
        tables.show(tables.cases_table(settled))


@listing.command("profiles")
def list_profiles(
    profile: ProfileOption = None,
    ckpt: CkptOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every setting and where it came from.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """The shipped profiles; with -v every setting and where its value came from."""
    from v4tool import profiles
    from v4tool.report import tables

    options = {"ckpt": ckpt, "threads": threads, "seed": seed}
    chosen = [profile] if profile else profiles.available()
    settled = [profiles.load(name, options=options, environ=os.environ) for name in chosen]
    if as_json:
        print_json([
            {"name": p.name, "summary": p.summary,
             "settings": [dict(zip(("key", "value", "from"), row, strict=True))
                          for row in p.settings()]}
            for p in settled
        ])  # fmt: skip
    elif verbose:
        for one in settled:
            tables.show(tables.settings_table(one))
    else:
        tables.show(tables.profiles_table(settled))


@listing.command("layers")
def list_layers(profile: ProfileOption = None, ckpt: CkptOption = None) -> None:
    """Every layer with its attention, routing and number of base keys."""
    from v4tool.report import tables

    tables.show(tables.layers_table(model_config(settle(profile, ckpt=ckpt))))


@listing.command("tensors")
def list_tensors(
    profile: ProfileOption = None,
    ckpt: CkptOption = None,
    layer: Annotated[int | None, typer.Option("--layer", help="One main layer.")] = None,
    glob: Annotated[str | None, typer.Option("--glob", help="Names that match.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The checkpoint's layout; with --ckpt what is missing or different there (exit 1 if any)."""
    from fnmatch import fnmatchcase

    from v4tool.checkpoint.inspection import inspect
    from v4tool.checkpoint.layout import layout
    from v4tool.report import tables

    settled = settle(profile, ckpt=ckpt)
    config = model_config(settled)

    def wanted(name: str) -> bool:
        in_layer = layer is None or name.startswith(config.block_path(layer) + ".")
        return in_layer and (glob is None or fnmatchcase(name, glob))

    if settled.ckpt is None:
        specs = {name: spec for name, spec in layout(config).items() if wanted(name)}
        if as_json:
            print_json([
                {"name": n, "dtype": s.dtype, "shape": s.shape, "shard": s.shard}
                for n, s in specs.items()
            ])  # fmt: skip
        else:
            tables.show(tables.tensors_table(specs))
        return
    rows = [row for row in inspect(settled.ckpt, config) if wanted(row.name)]
    if as_json:
        print_json([{"name": r.name, "status": r.status, "found": str(r.found)} for r in rows])
    else:
        tables.show(tables.status_table(rows))
    if any(row.status != "ok" for row in rows):
        raise typer.Exit(1)


def main(run: Callable[[], None] = app) -> None:
    """Run the command line; a user's mistake becomes one line on stderr and exit status 2."""
    try:
        run()
    except V4ToolError as error:
        say(f"v4tool: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        say("v4tool: interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # the reader of stdout has gone, as `head` does; there is nobody left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
