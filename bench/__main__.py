"""`python -m bench`: time of v4tool and of a straightforward port on blocks of the real size.

Makes a random checkpoint of the real widths with few experts (`bench.weights` has it stand in for
all of them), measures every kind of block by every engine in processes of their own, alternating,
and writes tables to stdout and JSON to `bench/results/`. Engines: `c` and `numpy` are v4tool with
and without its C kernel, `peer` is `bench.peer`. Their outputs are compared: c and numpy must
have the same bits.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from math import nan
from pathlib import Path
from typing import Annotated, Any

import typer
from platformdirs import user_cache_path
from rich.console import Console

from bench import tables
from bench.whole import Row, whole
from v4tool.checkpoint.synth import plan, reduce, synth
from v4tool.config import ModelConfig

SEED = 1
FLASH = Path(__file__).parents[1] / "src/v4tool/data/flash_config.json"
RESULTS = Path(__file__).parent / "results"
CACHE = user_cache_path("v4tool") / "bench"
GROWTH = (1, 4, 16, 64, 129, 256, 512, 1024, 2100)
PEER_GFLOPS = 2.5
"""A guess at the peer's speed, to tell the time before it starts."""

log = Console(stderr=True)
app = typer.Typer(add_completion=False)


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of integers."""
    return [int(part) for part in text.split(",") if part]


def run(module: str, *arguments: object) -> Row:
    """Run one measurement in its own process; returns its JSON result."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    result: Row = json.loads(done.stdout)
    return result


def checkpoint(directory: Path, full: ModelConfig, layers: list[int], experts: int) -> Path:
    """The checkpoint with these layers; generated if missing, after a message with its size."""
    path = directory / f"layers-{'-'.join(map(str, layers))}-experts-{experts}-seed-{SEED}"
    if not path.exists():
        size = plan(full, experts=experts, layers=layers).total_size
        log.print(f"making {size / 1e9:.1f} GB in {path}, about {size / 1e8 / 60:.0f} minutes")
        synth(path, full, seed=SEED, experts=experts, layers=layers)
    return path


def engines_of(engines: list[str], config: ModelConfig, layer: int) -> list[str]:
    """The engines to measure for a block; peer: main layers only, numpy: layers with indexer."""
    main, indexer = layer < config.n_layers, layer < config.n_layers and config.ratio(layer) == 4
    return [e for e in engines if e == "c" or (e == "peer" and main) or (e == "numpy" and indexer)]


def same_bits(groups: list[list[Row]]) -> list[str]:
    """Blocks for which v4tool's engines give different bits."""
    seen: dict[tuple[int, int], set[str]] = {}
    for group in groups:
        for row in group:
            if row["engine"] != "peer":
                seen.setdefault((row["layer"], row["tokens"]), set()).add(row["sha256"])
    return [f"layer {a}, {b} tokens" for (a, b), digests in seen.items() if len(digests) > 1]


def result_file(machine: Row) -> Path:
    """The file of this machine's results."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower())
    return RESULTS / f"{slug.strip('-')}.json"


@app.command(help=__doc__)
def main(
    layers: Annotated[str, typer.Option(help="the release's layers to make")] = "0,3,4",
    experts: Annotated[int, typer.Option(help="routed experts a layer on disk")] = 16,
    tokens: Annotated[str, typer.Option(help="lengths to compare at")] = "6,32,129",
    engines: Annotated[str, typer.Option(help="of c, numpy, peer")] = "c,numpy,peer",
    rounds: Annotated[int, typer.Option(help="alternations of the engines")] = 2,
    threads: Annotated[int, typer.Option(help="of every engine")] = os.cpu_count() or 1,
    growth: Annotated[bool, typer.Option(help="measure time and memory up to 2100 tokens")] = True,
    directory: Annotated[Path, typer.Option(help="where the checkpoint goes")] = CACHE,
    delete: Annotated[bool, typer.Option(help="delete the checkpoint at the end")] = False,
    save: Annotated[bool, typer.Option(help="keep the results in bench/results")] = True,
) -> None:
    """Run the measurements, store the results and print the tables."""
    full = ModelConfig.from_file(FLASH)
    kept, lengths = numbers(layers), numbers(tokens)
    config = reduce(full, layers=kept)
    path = checkpoint(directory, full, kept, experts)
    stand_for = path / "bench_config.json"
    stand_for.write_text(json.dumps(config.to_release_dict()))

    def measure(engine: str, layer: int, length: int, passes: int) -> Row:
        log.print(f"{engine}: block {layer}, {length} tokens", style="dim")
        options = ("--engine", engine, "--layer", layer, "--tokens", length, "--threads", threads)
        return run("bench.measure", path, stand_for, *options, "--rounds", passes)

    machine = run("bench.machine", path, "--threads", threads)
    places = range(config.n_layers + 2)
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for length in lengths:
        for layer in places:
            chosen = engines_of(engines.split(","), config, layer)
            for _ in range(rounds):
                for engine in chosen:
                    passes = 1 if engine == "peer" else 3
                    row = measure(engine, layer, length, passes)
                    groups.setdefault((layer, length, engine), []).append(row)
    rows = [row for group in groups.values() for row in group]
    forwards = [
        f for n in lengths for e in engines.split(",") if (f := whole(full, config, rows, e, n))
    ]
    indexer = next((i for i in range(config.n_layers) if config.ratio(i) == 4), None)
    grown = [measure("c", indexer, n, 1) for n in GROWTH] if growth and indexer is not None else []
    scaled = []
    for length in lengths if threads > 1 and indexer is not None else ():
        log.print(f"1 and {threads} threads: block {indexer}, {length} tokens", style="dim")
        options = ("--layer", indexer, "--tokens", length, "--threads", threads)
        scaled.append(run("bench.scaling", path, stand_for, *options))
    result: dict[str, Any] = {
        "machine": machine, "threads": threads, "layers": kept, "experts_on_disk": experts,
        "blocks": rows, "whole": forwards, "growth": grown, "scaling": scaled,
    }  # fmt: skip
    show(result, list(groups.values()))
    if save:
        RESULTS.mkdir(exist_ok=True)
        result_file(machine).write_text(json.dumps(result, indent=1) + "\n")
    if delete:
        shutil.rmtree(path)
    if wrong := same_bits(list(groups.values())):
        raise SystemExit(f"different bits: {'; '.join(wrong)}")


def show(result: Row, groups: list[list[Row]]) -> None:
    """Print all tables to stdout."""
    out = Console(width=None if sys.stdout.isatty() else 120)
    machine = result["machine"]
    out.print(
        f"{machine['cpu']}, {machine['cores']} cores, {result['threads']} threads, "
        f"torch {machine['torch']}; at most: disk {machine['disk_GB_per_s'] or nan:.2f} GB/s, "
        f"page cache {machine['page_cache_GB_per_s']:.1f} GB/s, "
        f"memory copy {machine['memory_copy_GB_per_s']:.1f} GB/s, "
        f"binary64 products {machine['gemm_binary64_GF_per_s']:.0f} GF/s"
    )
    out.print(tables.blocks(groups))
    out.print(tables.forwards(result["whole"], machine))
    if result["growth"]:
        out.print(tables.growth(result["growth"]))
    if result["scaling"]:
        out.print(tables.scaling(result["scaling"]))


if __name__ == "__main__":
    app()
