"""`v4tool synth`: writes a random checkpoint in the release's layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from v4tool.commands.options import JsonOption, QuietOption, layer_numbers, print_json
from v4tool.errors import InputError

if TYPE_CHECKING:
    from v4tool.config import ModelConfig


def synth(
    directory: Annotated[Path | None, typer.Argument(help="Directory to create.")] = None,
    like: Annotated[
        str, typer.Option("--like", help="A profile's model (nano, flash) or a config.json.")
    ] = "nano",
    experts: Annotated[
        int | None, typer.Option("--experts", help="Routed experts per layer.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers to keep: 0,2-5 [default: all].")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the sizes, write nothing.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a random checkpoint in the release's layout, of any size, shard by shard."""
    from v4tool.checkpoint import synth as making
    from v4tool.report.progress import bytes_progress

    config = like_config(like)
    kept = layer_numbers(layers) if layers is not None else None
    totals = making.plan(config, experts=experts, layers=kept)
    if not dry_run:
        if directory is None:
            raise InputError("synth: expected a directory to write to, found none")
        with bytes_progress(directory.name, totals.total_size, quiet=quiet) as progress:
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


def show_totals(totals: Any, as_json: bool) -> None:
    """Print a checkpoint's number of tensors, of MTP tensors, bytes and parameters."""
    from dataclasses import asdict

    if as_json:
        print_json(asdict(totals))
        return
    print(f"tensors      {totals.tensors}")
    print(f"mtp tensors  {totals.mtp_tensors}")
    print(f"bytes        {totals.total_size}")
    print(f"parameters   {totals.parameters}")
