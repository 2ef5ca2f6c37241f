"""Recordings have the same bits for any threads, instruction set, backend and batch of cases.

Where machines are told apart, every run is a process of its own. What is compared is the SHA-256
of the payload.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import Cli
from tests.conftest import GOLDEN_MINI, MINI_FILES, ROOT

CKPT = str(GOLDEN_MINI / "ckpt")
GOLDEN = next(g for g in MINI_FILES if g.name == "len6")


def hashes(out: Path, *args: str, **environment: str) -> dict[str, str]:
    """Case -> payload hash of `v4tool dump` in a fresh process."""
    command = [sys.executable, "-m", "v4tool", "dump", *args]
    ran = subprocess.run(
        [*command, "--out", str(out), "--quiet", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {row["case"]: row["payload_sha256"] for row in json.loads(ran.stdout)}


WAYS = {
    "2 threads": (["--threads", "2"], {}),
    "4 threads": (["--threads", "4"], {}),
    "torch without vectors": (["--threads", "2"], {"ATEN_CPU_CAPABILITY": "default"}),
    "MKL's compatibility mode": (["--threads", "1"], {"MKL_CBWR": "COMPATIBLE"}),
    "NumPy product": (["--backend", "numpy"], {}),
    "readable product": (["--backend", "readable"], {}),
}


@pytest.fixture(scope="module")
def golden_args() -> list[str]:
    ids, decode = GOLDEN.metadata("input_ids"), GOLDEN.metadata("decode_ids")
    return [
        "--ckpt", CKPT, "--input-ids", ",".join(map(str, ids)),
        "--decode-ids", ",".join(map(str, decode)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def reference(golden_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """With one thread and AVX2: the hash that all ways must give (values of our own port, SPEC's
    bits).
    """
    directory = tmp_path_factory.mktemp("reference")
    one = ["--threads", "1"]
    return hashes(directory, *golden_args, *one, ATEN_CPU_CAPABILITY="avx2")["custom"]


@pytest.mark.parametrize("way", WAYS)
def test_golden_input(way: str, golden_args: list[str], reference: str, tmp_path: Path) -> None:
    options, environment = WAYS[way]
    assert hashes(tmp_path, *golden_args, *options, **environment) == {"custom": reference}


PROFILE = """
[checkpoint]
path = "{ckpt}"
[[cases]]
id = "a"
input_ids = [35, 11, 74]
decode = 2
[[cases]]
id = "b"
input_ids = {long}
[[cases]]
id = "c"
input_ids = [300]
decode = 5
"""


def test_cases_recorded_together_and_separately(cli: Cli, tmp_path: Path) -> None:
    """One pass over the weights for several prompts of other lengths and steps changes nothing."""
    profile = tmp_path / "three.toml"
    long = [(13 * i) % 320 for i in range(131)]
    profile.write_text(PROFILE.format(ckpt=CKPT, long=long))

    def dumped(name: str, *cases: str) -> dict[str, str]:
        chosen = [word for case in cases for word in ("--case", case)]
        options = ("--profile", profile, "--threads", 1, "--out", tmp_path / name)
        rows = json.loads(cli("dump", *options, *chosen, "--quiet", "--json").out)
        return {row["case"]: row["payload_sha256"] for row in rows}

    together = dumped("all", *"abc")
    assert together.keys() == set("abc")
    assert dumped("a", "a") | dumped("b", "b") | dumped("c", "c") == together


def test_nano(tmp_path: Path) -> None:
    """The default profile, 43 layers deep: threads, instruction sets, in company and alone."""
    cases = ["--case", "prompt3", "--case", "baseline6"]
    together = hashes(tmp_path / "2", *cases, "--threads", "2")
    plain = ["--case", "baseline6", "--threads", "1"]
    alone = hashes(tmp_path / "1", *plain, ATEN_CPU_CAPABILITY="default")
    assert alone == {"baseline6": together["baseline6"]}
