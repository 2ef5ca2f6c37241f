"""Correct variants pass; faults that do not change values pass too, and are listed here.

The first: other orders of sums and of choices, another pick among equal scores, the sign of zeros.
The second: faults of scales that powers of two hide on ordinary data; they are seen by holding the
scale bytes themselves against their table (`test_activation`).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import GOLDEN_MINI, needs_golden
from tests.faults import own
from tests.faults.harness import Fault, Patch, record, save, verify
from v4tool.model import attention, compress, moe, scope
from v4tool.quant import activation
from v4tool.quant.activation import act_quant_inplace
from v4tool.verify.recording import verify_file
from v4tool.verify.results import VerifyResult, counted
from v4tool.verify.tensors import OWN_DESCRIPTION

PROMPTS = {"len6": 3, "len129": 1}
"""Golden prompts of the small checkpoint and how many of their decode steps are run."""


def run(
    inject: Callable[[Patch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompt: str = "len6",
    larger: bool = False,
) -> VerifyResult:
    path = tmp_path / "recording.safetensors"
    decode = 0 if larger else PROMPTS[prompt]
    fault = Fault("", inject, "", "", prompt=prompt, decode=decode, larger=larger)
    with monkeypatch.context() as patch:
        inject(patch)
        record(fault, path)
    return verify(fault, path)


def pooled_backwards(patch: Patch) -> None:
    right = compress.pool
    patch.setattr(compress, "pool", lambda kv, gate: right(kv.flip(1), gate.flip(1)))


def sums_backwards(patch: Patch) -> None:
    right = scope.linear_hi
    patch.setattr(scope, "linear_hi", lambda x, w, n: right(x.flip(-1).contiguous(), w.flip(-1), n))


def products_of_a_library(patch: Patch) -> None:
    for module in (scope, moe):
        patch.setattr(module, "q_linear", own.q_linear_of())


def own_attention(patch: Patch) -> None:
    patch.setattr(attention, "sparse_attn", own.attention_of())


NEUTRAL = [pooled_backwards, sums_backwards, products_of_a_library, own_attention]


@pytest.mark.parametrize("inject", NEUTRAL)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_another_order_of_sums(
    inject: Callable[[Patch], None],
    prompt: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the proof that the pieces which faults are made of are right when nothing is changed."""
    result = run(inject, tmp_path, monkeypatch, prompt)
    assert result.passed, result.verdict
    assert set(counted(result.nodes)) <= {"equal", "ulp"}


def test_scale_of_the_right_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece that faults of scales are made of, with the right scale."""

    def inject(patch: Patch) -> None:
        right = own.q_linear_of(own.rescaled(own.ceil_power, own.ceil_power))
        patch.setattr(scope, "q_linear", right)

    assert run(inject, tmp_path, monkeypatch).passed


def test_blocks_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer names the same blocks worst first."""

    def inject(patch: Patch) -> None:
        right = compress.choose_blocks
        patch.setattr(compress, "choose_blocks", lambda *args: right(*args).flip(1))

    result = run(inject, tmp_path, monkeypatch, "len129")
    assert result.passed, result.verdict
    assert counted(result.nodes)["order"] >= 4


def equal_scores_pick(scores: Tensor, k: int, allowed: Tensor, offset: int) -> Tensor:
    """The choice of `choose_blocks`, but the highest index wins where scores are equal."""
    t = scores.shape[1]
    forbidden = torch.arange(t) >= allowed.unsqueeze(1)
    flipped = scores.double().masked_fill(forbidden, -torch.inf).flip(1)
    best = t - 1 - flipped.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.where(best < allowed.unsqueeze(1), best + offset, -1)


SIGN_ONLY = """    out = torch.cat(parts, dim=1)
    one = torch.ones_like(out)
    return torch.where(out > 0, one, torch.where(out < 0, -one, out))
"""


def test_another_pick_among_equal_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are equal often; ties go to the highest block instead of the lowest."""

    def coarse(patch: Patch) -> None:
        right = compress.index_scores
        patch.setattr(
            compress, "index_scores", lambda *args: right(*args).sign().to(torch.bfloat16)
        )

    def ties_high(patch: Patch) -> None:
        patch.setattr(
            compress,
            "choose_blocks",
            lambda s, allowed, k, offset: equal_scores_pick(s, k, allowed, offset),
        )

    text, last = OWN_DESCRIPTION.read_text(), "    return torch.cat(parts, dim=1)\n"
    assert text.count(last) == 1
    mine = tmp_path / "coarse.vt"
    mine.write_text(text.replace(last, SIGN_ONLY))

    def both(patch: Patch) -> None:
        coarse(patch)
        ties_high(patch)

    path = tmp_path / "recording.safetensors"
    fault = Fault("", both, "", "", prompt="len129")
    with monkeypatch.context() as patch:
        both(patch)
        record(fault, path)
    ckpt = GOLDEN_MINI / "ckpt"
    result = verify_file(path, ckpt, vt_file=mine, exact=True)
    choices = [c for c in result.comparisons if c.key.endswith("indexer.out")]
    assert [c.status for c in choices] == ["order"] * 2
    assert all("another pick among equal scores" in c.note for c in choices)
    assert result.passed, result.verdict


def test_experts_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's experts worst first, their weights likewise."""

    def inject(patch: Patch) -> None:
        right = moe.choose_experts
        patch.setattr(moe, "choose_experts", lambda *args: right(*args).flip(1))

    result = run(inject, tmp_path, monkeypatch)
    assert result.passed, result.verdict
    changed = [c.key for c in result.comparisons if c.status == "order"]
    assert changed
    assert all(key.endswith("gate.out.1") for key in changed)


def test_negative_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros of a cache that nothing was written to, with the other sign."""
    path = tmp_path / "recording.safetensors"
    tensors = record(Fault("", lambda p: None, "", "", prompt="len6"), path)
    key = "mtp.0.decode.attn.sparse_attn.in.kv"
    assert bool((tensors[key] == 0).any())
    tensors[key] = torch.where(tensors[key] == 0, -tensors[key], tensors[key])
    save(tensors, path)
    result = verify_file(path, GOLDEN_MINI / "ckpt")
    assert result.passed
    assert [c.key for c in result.comparisons if c.status == "zero"] == [key]


# ------------------------------------------------------------------ what values cannot show


def kv_block_128(patch: Patch) -> None:
    right = act_quant_inplace
    patch.setattr(compress, "act_quant_inplace", lambda x, block: right(x, 128))


def scale_always_up(patch: Patch) -> None:
    right = activation._scale_codes

    def wrong(amax: Tensor, floor: float, inverse: float) -> Tensor:
        least = torch.tensor(floor, dtype=torch.float32)
        factor = torch.tensor(inverse, dtype=torch.float32)
        exact = (torch.maximum(amax, least) * factor).view(torch.int32) & 0x7FFFFF == 0
        return right(amax, floor, inverse) + exact.to(torch.uint8)

    patch.setattr(activation, "_scale_codes", wrong)


def amax_floor_missing(patch: Patch) -> None:
    right = activation._scale_codes
    patch.setattr(
        activation, "_scale_codes", lambda amax, floor, inverse: right(amax, 2.0**-100, inverse)
    )


INVISIBLE = [kv_block_128, scale_always_up, amax_floor_missing]


@needs_golden
@pytest.mark.parametrize("inject", INVISIBLE)
def test_invisible_in_values(
    inject: Callable[[Patch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary data gives the same values, so no verdict on values can name these."""
    result = run(inject, tmp_path, monkeypatch, "len6", larger=True)
    assert result.passed, result.verdict
