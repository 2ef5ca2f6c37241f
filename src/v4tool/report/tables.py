"""The tables that the commands print to stdout."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

from v4tool.names import Keys, base_keys, is_expert, layer_keys, mtp_keys, payload_bytes, steps_of
from v4tool.report.units import seconds, size

if TYPE_CHECKING:  # a listing must not wait for torch
    from v4tool.checkpoint.inspection import TensorStatus
    from v4tool.checkpoint.layout import TensorSpec
    from v4tool.config import ModelConfig
    from v4tool.dumping import DumpResult
    from v4tool.profiles import Profile

WIDE = 200
"""Columns where stdout is no terminal: nothing that a script reads may be cut off."""


def console() -> Console:
    """stdout, never folded where it is a file or a pipe."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDE)


def show(thing: RenderableType) -> None:
    """Print a table or a tree to stdout."""
    console().print(thing)


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the house style; `right` names the columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=True
        )
    return table


def shape_text(shape: Iterable[int | None]) -> str:
    """`[1, 6, 4096]`; rows that depend on the data as `n`."""
    return "[" + ", ".join("n" if n is None else str(n) for n in shape) + "]"


def lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns as plain text: rich takes a second for the thousands of rows of a long
    listing.
    """
    every = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in every)


def keys_lines(keys: Keys) -> str:
    """Keys with dtype, shape and what kind of value they hold, a line each."""
    return lines(
        ("key", "dtype", "shape", "values"),
        ((key, spec.dtype, shape_text(spec.shape), spec.kind) for key, spec in keys.items()),
    )


def cases_table(profile: "Profile") -> Table:
    """The cases of a profile."""
    table = plain_table("case", "tokens", "decode", "file", "subject", right=("tokens", "decode"))
    for case in profile.cases:
        table.add_row(case.id, str(len(case.input_ids)), str(case.decode), case.file, case.subject)
    return table


def layers_table(config: "ModelConfig") -> Table:
    """Every layer with its kind: ratio, routing, base keys of a long prefill."""
    table = plain_table("layer", "ratio", "attention", "routing", "base keys", right=("base keys",))
    long = steps_of(max(config.compress_ratios) or 1, 0)[0]
    for layer in range(config.n_layers + (1 if config.mtp_supported else 0)):
        ratio = config.ratio(layer)
        mtp = config.is_mtp(layer)
        keys = base_keys(mtp_keys(config, long) if mtp else layer_keys(config, layer, long))
        table.add_row(
            config.block_path(layer), str(ratio), attention_kind(ratio),
            "by token id" if config.is_hash(layer) else "by score", str(len(keys)),
        )  # fmt: skip
    return table


def attention_kind(ratio: int) -> str:
    """What a layer with this ratio attends to."""
    if ratio == 0:
        return "window"
    return f"window + blocks of {ratio}" + (", chosen by an indexer" if ratio == 4 else "")


def tensors_lines(specs: Mapping[str, "TensorSpec"]) -> str:
    """The checkpoint's layout, a line a tensor."""
    return lines(
        ("tensor", "dtype", "shape", "shard"),
        (
            (name, spec.dtype, shape_text(spec.shape), str(spec.shard))
            for name, spec in specs.items()
        ),
    )


def status_lines(rows: Iterable["TensorStatus"]) -> str:
    """The layout beside what a checkpoint has, a line a tensor."""
    return lines(
        ("tensor", "status", "expected", "found"),
        (
            (
                row.name,
                row.status,
                f"{row.spec.dtype} {shape_text(row.spec.shape)}" if row.spec else "",
                str(row.found or ""),
            )
            for row in rows
        ),
    )


def profiles_table(profiles: Iterable["Profile"]) -> Table:
    """The shipped profiles."""
    table = plain_table("profile", "summary", "cases", right=("cases",))
    for profile in profiles:
        table.add_row(profile.name, profile.summary, str(len(profile.cases)))
    return table


def settings_table(profile: "Profile") -> Table:
    """One profile's settings and where each value came from."""
    table = plain_table(profile.name, "value", "from")
    for key, value, origin in profile.settings():
        table.add_row(key, value, origin)
    return table


def dump_table(results: Iterable["DumpResult"]) -> Table:
    """What a dump has written."""
    right = ("tokens", "tensors", "experts", "payload")
    table = plain_table(
        "case", "tokens", "tensors", "experts", "payload", "payload sha256", "file", right=right
    )
    for result in results:
        table.add_row(
            result.case.id, str(len(result.case.input_ids)), str(result.tensors),
            str(result.experts), size(result.payload_bytes), result.payload_sha256[:16],
            str(result.path),
        )  # fmt: skip
    return table


def dump_line(results: Sequence["DumpResult"]) -> str:
    """Time, bytes read and memory of a pass, in one line."""
    last = results[-1]
    return (
        f"{len(results)} case{'s' if len(results) > 1 else ''} in {seconds(last.seconds)}, "
        f"{size(last.bytes_read)} read, peak memory {size(last.peak_rss)}"
    )


def not_finite_lines(results: Iterable["DumpResult"]) -> list[str]:
    """Of every case with NaN or infinity how many keys have one, and what the first one has."""
    return [
        f"case {result.case.id}: NaN or infinity in {result.not_finite} keys, "
        f"first {result.first_not_finite}"
        for result in results
        if result.not_finite
    ]


def keys_line(config: "ModelConfig", keys: Keys, length: int) -> str:
    """How many keys there are, and how large the payload of a recording of them is."""
    base = sum(not is_expert(key) for key in keys)
    payload = size(payload_bytes(config, keys, length))
    return f"{base} keys besides the routed experts', payload {payload}"
