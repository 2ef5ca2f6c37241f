"""Tables in narrow and dumb terminals, without colour, and in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.cli import Cli
from tests.conftest import GOLDEN_MINI
from v4tool.report.terminal import left_out, lines, plain_table

CKPT = GOLDEN_MINI / "ckpt"
LEN3 = GOLDEN_MINI / "len3.safetensors"
COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3|4|9|10)[0-9](?:;[0-9;]*)?m")
"""An escape sequence that sets the colour of text or background."""


def in_terminal(
    args: Sequence[object], columns: int, *, stderr: bool = False, **environment: str
) -> str:
    """What a command writes to a terminal of so many columns, its escape sequences included.

    stderr: with what it writes to stderr.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    left = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "v4tool", *map(str, args)], stdout=theirs,
        stderr=theirs if stderr else subprocess.PIPE,
        env={**left, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    _, said = process.communicate()
    assert process.returncode == 0, said
    return shown.decode().replace("\r\n", "\n")


def widest(text: str) -> int:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)  # colours and movements of the cursor
    return max(cell_len(line) for line in plain.splitlines())


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}, {"COLUMNS": "40", "TERM": "dumb"}])
def test_a_terminal_of_40_columns(environment: dict[str, str]) -> None:
    columns = 80 if "COLUMNS" in environment else 40
    shown = in_terminal(["list", "cases"], columns, **environment)
    assert widest(shown) <= 40
    rows = dict(line.split()[:2] for line in shown.splitlines() if line and line[0] != "(")
    assert rows["prompt129"] == "129"
    assert "(too narrow for: decode, file," in shown


def test_help_of_a_dumb_terminal_of_40_columns() -> None:
    assert widest(in_terminal(["dump", "--help"], 80, COLUMNS="40", TERM="dumb")) <= 40


DUMP = ["dump", "--ckpt", CKPT, "--input-ids", "1,2,3", "--force", "--out"]
PROGRESS = {
    "dump": (DUMP, ["mtp mtp.0 7/8", "payload sha256"]),
    "check": (["check", "--dump", LEN3, "--ckpt", CKPT], ["len3.safetensors", "MiB", "passed"]),
    "verify": (
        ["verify", "--dump", LEN3, "--ckpt", CKPT, "--jobs", 1],
        ["len3.safetensors", "0/1", "passed"],
    ),
    "synth": (["synth", "--like", CKPT / "config.json", "--layers", "0"], ["random", "MiB"]),
}
"""A command with a live line, and what stays of it and of the results."""


@pytest.mark.parametrize("name", PROGRESS)
def test_live_line_of_40_columns(tmp_path: Path, name: str) -> None:
    args, kept = PROGRESS[name]
    where = {"dump": [tmp_path / "x.safetensors"], "synth": [tmp_path / "random"]}.get(name, [])
    shown = in_terminal([*args, *where], 40, stderr=True)
    assert widest(re.sub("(?m)^1 case in .*", "", shown)) <= 40
    assert [word for word in kept if word not in re.sub(r"\x1b\[[0-9;]*m", "", shown)] == []


@pytest.mark.parametrize("columns", [40, 100])
def test_plain_lines_of_a_dumb_terminal(tmp_path: Path, columns: int) -> None:
    shown = in_terminal(
        [*DUMP, tmp_path / "x.safetensors"], columns, stderr=True, TERM="dumb"
    )  # fmt: skip
    head = next(line for line in shown.splitlines() if line.startswith("prefill layers.2 (4/8): "))
    assert re.search(r"\d s, left \d+ s$", head) if columns == 40 else " MiB read, " in head
    assert widest(re.sub("(?m)^1 case in .*", "", shown)) <= columns
    assert "\x1b[" not in shown


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour(environment: dict[str, str], coloured: bool) -> None:
    args = ["verify", "--dump", LEN3, "--ckpt", CKPT, "--quiet", "--jobs", 1, "--node", "rms_norm"]
    shown = in_terminal(args, 120, **environment)
    assert "passed" in shown
    assert bool(COLOUR.search(shown)) == coloured


TABLES = {
    "cases": (["list", "cases"], ["baseline6", "6", "prompt2100", "2100"]),
    "layers": (["list", "layers"], ["layers.42", "mtp.0", "base keys", "45"]),
    "profiles": (["list", "profiles"], ["nano", "flash"]),
    "settings": (["list", "profiles", "-v"], ["accumulate", "float64"]),
    "nodes": (["list", "nodes"], ["sparse_attn", "keys"]),
    "identities": (["check", "--explain"], ["attn_norm", "137"]),
    "keys": (["list", "keys"], ["layers.42.attn.indexer.compressor.wkv.out", "[1, 6, 256]"]),
    "tensors": (
        ["list", "tensors", "--layer", "2"],
        ["layers.2.attn.indexer.compressor.norm.weight", "BF16", "[128]"],
    ),
    "check": (
        ["check", "--dump", LEN3, "--ckpt", CKPT, "--quiet"],
        ["len3.safetensors", "findings", "passed"],
    ),
    "verify": (
        ["verify", "--dump", LEN3, "--ckpt", CKPT, "--quiet", "--jobs", 1],
        ["len3.safetensors", "816/816", "passed"],
    ),
}
"""A command, and what must stay of its table: the ids and the figures that matter."""


@pytest.mark.parametrize("name", TABLES)
def test_every_table_keeps_id_and_figure(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    args, kept = TABLES[name]
    monkeypatch.setenv("COLUMNS", "40")
    ran = cli(*args)
    assert ran.status == 0, ran.err
    # an id that is longer than the terminal stands alone on its line, whole
    wide = [line for line in ran.out.splitlines() if cell_len(line) > 40]
    assert [line for line in wide if len(line.split()) > 1] == []
    assert [word for word in kept if word not in ran.out] == []


@pytest.mark.parametrize("name", ["cases", "settings", "nodes", "identities"])
def test_nothing_is_folded_or_left_out_in_a_pipe(cli: Cli, name: str) -> None:
    args, _ = TABLES[name]
    shown = cli(*args).out
    assert "too narrow" not in shown
    starts = [line[:1] for line in shown.splitlines() if line]
    assert " " not in starts, "a folded row goes on in a line that starts with spaces"


# ---- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "expected"),
    [(34, []), (33, ["b"]), (22, ["b"]), (21, ["b", "c"]), (3, ["b", "c"])],
)
def test_left_out(available: int, expected: list[str]) -> None:
    """a, b, c of 10 columns with 2 between them take 34; a is never left out."""
    assert left_out({"a": 10, "b": 10, "c": 10}, ("b", "c"), available) == expected


def printed(table: object, width: int) -> list[str]:
    console = Console(width=width, record=True, file=sys.stderr)
    console.print(table)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_prose_is_wrapped_and_spare_columns_go_first() -> None:
    table = plain_table("id", "time", "says", right=("time",), spare=("time", "says"),
                        prose=("says",))  # fmt: skip
    table.add_row("first", "1.5 s", "a sentence that is longer than twenty-four columns")
    assert printed(table, 100) == [
        "id      time  says",
        "first  1.5 s  a sentence that is longer than twenty-four columns",
    ]
    assert printed(table, 36) == [
        "id     says",
        "first  a sentence that is longer",
        "       than twenty-four columns",
        "(too narrow for: time)",
    ]
    assert printed(table, 30) == ["id", "first", "(too narrow for: time, says)"]


def test_cells_are_no_markup() -> None:
    table = plain_table("file", "result")
    table.add_row("/tmp/[/a]/[bold]x:smile:\x1b[31m.safetensors", "ok")
    assert printed(table, 100)[1] == "/tmp/[/a]/[bold]x:smile:\\x1b[31m.safetensors  ok"


def test_lines_are_stacked_where_the_first_column_leaves_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [("layers.0.attn.wq_a.out", "F32", "[1, 6, 256]")]
    monkeypatch.setenv("COLUMNS", "40")
    assert lines(("key", "dtype", "shape"), rows, spare=("dtype",)).splitlines() == [
        "key                     shape",
        "layers.0.attn.wq_a.out  [1, 6, 256]",
        "(too narrow for: dtype)",
    ]
    monkeypatch.setenv("COLUMNS", "30")
    assert lines(("key", "dtype", "shape"), rows, spare=("dtype",)).splitlines() == [
        "key",
        "  dtype  shape",
        "layers.0.attn.wq_a.out",
        "  F32    [1, 6, 256]",
    ]


def test_a_file_name_with_markup(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "[" / "b]x.safetensors"
    out.parent.mkdir()
    ran = cli("dump", "--ckpt", CKPT, "--input-ids", "1,2", "--out", out, "--quiet")
    assert ran.status == 0, ran.err
    assert str(out) in ran.out
