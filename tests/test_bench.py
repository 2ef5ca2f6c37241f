"""Benchmarks: the peer computes the same block, and operations are counted correctly."""

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.measure import scope_of, streams
from bench.peer import Peer
from bench.weights import StandIn, candidates, experts_reached
from bench.whole import counts, whole
from bench.work import attended, operations, per_token
from tests.conftest import GOLDEN_MINI
from v4tool.checkpoint.layout import layout
from v4tool.checkpoint.shards import Checkpoint
from v4tool.checkpoint.synth import reduce, synth
from v4tool.config import ModelConfig, Numerics
from v4tool.model.block import block, large_weights

FLASH = ModelConfig.from_file(
    Path(__file__).parents[1] / "src" / "v4tool" / "data" / "flash_config.json"
)


@pytest.mark.parametrize("layer", range(6), ids=lambda n: f"block{n}")
def test_peer_computes_the_same_block(layer: int) -> None:
    """Ratios 0, 4, 128, hash and score routing, MTP: FP32 flips a bit here and there, no more.

    In the peer's one softmax over 6 rows nothing else differs; over 129 rows it rounds other
    probabilities to BF16 than the online one, and quantisation makes steps of such differences.
    """
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        config = checkpoint.config
        for tokens, equal, distance in ((6, 0.9, 0.01), (129, 0.1, 0.15)):
            weights = StandIn(checkpoint, config, tokens)
            scope = scope_of(weights, config, Numerics(), tokens, lambda name, value: None)
            x = streams(config, tokens)
            place = scope / config.block_path(layer)
            expected = block(place, x, layer).float()
            found = Peer(weights, config, layer, scope.ids).block(x)
            assert (found == expected).float().mean() > equal
            assert (found - expected).norm() / expected.norm() < distance


@pytest.mark.parametrize("layer", [0, 2, 3, FLASH.n_layers], ids=["0", "4", "128", "mtp"])
def test_operations_are_those_of_the_weights(layer: int) -> None:
    """A token meets every matrix of its block once, and of the routed experts six."""
    specs = layout(FLASH)
    path = FLASH.block_path(layer) + "."
    total = 0
    for name, spec in specs.items():
        matrix = name.endswith((".weight", "_fn")) and len(spec.shape) == 2
        if not name.startswith(path) or not matrix or name.endswith(f"{path}hc_head_fn"):
            continue
        share = 1 if ".experts." not in name else FLASH.n_activated_experts / FLASH.n_routed_experts
        streams_met = FLASH.hc_mult if name.endswith("h_proj.weight") else 1
        total += prod(spec.shape) * (2 if spec.dtype == "I8" else 1) * share * streams_met
    assert per_token(FLASH, layer) == total


def test_operations_of_attention() -> None:
    """129 tokens, ratio 4: 128 columns of the window and 32 blocks, 64 heads of 512, twice."""
    products = 129 * 64 * (128 + 32) * 512 * 2
    index = 129 * 64 * 32 * 128
    assert attended(FLASH, 2, 129) == products + index
    assert attended(FLASH, 0, 129) == 129 * 64 * 128 * 512 * 2
    assert operations(FLASH, FLASH.n_layers + 1, 129) == 2 * 129280 * 4096


@pytest.mark.parametrize(("tokens", "reached"), [(1, 6), (6, 24), (32, 61), (129, 115)])
def test_experts_reached_as_published(tokens: int, reached: int) -> None:
    """1045, 2663 and 5049 experts in 44 prefills (SPEC section 6); one token reaches six."""
    assert experts_reached(tokens, FLASH) == reached
    pool = candidates(tokens, reached, FLASH)
    assert pool * (1 - (1 - 6 / pool) ** tokens) == pytest.approx(reached, abs=1)


def test_stand_in_reads_real_numbers_of_bytes(tmp_path: Path) -> None:
    """Expert e comes from expert e mod N; bytes used are counted by the model's own names."""
    small = ModelConfig.from_file(GOLDEN_MINI / "ckpt" / "config.json")
    report = synth(tmp_path / "ckpt", small, seed=1, experts=2, layers=[2])
    with Checkpoint.open(report.directory) as checkpoint:
        config = reduce(small, layers=[2])
        weights = StandIn(checkpoint, config, 6)
        name = "layers.0.ffn.experts.{}.w1.weight"
        fifth = weights.read(name.format(5))
        assert torch.equal(fifth, checkpoint.read(name.format(1)))
        weights.read(name.format(3))
        assert weights.bytes_used == 2 * fifth.numel()
        gate = weights.read("layers.0.ffn.gate.weight")
        assert gate.shape == (small.n_routed_experts, small.dim)


def test_whole_counts_every_layer() -> None:
    """2 plain layers, 20 of ratio 128, 21 of ratio 4, MTP once, embedding and head twice."""
    kept = reduce(FLASH, layers=[0, 3, 4])
    assert counts(FLASH, kept) == {0: 2, 1: 20, 2: 21, 3: 1, 4: 2}
    rows = [
        {"engine": "c", "tokens": 6, "layer": i, "seconds": [1.0, 3.0, 2.0], "bytes_used": 10,
         "operations": 100}
        for i in range(5)
    ]  # fmt: skip
    found = whole(FLASH, kept, rows, "c", 6)
    assert found is not None
    assert (found["seconds"], found["bytes"], found["operations"]) == (92.0, 460.0, 4600.0)
    assert found["complete"]
    assert whole(FLASH, kept, rows[1:], "c", 6) is None


def test_every_weight_is_read_once() -> None:
    """Bytes read are the bytes of the tensors used: nothing is read twice or for nothing."""
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        weights = StandIn(checkpoint, checkpoint.config, 33)
        taken: list[Tensor] = []
        config = checkpoint.config
        numerics = Numerics(threads=2)
        scope = scope_of(weights, config, numerics, 33, lambda name, value: taken.append(value))
        for layer in range(1, 4):
            before = weights.bytes_read
            weights.used.clear()
            block(scope / checkpoint.config.block_path(layer), streams(scope.config, 33), layer)
            assert weights.bytes_read - before == weights.bytes_used
    assert taken


@pytest.mark.parametrize("layer", range(FLASH.n_layers + 1))
def test_prefetched_names_exist(layer: int) -> None:
    """The names that the reader is told ahead exist, and are nearly all that every token reads."""
    specs = layout(FLASH)
    path = FLASH.block_path(layer) + "."
    announced = sum(specs[name].nbytes for name in large_weights(FLASH, layer))
    every = sum(
        spec.nbytes
        for name, spec in specs.items()
        if name.startswith(path) and ".experts." not in name and "tid2eid" not in name
    )
    extra = sum(
        specs[f"{path}{name}.weight"].nbytes for name in ("e_proj", "h_proj") if "mtp" in path
    )
    assert 0.95 * (every - extra) < announced < every


def test_passes_alternate_between_threads_and_processes(tmp_path: Path) -> None:
    """As many passes each way as asked for, and ratios of these; every process ends."""
    small = ModelConfig.from_file(GOLDEN_MINI / "ckpt" / "config.json")
    report = synth(tmp_path / "ckpt", small, seed=1, experts=2, layers=[2])
    config = tmp_path / "bench_config.json"
    config.write_text(json.dumps(reduce(small, layers=[2]).to_release_dict()))
    place = ["--layer", "0", "--tokens", "6", "--threads", "2", "--rounds", "2"]
    command = [sys.executable, "-m", "bench.scaling", str(report.directory), str(config), *place]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert (row["layer"], row["tokens"], row["threads"]) == (0, 6, 2)
    one, several, processes = row["one"], row["several"], row["processes"]
    assert len(one) == len(several) == len(processes) == 2
    assert min(one + several + processes) > 0
    assert row["ratio"] == pytest.approx((one[0] / several[0] + one[1] / several[1]) / 2)
    assert row["at_most"] == pytest.approx(one[0] / processes[0] + one[1] / processes[1])
