"""Matrix products: the definition in plain Python, choice of a backend, refused arguments."""

import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.quant_operands import FAST, READABLE, fp4, fp8, generator, needs_kernel, numerics, spread
from tests.quant_tables import same_bits
from v4tool.config import Numerics
from v4tool.errors import V4ToolError
from v4tool.quant import _readable_product as readable
from v4tool.quant.activation import act_quant, to_bf16
from v4tool.quant.formats import E4M3, E8M0
from v4tool.quant.linear import (
    QuantizedWeight,
    backend_in_use,
    dequantize,
    grouped_linear,
    linear_hi,
    q_linear,
)


def by_definition(x: Tensor, w: Tensor, group: int) -> Tensor:
    """The module's rule in plain Python, element by element; binary64 [M, K], [N, K] -> [M, N]."""

    def element(a: list[float], b: list[float]) -> float:
        acc = 0.0
        for start in range(0, len(a), group):
            g = 0.0
            for p, q in zip(a[start : start + group], b[start : start + group], strict=True):
                g += p * q
            acc += g
        return acc

    sums = [[element(a, b) for b in w.tolist()] for a in x.tolist()]
    return torch.tensor(sums, dtype=torch.float64)


@pytest.mark.parametrize(("group", "binades"), [(32, 0), (128, 0), (32, 40), (128, 40)])
def test_the_readable_product_is_the_definition(group: int, binades: int) -> None:
    g = generator(group + binades)
    x, w = spread(g, 3, 300, binades=binades), spread(g, 5, 300, binades=binades)
    x, w = x.bfloat16().double(), w.float().double()
    assert same_bits(readable.product(x, w, group), by_definition(x, w, group))


def test_the_operands_depend_on_the_order_of_summation() -> None:
    """If rounding never happened in the tests below, equality of all ways would say nothing."""
    g = generator(1)
    x, w = spread(g, 3, 300, binades=40), spread(g, 5, 300, binades=40)
    assert not same_bits(readable.product(x, w, 128), readable.product(x, w, 32))
    assert not same_bits(readable.product(x, w, 128), x @ w.T)


def _sum_of(terms: dict[int, float], kind: str, n: Numerics) -> float:
    """A product of ones with a weight [1, 512] of +-1 or +-2^60 at some k, otherwise 0.

    At most one magnitude in each group, for a quantised one has one scale.
    """
    ones, values = torch.ones(1, 512).bfloat16(), torch.zeros(512)
    for k, value in terms.items():
        values[k] = value
    if kind == "bf16":
        return linear_hi(ones, values.bfloat16().unsqueeze(0), n).item()
    codes = torch.where(values > 0, 2 if kind == "fp4" else 0x38, 0)
    codes += torch.where(values < 0, 10 if kind == "fp4" else 0xB8, 0)
    largest = values.abs().view(1, -1, 32 if kind == "fp4" else 128).amax(-1)
    scale = torch.where(largest > 1, 127 + 60, 127).byte()
    packed = codes[0::2] | codes[1::2] << 4 if kind == "fp4" else codes
    w = QuantizedWeight(packed.byte().unsqueeze(0), scale, "fp4" if kind == "fp4" else "fp8")
    return q_linear(ones, w, n).item()


@pytest.mark.parametrize("backend", ["readable", *FAST])
@pytest.mark.parametrize(("kind", "group"), [("fp4", 32), ("fp8", 128), ("bf16", 128)])
def test_the_groups_are_these_and_are_added_in_order(backend: str, kind: str, group: int) -> None:
    big, n = 2.0**60, numerics(backend)
    apart = {0: 1.0, 128: big, 128 + group: -big}
    assert _sum_of(apart, kind, n) == 0.0, "the 1 joins 2^60 before that is taken away"
    together = {0: 1.0, 128: big, 128 + group - 1: -big}
    assert _sum_of(together, kind, n) == 1.0, "a group is summed before it joins the 1"
    last = {0: big, group: -big, 128 + group: 1.0}
    assert _sum_of(last, kind, n) == 1.0, "the 1 comes last"


def test_a_quantised_product_is_the_correctly_rounded_sum_of_its_exact_products() -> None:
    g = generator(2)
    x, w = spread(g, 2, 128).bfloat16(), fp8(g, 7, 128, (120, 130))
    q, scale = act_quant(x)
    exact_x = [[Fraction(v.item()) for v in row] for row in E4M3[q.int()] * E8M0[scale.int()]]
    exact_w = [[Fraction(v.item()) for v in row] for row in dequantize(w)]
    sums = [[float(sum(map(Fraction.__mul__, a, b))) for b in exact_w] for a in exact_x]
    expected = to_bf16(torch.tensor(sums, dtype=torch.float64))
    assert same_bits(q_linear(x, w, READABLE), expected)


@pytest.mark.parametrize("backend", ["readable", *FAST])
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_blocks_of_32_quantise_x_and_the_weight_in_32(backend: str, kind: str) -> None:
    """Small values survive in the one group of 32 that has no large value beside them.

    The weight is 0 where x is large and 1 elsewhere; in blocks of 128 all small values are lost.
    """
    x = torch.full((1, 128), 2.0**-20).bfloat16()
    x[0, [0, 64, 96]] = 1024.0
    one = 0x38 if kind == "fp8" else 0x02
    codes = torch.where(x[0] > 1, 0, one)
    packed = codes if kind == "fp8" else codes[0::2] | codes[1::2] << 4
    scale = torch.full((1, 4), 127).byte()
    w = QuantizedWeight(packed.byte().unsqueeze(0), scale, "fp8" if kind == "fp8" else "fp4", 32)
    assert q_linear(x, w, numerics(backend)).item() == 32 * 2.0**-20
    coarse = scale[:, :1] if kind == "fp8" else scale
    w = replace(w, scale=coarse, block=128)
    assert q_linear(x, w, numerics(backend)).item() == 0.0


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_dequantised_values_are_element_times_scale(kind: str) -> None:
    g = generator(3)
    w = fp4(g, 130, 96, (0, 255)) if kind == "fp4" else fp8(g, 130, 300, (0, 255))
    values = dequantize(w)
    for row, column in [(0, 0), (127, 95), (128, 1), (129, 64)]:
        if kind == "fp4":
            code = int(w.codes[row, column // 2]) >> 4 * (column % 2) & 15
            element = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * (-1 if code & 8 else 1)
            scale = int(w.scale[row, column // 32])
        else:
            element = E4M3[int(w.codes[row, column])].item()
            scale = int(w.scale[row // 128, column // 128])
        assert values[row, column].item() == math.ldexp(element, scale - 127), (row, column)


# ---- choice and refusals -------------------------------------------------------------------------


def test_the_backend_in_use_is_the_one_asked_for() -> None:
    assert backend_in_use(numerics("readable")) == "readable"
    assert backend_in_use(numerics("numpy")) == "numpy"


@needs_kernel
def test_the_kernel_is_used_where_it_is_built() -> None:
    assert backend_in_use(Numerics()) == backend_in_use(numerics("c")) == "c"


WITHOUT_KERNEL = """
import sys
sys.modules["v4tool.quant._kernel"] = None  # importing it now fails as if it were not there
from v4tool.config import Numerics
from v4tool.errors import V4ToolError
from v4tool.quant.linear import backend_in_use
print(backend_in_use(Numerics()))
try:
    backend_in_use(Numerics(backend="c"))
except V4ToolError as error:
    print(error)
"""


def test_without_the_kernel_numpy_is_used_and_c_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNEL], capture_output=True, text=True, check=True
    )
    used, refusal = done.stdout.splitlines()
    assert used == "numpy"
    assert refusal.startswith("backend: c expected, but the C kernel is not installed")


def test_a_kernel_of_another_version_is_not_used() -> None:
    stale = """
import sys, types
sys.modules["v4tool.quant._kernel"] = types.ModuleType("_kernel")
from v4tool.config import Numerics
from v4tool.quant.linear import backend_in_use, extension_problem
print(backend_in_use(Numerics()), extension_problem())
"""
    done = subprocess.run([sys.executable, "-c", stale], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "numpy it was built from the source of another version; install v4tool again\n"
    )


def test_float32_needs_the_readable_backend() -> None:
    assert backend_in_use(Numerics(accumulate="float32")) == "readable"
    for backend in ("numpy", "c"):
        asked = Numerics.model_validate({"accumulate": "float32", "backend": backend})
        with pytest.raises(V4ToolError, match=f"float32 needs readable or auto, found {backend}"):
            backend_in_use(asked)


def test_fp32_stays_close_to_binary64() -> None:
    g, fp32 = generator(14), Numerics(accumulate="float32")
    x, w = spread(g, 6, 2, 512).bfloat16(), fp8(g, 40, 512, (110, 113))
    # a BF16 result may land on the neighbouring value, 2^-7 of it away
    for product in (q_linear, grouped_linear):
        narrow, wide = product(x, w, fp32), product(x, w, READABLE)
        torch.testing.assert_close(narrow, wide, rtol=2.0**-7, atol=1e-3)
    plain = spread(g, 40, 512).float()
    out = linear_hi(x, plain, fp32)
    assert out.dtype == torch.float32
    # 512 terms of about 1, each rounded to 24 bits
    torch.testing.assert_close(out.double(), linear_hi(x, plain, READABLE), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("codes_shape", "scale_shape", "kind", "wanted"),
    [
        ((130, 256), (1, 2), "fp8", r"\(2, 2\)"),
        ((128, 256), (2, 1), "fp8", r"\(1, 2\)"),
        ((4, 32), (4, 1), "fp4", r"\(4, 2\)"),
        ((4, 32), (1, 2), "fp4", r"\(4, 2\)"),
    ],
)
def test_a_scale_of_another_shape_is_refused(
    codes_shape: tuple[int, int], scale_shape: tuple[int, int], kind: str, wanted: str
) -> None:
    with pytest.raises(ValueError, match=f"{wanted} expected"):
        QuantizedWeight(
            torch.zeros(codes_shape).byte(),
            torch.zeros(scale_shape).byte(),
            kind,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(("kind", "start", "stop"), [("fp4", 5, 200), ("fp8", 128, 200)])
def test_rows_of_a_weight_give_the_same_rows_of_the_product(
    kind: str, start: int, stop: int
) -> None:
    g = generator(15)
    x = spread(g, 3, 256).bfloat16()
    w = fp4(g, 300, 256, (110, 140)) if kind == "fp4" else fp8(g, 300, 256, (110, 140))
    some = q_linear(x, w.rows(start, stop), Numerics())
    assert same_bits(some, q_linear(x, w, Numerics())[:, start:stop])


def test_fp8_rows_are_cut_at_the_blocks_of_their_scales() -> None:
    with pytest.raises(ValueError, match="multiples of 128 rows only, not at 5"):
        fp8(generator(16), 300, 128, (110, 140)).rows(5, 300)
