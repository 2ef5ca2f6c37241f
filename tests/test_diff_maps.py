"""Round trips: our recording as another engine lays it out, through that engine's map, is exact."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import GOLDEN_MINI
from tests.engine_layouts import LAYOUTS, laid_out
from v4tool.checkpoint.shards import Checkpoint
from v4tool.diff.candidate import open_candidate
from v4tool.diff.maps import shipped_maps
from v4tool.diff.readers import open_tensors
from v4tool.names import recording_keys, steps_of

LEN33 = GOLDEN_MINI / "len33.safetensors"
DECODE = 3
INSIDE = (".rope.", ".sparse_attn.", ".compressor.out", "compressor.norm.out", ".experts.")
"""What fused kernels keep to themselves."""
COEFFICIENTS = ("hc_attn.pre", "hc_ffn.pre")
NOT_PUBLISHED = {
    "transformers": (*COEFFICIENTS, "layers.4.out", ".rope.", ".sparse_attn.",
                     "indexer.compressor.out", ".experts."),
    "vllm": (*COEFFICIENTS, *INSIDE, "kv_norm.out", ".gate.out."),
    "vllm, fused": (*COEFFICIENTS, *INSIDE, "kv_norm.out", ".gate.out.", "layers.4.out"),
    "sglang": (*INSIDE, ".hc_attn.", ".hc_ffn.", "indexer.out", ".gate.out.0", "head.out"),
    "llama.cpp": (),
}  # fmt: skip
"""What of a key's name tells that an engine's modules do not give it."""
IN_NO_DECODE_STEP = {"llama.cpp": (".sparse_attn.in.kv", ".sparse_attn.in.topk_idxs")}


def test_every_map_has_a_layout() -> None:
    assert {name for name, _, _ in LAYOUTS.values()} == set(shipped_maps()) - {"v4tool"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_recording_is_exact_again_through_the_map(layout: str, tmp_path: Path) -> None:
    recorded = load_file(LEN33)
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        config = checkpoint.config
    ids = json.loads(open_tensors(LEN33).metadata["input_ids"])
    recorded["input_ids"] = torch.tensor([ids])
    for number, token in enumerate(json.loads(open_tensors(LEN33).metadata["decode_ids"])):
        recorded[f"decode.{number}.input_ids"] = torch.tensor([[token]])
    steps = steps_of(len(ids), DECODE)
    path = tmp_path / "theirs.safetensors"
    save_file(dict(laid_out(layout, config, recorded, steps)), path)
    candidate = open_candidate(path, LAYOUTS[layout][0], config)

    assert candidate.unmatched == []
    main = [key for key in recorded if not key.startswith("mtp.")]
    absent = {
        key
        for key in main
        if any(part in key.replace("shared_experts", "shared") for part in NOT_PUBLISHED[layout])
        or (key.startswith("decode.") and key.endswith(IN_NO_DECODE_STEP.get(layout, ("/",))))
    }
    assert set(main) - set(candidate.specs) == absent
    assert len(recording_keys(config, len(ids), DECODE, mtp=False)) > len(absent)
    for key in set(main) - absent:
        ours, theirs = recorded[key], candidate.read(key)
        assert same(key, ours, theirs.reshape(ours.shape)), key


def same(key: str, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The same values; for tables of indices the same set in every row."""
    if not ours.is_floating_point() and not key.endswith("input_ids"):
        return torch.equal(ours.long().sort(-1).values, theirs.long().sort(-1).values)
    return torch.equal(ours.double(), theirs.double())
