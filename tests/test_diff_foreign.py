"""`diff` on tensors that other engines computed on the larger golden checkpoint."""

from functools import cache

import pytest

from tests.cli import Cli
from tests.conftest import GOLDEN, ROOT
from v4tool.checkpoint.shards import Checkpoint
from v4tool.diff.candidate import open_candidate
from v4tool.diff.compare import diff_candidate
from v4tool.diff.results import DiffResult

FOREIGN = ROOT.parent / "shared" / "foreign"
TRANSFORMERS = FOREIGN / "transformers"

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
