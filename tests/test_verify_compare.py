"""Comparison of two tensors: every status, with its statistics."""

import math

import pytest
import torch
from torch import Tensor

from v4tool.verify.compare import Rule, compare, ulps
from v4tool.verify.results import Comparison

EXACT = Rule()
TOLERANT = Rule(exact=False)
FP32 = Rule(exact=False, float32=True)
KEY = "layers.0.attn.out"


def bf16(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16).reshape(1, 1, -1)


def acc(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1)


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, 1, -1)


def i32(*rows: list[int]) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32)


ABOVE_ONE = 1 + 2.0**-7
"""The BF16 value next to 1."""
ULP = 2.0**-23
"""One unit in the last place of FP32 at 1."""

CASES = [
    ("the same bits", bf16(1, 2), f32(1, 2), EXACT, "equal"),
    ("another BF16 neighbour, small enough for allclose",
     bf16(2.0**-12), f32(2.0**-12 * ABOVE_ONE), EXACT, "differs"),
    ("another BF16 neighbour", bf16(1), f32(ABOVE_ONE), EXACT, "outside"),
    ("a recorded value that is no BF16 value", bf16(1), f32(1 + ULP), EXACT, "differs"),
    ("the sign of zero", bf16(0.0, 1), f32(-0.0, 1), EXACT, "zero"),
    ("acc, the same FP32", acc(1 + ULP / 4), f32(1), EXACT, "equal"),
    ("acc, 1 ulp of FP32", acc(1), f32(1 + ULP), EXACT, "ulp"),
    ("acc, 2 ulp of FP32", acc(1), f32(1 + 2 * ULP), EXACT, "differs"),
    ("acc, a sum that nearly vanishes", acc(1.0, 1e-14), f32(1.0, 3e-14), EXACT, "ulp"),
    ("acc, beyond the tolerance", acc(1), f32(1.001), EXACT, "outside"),
    ("tolerance alone", acc(1), f32(1 + 9 * ULP), TOLERANT, "close"),
    ("tolerance alone, beyond it", bf16(1), f32(ABOVE_ONE), TOLERANT, "outside"),
    ("FP32 sums: a neighbour passes", bf16(1), f32(ABOVE_ONE), FP32, "close"),
    ("FP32 sums: two steps do not", bf16(1), f32(1 + 2.0**-6), FP32, "outside"),
    ("FP32 sums: little beside the largest value", bf16(1, 0.01), f32(1, 0.0125), FP32, "close"),
    ("FP32 sums: not so little", bf16(1, 0.01), f32(1, 0.015), FP32, "outside"),
    ("FP32 sums: acc has no neighbours", acc(1), f32(1.005), FP32, "outside"),
    ("NaN", bf16(1, 2), f32(1, math.nan), EXACT, "nan"),
    ("NaN against NaN", bf16(1, math.nan), f32(1, math.nan), EXACT, "nan"),
    ("infinity", bf16(1, 2), f32(1, math.inf), EXACT, "nan"),
    ("the description gives NaN", bf16(1, math.nan), f32(1, 2), EXACT, "outside"),
    ("another shape", bf16(1, 2), f32(1, 2, 3), EXACT, "shape"),
    ("another dtype", bf16(1), bf16(1), EXACT, "dtype"),
    ("integers", i32([1, 2]), i32([1, 2]), EXACT, "equal"),
    ("another integer", i32([1, 2]), i32([1, 3]), EXACT, "outside"),
    ("integers in another order", i32([1, 2], [3, -1]), i32([2, 1], [3, -1]), EXACT, "order"),
    ("integers of another row", i32([1, 2], [3, 4]), i32([3, 4], [1, 2]), EXACT, "outside"),
    ("integers of another width", i32([1]), i32([1]).long(), EXACT, "dtype"),
    ("nothing at all", i32([]), i32([]), EXACT, "equal"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("computed", "recorded", "rule", "status"),
    [pytest.param(*case[1:], id=case[0]) for case in CASES],
)
def test_status(computed: Tensor, recorded: Tensor, rule: Rule, status: str) -> None:
    assert compare(KEY, computed, recorded, rule).status == status


def test_one_ulp_of_bf16_in_both_directions() -> None:
    """Every finite BF16 value is one step from the next; the two zeros are none apart."""
    bits = torch.arange(-0x7F80, 0x7F80, dtype=torch.int32)
    codes = torch.where(bits < 0, -bits + 0x8000 - 1, bits).to(torch.uint16).view(torch.bfloat16)
    steps = ulps(codes[1:].float(), codes[:-1].float(), "bf16")
    assert bool((codes[1:].float() >= codes[:-1].float()).all())
    assert steps.unique().tolist() == [0, 1]
    assert int((steps == 0).sum()) == 1


def judged(computed: Tensor, recorded: Tensor) -> Comparison:
    return compare("layers.0.attn.sparse_attn.out", computed, recorded, EXACT)


def test_figures() -> None:
    """Where, how far, how many, and the least tolerance that would have passed."""
    recorded = torch.ones(1, 3, 2, 4)
    recorded[0, 1, 1, 2] = 4.0
    recorded[0, 2, 0, 0] = ABOVE_ONE
    found = judged(torch.ones(1, 3, 2, 4, dtype=torch.bfloat16), recorded)
    assert found.status == "outside"
    assert found.worst is not None
    assert found.worst.index == (0, 1, 1, 2)
    assert found.worst.where == {"token": 1, "head": 1, "channel": 2}
    assert (found.worst.recorded, found.worst.computed) == (4.0, 1.0)
    assert (found.max_abs, found.max_rel) == (3.0, 0.75)
    assert found.ulps == 2 * 128
    assert found.share_outside == 2 / 24
    assert (found.count, found.bits_equal) == (24, 22)
    assert found.least_tolerance == 3 / 5
    assert found.per_token == (0.0, 0.75, pytest.approx(2.0**-7 / 4, rel=1e-2))
    assert found.axis == "token"
    dot, length = 22 + 4 + ABOVE_ONE, math.sqrt(24) * math.sqrt(22 + 16 + ABOVE_ONE**2)
    assert found.cosine == pytest.approx(dot / length, rel=1e-12)
    off = math.hypot(3.0, ABOVE_ONE - 1)
    assert found.relative_l2 == pytest.approx(off / math.sqrt(24), rel=1e-12)


@pytest.mark.parametrize(
    ("computed", "recorded", "relative_l2", "cosine"),
    [
        ((1, -2, 3), (1.5, -3, 4.5), 0.5, 1.0),  # a wrong factor, which the cosine does not show
        ((1, -2, 3), (-1, 2, -3), 2.0, -1.0),
        ((0, 0), (3, 4), math.inf, 0.0),
        ((3, 4), (0, 0), 1.0, 0.0),
        ((1, 2), (math.inf, 2), math.inf, math.nan),
    ],
)
def test_relative_l2_is_relative_to_what_the_node_gives(
    computed: tuple[float, ...],
    recorded: tuple[float, ...],
    relative_l2: float,
    cosine: float,
) -> None:
    found = compare(KEY, bf16(*computed), f32(*recorded), EXACT)
    assert found.relative_l2 == pytest.approx(relative_l2, rel=1e-12)
    assert found.cosine == pytest.approx(cosine, rel=1e-12, nan_ok=True)


def test_the_least_tolerance_passes_and_a_smaller_one_does_not() -> None:
    computed, recorded = bf16(1, 100, -3), f32(1.5, 100.5, -3)
    least = compare(KEY, computed, recorded, EXACT).least_tolerance
    at = Rule(least * 1.000001, least * 1.000001, exact=False)
    below = Rule(least * 0.999, least * 0.999, exact=False)
    assert compare(KEY, computed, recorded, at).status == "close"
    assert compare(KEY, computed, recorded, below).status == "outside"


def test_bf16_neighbours_are_accepted_after_a_rounded_input() -> None:
    """Two BF16 neighbours in 2000 elements, if an input is known in FP32 only; no more."""
    computed = torch.ones(1, 2, 1000, dtype=torch.bfloat16)
    recorded = torch.ones(1, 2, 1000)
    recorded[0, 1, 7] = ABOVE_ONE
    assert compare(KEY, computed, recorded, EXACT).status == "outside"
    assert compare(KEY, computed, recorded, EXACT, loose=True).status == "rounding"
    recorded[0, 0, :3] = ABOVE_ONE
    assert compare(KEY, computed, recorded, EXACT, loose=True).status == "outside"
    recorded[:] = 1.0
    recorded[0, 1, 7] = 1 + 2.0**-6
    assert compare(KEY, computed, recorded, EXACT, loose=True).status == "outside"


def test_not_a_number_says_where_it_starts() -> None:
    recorded = torch.ones(1, 4, 2)
    recorded[0, 2:] = math.nan
    key = "layers.1.attn.compressor.norm.out"
    found = compare(key, torch.ones(1, 4, 2, dtype=torch.bfloat16), recorded, EXACT)
    assert (found.status, found.note) == ("nan", "4 of 8 not finite, from block 2 on")


def test_a_choice_with_equal_scores_passes() -> None:
    computed, recorded = i32([5, 1]), i32([5, 2])
    asked: list[tuple[Tensor, Tensor]] = []

    def same(a: Tensor, b: Tensor) -> bool:
        asked.append((a, b))
        return True

    found = compare("x.indexer.out", computed, recorded, EXACT, same_choice=same)
    assert found.status == "order"
    assert "equal scores" in found.note
    assert [tuple(map(Tensor.tolist, pair)) for pair in asked] == [([[[5, 1]]], [[[5, 2]]])]
    never = compare("x.indexer.out", computed, recorded, EXACT, same_choice=lambda a, b: False)
    assert never.status == "outside"
