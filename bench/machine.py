"""Description of the machine and its measured limits: disk, memory, binary64 products.

    python -m bench.machine CHECKPOINT --threads 2

prints one JSON object. Host, user and paths are left out on purpose: results are kept in the
repository.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BYTES = 512 << 20
CHUNK = 4 << 20


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [x for x in info.read_text().splitlines() if x.startswith(("model name", "Model"))]
        if lines:
            return lines[0].split(":", 1)[1].strip()
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.machine()


def description() -> dict[str, Any]:
    """Processor, cores, memory, operating system and library versions."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def best(rounds: int, work: Callable[[], object]) -> float:
    """The shortest time of several runs, in seconds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def read_speed(path: Path, *, cold: bool) -> float | None:
    """GB/s of reading half a GiB in 4 MiB pieces; cold: after dropping its pages, if possible."""
    if cold and not hasattr(os, "posix_fadvise"):
        return None
    fd, buffer = os.open(path, os.O_RDONLY), torch.empty(CHUNK, dtype=torch.uint8).numpy().data
    stop = min(BYTES, os.fstat(fd).st_size)

    def read() -> None:
        if cold:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, stop, CHUNK):
            os.preadv(fd, [buffer], offset)

    try:
        return stop / best(1 if cold else 3, read) / 1e9
    finally:
        os.close(fd)


def limits(checkpoint: Path, threads: int) -> dict[str, Any]:
    """Measured upper bounds; `threads` for the product only."""
    shard = max(checkpoint.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    source, target = torch.zeros(BYTES // 8), torch.zeros(BYTES // 8)
    torch.set_num_threads(threads)
    a = torch.rand(1536, 1536, dtype=torch.float64)
    return {
        "disk_GB_per_s": read_speed(shard, cold=True),
        "page_cache_GB_per_s": read_speed(shard, cold=False),
        "memory_copy_GB_per_s": source.nbytes / best(5, lambda: target.copy_(source)) / 1e9,
        "gemm_binary64_GF_per_s": 2 * 1536**3 / best(5, lambda: a @ a) / 1e9,
        "gemm_threads": threads,
    }


def main() -> None:
    """Read the command line, print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    print(json.dumps(description() | limits(arguments.checkpoint, arguments.threads)))


if __name__ == "__main__":
    main()
