"""The keys, dtypes, shapes and token ids that a recording must have, and their check (SPEC 6).

The keys are those of `names.recording_keys`. Which routed experts there must be depends on the
data: they are compared with the recorded `gate.out.1`. Left out: the values of all other tensors.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from v4tool.check.file_tensors import FileTensors
from v4tool.check.findings import Findings
from v4tool.check.form import common_forms
from v4tool.config import ModelConfig
from v4tool.names import (
    EXPERT,
    EXPERT_OUTPUTS,
    Keys,
    KeySpec,
    Kind,
    generic,
    is_expert,
    recording_keys,
)
from v4tool.record.scan import Header
from v4tool.untrusted import parse_json

INPUT_IDS = "input_ids"


@dataclass
class Expectation:
    """What a file must contain: tokens, ids and keys.

    length: of the prompt, 0 if unknown; ids: of the prompt, None if unknown; decode_ids: of the
    decode steps, -1 where unknown; partial: keys may be missing; mtp: whether it has the MTP
    passes; keys: required keys with dtype and shape; usable: the keys of the file that have these,
    and the kind of their values.
    """

    length: int
    ids: list[int] | None
    decode_ids: list[int]
    partial: bool
    mtp: bool
    keys: Keys = field(default_factory=dict)
    usable: dict[str, Kind] = field(default_factory=dict)

    def ids_of(self, prefix: str, tensors: FileTensors, count: int) -> list[int]:
        """The ids of the pass with this key prefix and `count` tokens; empty if unknown.

        MTP's passes take the ids of the prompt, its decode step the last of them.
        """
        is_mtp = prefix.startswith("mtp.")
        own = INPUT_IDS if is_mtp else f"{prefix}{INPUT_IDS}"
        if own in tensors:
            ids = [int(i) for i in tensors.ints(own).reshape(-1)]
        elif is_mtp or not prefix:
            ids = self.ids or []
        else:
            ids = [i for i in [self.decode_ids[int(prefix.split(".")[1])]] if i >= 0]
        return ids[-count:] if len(ids) >= count else []


def expectation(
    header: Header, config: ModelConfig, *, ids: Sequence[int] | None, partial: bool
) -> Expectation:
    """Derive the expectation from metadata and shapes; ids: used if the metadata has none."""
    stated = stated_ids(header, INPUT_IDS)
    if stated is None and ids is not None:
        stated = list(ids)
    length = len(stated or [])
    if not stated and INPUT_IDS in header.entries:
        length, stated = math.prod(header.entries[INPUT_IDS].shape), None
    decode_ids = stated_ids(header, "decode_ids")
    if decode_ids is None:
        decode_ids = [-1] * _decode_steps(header)
    restricted = any(name in header.metadata for name in ("only", "layers"))
    mtp = config.mtp_supported and header.metadata.get("mtp") != "false"
    found = Expectation(length, stated, decode_ids, partial or restricted, mtp)
    if length:
        found.keys = recording_keys(config, length, len(decode_ids), mtp=mtp)
    return found


def stated_ids(header: Header, name: str) -> list[int] | None:
    """The ids in the metadata field `name`; None if it is not a JSON list of integers."""
    try:
        ids = parse_json(header.metadata[name])
    except (KeyError, ValueError):
        return None
    return ids if isinstance(ids, list) and all(type(i) is int for i in ids) else None


def _decode_steps(header: Header) -> int:
    """The number that the keys name, yet no more than there are keys."""
    steps = [int(m[1]) for key in header.entries if (m := re.match(r"decode\.(\d{1,9})\.", key))]
    return min(1 + max(steps, default=-1), len(header.entries))


def check_keys(header: Header, expected: Expectation, findings: Findings) -> None:
    """Check names, dtypes and shapes of all keys; fills `expected.usable`."""
    for rule in ("key missing", "key unknown", "form", "dtype", "shape"):
        findings.applied(rule, header.entries)
    if not expected.keys:
        findings.report(
            INPUT_IDS, "input ids", "the ids of a prompt", "none in metadata or payload"
        )
        return
    specs = {k: expected.keys.get(generic(k)) if "<E>" not in k else None for k in header.entries}
    explained = _check_form(header, specs, findings)
    for key, entry in header.entries.items():
        spec = specs[key]
        if key in explained:
            continue
        if spec is None:
            findings.report(
                key, "key unknown", "a key of this configuration and length", "this key"
            )
        elif spec.dtype != entry.dtype:
            findings.report(key, "dtype", spec.dtype, entry.dtype)
        elif not _fits(spec.shape, entry.shape):
            findings.report(key, "shape", list(_shown(spec.shape)), list(entry.shape))
        elif header.readable(key):
            expected.usable[key] = spec.kind
    if not expected.partial:
        for key in expected.keys.keys() - header.entries.keys():
            if not is_expert(key):
                spec = expected.keys[key]
                findings.report(
                    key, "key missing", f"{spec.dtype} {list(spec.shape)}", "no such key"
                )


def _check_form(
    header: Header, specs: Mapping[str, KeySpec | None], findings: Findings
) -> frozenset[str]:
    """Report what many tensors have in common; returns their keys, which need no own finding."""
    known = [(spec, header.entries[key]) for key, spec in specs.items() if spec is not None]
    forms = list(common_forms(known))
    for form in forms:
        findings.report("tensors", "form", form.expected, form.found)
    return frozenset().union(*(form.keys for form in forms))


def _fits(wanted: tuple[int | None, ...], found: tuple[int, ...]) -> bool:
    return len(wanted) == len(found) and all(
        w in (None, f) for w, f in zip(wanted, found, strict=True)
    )


def _shown(shape: tuple[int | None, ...]) -> list[int | str]:
    return ["rows" if n is None else n for n in shape]


def check_experts(
    header: Header, expected: Expectation, tensors: FileTensors, findings: Findings
) -> None:
    """Check the routed experts' keys.

    Each expert has all of its keys; where `gate.out.1` is recorded, the experts are exactly those
    in it, with one row for each of their tokens.
    """
    groups = _groups(header)
    for name, outputs in groups.items():
        findings.applied("expert group", [f"{name}.{output}" for output in outputs])
        for output in set(EXPERT_OUTPUTS) - outputs if not _restricted(header) else ():
            findings.report(
                f"{name}.{output}", "expert group", "all four keys of an expert", "no such key"
            )
    for generic_key in expected.keys:
        if "<E>" in generic_key and generic_key.endswith(".w1.out"):
            _check_routing(
                EXPERT.split(generic_key)[0], groups, header, expected, tensors, findings
            )


def _restricted(header: Header) -> bool:
    """Whether the recording was made with `--only`, which may leave out keys of an expert."""
    return "only" in header.metadata


def _groups(header: Header) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for key in header.entries:
        if match := EXPERT.search(key):
            groups.setdefault(key[: match.end() - 1], set()).add(key[match.end() :])
    return groups


def _check_routing(
    prefix: str,
    groups: dict[str, set[str]],
    header: Header,
    expected: Expectation,
    tensors: FileTensors,
    findings: Findings,
) -> None:
    """Compare the experts of one block pass with its `gate.out.1`; prefix: ends in `ffn.`."""
    gate = f"{prefix}gate.out.1"
    if gate not in tensors:
        return
    present = {int(name.rsplit(".", 1)[1]): name for name in groups if name.startswith(prefix)}
    routes = tensors.ints(gate)
    experts, counts = np.unique(routes, return_counts=True)
    wanted = dict(zip(experts.tolist(), counts.tolist(), strict=True))
    findings.applied("expert routed", [gate], routes.size)
    if present or not expected.partial:
        for expert in sorted(wanted.keys() - present.keys()):
            named = f"recorded, {wanted[expert]} tokens are routed to it in {gate}"
            findings.report(f"{prefix}experts.{expert}", "expert routed", named, "no such keys")
    for expert in sorted(present.keys() - wanted.keys()):
        findings.report(present[expert], "expert routed", f"named in {gate}", "not named there")
    for expert in sorted(present.keys() & wanted.keys()):
        name, rows = present[expert], wanted[expert]
        _check_rows(name, groups[name], rows, gate, header, tensors, findings)


def _check_rows(
    name: str,
    outputs: set[str],
    rows: int,
    gate: str,
    header: Header,
    tensors: FileTensors,
    findings: Findings,
) -> None:
    keys = [f"{name}.{output}" for output in sorted(outputs)]
    findings.applied("expert rows", keys)
    for key in keys:
        found = header.entries[key].shape
        if found and found[0] != rows:
            findings.report(key, "expert rows", f"{rows} rows, its tokens in {gate}", f"{found[0]}")
            tensors.kinds.pop(key, None)


def check_ids(
    header: Header,
    expected: Expectation,
    tensors: FileTensors,
    findings: Findings,
    *,
    ids: Sequence[int] | None,
    decode_ids: Sequence[int] | None,
    case: str,
) -> None:
    """Check that the ids in metadata, tensors, case and manifest are the same.

    ids, decode_ids: those of case or manifest, None if there is none; case: name for messages.
    """
    findings.applied("input ids", [k for k in header.entries if k.endswith(INPUT_IDS)])
    stated = stated_ids(header, INPUT_IDS)
    if stated is None and "__metadata__" not in {f.key for f in header.findings}:
        found = header.metadata.get(INPUT_IDS, "nothing")
        findings.report(f"__metadata__.{INPUT_IDS}", "input ids", "a JSON list of ids", found)
    if ids is not None and stated is not None and list(ids) != stated:
        findings.report(
            f"__metadata__.{INPUT_IDS}", "input ids",
            f"those of {case or 'the case'}, {_brief(ids)}", _brief(stated),
        )  # fmt: skip
    if decode_ids is not None and list(decode_ids) != expected.decode_ids:
        findings.report(
            "__metadata__.decode_ids", "input ids",
            f"those of {case or 'the case'}, {_brief(decode_ids)}", _brief(expected.decode_ids),
        )  # fmt: skip
    main = stated if stated is not None else list(ids) if ids is not None else None
    _check_tensor(tensors, findings, INPUT_IDS, main)
    for number, token in enumerate(expected.decode_ids):
        known = [token] if token >= 0 else None
        _check_tensor(tensors, findings, f"decode.{number}.{INPUT_IDS}", known)


def _check_tensor(
    tensors: FileTensors, findings: Findings, key: str, ids: list[int] | None
) -> None:
    if key in tensors and ids is not None:
        found = tensors.ints(key).reshape(-1).tolist()
        if found != ids:
            findings.report(key, "input ids", f"{_brief(ids)} as stated", _brief(found))


def _brief(ids: Sequence[int]) -> str:
    text = ", ".join(map(str, ids[:6]))
    return f"[{text}, ...] ({len(ids)} ids)" if len(ids) > 6 else f"[{text}]"
