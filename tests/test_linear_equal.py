"""All backends of matrix products equal the readable one, bit for bit: codes, scales, shapes."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.quant_operands import FAST, READABLE, THERE, codes, fp4, fp8, generator, numerics, spread
from tests.quant_tables import all_bf16, same_bits
from v4tool.config import Numerics
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import (
    QuantizedWeight,
    StoredWeight,
    batched_linear_hi,
    dequantize,
    grouped_linear,
    linear_hi,
    q_linear,
)

pytestmark = pytest.mark.usefixtures("shared_out")

CODES = torch.arange(256).to(torch.uint8)
SCALES = [0, 1, 2, 3, 4, 126, 127, 128, 246, 247, 248, 253, 254, 255]
"""The ends, and on both sides of where BF16(element * scale) starts to differ from the product."""
NEG_ZERO_F32 = -(2**31)


@pytest.mark.parametrize("backend", FAST)
def test_every_byte_of_fp4_under_every_scale(backend: str) -> None:
    w = QuantizedWeight(
        CODES.repeat(256, 1), CODES.unsqueeze(-1).expand(256, 16).contiguous(), "fp4"
    )
    x = spread(generator(4), 3, 512).bfloat16()
    assert same_bits(q_linear(x, w, numerics(backend)), q_linear(x, w, READABLE))


def every_fp8_code(block: int = 128) -> QuantizedWeight:
    """For each scale of SCALES a block of rows; one half holds all codes and the other no NaN."""
    rows = torch.stack([CODES.roll(i) for i in range(block * len(SCALES))])
    rows[::2][rows[::2] & 0x7F == 0x7F] = 0x80
    scale = torch.tensor(SCALES).byte().repeat(256 // block, 1).T.contiguous()
    return QuantizedWeight(rows, scale, "fp8", block)


@pytest.mark.parametrize("block", [128, 32])
@pytest.mark.parametrize("backend", FAST)
def test_every_code_of_fp8_under_scales_of_all_kinds(backend: str, block: int) -> None:
    w, x = every_fp8_code(block), spread(generator(5), 3, 256).bfloat16()
    expected = q_linear(x, w, READABLE)
    assert expected.isnan().sum() == 3 * (block * len(SCALES) / 2 + block / 2)
    assert same_bits(q_linear(x, w, numerics(backend)), expected)


@pytest.mark.parametrize("backend", FAST)
def test_every_code_of_fp8_rounded_to_bf16(backend: str) -> None:
    w, x = every_fp8_code(), spread(generator(6), 3, 2, 256).bfloat16()
    assert same_bits(grouped_linear(x, w, numerics(backend)), grouped_linear(x, w, READABLE))


@pytest.mark.parametrize("backend", FAST)
def test_every_code_of_fp8_on_its_own(backend: str) -> None:
    """Ones in columns 0 and 128, where 128 rows have all codes: the weight itself, but no -0."""
    w, x = every_fp8_code(), torch.zeros(2, 256).bfloat16()
    w.codes[w.codes & 0x7F == 0x7F] = 0x7E  # or nothing but NaN would come out
    x[0, 0] = x[1, 128] = 1
    values = dequantize(w)[:, [0, 128]].T
    exact, rounded = to_bf16(values + 0.0), to_bf16(values) + 0.0
    # 246 is the last scale of which no code is rounded to infinity, whose product with 0 is NaN
    for product, last, expected in ((q_linear, 254, exact), (_ungrouped, 246, rounded)):
        some = torch.tensor(SCALES).repeat_interleave(128) <= last
        found = product(x, w, numerics(backend))
        assert same_bits(found[:, some], expected[:, some]), product
        assert found[:, -128:].isnan().all()


def _ungrouped(x: Tensor, w: QuantizedWeight, n: Numerics) -> Tensor:
    return grouped_linear(x.unsqueeze(1), w, n).squeeze(1)


def normal_codes(g: torch.Generator, n: int, k: int) -> Tensor:
    """E4M3 codes without zero, subnormal and NaN: the kernel widens these without its table."""
    return codes(g, n, k, low=0x08, high=0x7F) | codes(g, n, k, high=2) << 7


@pytest.mark.parametrize("backend", FAST)
def test_tiles_of_rows_across_two_scales(backend: str) -> None:
    g = generator(17)
    w = QuantizedWeight(normal_codes(g, 160, 128), torch.tensor([[120], [123]]).byte(), "fp8")
    x = spread(g, 3, 4, 128).bfloat16()
    assert same_bits(grouped_linear(x, w, numerics(backend)), grouped_linear(x, w, READABLE))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("code", [0x00, 0x80, 0x01, 0x87, 0x7F, 0xFF])
def test_one_zero_subnormal_or_nan_among_normal_codes(backend: str, code: int) -> None:
    g = generator(code)
    w = QuantizedWeight(normal_codes(g, 40, 200), torch.tensor([[120, 121]]).byte(), "fp8")
    x = spread(g, 3, 200).bfloat16()
    for row, column in [(0, 0), (13, 31), (15, 128), (17, 70), (39, 199)]:
        w.codes[row, column] = code
        x[0] = torch.arange(200) == column
        found = q_linear(x, w, numerics(backend))
        assert same_bits(found, q_linear(x, w, READABLE)), (row, column)
        alone = to_bf16(dequantize(w)[row, column] + 0.0)
        assert same_bits(found[0, row], alone), (row, column)
        w.codes[row, column] = 0x38


@pytest.mark.parametrize("backend", ["readable", *FAST])
@pytest.mark.parametrize(
    ("code", "scale", "value", "why"),
    [
        (0x38, 127, 1.0, "nothing to round"),
        (0x01, 0, 0.0, "2^-136 is less than half of the smallest value"),
        (0x0B, 2, 2.0**-131 + 2.0**-132, "11 * 2^-134 is a tie, to the even 12 * 2^-134"),
        (0x0B, 3, 11 * 2.0**-133, "the smallest scale under which nothing is rounded"),
        (0x7E, 246, 448 * 2.0**119, "the largest such scale"),
        (0x7E, 247, math.inf, "448 * 2^120 is beyond the largest value"),
    ],
)
def test_the_weight_of_wo_a_is_rounded_to_bf16_before_the_product(
    backend: str, code: int, scale: int, value: float, why: str
) -> None:
    w = QuantizedWeight(torch.full((16, 128), code).byte(), torch.tensor([[scale]]).byte(), "fp8")
    factor = 2.0**20 if scale < 127 else 2.0**-20
    found = grouped_linear(torch.full((2, 1, 128), factor).bfloat16(), w, numerics(backend))
    expected = torch.full((2, 1, 16), 128 * value * factor).bfloat16()
    assert same_bits(found, expected), why


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("columns", [64, 65])
def test_every_bf16_weight(backend: str, columns: int) -> None:
    w = torch.nn.functional.pad(all_bf16(), (0, -65536 % columns)).view(-1, columns)
    x = spread(generator(7), 2, columns).bfloat16()
    assert same_bits(linear_hi(x, w, numerics(backend)), linear_hi(x, w, READABLE))


@pytest.mark.parametrize("backend", FAST)
def test_f32_weights_at_the_ends_of_their_range(backend: str) -> None:
    g = generator(8)
    bits = torch.randint(-(2**31), 2**31, (70, 200), generator=g).to(torch.int32)
    bits[0], bits[1], bits[2] = 1, 0x7F7FFFFF, NEG_ZERO_F32
    x = spread(g, 4, 200, binades=100).bfloat16()
    w = bits.view(torch.float32)
    assert same_bits(linear_hi(x, w, numerics(backend)), linear_hi(x, w, READABLE))


SHAPES = [
    (1, 1, 2, "the smallest"),
    (1, 16, 128, "one tile of rows, one block of columns"),
    (2, 17, 130, "one more of each"),
    (4, 33, 96, "four rows of x are taken as two and two"),
    (5, 31, 640, "more columns than are decoded at a time in other designs"),
    (7, 200, 1000, "rows and columns that are a multiple of nothing"),
    (300, 40, 258, "many rows of x"),
    (385, 24, 64, "one more row of x than the kernel packs at a time"),
    (257, 24, 64, "one more than the fallback takes at a time"),
    (3, 300, 2112, "several tasks, a long row"),
]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("m", "n", "k", "why"), SHAPES)
def test_shapes(backend: str, m: int, n: int, k: int, why: str) -> None:
    g = generator(m)
    x = spread(g, m, k, binades=8).bfloat16()
    other = numerics(backend, threads=2)
    for block in (128, 32):
        for w in (fp4(g, n, k, (110, 140), block), fp8(g, n, k, (110, 140), block=block)):
            expected = q_linear(x, w, READABLE)
            assert same_bits(q_linear(x, w, other), expected), (w.kind, block, why)
    for plain in (spread(g, n, k).bfloat16(), spread(g, n, k).float()):
        assert same_bits(linear_hi(x, plain, other), linear_hi(x, plain, READABLE)), why
    for groups in (3, 4):  # what two threads share out: rows of each group, whole groups
        x_groups = torch.stack([x, x.flip(0), -x, x][:groups], dim=1)
        for block in (128, 32):
            w = fp8(g, groups * n, k, (110, 140), block=block)
            expected = grouped_linear(x_groups, w, READABLE)
            assert same_bits(grouped_linear(x_groups, w, other), expected), (block, why)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, int, tuple[int, int], bool, int]:
    m, n = draw(st.integers(1, 13)), draw(st.integers(1, 150))
    k = 2 * draw(st.integers(1, 330))
    low = draw(st.integers(0, 255))
    scales = (low, draw(st.integers(low + 1, 256)))
    binades = draw(st.sampled_from([0, 4, 20, 110]))
    return (
        draw(st.integers(0, 2**32)),
        m,
        n,
        k,
        binades,
        scales,
        draw(st.booleans()),
        draw(st.sampled_from([1, 2, 4])),
    )


@settings(max_examples=40, deadline=None)
@given(cases())
def test_any_quantised_product(
    case: tuple[int, int, int, int, int, tuple[int, int], bool, int],
) -> None:
    seed, m, n, k, binades, scales, nan, threads = case
    g = generator(seed)
    x = spread(g, m, k, binades=binades).bfloat16()
    x[torch.rand(m, k, generator=g) < 0.1] = -0.0
    four, eight = fp4(g, n, k, scales), fp8(g, n, k, scales, nan)
    groups = x.unsqueeze(1).expand(m, 2, k)
    wo_a = fp8(g, 2 * n, k, scales, nan)
    finer = fp4(g, n, k, scales, 32), fp8(g, n, k, scales, nan, 32)
    for backend in THERE:
        other = numerics(backend, threads)
        for w in finer:
            assert same_bits(q_linear(x, w, other), q_linear(x, w, READABLE)), (backend, w.kind)
        assert same_bits(q_linear(x, four, other), q_linear(x, four, READABLE)), backend
        assert same_bits(q_linear(x, eight, other), q_linear(x, eight, READABLE)), backend
        expected = grouped_linear(groups, wo_a, READABLE)
        assert same_bits(grouped_linear(groups, wo_a, other), expected), backend


@settings(max_examples=40, deadline=None)
@given(cases())
def test_any_product_with_a_weight_as_it_is(
    case: tuple[int, int, int, int, int, tuple[int, int], bool, int],
) -> None:
    seed, m, n, k, binades, _, nan, threads = case
    g = generator(seed)
    x, w = spread(g, m, k, binades=binades).bfloat16(), spread(g, n, k, binades=binades)
    if nan:
        x[0, 0], w[-1, -1] = math.inf, math.nan
    for backend in THERE:
        for weight in (w.bfloat16(), w.float()):
            found = linear_hi(x, weight, numerics(backend, threads))
            assert same_bits(found, linear_hi(x, weight, READABLE)), (backend, weight.dtype)


@pytest.mark.parametrize("backend", ["readable", *FAST])
@pytest.mark.parametrize(
    ("m", "n", "k", "why"),
    [
        (1, 1, 1, "the smallest"),
        (3, 16, 128, "one tile of rows, one block of columns"),
        (5, 17, 130, "one more of each"),
        (64, 100, 64, "columns that fill half of a block"),
        (2, 70, 300, "rows and columns that are a multiple of nothing"),
    ],
)
def test_batched_products(backend: str, m: int, n: int, k: int, why: str) -> None:
    """One weight for each x, in the layouts of keys (rows whole) and of values (columns whole)."""
    g = generator(m + n)
    x, w = spread(g, 4, m, k, binades=20).bfloat16(), spread(g, 4, n, k, binades=20).bfloat16()
    x[1, 0, -1], w[2, -1, 0], w[3, 0, 0] = math.nan, math.inf, -0.0
    expected = torch.stack([linear_hi(a, b, READABLE) for a, b in zip(x, w, strict=True)])
    assert expected.isnan().sum() >= n
    many = torch.zeros(4, k, n + 1).bfloat16()
    many[..., :n] = w.transpose(1, 2)
    layouts = {
        "rows": w,
        "columns": w.transpose(1, 2).contiguous().transpose(1, 2),
        "rows of more": torch.cat([w, w], dim=1)[:, :n],
        "columns of more rows": many[..., :n].transpose(1, 2),
        "products apart": torch.stack([w, w], dim=2).unbind(2)[0],
    }
    for name, weights in layouts.items():
        found = batched_linear_hi(x, weights, numerics(backend))
        assert same_bits(found, expected), (why, name)
    apart = torch.stack([x, x], dim=3).unbind(3)[0]
    assert same_bits(batched_linear_hi(apart, w, numerics(backend)), expected), why


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("n", [24, 32, 33])
def test_one_tile_of_weight_rows_for_many_rows_of_x(backend: str, n: int) -> None:
    """What hc_fn's products share out is x."""
    g = generator(n)
    x, w = spread(g, 129, 300, binades=20).bfloat16(), spread(g, n, 300).float()
    for threads in (1, 2, 3):
        found = linear_hi(x, w, numerics(backend, threads))
        assert same_bits(found, linear_hi(x, w, READABLE)), threads


@pytest.mark.parametrize("backend", FAST)
def test_sums_that_fp32_cannot_hold(backend: str) -> None:
    """The kernel sums FP4 products in FP32 where that is exact; here it is not.

    15 times 448 * 6, two products of 2^-10 that are lost in FP32 beside those, 15 times -448 * 6.
    """
    x = torch.tensor([448.0] * 15 + [2.0**-9] * 2 + [448.0] * 15).bfloat16()
    row = [0x77] * 7 + [0x17, 0xF1] + [0xFF] * 7
    w = QuantizedWeight(
        torch.tensor([row] * 40).byte(), torch.full((40, 1), 127, dtype=torch.uint8), "fp4"
    )
    rows = torch.stack([x, x, torch.ones_like(x), -x, x])
    found = q_linear(rows, w, numerics(backend))
    assert found[:, 0].tolist() == [2.0**-9, 2.0**-9, 1.0, -(2.0**-9), 2.0**-9]
    assert same_bits(found, q_linear(rows, w, READABLE))


@pytest.mark.parametrize("backend", FAST)
def test_results_are_never_minus_zero(backend: str) -> None:
    x, w = torch.full((2, 4), -0.0).bfloat16(), torch.ones(3, 4).bfloat16()
    for weight in (w, w.float()):
        out = linear_hi(x, weight, numerics(backend))
        assert out.view(torch.int64).tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(
    backend: str, threads: int
) -> None:
    g = generator(9)
    x, w = spread(g, 11, 520, binades=30).bfloat16(), fp4(g, 700, 520, (60, 190))
    alone = torch.cat([q_linear(row, w, numerics(backend)) for row in x.split(1)])
    assert same_bits(q_linear(x, w, numerics(backend, threads)), alone)
    plain = spread(g, 300, 520, binades=30).float()
    alone = torch.cat([linear_hi(row, plain, numerics(backend)) for row in x.split(1)])
    assert same_bits(linear_hi(x, plain, numerics(backend, threads)), alone)


@pytest.mark.parametrize("backend", ["readable", *FAST])
def test_leading_dimensions_and_layout_do_not_matter(backend: str) -> None:
    g, n = generator(10), numerics(backend)
    x = spread(g, 130, 2, 3).bfloat16().permute(1, 2, 0)
    w, plain = fp8(g, 20, 130, (120, 130)), spread(g, 130, 20).bfloat16().T
    assert q_linear(x, w, n).shape == linear_hi(x, plain, n).shape == (2, 3, 20)
    assert same_bits(q_linear(x[1, 2], w, n), q_linear(x, w, n)[1, 2])
    assert same_bits(linear_hi(x[1, 2], plain, n), linear_hi(x, plain, n)[1, 2])
    wo_a = fp8(g, 3 * 5, 130, (120, 130))
    assert grouped_linear(x, wo_a, n).shape == (2, 3, 5)
    assert same_bits(grouped_linear(x[1], wo_a, n), grouped_linear(x, wo_a, n)[1])


@pytest.mark.parametrize("backend", ["readable", *FAST])
def test_no_rows_give_no_rows(backend: str) -> None:
    g, n = generator(11), numerics(backend)
    none = torch.empty(0, 128).bfloat16()
    assert q_linear(none, fp4(g, 20, 128, (120, 130)), n).shape == (0, 20)
    assert linear_hi(none, torch.ones(5, 128), n).shape == (0, 5)
    assert grouped_linear(none.view(0, 1, 128), fp8(g, 20, 128, (120, 130)), n).shape == (0, 1, 20)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 600, 4096), (40, 700, 1024), (400, 200, 256)])
def test_a_weight_in_a_file_is_read_once(
    backend: str, m: int, n: int, k: int, threads: int
) -> None:
    """Rows in pieces into a buffer that the next piece overwrites: each of them once."""
    g = generator(17)
    for w in (fp4(g, n, k, (118, 124)), fp8(g, n, k, (118, 124))):
        read: list[tuple[int, int]] = []
        buffers = threading.local()

        def rows(start: int, stop: int, w=w, read=read, buffers=buffers) -> Tensor:
            read.append((start, stop))
            if not hasattr(buffers, "held"):
                buffers.held = torch.empty_like(w.codes)
            buffers.held.fill_(0x7F)
            part = buffers.held[: stop - start]
            return part.copy_(w.codes[start:stop])

        stored = StoredWeight(w.shape, w.scale, w.kind, rows)
        x = spread(g, m, k).bfloat16()
        assert same_bits(q_linear(x, stored, numerics(backend, threads)), q_linear(x, w, READABLE))
        ends = sorted(read)
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
        assert ends[-1][1] == n
