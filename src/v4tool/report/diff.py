"""Shows what `diff` found: verdict, arithmetic by operator, names without a key."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from v4tool.report.terminal import plain_table

if TYPE_CHECKING:
    from v4tool.diff.results import DiffResult

NAMES_SHOWN = 8


def verdict_lines(result: "DiffResult") -> Iterator[str]:
    """The verdict, and which arithmetic the residues were taken in."""
    judged = len(result.residues)
    yield (
        f"{result.candidate}: {result.tokens} tokens, {result.decode} decode steps, "
        f"{judged} keys judged, arithmetic: {result.arithmetic}"
    )
    if result.verdict is None:
        yield "no operator at fault"
    else:
        yield f"first operator at fault: {result.verdict.sentence()}"


def operators_table(result: "DiffResult") -> Table:
    """One row an operator: arithmetic, residues over all blocks, the bound."""
    table = plain_table(
        "operator", "arithmetic", "blocks", "median", "largest", "bound",
        right=("blocks", "median", "largest", "bound"),
        spare=("bound", "median", "blocks", "arithmetic"),
    )  # fmt: skip
    for row in result.operators:
        figures = (f"{x:.1e}" for x in (row.median, row.largest, row.bound))
        table.add_row(row.operator, ", ".join(row.options) or "-", str(row.count), *figures)
    return table


def unmatched_lines(result: "DiffResult") -> Iterator[str]:
    """Names that the map has no key for, and keys that no operator computes."""
    for what, names in (("names without a key", result.unmatched),
                        ("keys that no operator computed", result.unjudged)):  # fmt: skip
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            yield f"{len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}{more}"
