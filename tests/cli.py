"""Runs the command line in this process, as the installed script does, and returns its output."""

import sys
from dataclasses import dataclass
from typing import Protocol

import pytest

from v4tool.cli import main


@dataclass(frozen=True)
class Ran:
    """What a call gave."""

    status: int
    out: str
    err: str


class Cli(Protocol):
    """Calls `v4tool` with these arguments."""

    def __call__(self, *args: object) -> Ran: ...


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("list", "keys")` -> status, stdout, stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["v4tool", *map(str, args)])
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


def one_line(ran: Ran) -> str:
    """The message of a call that a mistake of the user's ended: one line, status 2, nothing on
    stdout.
    """
    assert ran.status == 2, ran
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("v4tool: ")
    return lines[0]
