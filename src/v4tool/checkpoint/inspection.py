"""Comparison of a checkpoint's tensors with those of its configuration (SPEC section 2).

Differences that keep the values are accepted with a note (`ACCEPTED`: another dtype name for the
same bytes, scales in F32, `tid2eid` in I32). Tensors outside the layout are accepted with a note if
the checkpoint has all of the layout's and the tensor is empty or listed in the index. All other
differences are counted by kind and listed, with an explanation for known variants: other naming
schemes, the Base checkpoint's FP8 experts, the DSpark re-release's mtp blocks. No tensor is renamed
or filled in. Left out: the payload's values (`payload`).
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from v4tool.checkpoint.layout import TensorSpec, layout
from v4tool.checkpoint.tensor_index import TensorIndex, catalogue, some
from v4tool.config import ModelConfig
from v4tool.safetensors_header import Entry

Status = Literal["ok", "missing", "unexpected", "different", "extra"]
"""`extra`: outside the layout and accepted, `unexpected`: outside the layout and refused."""

ACCEPTED = {
    ("F8_E8M0", "F32"): "scales are stored in F32 and read as powers of two",
    ("F8_E8M0", "U8"): "scales are stored as U8 and read as E8M0 codes",
    ("I8", "U8"): "weights are stored as U8 and read as FP4 codes, two in a byte",
    ("I8", "F4"): "weights are stored as F4 and read as FP4 codes, two in a byte",
    ("I64", "I32"): "tables of experts are stored in I32",
}
"""Note by (expected, found) dtype with the same values; F32 scales are checked when read."""


@dataclass(frozen=True, slots=True)
class TensorStatus:
    """One row: `spec` is None for an unexpected or extra tensor, `found` for a missing one."""

    name: str
    spec: TensorSpec | None
    status: Status
    found: Entry | None


@dataclass
class Comparison:
    """The result of a comparison.

    specs: the tensors that may be read. problems: reasons to refuse the checkpoint. notes: remarks
    for the user.
    """

    specs: dict[str, TensorSpec]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inspect(directory: Path | str, config: ModelConfig | None = None) -> list[TensorStatus]:
    """The status of every tensor: those of the layout in its order, then those outside it.

    Tensors of a damaged shard count as missing. Raises ConfigError or CheckpointError if there is
    no configuration or no shard to read.
    """
    found = catalogue(directory)
    config = config or ModelConfig.from_file(found.directory / "config.json")
    entries = found.entries()
    specs = {n: s for n, s in layout(config).items() if s.used or n in entries}
    return _rows(specs, entries, found.listed)


def compare(found: TensorIndex, config: ModelConfig, *, mtp: bool = True) -> Comparison:
    """Compare a directory with the layout, but for what no pass reads.

    Without `mtp`, whatever is named `mtp.*` is left out too.
    """
    specs, entries = layout(config), found.entries()
    used = {name: spec for name, spec in specs.items() if spec.used}
    read = {name: entry for name, entry in entries.items() if config.architecture.reads(name)}
    unread = len(entries) - len(read)
    notes = [f"{unread} tensors of the image part are not read"] if unread else []
    if mtp:
        return _judge(Comparison(used, _mtp_problems(config, read), notes), read, found.listed)
    main = {name: spec for name, spec in used.items() if not _is_mtp(name)}
    kept = {name: entry for name, entry in read.items() if not _is_mtp(name)}
    left = len(read) - len(kept)
    notes += [f"{left} tensors of mtp.* are left out"] if left else []
    return _judge(Comparison(main, notes=notes), kept, found.listed)


def _is_mtp(name: str) -> bool:
    return name.startswith("mtp.")


def _rows(
    specs: dict[str, TensorSpec], entries: dict[str, Entry], listed: Set[str]
) -> list[TensorStatus]:
    out = [
        TensorStatus(name, spec, _status(spec, entries.get(name)), entries.get(name))
        for name, spec in specs.items()
    ]
    # if a tensor is missing or different, an unknown one may be that tensor under another name
    whole = all(row.status == "ok" for row in out)
    for name in sorted(entries.keys() - specs.keys()):
        harmless = whole and (name in listed or not entries[name].nbytes)
        status: Status = "extra" if harmless else "unexpected"
        out.append(TensorStatus(name, None, status, entries[name]))
    return out


def _status(spec: TensorSpec, found: Entry | None) -> Status:
    if found is None:
        return "missing"
    dtype_ok = spec.dtype == found.dtype or (spec.dtype, found.dtype) in ACCEPTED
    return "ok" if dtype_ok and _header_shape(spec, found.dtype) == found.shape else "different"


def _header_shape(spec: TensorSpec, dtype: str) -> tuple[int, ...]:
    """The tensor's shape in a header: in codes for F4, in bytes of two codes for I8 and U8."""
    return (*spec.shape[:-1], 2 * spec.shape[-1]) if dtype == "F4" else spec.shape


def _mtp_problems(config: ModelConfig, entries: dict[str, Entry]) -> list[str]:
    """Why MTP cannot be computed here, from the configuration or from the names."""
    reason = config.mtp_problem
    blocks = {n.split(".")[1] for n in entries if _is_mtp(n)}
    marks = set(config.architecture.draft_marks)
    present = marks & entries.keys()
    if reason is None and blocks and marks and (len(blocks) > 1 or not present):
        reason = (
            f"the checkpoint has {len(blocks)} mtp block{'s' * (len(blocks) > 1)} "
            f"{'with' if present else 'without'} enorm and hnorm, another design (as in the DSpark "
            "re-release)"
        )
    return [f"MTP cannot be computed, only the main model can: {reason}"] if reason else []


def _judge(out: Comparison, entries: dict[str, Entry], listed: Set[str]) -> Comparison:
    """Add problems and notes of all rows, without mtp.* if its design is a problem already."""
    rows = [
        row for row in _rows(out.specs, entries, listed) if not (out.problems and _is_mtp(row.name))
    ]
    missing, unexpected, different, extra = (
        [row for row in rows if row.status == status]
        for status in ("missing", "unexpected", "different", "extra")
    )
    out.problems += _dialects(unexpected)
    out.problems += _named("missing", missing) + _named("unexpected", unexpected)
    out.problems += _differences(different)
    stored = Counter((r.spec.dtype, r.found.dtype) for r in rows if r.spec and r.found)
    out.notes += [f"{stored[pair]} {remark}" for pair, remark in ACCEPTED.items() if stored[pair]]
    out.notes += [f"{line}: not part of the layout, not read" for line in _named("extra", extra)]
    return out


def _named(what: str, rows: list[TensorStatus]) -> list[str]:
    names = some(row.name for row in rows)
    return [f"{len(rows)} {what} tensor{'s' * (len(rows) > 1)}: {names}"] if rows else []


def _dialects(unexpected: list[TensorStatus]) -> list[str]:
    """Lines that explain unexpected names by another naming scheme."""
    out = []
    prefixed = [r.name for r in unexpected if r.name.startswith("model.")]
    if prefixed:
        out.append(f"{len(prefixed)} names of another dialect begin with model.: {some(prefixed)}")
    inverse = [r.name for r in unexpected if r.name.endswith(".weight_scale_inv")]
    if inverse:
        out.append(
            f"{len(inverse)} scales are named weight_scale_inv, expected scale: {some(inverse)}"
        )
    return out


def _differences(rows: list[TensorStatus]) -> list[str]:
    out = []
    experts = [r for r in rows if ".ffn.experts." in r.name and _is_fp8_expert(r)]
    if experts:
        out.append(
            f"{len(experts)} weights of routed experts are stored in F8_E4M3 (as in the Base "
            "checkpoint), expert_dtype says fp4: only FP4 experts are defined, nothing is converted"
        )
        explained = {r.name.rsplit(".", 1)[0] for r in experts}
        rows = [r for r in rows if r.name.rsplit(".", 1)[0] not in explained]
    if rows:
        found = some(map(_difference, rows))
        out.append(f"{len(rows)} tensor{'s' * (len(rows) > 1)} of wrong dtype or shape: {found}")
    return out


def _is_fp8_expert(row: TensorStatus) -> bool:
    return bool(row.spec and row.found and (row.spec.dtype, row.found.dtype) == ("I8", "F8_E4M3"))


def _difference(row: TensorStatus) -> str:
    spec, found = row.spec, row.found
    assert spec is not None
    assert found is not None
    hint = " (transposed)" if spec.shape != found.shape == spec.shape[::-1] else ""
    return f"{row.name} expected {spec.dtype} {list(spec.shape)}, found {found}{hint}"
