"""Tables of a manifest: recordings, verification results and coverage (`list cases`)."""

from rich.table import Table

from v4tool.record.manifest import Entry, Manifest
from v4tool.report.terminal import plain_table
from v4tool.report.units import seconds, size


def recordings_table(manifest: Manifest) -> Table:
    """One row per recording: size, payload hash, numerics, time, memory, verification."""
    right = ("tokens", "decode", "tensors", "payload", "time", "peak memory")
    table = plain_table(
        "recording", "tokens", "decode", "tensors", "payload", "payload sha256", "numerics",
        "time", "peak memory", "verified", right=right, prose=("verified",),
        spare=("peak memory", "time", "numerics", "decode", "tensors", "payload", "tokens"),
    )  # fmt: skip
    for case_id, entry in manifest.cases.items():
        table.add_row(
            case_id,
            str(entry.length),
            str(len(entry.decode_ids)),
            str(entry.tensors),
            size(entry.payload_bytes),
            entry.payload_sha256[:16],
            str(entry.numerics.get("accumulate", "")),
            seconds(entry.seconds),
            size(entry.peak_rss_bytes),
            verified(entry),
        )
    return table


def verified(entry: Entry) -> str:
    """The result of the last verification in a few words; "not yet" without one."""
    if entry.verification is None:
        return "not yet"
    found = entry.verification
    checks = f"{found['node_checks_passed']}/{found['node_checks']} node checks"
    return checks if found["passed"] else f"FAILED, {checks}"


def coverage_table(manifest: Manifest) -> Table:
    """One row per recording: blocks, window, top-k, SwiGLU clamp and experts its prompt reaches."""
    right = ("clamp hits", "experts, least", "experts, most")
    table = plain_table(
        "coverage", "blocks of 4", "blocks of 128", "window", "top-k", "clamp hits",
        "experts, least", "experts, most", right=right,
        spare=("experts, most", "experts, least", "clamp hits", "top-k", "window"),
    )  # fmt: skip
    for case_id, entry in manifest.cases.items():
        coverage = entry.coverage
        experts = coverage.experts_reached.values()
        table.add_row(
            case_id,
            blocks(entry, "4"),
            blocks(entry, "128"),
            "exceeded" if coverage.window_exceeded else "not exceeded",
            "truncated" if coverage.topk_truncated else "not truncated",
            str(sum(coverage.clamp_hits.values())),
            str(min(experts, default=0)),
            str(max(experts, default=0)),
        )
    return table


def blocks(entry: Entry, ratio: str) -> str:
    """Complete blocks of a ratio and the tokens after the last one: `8 + 1`."""
    found = entry.coverage.blocks.get(ratio)
    return f"{found.complete} + {found.trailing}" if found else ""
