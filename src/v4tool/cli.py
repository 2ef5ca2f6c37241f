"""The Typer application `v4tool`: registers the commands and maps errors to exit statuses.

Exit status: 0 success, 1 a failed check or a mismatch, 2 an input that cannot be used (one line on
stderr). Results go to stdout; progress and messages go to stderr. Slow imports (torch) are made
inside the commands, so that `--help` starts fast.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from v4tool.commands.check import check
from v4tool.commands.diff import diff
from v4tool.commands.dump import dump
from v4tool.commands.listing import listing
from v4tool.commands.options import say
from v4tool.commands.regen import regen
from v4tool.commands.streams import flush_stdout, use_robust_streams
from v4tool.commands.synth import synth
from v4tool.commands.verify import verify
from v4tool.errors import V4ToolError

app = typer.Typer(
    help="Bit-exact reference activations for DeepSeek-V4-Flash: record, check and verify.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (dump, check, verify, diff, regen, synth):
    app.command()(command)
app.add_typer(listing, name="list")


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --version: torch and backend in use.")
    ] = False,
) -> None:
    """Record, check and verify reference activations for DeepSeek-V4-Flash on a CPU."""
    if version:
        from v4tool.report.version import version_lines

        print("\n".join(version_lines(verbose)))
        raise typer.Exit


def main(run: Callable[[], None] = app) -> None:
    """Run the command line. V4ToolError: one line on stderr, exit status 2; Ctrl-C: 130."""
    # importing torch creates hundreds of thousands of permanent objects; garbage collections over
    # them, during the import and at exit, take most of a second
    gc.set_threshold(1_000_000, 20, 20)
    atexit.register(gc.freeze)
    use_robust_streams()
    if "COLUMNS" in os.environ:  # rich takes it on a dumb terminal only where LINES is set too
        os.environ.setdefault("LINES", "25")
    try:
        try:
            run()
        finally:
            flush_stdout()
    except V4ToolError as error:
        say(f"v4tool: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        say("v4tool: interrupted")
        sys.exit(130)
