"""`diff` on tensors that other engines computed on the larger golden checkpoint."""

from functools import cache

import pytest

from tests.cli import Cli
from tests.conftest import GOLDEN, ROOT
from v4tool.checkpoint.shards import Checkpoint
from v4tool.diff.candidate import open_candidate
from v4tool.diff.compare import diff_candidate
from v4tool.diff.results import DiffResult
from v4tool.names import recording_keys

FOREIGN = ROOT.parent / "shared" / "foreign"
TRANSFORMERS = FOREIGN / "transformers"
GGML = FOREIGN / "ggml"

pytestmark = pytest.mark.skipif(
    not FOREIGN.is_dir() or not GOLDEN.is_dir(),
    reason="other engines' tensors are not beside this checkout (shared/foreign)",
)

FAULTS = {
    "no_route_scale": ("layers.0.ffn.gate.out.0", ["no_route_scale"]),
    "comb_transposed": ("layers.0.hc_ffn.post", ["comb_transposed"]),
    "sigmoid_gate": ("layers.0.ffn.gate.out.0", ["sigmoid_scores"]),
    "rope_half_split": ("layers.0.attn.wo_b.in", ["half_split"]),
}
"""File -> the first key at fault and the fault that reproduces it."""


@cache
def judged(file: str) -> DiffResult:
    with Checkpoint.open(GOLDEN / "ckpt") as checkpoint:
        path = TRANSFORMERS / f"{file}.safetensors"
        candidate = open_candidate(path, "transformers", checkpoint.config)
        return diff_candidate(candidate, checkpoint, name=path.name, map_name="transformers")


@cache
def judged_ggml() -> DiffResult:
    with Checkpoint.open(GOLDEN / "ckpt") as checkpoint:
        candidate = open_candidate(GGML, "llama.cpp", checkpoint.config)
        return diff_candidate(candidate, checkpoint, name="ggml", map_name="llama.cpp")


def test_nothing_is_at_fault_in_llama_cpp() -> None:
    result = judged_ggml()
    assert result.ok
    assert (len(result.residues), result.tokens, result.decode) == (790, 6, 1)
    # FP32 sums: every operator is recomputed in that engine's arithmetic, choices included
    errors = {residue.key: residue.error for residue in result.residues}
    attention = {key for key in errors if key.endswith(".sparse_attn.out")}
    assert max(errors[key] for key in set(errors) - attention) < 3e-7
    # sums in FP16: a few elements of 1536 a token take the neighbour, 2^-11 each, at near ties
    assert max(errors[key] for key in attention) < 2**-11 * (9 / 1536) ** 0.5
    assert result.unjudged == ()


LINEAR = ("FP32", "not quantised", "as stored")
EXPERT = ("FP32", "Q8_0 (INT8 per 32)", "as stored")
GGML_ARITHMETIC = {
    "q_linear[attn.wq_a]": LINEAR,
    "q_linear[attn.wo_b]": LINEAR,
    "q_linear[ffn.shared_experts.w1]": LINEAR,
    "q_linear[ffn.experts.<E>.w1]": EXPERT,
    "expert_down[ffn.experts.<E>]": (*EXPERT, "after w2"),
    "attn_kv": ("FP32", "not quantised"),
    "compressor_out": ("FP32", "not quantised"),
    "index_compressor_out": ("FP32", "Hadamard, no FP4"),
    "compressor_rows[attn.compressor]": ("BF16",),
    "index_weights": ("FP32", "BF16"),
    "head": ("BF16",),
    "rms_norm[attn_norm]": ("FP32",),
    # that machine multiplied FP16 in vectors of 128 and the rest of a row in FP32
    "sparse_attn": ("FP32", "FP16 cache, sums, weights in vectors of 128"),
}
"""FP8 weights were kept as F32, experts as MXFP4, the rest as BF16; the cache is FP16."""


def test_the_arithmetic_of_llama_cpp_is_named() -> None:
    rows = {row.operator: row.options for row in judged_ggml().operators}
    assert {operator: rows[operator] for operator in GGML_ARITHMETIC} == GGML_ARITHMETIC


def test_every_key_of_a_prefill_is_found_in_llama_cpps_tensors() -> None:
    with Checkpoint.open(GOLDEN / "ckpt") as checkpoint:
        config = checkpoint.config
        candidate = open_candidate(GGML, "llama.cpp", config)
    expected = {key for key in recording_keys(config, 6, 1, mtp=False) if "<E>" not in key}
    # the window of a decode step lies in a cache that the graph does not name
    absent = {key for key in expected if key.startswith("decode.0.")
              and key.endswith((".sparse_attn.in.kv", ".sparse_attn.in.topk_idxs"))}  # fmt: skip
    assert expected - set(candidate.specs) == absent


def test_nothing_is_at_fault_in_the_sound_port_and_its_arithmetic_is_named() -> None:
    result = judged("sound")
    assert result.ok
    assert result.arithmetic == "FP32, nothing quantised"
    assert (len(result.residues), result.tokens) == (158, 6)
    # FP32 sums: no residue is even a tenth of what the bound allows
    assert max(residue.error for residue in result.residues) < 3e-7
    rows = {row.operator: row.options for row in result.operators}
    assert rows["q_linear[attn.wq_a]"] == ("FP32", "not quantised", "as stored")
    assert rows["compressor_out"] == ("FP32", "not quantised")
    assert result.unjudged == ()


@pytest.mark.parametrize("file", FAULTS)
def test_the_fault_of_each_port_is_the_first_and_is_named(file: str) -> None:
    verdict = judged(file).verdict
    assert verdict is not None
    key, names = FAULTS[file]
    assert verdict.residue.key == key
    assert [fault.name for fault in verdict.faults] == names
    assert verdict.faults[0].error < 3e-7


def test_the_span_between_recorded_points_is_named() -> None:
    verdict = judged("rope_half_split").verdict
    assert verdict is not None
    assert verdict.residue.inputs == ("layers.0.attn.kv_norm.out", "layers.0.attn.wq_b.out")
    assert verdict.span[0] == "head_rms"
    assert verdict.span[-1] == "output_groups"


def test_a_port_that_drops_the_route_scale_ends_with_status_1(cli: Cli) -> None:
    path = TRANSFORMERS / "no_route_scale.safetensors"
    ran = cli("diff", path, "--map", "transformers", "--ckpt", GOLDEN / "ckpt", "-q")
    assert ran.status == 1
    verdict = next(line for line in ran.out.splitlines() if line.startswith("first operator"))
    assert "layers.0.ffn.gate.out.0: relative L2 0.5" in verdict
    assert "reproduced by no_route_scale" in verdict
