"""stdout and stderr of real processes: closed pipes, a full disk, other encodings."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import GOLDEN_MINI

CKPT = GOLDEN_MINI / "ckpt"
LEN3 = GOLDEN_MINI / "len3.safetensors"
CHINESE = "你好"
"""How the text of `baseline6` begins."""


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "v4tool", *map(str, args)]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would change the streams."""
    left_out = ("PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "COLUMNS")
    return {k: v for k, v in os.environ.items() if k not in left_out} | changes


def without_reader(args: Sequence[object], **changes: str) -> tuple[int, str]:
    """Status and stderr of a command whose stdout is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(
            command(*args), stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
            env=environment(**changes),
        )  # fmt: skip
    finally:
        os.close(writer)
    return ran.returncode, ran.stderr


COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "list keys": ["list", "keys"],
    "list keys --json": ["list", "keys", "--json"],
    "list cases": ["list", "cases"],
    "list cases --json": ["list", "cases", "--json"],
    "list profiles": ["list", "profiles"],
    "list layers": ["list", "layers"],
    "list tensors": ["list", "tensors", "--ckpt", CKPT],
    "list nodes": ["list", "nodes"],
    "list maps": ["list", "maps"],
    "list maps llama.cpp": ["list", "maps", "llama.cpp"],
    "synth": ["synth", "--like", "flash", "--dry-run"],
    "check": ["check", "--dump", LEN3, "--ckpt", CKPT, "--quiet"],
    "check --explain": ["check", "--explain"],
    "verify": ["verify", "--dump", LEN3, "--ckpt", CKPT, "--quiet", "--jobs", "1"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_pipe_is_no_error(name: str) -> None:
    status, said = without_reader(COMMANDS[name])
    assert status == 0, said
    assert "Error" not in said
    assert "Exception" not in said


def test_unbuffered_output_to_a_closed_pipe() -> None:
    assert without_reader(["list", "cases"], PYTHONUNBUFFERED="1") == (0, "")


def test_a_pipe_closed_after_two_lines() -> None:
    """As `v4tool list keys | head -2`; the remark on stderr still comes."""
    process = subprocess.Popen(
        command("list", "keys"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    first = [process.stdout.readline(), process.stdout.readline()]
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert [line.split()[0] for line in first] == ["key", "input_ids"]
    assert said.startswith("1749 keys besides the routed experts'")


def test_a_dump_completes_with_a_closed_pipe(tmp_path: Path) -> None:
    """A dump whose progress and result nobody reads is written all the same."""
    out = tmp_path / "out.safetensors"
    reader, writer = os.pipe()
    os.close(reader)
    args = ("dump", "--ckpt", CKPT, "--input-ids", "1,2,3", "--out", out, "--json")
    ran = subprocess.run(
        command(*args), stdout=writer, stderr=writer, check=False, env=environment()
    )
    os.close(writer)
    assert ran.returncode == 0
    assert out.is_file()


def test_a_failed_check_keeps_its_status_with_a_closed_pipe(tmp_path: Path) -> None:
    """A script that pipes into `head` under `pipefail` must not take a mismatch for success."""
    damaged = bytearray(LEN3.read_bytes())
    damaged[-1] ^= 0x40
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged)
    status, said = without_reader(["check", "--dump", path, "--ckpt", CKPT, "--quiet"])
    assert (status, said) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize("args", [["list", "keys"], ["list", "cases"], ["--version"]])
def test_a_full_disk_is_one_line(args: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(
            command(*args), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env=environment(),
        )  # fmt: skip
    assert ran.returncode == 2
    lines = [line for line in ran.stderr.splitlines() if line.startswith("v4tool: ")]
    assert lines == ["v4tool: stdout: cannot be written: No space left on device"]
    assert "Traceback" not in ran.stderr


ENCODINGS = {
    "the C locale": ({"LC_ALL": "C", "PYTHONUTF8": "0"}, "ascii"),
    "ASCII, strict": ({"PYTHONIOENCODING": "ascii:strict"}, "ascii"),
    "Latin-1": ({"PYTHONIOENCODING": "latin-1"}, "latin-1"),
    "GBK": ({"PYTHONIOENCODING": "gbk"}, "gbk"),
    "UTF-16": ({"PYTHONIOENCODING": "utf-16"}, "utf-16"),
    "UTF-8": ({"PYTHONIOENCODING": "utf-8"}, "utf-8"),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_json_survives_any_encoding(name: str) -> None:
    changes, encoding = ENCODINGS[name]
    ran = subprocess.run(
        command("list", "cases", "--json"), capture_output=True, check=False,
        env=environment(**changes),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    text = ran.stdout.decode(encoding)
    assert json.loads(text)[0]["text"].startswith(CHINESE)
    assert (CHINESE in text) == encoding.startswith("utf")


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["list", "cases"],
        ["list", "profiles", "-v"],
        ["check", "--explain"],
        ["list", "keys", "--ckpt", "/tmp/没有"],
        ["dump", "--text", CHINESE, "--ckpt", CKPT, "--out", "/dev/null/x.safetensors"],
    ],
)
def test_the_c_locale(args: list[object]) -> None:
    """What cannot be shown is escaped; a mistake stays one line."""
    ran = subprocess.run(
        command(*args), capture_output=True, check=False,
        env=environment(LC_ALL="C", PYTHONUTF8="0"),
    )  # fmt: skip
    said = ran.stderr.decode("ascii")
    ran.stdout.decode("ascii")
    assert "Traceback" not in said
    assert ran.returncode == (0 if ran.stdout else 2), said


def test_a_closed_stdout() -> None:
    """`v4tool list cases --json >&-`: nothing can be shown, nothing is wrong."""
    for args in (["list", "cases", "--json"], ["list", "cases"], ["list", "keys"]):
        ran = subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command(*args)],
            stderr=subprocess.PIPE, text=True, check=False, env=environment(),
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
