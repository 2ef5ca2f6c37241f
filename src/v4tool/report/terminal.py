"""Width of the terminal, and tables that leave out columns where it is narrow.

A terminal has its own width, or `COLUMNS`; a file or a pipe has none, so that nothing is folded
there, unless `COLUMNS` is set. What a table leaves out is said below it. Left out: what the tables
hold (`tables`, `check`, `verify`, `manifest`).
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from v4tool.errors import printable

UNLIMITED = 4000
"""Columns where stdout is no terminal: nothing that a script reads may be cut off."""
UNKNOWN = 80
"""Columns of a terminal that does not say how many it has."""
PROSE = 24
"""Columns that a column of sentences needs at least; below it is left out, where it may be."""
GAP = 2
"""Columns between two columns of a table."""


def terminal_width(stream: IO[str] | None = None) -> int | None:
    """Columns of a stream (default: stdout); None for a file or a pipe without `COLUMNS` in the
    environment.
    """
    stream = stream or sys.stdout
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    if stream is None or not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or UNKNOWN
    except OSError:
        return UNKNOWN


def show(thing: RenderableType) -> None:
    """Print a table or a tree to stdout."""
    # rich takes a dumb terminal's width only together with a height
    Console(width=terminal_width() or UNLIMITED, height=25).print(thing)


def total(widths: Iterable[int]) -> int:
    """Columns that a table with columns of these widths takes."""
    widths = list(widths)
    return sum(widths) + GAP * (len(widths) - 1)


def left_out(widths: Mapping[str, int], spare: Sequence[str], available: int) -> list[str]:
    """The columns of `spare`, in that order, without which the others fit as far as they can."""
    kept, gone = dict(widths), list[str]()
    for name in (name for name in spare if name in kept):
        if total(kept.values()) <= available:
            break
        del kept[name]
        gone.append(name)
    return gone


class NarrowingTable(Table):
    """A table whose `spare` columns are left out, in that order, until the others fit.

    prose: columns of sentences, which may be wrapped to PROSE. Cells are shown as they are: no
    markup, control characters as escapes.
    """

    def __init__(self, spare: Sequence[str] = (), prose: Sequence[str] = ()) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold")
        self.spare, self.prose = spare, prose

    def add_row(self, *cells: str | Text) -> None:  # type: ignore[override]
        """Add a row of plain texts, or of texts with a style."""
        super().add_row(*(Text(printable(c)) if isinstance(c, str) else c for c in cells))

    def widths(self) -> dict[str, int]:
        """Columns that each column takes, unwrapped."""
        return {
            str(column.header): max(cell_len(str(c)) for c in (column.header, *column.cells))
            for column in self.columns
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, widths = options.max_width, self.widths()
        least = {n: min(w, max(PROSE, len(n))) if n in self.prose else w for n, w in widths.items()}
        gone = left_out(least, self.spare, width)
        fits = total(w for name, w in widths.items() if name not in gone) <= width
        table = NarrowingTable()
        for i, column in enumerate(c for c in self.columns if c.header not in gone):
            # the first column, of ids, is wrapped only where it would take most of the width
            keep_whole = fits or (i == 0 and widths[str(column.header)] <= width // 2)
            table.columns.append(replace(column, _index=i, no_wrap=keep_whole))
        table.rows = self.rows
        yield from Table.__rich_console__(table, console, options)
        if gone:  # a caption would be wrapped to the width of the table
            yield Text(f"(too narrow for: {', '.join(gone)})", "dim italic")


def plain_table(
    *columns: str, right: Sequence[str] = (), spare: Sequence[str] = (), prose: Sequence[str] = ()
) -> NarrowingTable:
    """An empty table in the house style.

    right: the columns of numbers; spare: those left out where the terminal is too narrow, in that
    order; prose: those that may be wrapped.
    """
    table = NarrowingTable(spare, prose)
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=True
        )
    return table


def lines(header: Sequence[str], rows: Iterable[Sequence[str]], spare: Sequence[str] = ()) -> str:
    """Aligned columns as plain text: rich takes a second for the thousands of rows of a long
    listing.

    spare: columns left out where the terminal is too narrow, in that order. Where the others do
    not fit either, all but the first stand on a line of their own below it.
    """
    available, every = terminal_width() or UNLIMITED, [header, *rows]
    longest = [max(map(len, column)) for column in zip(*every, strict=True)]
    widths = dict(zip(header, longest, strict=True))
    gone = left_out(widths, spare, available)
    kept = [i for i, name in enumerate(header) if name not in gone]
    if total(longest[i] for i in kept) <= available:
        text = [_aligned(row, longest, kept) for row in every]
    else:
        del widths[header[0]]
        gone = left_out(widths, spare, available - GAP)
        rest = [i for i, name in enumerate(header) if i and name not in gone]
        text = [f"{row[0]}\n{' ' * GAP}{_aligned(row, longest, rest)}" for row in every]
    return "\n".join([*text, f"(too narrow for: {', '.join(gone)})"] if gone else text)


def _aligned(row: Sequence[str], widths: Sequence[int], chosen: Sequence[int]) -> str:
    return "  ".join(row[i].ljust(widths[i]) for i in chosen).rstrip()
