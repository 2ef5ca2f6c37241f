"""`v4tool list`: prints keys, cases, profiles, layers, tensors, nodes or maps."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from v4tool.commands.options import (
    CkptOption,
    FromOption,
    JsonOption,
    ProfileOption,
    SeedOption,
    ThreadsOption,
    model_config,
    print_json,
    resolve_profile,
    say,
)
from v4tool.errors import InputError

if TYPE_CHECKING:
    from v4tool.config import ModelConfig
    from v4tool.names import Keys

listing = typer.Typer(
    help="Show keys, cases, profiles, layers, tensors, nodes or maps.", no_args_is_help=True
)


@listing.command("keys")
def list_keys(
    name: Annotated[str | None, typer.Argument(metavar="KEY", help="Only this key.")] = None,
    case: Annotated[str, typer.Option("--case", help="A case of the profile.")] = "baseline6",
    length: Annotated[
        int | None, typer.Option("--length", help="Number of tokens, in place of a case.")
    ] = None,
    decode: Annotated[int | None, typer.Option("--decode", help="Decode steps.")] = None,
    layer: Annotated[int | None, typer.Option("--layer", help="One main layer.")] = None,
    glob: Annotated[str | None, typer.Option("--glob", help="Shell pattern of keys.")] = None,
    where: Annotated[
        bool, typer.Option("--where", help="Source lines that compute KEY: port and model.vt.")
    ] = False,
    profile: ProfileOption = None,
    ckpt: CkptOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the keys of a recording with dtype and shape, from the config and the prompt's length.

    With KEY and --where: the source line of the port that computes the key, the calls that lead to
    it, and the node of the second description (model.vt).
    """
    from v4tool.names import recording_keys

    if where and name is None:
        raise InputError("--where: expected one KEY, found none")
    resolved = resolve_profile(profile, ckpt=ckpt)
    config = model_config(resolved)
    chosen = resolved.case(case)
    tokens = len(chosen.input_ids) if length is None else length
    if tokens < 1:
        raise InputError(f"--length: expected at least 1 token, found {tokens}")
    steps = (chosen.decode if length is None else 0) if decode is None else decode
    keys = recording_keys(config, tokens, steps, mtp=config.mtp_supported)
    if name is not None:
        recording = f"{tokens} tokens, {steps} decode steps"
        keys = _only(keys, name, config.n_routed_experts, recording)
    keys = _matching(keys, layer, glob, config.n_routed_experts)
    if where:
        _show_lines(config, next(iter(keys)), tokens, as_json)
    else:
        _show_keys(config, keys, tokens, as_json)


def _matching(keys: "Keys", layer: int | None, glob: str | None, experts: int) -> "Keys":
    """The keys of a layer that match a shell pattern (None: all). InputError if there is none."""
    from v4tool.names import layer_of, matches

    found = {
        key: spec
        for key, spec in keys.items()
        if (layer is None or layer_of(key) == layer)
        and (glob is None or matches(key, [glob], experts))
    }
    if not found:
        raise InputError("list keys: no key matches --layer and --glob")
    return found


def _show_keys(config: "ModelConfig", keys: "Keys", tokens: int, as_json: bool) -> None:
    """Print keys with dtype, shape and kind of values, and their number and size to stderr."""
    from v4tool.report import tables

    if as_json:
        print_json([
            {"key": key, "dtype": spec.dtype, "shape": spec.shape, "kind": spec.kind}
            for key, spec in keys.items()
        ])  # fmt: skip
    else:
        print(tables.keys_lines(keys))
        say(tables.keys_line(config, keys, tokens))


def _show_lines(config: "ModelConfig", key: str, tokens: int, as_json: bool) -> None:
    """Print the source lines that compute a key."""
    from v4tool.report.where import as_dict, key_lines
    from v4tool.where import lines_of

    found = lines_of(config, key, tokens)
    if as_json:
        print_json(as_dict(found))
    else:
        print(key_lines(found))


def _only(keys: "Keys", name: str, experts: int, recording: str) -> "Keys":
    """The spec of one key, InputError if there is none; experts may be given by number."""
    from difflib import get_close_matches

    from v4tool.names import generic, matches

    key = generic(name)
    if key not in keys or not matches(key, [name], experts):
        close = get_close_matches(name, list(keys), n=1)
        nearest = f"; the nearest is {close[0]}" if close else ""
        raise InputError(
            f"{name}: expected a key of {recording} (--case, --length and --decode choose others), "
            f"found none of that name{nearest}"
        )
    return {key: keys[key]}


@listing.command("cases")
def list_cases(
    profile: ProfileOption = None, directory: FromOption = None, as_json: JsonOption = False
) -> None:
    """List a profile's cases, and the recordings in its manifest with their coverage."""
    from v4tool.record.manifest import Manifest
    from v4tool.report import manifest as report
    from v4tool.report import tables

    resolved = resolve_profile(profile)
    manifest = Manifest.load(directory or resolved.out_dir)
    if as_json:
        entries = manifest.model_dump(mode="json")["cases"]
        print_json(
            [
                {**case.model_dump(mode="json"), "recording": entries.get(case.id)}
                for case in resolved.cases
            ]
        )
        return
    tables.show(tables.cases_table(resolved))
    if manifest.cases:
        print()
        tables.show(report.recordings_table(manifest))
        print()
        tables.show(report.coverage_table(manifest))


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
    """List the shipped profiles; with -v every setting and where its value comes from."""
    from v4tool import profiles
    from v4tool.report import tables

    options = {"ckpt": ckpt, "threads": threads, "seed": seed}
    chosen = [profile] if profile else profiles.available()
    resolved = [profiles.load(name, options=options, environ=os.environ) for name in chosen]
    if as_json:
        print_json([
            {"name": p.name, "summary": p.summary,
             "settings": [dict(zip(("key", "value", "from"), row, strict=True))
                          for row in p.settings()]}
            for p in resolved
        ])  # fmt: skip
    elif verbose:
        for one in resolved:
            tables.show(tables.settings_table(one))
    else:
        tables.show(tables.profiles_table(resolved))


@listing.command("layers")
def list_layers(profile: ProfileOption = None, ckpt: CkptOption = None) -> None:
    """List the layers with attention kind, routing and number of base keys."""
    from v4tool.report import tables

    tables.show(tables.layers_table(model_config(resolve_profile(profile, ckpt=ckpt))))


@listing.command("tensors")
def list_tensors(
    profile: ProfileOption = None,
    ckpt: CkptOption = None,
    layer: Annotated[int | None, typer.Option("--layer", help="One main layer.")] = None,
    glob: Annotated[str | None, typer.Option("--glob", help="Shell pattern of names.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List a checkpoint's tensors; with --ckpt also missing and different ones (exit 1 if any)."""
    from fnmatch import fnmatchcase

    from v4tool.checkpoint.inspection import inspect
    from v4tool.checkpoint.layout import layout
    from v4tool.report import tables

    resolved = resolve_profile(profile, ckpt=ckpt)
    config = model_config(resolved)

    def wanted(name: str) -> bool:
        in_layer = layer is None or name.startswith(config.block_path(layer) + ".")
        return in_layer and (glob is None or fnmatchcase(name, glob))

    if resolved.ckpt is None:
        specs = {name: spec for name, spec in layout(config).items() if wanted(name)}
        if as_json:
            print_json([
                {"name": n, "dtype": s.dtype, "shape": s.shape, "shard": s.shard}
                for n, s in specs.items()
            ])  # fmt: skip
        else:
            print(tables.tensors_lines(specs))
        return
    rows = [row for row in inspect(resolved.ckpt, config) if wanted(row.name)]
    if as_json:
        print_json([{"name": r.name, "status": r.status, "found": str(r.found)} for r in rows])
    else:
        print(tables.status_lines(rows))
    if any(row.status not in ("ok", "extra") for row in rows):
        raise typer.Exit(1)


@listing.command("nodes")
def list_nodes(
    case: Annotated[str, typer.Option("--case", help="A case of the profile.")] = "baseline6",
    vt: Annotated[
        Path | None, typer.Option("--vt", help="Another description (not executed here).")
    ] = None,
    profile: ProfileOption = None,
    ckpt: CkptOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the nodes of the second description with their keys; exit 1 if a key has no node."""
    from dataclasses import asdict

    from v4tool.checkpoint.layout import layout
    from v4tool.names import recording_keys
    from v4tool.report import tables
    from v4tool.report.verify import nodes_table
    from v4tool.verify.listing import list_nodes as nodes_of

    resolved = resolve_profile(profile, ckpt=ckpt)
    config = model_config(resolved)
    chosen = resolved.case(case)
    keys = recording_keys(config, len(chosen.input_ids), chosen.decode, mtp=config.mtp_supported)
    nodes, left = nodes_of(vt, keys, layout(config))
    if as_json:
        print_json({"nodes": [asdict(node) for node in nodes], "uncovered": left})
    else:
        tables.show(nodes_table(nodes))
        say(f"{len(nodes)} nodes, {len(keys)} keys, {len(left)} that no node judges")
    if left:
        raise typer.Exit(1)


@listing.command("maps")
def list_maps(
    name: Annotated[
        str | None, typer.Argument(metavar="MAP", help="The rules of this map, or of a TOML file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the maps of other engines' tensor names (`diff --map`); with MAP its rules."""
    from v4tool.diff.maps import load_map, shipped_maps
    from v4tool.report import tables

    chosen = {one: load_map(one) for one in (shipped_maps() if name is None else [name])}
    if as_json:
        found = [{"name": n, **m.model_dump(mode="json")} for n, m in chosen.items()]
        print_json(found if name is None else found[0])
    elif name is None:
        tables.show(tables.maps_table(chosen))
    else:
        print(tables.rules_lines(chosen[name].rules))
        decode = chosen[name].decode
        steps = f"; decode steps: {decode}NAME" if decode else ""
        say(f"{name}: {chosen[name].summary}{steps}")
