"""The options that several commands share, and what they mean: profile, checkpoint, cases.

Heavy imports stay inside the functions, so that `--help` answers at once.
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
    from v4tool.dumping import Selection
    from v4tool.profiles import Case, Profile

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
FromOption = Annotated[
    Path | None, typer.Option("--from", help="Directory of the recordings, if not the profile's.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def resolve_profile(profile: str | None, **options: object) -> "Profile":
    """The profile with options and environment taken in."""
    from v4tool import profiles

    return profiles.load(profile, options=options, environ=os.environ)


def say(line: str) -> None:
    """A remark on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON value on stdout, with escapes where stdout's encoding has not all characters."""
    print(json.dumps(value, indent=1, ensure_ascii=not shows_unicode(sys.stdout)))


def unsaid(line: str) -> None:
    """Drop a remark, as --quiet asks for."""


def checkpoint_directory(profile: "Profile", *, quiet: bool = False) -> Path:
    """The profile's checkpoint; a random one is made on first use. Remarks go to stderr."""
    from v4tool.checkpoint import directory

    return directory.checkpoint_directory(profile, unsaid if quiet else say)


def open_checkpoint(
    profile: "Profile", *, mtp: bool = True, allow_nan: bool = False, quiet: bool = False
) -> "Checkpoint":
    """The profile's checkpoint, opened; its remarks go to stderr."""
    from v4tool.checkpoint import directory

    remark = unsaid if quiet else say
    return directory.open_checkpoint(profile, remark, mtp=mtp, allow_nan=allow_nan)


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


def selection_of(only: list[str] | None, layers: str | None, mtp: bool) -> "Selection":
    """What --only, --layers and --no-mtp leave to record."""
    from v4tool.dumping import Selection
    from v4tool.names import parse_layers

    try:
        numbers = frozenset(parse_layers(layers)) if layers is not None else None
    except ValueError:
        raise InputError(
            f"--layers: expected numbers and ranges such as 0,2-5, found {layers!r}"
        ) from None
    return Selection(tuple(only) if only else None, numbers, mtp)
