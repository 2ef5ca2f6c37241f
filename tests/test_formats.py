"""The number formats, over all of their codes and the golden tables, bit for bit (SPEC 2, 3)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.quant_tables import QUANT_TABLES, same_bits
from v4tool.quant.formats import E2M1, E4M3, E8M0, e2m1_encode, e4m3_encode, look_up, unpack_fp4

Encode = Callable[[Tensor], Tensor]

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAN_CODES = [0x7F, 0xFF]


def e4m3_by_definition(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return math.copysign(magnitude, -1 if code & 0x80 else 1)


def test_e2m1_has_the_values_of_spec_2() -> None:
    expected = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert same_bits(E2M1, torch.tensor(expected))


def test_e4m3_has_the_values_of_its_definition_and_two_nans() -> None:
    for code in range(256):
        if code in NAN_CODES:
            assert math.isnan(E4M3[code])
        else:
            expected = torch.tensor(e4m3_by_definition(code))
            assert same_bits(E4M3[code], expected), hex(code)


def test_e4m3_agrees_with_torchs_decoding() -> None:
    codes = torch.arange(256).to(torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    number = ~theirs.isnan()
    assert same_bits(E4M3[number], theirs[number])
    assert number.sum() == 254


def test_e8m0_is_a_power_of_two_for_every_code_but_the_last() -> None:
    for code in range(255):
        assert E8M0[code].item() == math.ldexp(1.0, code - 127), code
    assert math.isnan(E8M0[255])


@pytest.mark.parametrize(
    ("byte", "codes", "why"),
    [
        (0x21, [1, 2], "the low nibble is the even element"),
        (0x00, [0, 0], "zeros"),
        (0xF8, [8, 15], "-0 and -6"),
    ],
)
def test_bytes_are_unpacked_low_nibble_first(byte: int, codes: list[int], why: str) -> None:
    assert unpack_fp4(torch.tensor([[byte]], dtype=torch.uint8)).tolist() == [codes], why


def test_unpacking_keeps_all_dimensions_but_the_last() -> None:
    packed = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    codes = unpack_fp4(packed)
    assert codes.shape == (2, 3, 8)
    assert torch.equal(codes[..., 0::2] | codes[..., 1::2] << 4, packed)


def test_every_e4m3_code_survives_a_round_trip() -> None:
    numbers = [code for code in range(256) if code not in NAN_CODES]
    assert e4m3_encode(E4M3[numbers]).tolist() == numbers


def test_every_e2m1_code_survives_a_round_trip() -> None:
    assert e2m1_encode(E2M1).tolist() == list(range(16))


@pytest.mark.parametrize(
    ("table", "encode"), [("fp8_code", e4m3_encode), ("fp4_code", e2m1_encode)]
)
def test_every_finite_bf16_value_has_the_golden_code(table: str, encode: Encode) -> None:
    values = QUANT_TABLES["all_bf16_bits"].view(torch.bfloat16)
    finite = values.isfinite()
    assert finite.sum() == 65280
    assert torch.equal(encode(values[finite]), QUANT_TABLES[table][finite])


def _between(values: Tensor) -> list[tuple[float, int, int]]:
    """The middle of every two neighbours among codes 0, 1, 2, ... with both codes."""
    pairs = zip(values.tolist(), values[1:].tolist(), strict=False)
    return [((a + b) / 2, i, i + 1) for i, (a, b) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("values", "encode", "sign"),
    [(E4M3[:0x7F], e4m3_encode, 0x80), (E2M1[:8], e2m1_encode, 8)],
    ids=["e4m3", "e2m1"],
)
def test_ties_go_to_the_even_code_and_their_neighbours_do_not(
    values: Tensor, encode: Encode, sign: int
) -> None:
    for middle, low, high in _between(values):
        even = low if low % 2 == 0 else high
        tie = torch.tensor([middle, -middle], dtype=torch.float64)
        assert encode(tie).tolist() == [even, even | sign], middle
        below, above = math.nextafter(middle, 0), math.nextafter(middle, math.inf)
        around = torch.tensor([below, above], dtype=torch.float64)
        assert encode(around).tolist() == [low, high], middle


@pytest.mark.parametrize(
    ("value", "e4m3", "e2m1", "why"),
    [
        (0.0, 0x00, 0, "zero"),
        (-0.0, 0x80, 8, "minus zero keeps its sign"),
        (1e-30, 0x00, 0, "far below the grid"),
        (-1e-30, 0x80, 8, "far below the grid, negative"),
        (448.0, 0x7E, 7, "the largest E4M3 value"),
        (1e30, 0x7E, 7, "clamped, never NaN"),
        (-1e30, 0xFE, 15, "clamped, negative"),
        (math.inf, 0x7E, 7, "clamped"),
    ],
)
def test_encoding_at_the_ends(value: float, e4m3: int, e2m1: int, why: str) -> None:
    x = torch.tensor([value])
    assert e4m3_encode(x).item() == e4m3, why
    assert e2m1_encode(x).item() == e2m1, why


def test_nan_is_encoded_as_nan_of_its_sign() -> None:
    nans = torch.tensor([math.nan, -math.nan])
    assert e4m3_encode(nans).tolist() == NAN_CODES


def test_look_up_takes_codes_of_any_shape() -> None:
    codes = torch.tensor([[0, 255], [128, 1]], dtype=torch.uint8)
    assert look_up(torch.arange(256), codes).tolist() == [[0, 255], [128, 1]]
