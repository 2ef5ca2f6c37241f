"""How a check's findings, identities and the port's rows are shown."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from v4tool.report.tables import plain_table
from v4tool.report.units import seconds, size

if TYPE_CHECKING:
    from v4tool.check.explain import Explanation
    from v4tool.check.port import PortRow
    from v4tool.check.recording import CheckResult

MOST_FINDINGS = 200
"""Findings of one recording that are printed; --json has all of them."""


def finding_lines(result: "CheckResult") -> Iterator[str]:
    """Every finding in a line, errors first; how many more there are where there are very many."""
    ordered = sorted(result.findings, key=lambda finding: finding.severity)
    for finding in ordered[:MOST_FINDINGS]:
        prefix = "note: " if finding.severity == "note" else ""
        yield f"{prefix}{result.path.name}: {finding.line()}"
    if len(ordered) > MOST_FINDINGS:
        yield f"{result.path.name}: {len(ordered) - MOST_FINDINGS} more findings (--json)"


def summary_table(results: Iterable["CheckResult"]) -> Table:
    """One line a recording."""
    right = ("keys", "tied", "findings", "read", "time")
    table = plain_table("recording", "keys", "tied", "findings", "read", "time", "result",
                        right=right)  # fmt: skip
    for result in results:
        table.add_row(
            result.path.name,
            str(result.keys),
            str(result.tied),
            str(len(result.findings)),
            size(result.bytes_read),
            seconds(sum(result.seconds.values())),
            "passed" if result.ok else "FAILED",
        )
    return table


def identities_table(explanation: "Explanation") -> Table:
    """Every identity, what it takes and how many keys it covers."""
    table = plain_table("identity", "keys", "needs", "says", right=("keys",))
    for row in explanation.identities:
        table.add_row(row.id, str(row.keys), row.needs, row.says)
    return table


def loose_table(explanation: "Explanation") -> Table:
    """The keys that only weights can tie."""
    table = plain_table("tied by weights alone (check --deep, verify)", "keys", right=("keys",))
    for name, count in explanation.only_weights.items():
        table.add_row(name, str(count))
    return table


def port_table(rows: Iterable["PortRow"]) -> Table:
    """What the port's self-check saw."""
    table = plain_table("check", "result", "time", "seen", right=("time",))
    for row in rows:
        table.add_row(row.name, row.status, seconds(row.seconds), row.detail)
    return table
