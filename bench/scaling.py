"""Speed-up by threads, compared with independent processes on the same machine.

    python -m bench.scaling CHECKPOINT CONFIG --layer 2 --tokens 129 --threads 2

prints one JSON object. A block is computed by one thread, by several, and by one thread each in as
many processes at once, in turn, since the speed of a shared machine changes within minutes; the
ratios are medians over the rounds. Not even the processes reach as many times the speed of one:
they share caches, memory and the processor's power.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import mean, median
from typing import Any

import torch

from bench.measure import opened, parser, task


@contextmanager
def passes(arguments: argparse.Namespace) -> Iterator[Callable[[int], float]]:
    """A function that computes the block once on `threads` threads and returns the seconds."""
    torch.set_num_threads(1)
    with opened(arguments) as (weights, announced):

        def once(threads: int) -> float:
            run = task("c", announced, weights.config, arguments.layer, arguments.tokens, threads)
            began = time.perf_counter()
            run()
            return time.perf_counter() - began

        yield once


def serve(arguments: argparse.Namespace, asked: Connection) -> None:
    """Loop of the other process: one pass per request, until the connection is closed."""
    with passes(arguments) as once:
        try:
            while True:
                asked.recv()
                asked.send(once(1))
        except EOFError:
            return


@contextmanager
def beside(arguments: argparse.Namespace) -> Iterator[Connection]:
    """A second process that computes the same block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(arguments, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds per pass by threads and by processes, after one warm-up, and their ratios."""
    threads, ways = arguments.threads, ("one", "several", "processes")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        once = stack.enter_context(passes(arguments))
        others = [stack.enter_context(beside(arguments)) for _ in range(threads - 1)]

        def together() -> float:
            for other in others:
                other.send(None)
            return mean([once(1), *(other.recv() for other in others)])

        for _ in range(1 + arguments.rounds):
            seconds["one"].append(once(1))
            seconds["several"].append(once(threads))
            seconds["processes"].append(together())
    one, several, processes = (seconds[way][1:] for way in ways)
    return {
        "layer": arguments.layer,
        "tokens": arguments.tokens,
        "threads": threads,
        "one": one,
        "several": several,
        "processes": processes,
        "ratio": median(a / b for a, b in zip(one, several, strict=True)),
        "at_most": median(threads * a / b for a, b in zip(one, processes, strict=True)),
    }


def main() -> None:
    """Read the command line, print the result."""
    print(json.dumps(measure(parser(__doc__, rounds=9).parse_args())))


if __name__ == "__main__":
    main()
