"""Tables of the commands `dump` and `list`, and functions to print tables to stdout."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from v4tool.names import Keys, base_keys, is_expert, layer_keys, payload_bytes, steps_of
from v4tool.report.terminal import lines, plain_table, show
from v4tool.report.units import seconds, size

if TYPE_CHECKING:  # a listing must not wait for torch
    from v4tool.checkpoint.inspection import TensorStatus
    from v4tool.checkpoint.layout import TensorSpec
    from v4tool.config import ModelConfig
    from v4tool.diff.maps import MapRule, TensorMap
    from v4tool.dumping import DumpResult
    from v4tool.profiles import Profile

__all__ = [
    "cases_table",
    "dump_line",
    "dump_table",
    "keys_line",
    "keys_lines",
    "layers_table",
    "maps_table",
    "profiles_table",
    "rules_lines",
    "settings_table",
    "show",
    "status_lines",
    "tensors_lines",
]


def shape_text(shape: Iterable[int | None]) -> str:
    """A shape as text, `[1, 6, 4096]`; sizes that depend on the data as `n`."""
    return "[" + ", ".join("n" if n is None else str(n) for n in shape) + "]"


def keys_lines(keys: Keys) -> str:
    """One line per key: dtype, shape, kind of values (bf16, acc, int)."""
    return lines(
        ("key", "dtype", "shape", "values"),
        ((key, spec.dtype, shape_text(spec.shape), spec.kind) for key, spec in keys.items()),
        spare=("values", "dtype"),
    )


def cases_table(profile: "Profile") -> Table:
    """One row per case of a profile: tokens, decode steps, file, subject."""
    table = plain_table(
        "case", "tokens", "decode", "file", "subject", right=("tokens", "decode"),
        spare=("decode", "file", "subject"), prose=("subject",),
    )  # fmt: skip
    for case in profile.cases:
        table.add_row(case.id, str(len(case.input_ids)), str(case.decode), case.file, case.subject)
    return table


def maps_table(maps: Mapping[str, "TensorMap"]) -> Table:
    """One row per map of another engine's names: number of rules, summary."""
    table = plain_table(
        "map", "rules", "names", right=("rules",), spare=("rules",), prose=("names",)
    )
    for name, found in maps.items():
        table.add_row(name, str(len(found.rules)), found.summary)
    return table


def rules_lines(rules: "Sequence[MapRule]") -> str:
    """One line per rule of a map: name, key, what it is kept to, steps."""

    def limits(rule: "MapRule") -> str:
        ratios = [f"ratio {'/'.join(map(str, rule.ratios))}"] if rule.ratios else []
        return ", ".join([*ratios, *([rule.passes] if rule.passes else [])])

    return lines(
        ("name", "key", "only", "steps"),
        ((rule.name, rule.key, limits(rule), "; ".join(rule.steps)) for rule in rules),
        spare=("only", "steps"),
    )


def layers_table(config: "ModelConfig") -> Table:
    """One row per layer: ratio, attention, routing, number of base keys of a long prefill."""
    table = plain_table(
        "layer", "ratio", "attention", "routing", "base keys", right=("base keys",),
        spare=("routing", "attention"), prose=("attention",),
    )  # fmt: skip
    long = steps_of(max(config.compress_ratios) or 1, 0)[0]
    for layer in range(config.n_layers + (1 if config.mtp_supported else 0)):
        ratio = config.ratio(layer)
        keys = base_keys(layer_keys(config, layer, long))
        table.add_row(
            config.block_path(layer), str(ratio), attention_kind(ratio),
            "by token id" if config.is_hash(layer) else "by score", str(len(keys)),
        )  # fmt: skip
    return table


def attention_kind(ratio: int) -> str:
    """The attention kind of a layer with this compression ratio, in words."""
    if ratio == 0:
        return "window"
    return f"window + blocks of {ratio}" + (", chosen by an indexer" if ratio == 4 else "")


def tensors_lines(specs: Mapping[str, "TensorSpec"]) -> str:
    """One line per tensor of a checkpoint's layout: dtype, shape, shard."""
    return lines(
        ("tensor", "dtype", "shape", "shard"),
        (
            (name, spec.dtype, shape_text(spec.shape), str(spec.shard))
            for name, spec in specs.items()
        ),
        spare=("shard",),
    )


def status_lines(rows: Iterable["TensorStatus"]) -> str:
    """One line per tensor: status, what the layout expects, what the checkpoint has."""
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
    """One row per shipped profile."""
    table = plain_table(
        "profile", "summary", "cases", right=("cases",), spare=("cases",), prose=("summary",)
    )
    for profile in profiles:
        table.add_row(profile.name, profile.summary, str(len(profile.cases)))
    return table


def settings_table(profile: "Profile") -> Table:
    """One row per setting of a profile: its value and where it comes from."""
    table = plain_table(profile.name, "value", "from", spare=("from",), prose=("value", "from"))
    for key, value, origin in profile.settings():
        table.add_row(key, value, origin)
    return table


def dump_table(results: Iterable["DumpResult"]) -> Table:
    """One row per recording written: tokens, tensors, experts, payload, hash, file."""
    right = ("tokens", "tensors", "experts", "payload")
    table = plain_table(
        "case", "tokens", "tensors", "experts", "payload", "payload sha256", "file", right=right,
        spare=("experts", "tensors", "tokens", "payload", "file"), prose=("file",),
    )  # fmt: skip
    for result in results:
        table.add_row(
            result.case.id, str(len(result.case.input_ids)), str(result.tensors),
            str(result.experts), size(result.payload_bytes), result.payload_sha256[:16],
            str(result.path),
        )  # fmt: skip
    return table


def dump_line(results: Sequence["DumpResult"]) -> str:
    """Time, bytes read and peak memory of a dump in one line."""
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
    """Number of keys, and the payload size of a recording that has them, in one line."""
    base = sum(not is_expert(key) for key in keys)
    payload = size(payload_bytes(config, keys, length))
    return f"{base} keys besides the routed experts', payload {payload}"
