"""Progress displays on stderr: a live line in a terminal, one plain line a block pass elsewhere.

Where stderr is narrow, both leave out figures: what runs and how much of the whole is done stay.
A dumb terminal is shown no live line, since it cannot overwrite one.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from v4tool.report.terminal import UNLIMITED, left_out, terminal_width, total
from v4tool.report.units import size

LEAST_NAME = 18
"""Columns that the name of what runs keeps on a live line; a longer one is cut off."""
COUNT = TextColumn("{task.completed:.0f}/{task.total:.0f}")
FIGURES = {"experts": 13, "read": 14, "rate": 11, "peak": 14}
"""What a dump shows of itself, with the columns that each takes."""
SPARE = ("bar", "peak", "rate", "experts", "elapsed", "spinner", "read", "detail", "left")
"""Parts of a line that are left out where it is too narrow, in this order."""


class TimeLeftColumn(TimeRemainingColumn):
    """The estimate of the time left, with the word."""

    def render(self, task: Task) -> Text:
        """`left 0:00:12`."""
        return Text.assemble("left ", super().render(task))


class RateColumn(ProgressColumn):
    """Bytes a second in binary units."""

    def render(self, task: Task) -> Text:
        """`160.2 MiB/s`, nothing before it is known."""
        return Text(f"{size(task.speed)}/s" if task.speed else "")


def live_line(columns: Mapping[str, tuple[int, ProgressColumn]], *, quiet: bool) -> Progress:
    """A live line on stderr with the name of what runs and those of `columns` that fit.

    columns: name -> (width, column), in the order in which they are shown. Disabled where `quiet`,
    or where stderr is no terminal or a dumb one.
    """
    console = Console(stderr=True)
    widths = {"": LEAST_NAME, **{name: width for name, (width, _) in columns.items()}}
    gone = left_out(widths, SPARE, console.width)
    shown = {name: pair for name, pair in columns.items() if name not in gone}
    room = console.width - total([0, *(width for width, _ in shown.values())])
    name = Column(no_wrap=True, overflow="ellipsis", max_width=max(room, 1))
    parts: list[ProgressColumn] = [column for _, column in shown.values()]
    parts.insert(0, TextColumn("{task.description}", table_column=name))
    live = console.is_terminal and not console.is_dumb_terminal and not quiet
    return Progress(*parts, console=console, transient=True, disable=not live)


def field(*path: str) -> TextColumn:
    """A column that shows what `Progress.update` was given under this name (and key in it)."""
    return TextColumn(f"{{task.fields{''.join(f'[{name}]' for name in path)}}}")


def plain_line(head: str, parts: Mapping[str, str], width: int) -> str:
    """`head: part, part, …` with those parts that fit into the width."""
    widths = {"": len(head), **{name: len(part) for name, part in parts.items()}}
    gone = left_out(widths, SPARE, width)
    shown = [part for name, part in parts.items() if name not in gone]
    return f"{head}: {', '.join(shown)}" if shown else head


class DumpProgress:
    """Shows layer n of N, experts, bytes read, rate, elapsed, time left and peak memory.

    steps: how often `watch` will be called; bytes_read, peak_rss: called for each line shown,
    in bytes; quiet: show nothing.
    """

    def __init__(
        self,
        steps: int,
        bytes_read: Callable[[], int],
        peak_rss: Callable[[], int],
        *,
        quiet: bool = False,
    ) -> None:
        self.steps, self.bytes_read, self.peak_rss, self.quiet = steps, bytes_read, peak_rss, quiet
        self.started = self.place_started = time.monotonic()
        self.done, self.experts, self.place = 0, 0, ""
        self.bar = live_line(
            {
                "spinner": (1, SpinnerColumn()),
                "bar": (24, BarColumn(bar_width=24)),
                "count": (5, COUNT),
                **{name: (width, field("figures", name)) for name, width in FIGURES.items()},
                "elapsed": (7, TimeElapsedColumn()),
                "left": (12, TimeLeftColumn()),
            },
            quiet=quiet,
        )
        self.live = not self.bar.disable
        self.task = self.bar.add_task(
            "reading the checkpoint", total=steps, figures=dict.fromkeys(FIGURES, "")
        )

    def watch(self, name: str, place: str) -> None:
        """Note that a module starts; name: of the pass, place: the module's path."""
        self._end_place()
        self.place = f"{name} {place}"
        self.place_started = time.monotonic()
        if self.live:
            self.bar.update(
                self.task, description=self.place, completed=self.done, figures=self._figures()
            )
        self.done += 1

    def expert(self) -> None:
        """Count one more computed routed expert."""
        self.experts += 1

    def _figures(self) -> dict[str, str]:
        read, seconds = self.bytes_read(), max(time.monotonic() - self.started, 1e-9)
        return {
            "experts": f"{self.experts} experts",
            "read": f"{size(read)} read",
            "rate": f"{size(read / seconds)}/s",
            "peak": f"peak {size(self.peak_rss())}",
        }

    def _end_place(self) -> None:
        if not self.place or self.live or self.quiet:
            return
        now = time.monotonic()
        left = (now - self.started) / self.done * (self.steps - self.done)
        parts = {
            "time": f"{now - self.place_started:.2f} s",
            **self._figures(),
            "elapsed": f"elapsed {now - self.started:.1f} s",
            "left": f"left {left:.0f} s",
        }
        head = f"{self.place} ({self.done}/{self.steps})"
        width = terminal_width(sys.stderr) or UNLIMITED
        print(plain_line(head, parts, width), file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        if kind is None:
            self._end_place()


@contextmanager
def bytes_progress(
    what: str, total_bytes: int, *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A live line over `total_bytes` on stderr; yields a function to call with the bytes done."""
    columns = {
        "bar": (24, BarColumn(bar_width=24)),
        "bytes": (17, DownloadColumn(binary_units=True)),
        "rate": (11, RateColumn()),
        "left": (12, TimeLeftColumn()),
    }
    with live_line(columns, quiet=quiet) as line:
        task = line.add_task(what, total=total_bytes)
        yield lambda done: line.advance(task, done)


@contextmanager
def count_progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A live line on stderr; yields a function to call with (done, total, label of the last)."""
    columns = {
        "bar": (24, BarColumn(bar_width=24)),
        "count": (7, COUNT),
        "detail": (LEAST_NAME, field("detail")),
        "elapsed": (7, TimeElapsedColumn()),
    }
    with live_line(columns, quiet=quiet) as line:
        task = line.add_task(what, total=1, detail="")
        yield lambda done, of, detail: line.update(task, completed=done, total=of, detail=detail)
