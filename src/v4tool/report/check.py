"""Lines and tables of the commands `check` and `regen`."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from v4tool.report.terminal import plain_table
from v4tool.report.units import seconds, size

if TYPE_CHECKING:
    from v4tool.check.anchors import AnchorRow
    from v4tool.check.explain import Explanation
    from v4tool.check.port import PortRow
    from v4tool.check.recording import CheckResult
    from v4tool.regen import Planned, RegenResult

MOST_FINDINGS = 200
"""Findings of one recording that are printed; --json has all of them."""


def finding_lines(result: "CheckResult") -> Iterator[str]:
    """One line per finding, errors first; at most MOST_FINDINGS, then the number of the others."""
    ordered = sorted(result.findings, key=lambda finding: finding.severity)
    for finding in ordered[:MOST_FINDINGS]:
        prefix = "note: " if finding.severity == "note" else ""
        yield f"{prefix}{result.path.name}: {finding.line()}"
    if len(ordered) > MOST_FINDINGS:
        yield f"{result.path.name}: {len(ordered) - MOST_FINDINGS} more findings (--json)"


def summary_table(results: Iterable["CheckResult"]) -> Table:
    """One row per recording: keys, covered keys, findings, bytes read, time, result."""
    right = ("keys", "covered", "findings", "read", "time")
    table = plain_table("recording", "keys", "covered", "findings", "read", "time", "result",
                        right=right, spare=("read", "time", "covered", "keys"))  # fmt: skip
    for result in results:
        table.add_row(
            result.path.name,
            str(result.keys),
            str(result.covered),
            str(len(result.findings)),
            size(result.bytes_read),
            seconds(sum(result.seconds.values())),
            "passed" if result.ok else "FAILED",
        )
    return table


def identities_table(explanation: "Explanation") -> Table:
    """One row per identity: number of keys it covers, what it needs, its condition."""
    table = plain_table(
        "identity", "keys", "needs", "says", right=("keys",), spare=("needs", "says"),
        prose=("says",),
    )  # fmt: skip
    for row in explanation.identities:
        table.add_row(row.id, str(row.keys), row.needs, row.says)
    return table


def weights_only_table(explanation: "Explanation") -> Table:
    """The keys that no identity covers without the checkpoint, with counts."""
    table = plain_table("covered by weights only (check --deep, verify)", "keys", right=("keys",))
    for name, count in explanation.only_weights.items():
        table.add_row(name, str(count))
    return table


def port_table(rows: Iterable["PortRow"]) -> Table:
    """One row per check of the port's self-test: result, time, details."""
    table = plain_table(
        "check", "result", "time", "details", right=("time",), spare=("time",), prose=("details",)
    )
    for row in rows:
        table.add_row(row.name, row.status, seconds(row.seconds), row.detail)
    return table


def anchors_table(rows: Iterable["AnchorRow"]) -> Table:
    """Published and computed next token per case; log-probabilities in nats."""
    right = ("expected id", "found id", "log-probability")
    table = plain_table("anchor", "expected id", "found id", "published", "log-probability",
                        "margin", "result", right=right,
                        spare=("margin", "published", "log-probability"))  # fmt: skip
    for row in rows:
        low, high = row.published or (None, None)
        table.add_row(
            row.case,
            str(row.expected),
            str(row.found),
            "" if low is None else f"{low} … {high}",
            f"{row.logprob:.4f}",
            "" if row.margin is None else f"{row.margin:.2f} (published {row.published_margin})",
            "ok" if row.ok else "FAILED",
        )
    return table


def plan_table(planned: Iterable["Planned"]) -> Table:
    """What `regen` would do with each case: record it again or skip it, and why."""
    table = plain_table(
        "case", "tokens", "file", "would be", right=("tokens",), spare=("tokens", "file"),
        prose=("would be",),
    )  # fmt: skip
    for one in planned:
        fate = f"skipped: {one.left_alone}" if one.left_alone else "recorded again"
        table.add_row(one.entry.id, str(one.entry.length), one.entry.file, fate)
    return table


def regen_table(results: Iterable["RegenResult"]) -> Table:
    """One row per case: whether payloads are equal, results of check and verify, file replaced."""
    table = plain_table(
        "case", "payload", "check", "verify", "old reference", "file",
        spare=("file", "old reference"), prose=("file",),
    )  # fmt: skip
    for result in results:
        table.add_row(
            result.case,
            "the same bits" if result.same_payload else "OTHER BITS",
            "passed" if result.check.ok else "FAILED",
            "passed" if result.verified.passed else "FAILED",
            "replaced" if result.replaced else "kept",
            str(result.path),
        )
    return table
