"""Activation quantisation, Hadamard rotation and rounding to BF16 (SPEC 3 to 5)."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.quant_tables import QUANT_TABLES, all_bf16, same_bits
from v4tool.quant.activation import (
    act_quant,
    act_quant_inplace,
    fp4_act_quant,
    fp4_scale,
    fp8_scale,
    hadamard,
    to_bf16,
)
from v4tool.quant.formats import E2M1, E4M3, E8M0, e2m1_encode, e4m3_encode

Encode = Callable[[Tensor], Tensor]

NEG_ZERO = 0x8000 - 65536


def bf16(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("scale", "table"), [(fp8_scale, "scale_e8m0_fp8"), (fp4_scale, "scale_e8m0_fp4")]
)
def test_every_finite_amax_has_the_golden_scale(scale: Encode, table: str) -> None:
    amax = QUANT_TABLES["bf16_bits"].view(torch.bfloat16).float()
    assert len(amax) == 32640
    assert torch.equal(scale(amax), QUANT_TABLES[table])


@pytest.mark.parametrize(
    ("amax", "fp8", "fp4", "why"),
    [
        (0.0, 105, 1, "the floors: 1e-4 and 6 * 2^-126"),
        (2.0**-133, 105, 1, "the smallest subnormal BF16 value"),
        (448.0, 127, 134, "the largest E4M3 value needs no scale"),
        (450.0, 128, 134, "the next BF16 value above it does"),
        (6.0, 121, 127, "the largest E2M1 value needs no scale"),
        (2.0**127 * (2 - 2.0**-7), 247, 253, "the largest finite BF16 value"),
        (math.inf, 255, 255, "no scale makes an infinity finite"),
        (math.nan, 255, 255, "NaN stays NaN"),
    ],
)
def test_smallest_and_largest_scales(amax: float, fp8: int, fp4: int, why: str) -> None:
    x = torch.tensor([amax], dtype=torch.float32)
    assert fp8_scale(x).item() == fp8, why
    assert fp4_scale(x).item() == fp4, why


def test_every_bf16_value_has_the_golden_code_under_scale_one() -> None:
    values = QUANT_TABLES["all_bf16_bits"].view(torch.bfloat16)
    inside = values.isfinite() & (values.abs() <= 448)
    blocks = torch.stack([values[inside], torch.full_like(values[inside], 448)], dim=-1)
    codes, scale = act_quant(blocks, block=2)
    assert (scale == 127).all()
    assert (codes[:, 1] == 0x7E).all()
    assert torch.equal(codes[:, 0], QUANT_TABLES["fp8_code"][inside])


def _every_scale() -> Tensor:
    """For each scale of FP4 blocks one block: its largest value, then values below that."""
    magnitudes = all_bf16()[:0x7F80]
    scales = fp4_scale(magnitudes.float()).int()
    last = torch.tensor([int((scales == s).nonzero().max()) for s in range(1, 254)])
    index = (last[:, None] - torch.arange(0, 1400, 1)).clamp(min=0)
    signs = torch.where(torch.arange(1400) % 3 == 1, -1.0, 1.0).bfloat16()
    blocks: Tensor = magnitudes[index] * signs
    return blocks


def _reference(x: Tensor, scale: Tensor, encode: Encode, values: Tensor) -> Tensor:
    """SPEC 3 word for word: BF16(q * scale), one block a row."""
    factor = E8M0.double()[scale.int()].unsqueeze(-1)
    return to_bf16(values.double()[encode(x.double() / factor).int()] * factor)


def test_fp4_rounds_as_spec_3_at_every_scale() -> None:
    blocks = _every_scale()
    scale = fp4_scale(blocks.abs().amax(-1).float())
    assert scale.tolist() == list(range(1, 254))
    expected = _reference(blocks, scale, e2m1_encode, E2M1)
    assert same_bits(fp4_act_quant(blocks, blocks.shape[1]), expected)


def test_fp8_rounds_as_spec_3_at_every_scale() -> None:
    blocks = _every_scale()
    scale = fp8_scale(blocks.abs().amax(-1).float())
    assert set(scale.tolist()) == set(range(105, 248))
    expected = _reference(blocks, scale, e4m3_encode, E4M3)
    assert same_bits(act_quant_inplace(blocks, blocks.shape[1]), expected)
    codes, found = act_quant(blocks, blocks.shape[1])
    assert torch.equal(found.squeeze(-1), scale)
    factor = E8M0.double()[scale.int()].unsqueeze(-1)
    assert torch.equal(codes, e4m3_encode(blocks.double() / factor))


def test_every_block_has_its_own_scale_and_the_last_may_be_short() -> None:
    x = bf16(*[1.0] * 4, *[448.0] * 4, 0.25, -0.0)
    codes, scale = act_quant(x, block=4)
    assert scale.tolist() == [119, 127, 117]
    assert codes.tolist() == [0x78] * 4 + [0x7E] * 4 + [0x78, 0x80]


def test_leading_dimensions_and_layout_do_not_matter() -> None:
    x = torch.randn(3, 256, 5).bfloat16().transpose(1, 2)
    codes, scale = act_quant(x)
    assert codes.shape == (3, 5, 256)
    assert scale.shape == (3, 5, 2)
    row, row_scale = act_quant(x[1, 2])
    assert torch.equal(codes[1, 2], row)
    assert torch.equal(scale[1, 2], row_scale)


def test_a_block_of_zeros_keeps_its_signs() -> None:
    x = bf16(0.0, -0.0)
    assert act_quant(x, 2)[0].tolist() == [0, 0x80]
    assert act_quant_inplace(x, 2).view(torch.int16).tolist() == [0, NEG_ZERO]
    assert fp4_act_quant(x, 2).view(torch.int16).tolist() == [0, NEG_ZERO]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_nan_or_infinity_has_scale_nan(bad: float) -> None:
    x = torch.cat([bf16(1.0, bad), bf16(1.0, 2.0)])
    assert act_quant(x, 2)[1].tolist() == [255, 120]
    assert act_quant_inplace(x, 2).isnan().tolist() == [True, True, False, False]
    assert fp4_act_quant(x, 2).isnan().tolist() == [True, True, False, False]


def test_in_place_leaves_its_argument_as_it_is() -> None:
    x = torch.randn(64).bfloat16()
    before = x.clone()
    act_quant_inplace(x, 64)
    fp4_act_quant(x)
    assert same_bits(x, before)


def sylvester(n: int) -> Tensor:
    """The natural-order matrix by its definition: the sign is the parity of the common bits."""
    i = torch.arange(n)
    common = (i[:, None] & i).tolist()
    return torch.tensor([[(-1.0) ** c.bit_count() for c in row] for row in common]).double()


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard_is_the_sylvester_matrix_over_the_root_of_n(n: int) -> None:
    x = torch.randint(-255, 256, (7, 3, n)).bfloat16()  # integers, so that every sum is exact
    expected = to_bf16((x.double() @ sylvester(n)) * n**-0.5)
    assert same_bits(hadamard(x), expected)


def test_hadamard_of_many_rows_is_that_of_each() -> None:
    x = torch.randn(700, 128).bfloat16()
    rows = torch.stack([hadamard(x[i]) for i in (0, 255, 256, 699)])
    assert same_bits(hadamard(x)[[0, 255, 256, 699]], rows)
    assert hadamard(x[:0]).shape == (0, 128)


def test_hadamard_in_fp32_is_close_to_that_in_binary64() -> None:
    x = torch.randn(50, 128).bfloat16()
    wide, narrow = hadamard(x).float(), hadamard(x, torch.float32).float()
    # both are BF16, whose neighbours differ by at most 2^-7 of their value
    torch.testing.assert_close(narrow, wide, rtol=2.0**-7, atol=1e-6)


def test_hadamard_refuses_other_lengths() -> None:
    with pytest.raises(ValueError, match="power of two, not 96"):
        hadamard(torch.zeros(96).bfloat16())


@pytest.mark.parametrize(
    ("value", "bits", "why"),
    [
        (1 + 2.0**-8, 0x3F80, "a tie goes to the even neighbour"),
        (1 + 3 * 2.0**-8, 0x3F82, "the same, upwards"),
        (1 + 2.0**-8 + 2.0**-23, 0x3F81, "above the tie in FP32"),
        (1 + 2.0**-8 + 2.0**-30, 0x3F80, "above the tie, but not in FP32: rounded twice"),
        (2.0**-133, 0x0001, "the smallest subnormal"),
        (2.0**-134, 0x0000, "half of it is a tie to zero"),
        (-(2.0**-200), NEG_ZERO, "underflow keeps the sign"),
        (3.4e38, 0x7F80, "beyond the largest BF16 value but not beyond FP32"),
        (1e300, 0x7F80, "overflow in FP32"),
    ],
)
def test_to_bf16_rounds_to_fp32_first(value: float, bits: int, why: str) -> None:
    assert to_bf16(torch.tensor([value]).double()).view(torch.int16).item() == bits, why


@pytest.mark.parametrize("length", [1, 7, 8, 33])
def test_every_nan_becomes_the_same(length: int) -> None:
    nans = torch.full((length,), math.nan, dtype=torch.float64)
    assert to_bf16(nans).view(torch.int16).tolist() == [0x7FC0] * length
    assert to_bf16(-nans).view(torch.int16).tolist() == [0x7FC0] * length


@given(st.floats(allow_nan=False), st.integers(0, 40))
def test_to_bf16_does_not_depend_on_the_position(value: float, at: int) -> None:
    x = torch.zeros(41, dtype=torch.float64)
    x[at] = value
    assert same_bits(to_bf16(x)[at], to_bf16(torch.tensor(value, dtype=torch.float64)))
