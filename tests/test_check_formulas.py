"""The arithmetic of `check` (bits, intervals, formulas) against literal values and tables."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import GOLDEN_MINI
from v4tool.check import formulas
from v4tool.check.bits import (
    equal_values,
    holds_bf16,
    ordinals,
    rounding_interval,
    to_bf16,
    to_f32,
    to_f64,
    upper_halves,
)
from v4tool.check.value_rules import column_residual, row_residual
from v4tool.check.weight_bounds import RowBounds, norm_bounds, sink_bounds
from v4tool.config import ModelConfig
from v4tool.names import Step

CONFIG = ModelConfig.from_file(GOLDEN_MINI / "ckpt")
FINITE = st.integers(0, 0x7F7F) | st.integers(0x8000, 0xFF7F)
"""Bit patterns of all finite BF16 values."""
NORMAL = st.integers(0x0080, 0x7F7F) | st.integers(0x8080, 0xFF7F)
"""Without zero and subnormal values."""


def bits(*values: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, np.uint16)


@pytest.mark.parametrize(
    ("value", "expected", "reason"),
    [
        (1.0, 0x3F80, "exact"),
        (1.00390625, 0x3F80, "a tie goes to the even one, below"),
        (1.01171875, 0x3F82, "a tie goes to the even one, above"),
        (1.0039064, 0x3F81, "just above a tie of FP32"),
        (1.00390625 + 2**-40, 0x3F80, "rounding to FP32 first makes it a tie"),
        (-1.00390625, 0xBF80, "the same below zero"),
        (0.0, 0x0000, "zero"),
    ],
)
def test_rounding(value: float, expected: int, reason: str) -> None:
    assert to_bf16(np.array([value]))[0] == expected, reason


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_a_bf16_value_rounds_to_itself(patterns: list[int]) -> None:
    values = bits(*patterns)
    assert equal_values(to_bf16(to_f64(values)), values).all()
    assert (upper_halves(to_f64(values).astype(np.float32)) == values).all()


@given(NORMAL)
def test_the_interval_of_a_value_is_what_rounds_to_it(pattern: int) -> None:
    value = bits(pattern)
    low, high = (side[0] for side in rounding_interval(value))
    size = abs(float(to_f64(value)[0]))
    inside = np.array([low + (high - low) * 1e-4, size, high - (high - low) * 1e-4])
    assert (to_bf16(inside) == (pattern & 0x7FFF)).all()
    if pattern & 0x7FFF < 0x7F7F:
        assert to_bf16(np.array([high * (1 + 1e-6)]))[0] == (pattern & 0x7FFF) + 1


@given(FINITE, st.floats(0, 0.4), st.floats(0, 0.4))
def test_between_finds_the_value_inside(pattern: int, below: float, above: float) -> None:
    value = float(to_f64(bits(pattern))[0])
    step = max(abs(value) * 2**-8, 1e-38)
    low, high = np.array([value - below * step]), np.array([value + above * step])
    assert holds_bf16(low, high)[0]


@given(st.integers(0x0080, 0x7F7E), st.floats(0.01, 0.99), st.booleans())
def test_between_finds_nothing_inside_a_step(pattern: int, part: float, negative: bool) -> None:
    a, b = (float(v) for v in to_f64(bits(pattern, pattern + 1)))
    low, high = a + (b - a) * 0.005, a + (b - a) * max(part, 0.005)
    pair = (
        (np.array([-high]), np.array([-low])) if negative else (np.array([low]), np.array([high]))
    )
    assert not holds_bf16(*pair)[0]


def test_between_of_an_empty_interval() -> None:
    assert not holds_bf16(np.array([1.0]), np.array([0.5]))[0]
    assert not holds_bf16(np.array([np.inf]), np.array([-np.inf]))[0]
    assert holds_bf16(np.array([-np.inf]), np.array([np.inf]))[0]


def test_order_is_that_of_the_values() -> None:
    every = np.concatenate([np.arange(0xFF7F, 0x7FFF, -1), np.arange(0x0000, 0x7F80)])
    values = every.astype(np.uint16)
    assert (np.diff(ordinals(values)) >= 0).all()
    assert (np.diff(to_f64(values)) >= 0).all()


RNG = np.random.Generator(np.random.PCG64(1))


def random_bits(*shape: int) -> np.ndarray:  # type: ignore[type-arg]
    return to_bf16(RNG.standard_normal(shape) * np.exp(RNG.standard_normal(shape)))


@pytest.mark.parametrize("rows", [1, 2, 12])
def test_the_true_weight_lies_within_the_bounds_and_a_flip_leaves_none(rows: int) -> None:
    x, weight = to_f32(random_bits(rows, 64)), to_f64(random_bits(64))
    scale = 1 / np.sqrt(np.square(x, dtype=np.float64).mean(-1, keepdims=True) + 1e-6)
    out = to_bf16(weight * x * scale)
    low, high = norm_bounds(out, x, 1e-6)
    assert ((low <= weight) & (weight <= high)).all()
    if rows < 12:
        return
    for column in range(64):
        flipped = out.copy()
        flipped[5, column] ^= 1
        low, high = norm_bounds(flipped, x, 1e-6)
        bounds = RowBounds("key", ("x",), 64, discrete=True)
        bounds.add(low, high)
        possible = bounds.possible(bounds.low, bounds.high)
        assert not possible[column]
        assert possible.sum() == 63
        found, violating = bounds.violating_rows(column)
        assert (found, violating) == (weight[column], [5])


def test_the_true_sink_lies_within_the_bounds_and_a_flip_leaves_none() -> None:
    q, kv = random_bits(6, 3, 64), random_bits(40, 64)
    table = np.tile(np.arange(40), (6, 1))
    sums = formulas.attention_sums(q, kv, table)
    sink = np.array([-20.0, 0.0, 3.0])
    out = to_bf16(sums[0] / (sums[1] + np.exp(sink - sums[2]))[..., None])
    low, high = sink_bounds(out, *sums)
    assert ((low <= sink) & (sink <= high)).all()
    for head in range(3):
        flipped = out.copy()
        flipped[2, head, 11] ^= 1
        low, high = sink_bounds(flipped, *sums)
        assert low.max(0)[head] > high.min(0)[head]


def test_every_element_off_by_the_sink_is_noticed() -> None:
    """A sign that the numerator does not have."""
    q, kv = random_bits(2, 1, 64), random_bits(8, 64)
    sums = formulas.attention_sums(q, kv, np.tile(np.arange(8), (2, 1)))
    out = to_bf16(sums[0] / (sums[1] + 1)[..., None])
    out[0, 0, 5] ^= 0x8000
    low, high = sink_bounds(out, *sums)
    assert low[0, 0] > high[0, 0]
    assert low[1, 0] <= high[1, 0]


def test_fp8_and_fp4_steps_of_literal_values() -> None:
    # amax 448 * 2^-4 gives the scale 2^-4 exactly; 28 and its neighbours lie on a grid of 2
    x = np.zeros(64)
    x[:5] = [28.0, 27.0, 25.0, 1.0, -0.03125]
    assert to_f64(formulas.fp8_round_trip(to_bf16(x)))[:5].tolist() == [
        28.0,
        28.0,
        24.0,
        1.0,
        -0.03125,
    ]
    y = np.zeros(32)
    y[:9] = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.3]
    expected = [6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, -0.5]
    assert to_f64(formulas.fp4_round_trip(to_bf16(y)))[:9].tolist() == expected


@pytest.mark.parametrize(
    ("step", "row", "expected"),
    [
        (Step("", 3, 0), 0, [0, -1, -1]),
        (Step("", 3, 0), 2, [0, 1, 2]),
        (Step("", 130, 0), 129, list(range(2, 130))),
        (Step("", 130, 0), 127, list(range(128))),
        (Step("decode.0.", 1, 3), 0, [0, 1, 2, 3] + [-1] * 124),
        (Step("decode.0.", 1, 127), 0, list(range(128))),
        (Step("decode.0.", 1, 130), 0, [*range(3, 128), 0, 1, 2]),
    ],
)
def test_window_part(step: Step, row: int, expected: list[int]) -> None:
    assert formulas.window_part(CONFIG, step)[row].tolist() == expected


def test_ties_of_scores_go_to_the_lowest_block() -> None:
    scores = np.array([[1.0, 3.0, 3.0, 0.0, 3.0]])
    assert formulas.top_blocks(scores, np.array([4]), 3, 100).tolist() == [[101, 102, 100]]
    assert formulas.top_blocks(scores, np.array([1]), 3, 100).tolist() == [[100, -1, -1]]


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 4.0, 12.0])
def test_sinkhorn_stays_within_its_residuals(sharpness: float) -> None:
    """Random logits, gentle to nearly permutations; a perturbed matrix of the gentle kind does
    not.
    """
    logits = RNG.standard_normal((200, 4, 4)) * sharpness
    eps, comb = 1e-6, np.exp(logits - logits.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + eps
    comb = comb / (comb.sum(1, keepdims=True) + eps)
    for _ in range(19):
        comb = comb / (comb.sum(2, keepdims=True) + eps)
        comb = comb / (comb.sum(1, keepdims=True) + eps)
    comb = comb.astype(np.float32).astype(np.float64)
    assert (np.abs(comb.sum(1) - 1).max(-1) <= column_residual(comb, eps)).all()
    assert (np.abs(comb.sum(2) - 1).max(-1) <= row_residual(comb, 20, eps)).all()
    if sharpness < 1:
        comb[:, 1, 2] *= 1.001
        assert (np.abs(comb.sum(1) - 1).max(-1) > column_residual(comb, eps)).all()
        assert (np.abs(comb.sum(2) - 1).max(-1) > row_residual(comb, 20, eps)).all()
