"""Progress on stderr: a live bar in a terminal; for dumps elsewhere one line per layer.

Left out: the computation, which calls these objects.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from v4tool.report.units import size


class DumpProgress:
    """Shows layer n of N, experts, bytes read, rate, elapsed, time left and peak memory.

    steps: how often `watch` will be called; bytes_read, peak_rss: called for each line shown;
    quiet: show nothing.
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
        self.console = Console(stderr=True)
        self.started = self.place_started = time.monotonic()
        self.done, self.experts, self.place = 0, 0, ""
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task("reading the checkpoint", total=steps, detail="")

    def watch(self, name: str, place: str) -> None:
        """Note that a module starts; name: of the pass, place: the module's path."""
        self._end_place()
        self.place = f"{name} {place}"
        self.place_started = time.monotonic()
        if self.live:
            self.bar.update(
                self.task, description=self.place, completed=self.done, detail=self._detail()
            )
        self.done += 1

    def expert(self) -> None:
        """Count one more computed routed expert."""
        self.experts += 1

    def _detail(self) -> str:
        read, seconds = self.bytes_read(), max(time.monotonic() - self.started, 1e-9)
        return (
            f"{self.experts} experts, {size(read)} read, {size(read / seconds)}/s, "
            f"peak {size(self.peak_rss())}"
        )

    def _end_place(self) -> None:
        if not self.place or self.live or self.quiet:
            return
        now = time.monotonic()
        left = (now - self.started) / self.done * (self.steps - self.done)
        print(
            f"{self.place} ({self.done}/{self.steps}): {now - self.place_started:.2f} s, "
            f"{self._detail()}, elapsed {now - self.started:.1f} s, left {left:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Self:
        if self.live:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self.bar.stop()
        elif kind is None:
            self._end_place()


@contextmanager
def bytes_progress(total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes on stderr; yields a function to call with the bytes just done."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def count_progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; yields a function to call with (done, total, label of the last one)."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=1, detail="")
        yield lambda done, total, detail: bar.update(
            task, completed=done, total=total, detail=detail
        )
