"""Options shared by several commands, and their resolution: profile, checkpoint, cases, keys.

Slow imports (torch) are made inside the functions, so that `--help` starts fast.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from v4tool.commands.streams import shows_unicode
from v4tool.errors import InputError

if TYPE_CHECKING:
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.config import ModelConfig
    from v4tool.profiles import Case, Profile
    from v4tool.selection import Selection

ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="A shipped profile (nano, flash) or a TOML file.")
]
CkptOption = Annotated[
    Path | None, typer.Option("--ckpt", help="Directory of the checkpoint to use.")
]
ThreadsOption = Annotated[str | None, typer.Option("--threads", help="Worker threads, or auto.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of nano's random weights.")]
AccumulateOption = Annotated[
    str | None, typer.Option("--accumulate", help="float64 (the reference) or float32.")
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", help="Backend of matrix products: auto, c, numpy, readable."),
]
CaseOption = Annotated[list[str] | None, typer.Option("--case", help="A case of the profile.")]
AllOption = Annotated[bool, typer.Option("--all", help="All cases of the profile.")]
FromOption = Annotated[
    Path | None, typer.Option("--from", help="Directory of the recordings [default: profile's].")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def resolve_profile(profile: str | None, **options: object) -> "Profile":
    """The profile, resolved from options, environment, file and defaults."""
    from v4tool import profiles

    return profiles.load(profile, options=options, environ=os.environ)


def say(line: str) -> None:
    """Print one line to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print JSON to stdout; characters are escaped unless stdout's encoding is a Unicode one."""
    print(json.dumps(value, indent=1, ensure_ascii=not shows_unicode(sys.stdout)))


def discard(line: str) -> None:
    """Print nothing; the counterpart of `say` under --quiet."""


def checkpoint_directory(profile: "Profile", *, quiet: bool = False) -> Path:
    """Directory of the profile's checkpoint; nano's is generated on first use."""
    from v4tool.checkpoint import directory

    return directory.checkpoint_directory(profile, discard if quiet else say)


def open_checkpoint(
    profile: "Profile", *, mtp: bool = True, allow_nan: bool = False, quiet: bool = False
) -> "Checkpoint":
    """Open the profile's checkpoint; notes about it go to stderr."""
    from v4tool.checkpoint import directory

    remark = discard if quiet else say
    return directory.open_checkpoint(profile, remark, mtp=mtp, allow_nan=allow_nan)


def model_config(profile: "Profile") -> "ModelConfig":
    """The model's configuration; no weights are read."""
    from v4tool.config import ModelConfig

    return ModelConfig.from_file(profile.config)


def chosen_cases(profile: "Profile", ids: list[str] | None, every: bool) -> list["Case"]:
    """The cases named by --case or --all. InputError if neither or both are given."""
    if every and ids:
        raise InputError("--case and --all: expected one of them, found both")
    if every:
        return [case for case in profile.cases if case.expect is None]
    if not ids:
        raise InputError("no case: name one with --case ID, or --all (`v4tool list cases`)")
    return [profile.case(case_id) for case_id in dict.fromkeys(ids)]


def selection_of(only: list[str] | None, layers: str | None, mtp: bool) -> "Selection":
    """The keys to record according to --only, --layers and --mtp."""
    from v4tool.selection import Selection

    numbers = frozenset(layer_numbers(layers)) if layers is not None else None
    return Selection(tuple(only) if only else None, numbers, mtp)


def layer_numbers(layers: str) -> list[int]:
    """The numbers given by --layers; InputError if it is not a list of numbers and ranges."""
    from v4tool.names import parse_layers

    try:
        return list(parse_layers(layers))
    except ValueError:
        raise InputError(
            f"--layers: expected numbers and ranges such as 0,2-5, found {layers!r}"
        ) from None
