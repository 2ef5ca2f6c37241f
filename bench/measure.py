"""Measures one block of the real size with one engine, in its own process.

    python -m bench.measure CHECKPOINT CONFIG --engine c --layer 2 --tokens 129

prints one JSON object. A process each, so that peak memory is that of the one thing measured and
nothing is warm but the page cache. v4tool's first pass is left out of the times and in the
memory; the peer, which takes so much longer, is measured from the first.
"""

import argparse
import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.peer import Peer
from bench.weights import StandIn
from bench.work import operations
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig, Numerics
from v4tool.model.block import block, embed, head_input
from v4tool.model.head import logits
from v4tool.model.mtp import mtp_input
from v4tool.model.prefetch import PrefetchingWeights
from v4tool.model.scope import Scope, Segment, Weights
from v4tool.names import Step

ENGINES = ("c", "numpy", "peer")


def peak_rss() -> int:
    """Peak resident memory of this process in bytes, without the parent's at its start."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def cpu_seconds() -> float:
    """Processor time of all threads, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def scope_of(
    weights: Weights,
    config: ModelConfig,
    numerics: Numerics,
    tokens: int,
    tap: Callable[[str, Tensor], None],
) -> Scope:
    """The root scope of the model for one prompt of random ids."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, config.vocab_size, (tokens,), generator=generator)
    segment = Segment(Step("", tokens, 0), ids, {}, tap)
    return Scope(weights, config, numerics, (segment,))


def streams(config: ModelConfig, tokens: int) -> Tensor:
    """Random residual streams, BF16 [T, M, D]."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, config.hc_mult, config.dim, generator=generator).bfloat16()


def task(
    engine: str, weights: Weights, config: ModelConfig, layer: int, tokens: int, threads: int
) -> Callable[[], Any]:
    """The function to measure; layer `n_layers`: the MTP block, `n_layers + 1`: embedding, head."""
    x = streams(config, tokens)
    if engine == "peer":
        ids = scope_of(weights, config, Numerics(), tokens, lambda name, value: None).ids
        return lambda: Peer(weights, config, layer, ids).block(x)
    numerics = Numerics(threads=threads, backend="numpy" if engine == "numpy" else "c")

    def run() -> Tensor:
        scope = scope_of(weights, config, numerics, tokens, lambda name, value: None)
        if layer == config.n_layers + 1:
            embed(scope, "embed.weight")
            return logits(scope, head_input(scope, x), "head.weight")
        path = config.block_path(layer) + "."
        place = replace(scope, path=path, record=path)
        y = mtp_input(place, x, "embed.weight") if config.is_mtp(layer) else x
        return block(place, y, layer)

    return run


@contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[tuple[StandIn, PrefetchingWeights]]:
    """The weight reader of a measurement, and the same with prefetching, as in a dump."""
    config = ModelConfig.from_file(arguments.config)
    with Checkpoint.open(arguments.checkpoint, drop_pages=False) as checkpoint:
        weights = StandIn(checkpoint, config, arguments.tokens)
        with PrefetchingWeights(weights) as announced, torch.inference_mode():
            yield weights, announced


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Command line options of a measurement."""
    out = argparse.ArgumentParser(description=description)
    out.add_argument("checkpoint", type=Path)
    out.add_argument("config", type=Path, help="config.json of the model that is stood in for")
    out.add_argument("--layer", type=int, default=2)
    out.add_argument("--tokens", type=int, default=129)
    out.add_argument("--threads", type=int, default=2)
    out.add_argument("--rounds", type=int, default=rounds)
    return out


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the task several times; returns times, memory and bytes read."""
    torch.set_num_threads(arguments.threads if arguments.engine == "peer" else 1)
    before = peak_rss()
    with opened(arguments) as (weights, announced):
        config = weights.config
        run = task(
            arguments.engine, announced, config,
            arguments.layer, arguments.tokens, arguments.threads,
        )  # fmt: skip
        if arguments.engine != "peer":
            run()
        seconds, cpu = [], []
        for _ in range(arguments.rounds):
            weights.used.clear()
            read, began, used = weights.bytes_read, time.perf_counter(), cpu_seconds()
            result = run()
            seconds.append(time.perf_counter() - began)
            cpu.append(cpu_seconds() - used)
            read = weights.bytes_read - read
    digest = hashlib.sha256(result.contiguous().view(torch.uint8).numpy().data).hexdigest()
    reached = {
        name.split(".experts.")[1].split(".")[0] for name in weights.used if ".experts." in name
    }
    return {
        "engine": arguments.engine,
        "layer": arguments.layer,
        "ratio": config.ratio(arguments.layer) if arguments.layer <= config.n_layers else None,
        "mtp": arguments.layer == config.n_layers,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "operations": operations(config, arguments.layer, arguments.tokens),
        "experts": len(reached),
        "bytes_read": read,
        "bytes_used": weights.bytes_used,
        "peak_rss": peak_rss(),
        "rss_before": before,
        "sha256": digest,
    }


def main() -> None:
    """Read the command line, print the result."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--engine", choices=ENGINES, default="c")
    print(json.dumps(measure(options.parse_args())))


if __name__ == "__main__":
    main()
