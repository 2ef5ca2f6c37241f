"""Reproducibility of binary64 and FP32 accumulation: keys with equal bits across machine settings.

Two machines are played by one: torch with and without vector instructions and MKL in its
compatibility mode stand for two processors. Each dump is a process of its own. Run as `python -m
bench.bits` from the repository.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

MACHINES = {
    "vectors": {"ATEN_CPU_CAPABILITY": "avx2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
}
LAST = "layers.{}.out"


def dump(out: Path, accumulate: str, case: str, environment: dict[str, str]) -> None:
    """Record the case in a new process."""
    command = [sys.executable, "-m", "v4tool", "dump", "--case", case, "--out", str(out)]
    command += ["--accumulate", accumulate, "--quiet", "--json"]
    subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE)


def compare(a: Path, b: Path, depth: int) -> tuple[int, int, float]:
    """Keys equal bit for bit, keys in both, and the relative L2 difference after layer `depth`."""
    with safe_open(str(a), "pt") as first, safe_open(str(b), "pt") as second:
        keys = sorted(set(first.keys()) | set(second.keys()))
        common = [k for k in keys if k in first.keys() and k in second.keys()]  # noqa: SIM118
        equal = sum(torch.equal(first.get_tensor(k), second.get_tensor(k)) for k in common)
        x, y = (f.get_tensor(LAST.format(depth)).double() for f in (first, second))
    return equal, len(keys), float((x - y).norm() / x.norm())


def main() -> None:
    """Dump one case four times and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="prompt32")
    parser.add_argument("--depth", type=int, default=5, help="layer whose output is compared")
    options = parser.parse_args()
    table = Table(
        "accumulate", "keys equal bit for bit", f"relative L2 after layer {options.depth}"
    )
    with tempfile.TemporaryDirectory() as directory:
        for accumulate in ("float64", "float32"):
            paths = [Path(directory) / f"{i}.safetensors" for i in range(len(MACHINES))]
            for path, environment in zip(paths, MACHINES.values(), strict=True):
                dump(path, accumulate, options.case, environment)
            equal, keys, distance = compare(*paths, options.depth)
            table.add_row(accumulate, f"{equal} of {keys}", f"{distance:.1e}")
            for path in paths:
                path.unlink()
    Console().print(table)


if __name__ == "__main__":
    main()
