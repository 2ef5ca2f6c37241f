"""`check` without weights and hashes: rate of detected single bit flips, over all BF16 keys.

A run of `check` takes several flips that cannot be mistaken for each other: in layers that are
not neighbours and not two passes of the same layer. A flip counts as found when a finding names
its key, as the one that is wrong or as one that the expected value comes from.
"""

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import GOLDEN, GOLDEN_MINI, needs_golden
from tests.recordings import Copy, rules_that_name
from v4tool.check.recording import check_recording
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.names import generic, is_expert, pass_of, recording_keys

Lane = tuple[int, int] | str
"""A layer in a pass (number of the pass, layer), an MTP pass, or the top level."""

LOWEST_MANTISSA_BIT = 16
"""Of a BF16 value in its FP32 word."""

ONLY_WEIGHTS = {
    "attn.wo_b.in", "ffn.shared_experts.w1.out", "ffn.shared_experts.w3.out", "norm.out",
    "mtp.norm.out", "attn.indexer.weights_proj.out",
}  # fmt: skip
"""Kinds of keys that nothing covers without weights."""
PARTLY = {
    "attn.compressor.norm.out", "attn.indexer.compressor.norm.out", "attn.indexer.wq_b.out",
    "attn.wq_a.out", "attn.wkv.out", "attn.wq_b.out", "mtp.e_proj.out", "mtp.h_proj.out",
    "embed.out",
}  # fmt: skip
"""Kinds of keys whose successor rounds or quantises: some flips leave no trace in it."""


def lane_of(key: str) -> Lane:
    match = re.match(r"(?:decode\.(\d+)\.)?layers\.(\d+)\.", key)
    if match:
        return (int(match[1]) + 1 if match[1] else 0, int(match[2]))
    return pass_of(key) if key.startswith("mtp.") else "top"


def kind_of(key: str) -> str:
    """The key without pass and layer; the top level of MTP keeps a mark."""
    name = re.sub(r"^layers\.\d+\.", "", generic(key).removeprefix(pass_of(key)))
    block = name.startswith(("attn", "ffn", "hc_")) or not key.startswith("mtp.")
    return name if block else f"mtp.{name}"


def expert_of(key: str) -> int | None:
    """The number of the routed expert that a key is of, if it is of one."""
    match = re.search(r"\.experts\.(\d+)\.", key)
    return int(match[1]) if match else None


def schedule(keys: list[str], layers: int) -> Iterator[list[str]]:
    """Every key once; the keys of one run lie in lanes that do not touch."""
    lanes: dict[Lane, list[str]] = defaultdict(list)
    for key in keys:
        lanes[lane_of(key)].append(key)
    passes = 1 + max((lane[0] for lane in lanes if isinstance(lane, tuple)), default=0)
    sets: list[list[Lane]] = [
        [((layer // 2 + shift) % passes, layer) for layer in range(parity, layers, 2)]
        for parity in range(2)
        for shift in range(passes)
    ]
    sets += [[lane] for lane in lanes if isinstance(lane, str)]
    for lane_set in sets:
        present = [lanes[lane] for lane in lane_set if lane in lanes]
        for i in range(max((len(lane) for lane in present), default=0)):
            yield [lane[i] for lane in present if i < len(lane)]


def found_by_key(
    path: Path, keys: list[str], target: Path, seed: int, checkpoint: Checkpoint | None = None
) -> dict[str, set[str]]:
    """For every key the rules that name it when one of its values has a flipped bit."""
    config = ModelConfig.from_file(path.parent / "ckpt")
    rng, original, found = random.Random(seed), Copy.of(path), {}
    for run in schedule(keys, config.n_layers):
        copy = Copy(original.header, bytearray(original.payload))
        for key in run:
            start, stop = copy.span(key)
            copy.flip(key, rng.randrange((stop - start) // 4), LOWEST_MANTISSA_BIT)
        result = check_recording(
            copy.write(target), config=config, checkpoint=checkpoint, deep=checkpoint is not None
        )
        found |= {key: rules_that_name(result, key) for key in run}
    return found


def bf16_keys(path: Path) -> list[str]:
    """The BF16-valued keys of a golden recording."""
    from tests.recordings import entry_of

    config = ModelConfig.from_file(path.parent / "ckpt")
    entry = entry_of(path, config)
    specs = recording_keys(config, entry.length, len(entry.decode_ids))
    header = Copy.of(path).header
    return [k for k in header if k != "__metadata__" and specs[generic(k)].kind == "bf16"]


def shares(found: dict[str, set[str]]) -> dict[str, tuple[int, int]]:
    """Flips found and made, by kind of key."""
    by_kind: dict[str, tuple[int, int]] = {}
    for key, rules in found.items():
        hits, total = by_kind.get(kind_of(key), (0, 0))
        by_kind[kind_of(key)] = (hits + bool(rules), total + 1)
    return dict(sorted(by_kind.items()))


def test_flips_of_a_few_layers(tmp_path: Path) -> None:
    """Three layers of three types in two passes, two experts each: what is covered is found."""
    path = GOLDEN_MINI / "len33.safetensors"
    lanes: set[Lane] = {(0, 0), (1, 2), (0, 1), (1, 3)}
    skipped = ONLY_WEIGHTS | {"ffn.experts.<E>.w1.out", "ffn.experts.<E>.w3.out"}
    keys = [
        key
        for key in bf16_keys(path)
        if lane_of(key) in lanes and kind_of(key) not in skipped and expert_of(key) in (None, 0, 5)
    ]
    found = found_by_key(path, keys, tmp_path / "a.safetensors", seed=5)
    missed = [key for key, rules in found.items() if not rules and kind_of(key) not in PARTLY]
    assert len(found) == len(keys) == 96
    assert not missed


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("seed", [1, 2])
def test_flips_of_every_key(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """At least 80 % of the keys that are no routed experts', and every expert's out and w2.out."""
    path = GOLDEN / "len32.safetensors"
    found = found_by_key(path, bf16_keys(path), tmp_path / "a.safetensors", seed)
    base = [bool(rules) for key, rules in found.items() if not is_expert(key)]
    with capsys.disabled():
        print(f"\nseed {seed}: {sum(base)} of {len(base)} base keys, {sum(base) / len(base):.1%}")
        for kind, (hits, total) in shares(found).items():
            print(f"  {kind:40s} {hits:4d} of {total}")
    assert sum(base) >= 0.8 * len(base)
    ends = ("w2.out", "out")
    experts = [k for k in found if is_expert(k) and re.search(r"\.\d+\.(w2\.)?out$", k)]
    assert experts
    assert all(found[key] for key in experts), ends
    covered = [k for k in found if kind_of(k) not in ONLY_WEIGHTS | PARTLY and not is_expert(k)]
    assert all(found[key] for key in covered)


@pytest.mark.slow
def test_flips_of_every_key_with_the_checkpoint(tmp_path: Path) -> None:
    """A deep check covers every key; what a quantisation swallows is swallowed for the model as
    well.
    """
    path = GOLDEN_MINI / "len6.safetensors"
    with Checkpoint.open(path.parent / "ckpt") as checkpoint:
        keys = bf16_keys(path)
        found = found_by_key(path, keys, tmp_path / "a.safetensors", 3, checkpoint)
    assert [key for key in keys if not found[key]] == []
