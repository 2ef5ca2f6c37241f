"""Tests of the port's kernels against independent formulas, without a checkpoint (`check --port`).

Number formats, activation quantisation, Hadamard transform, rotary embedding, Sinkhorn iteration,
sparse attention and matrix products (SPEC sections 2 to 5). Results are compared bit for bit; where
a formula sums or rounds in another order, a comment gives the bound. Left out: how the model calls
the kernels, which the golden recordings test.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from v4tool.check.bits import F64, Bits, Ints, equal_values, ordinals, to_bf16, to_f64
from v4tool.check.formulas import attention_sums, fp4_round_trip, fp8_round_trip, hadamard
from v4tool.check.value_rules import column_residual, row_residual
from v4tool.check.weight_values import to_bits
from v4tool.config import Numerics
from v4tool.model.attention import sparse_attn
from v4tool.model.hyper import sinkhorn
from v4tool.model.layers import rotate
from v4tool.quant import activation, formats
from v4tool.quant.linear import (
    QuantizedWeight,
    backend_in_use,
    dequantize,
    grouped_linear,
    linear_hi,
    q_linear,
)


class CheckFailed(Exception):
    """A check of the port failed; the message says what differs."""


def require_equal(found: Bits, expected: Bits, what: str) -> None:
    """Raise `CheckFailed` unless BF16 values are equal (+0 equals -0); what: for the message."""
    wrong = np.flatnonzero(~equal_values(found, expected).reshape(-1))
    if wrong.size:
        i = int(wrong[0])
        pair = f"{to_f64(found).reshape(-1)[i]!r}, expected {to_f64(expected).reshape(-1)[i]!r}"
        raise CheckFailed(f"{what}: {wrong.size} of {found.size} values differ, first {pair}")


def require(condition: bool, what: str) -> None:
    """Raise `CheckFailed` unless the condition holds."""
    if not condition:
        raise CheckFailed(what)


def random_bf16(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    """BF16 values with magnitudes over several powers of two, the same on every machine."""
    generator = np.random.Generator(np.random.PCG64(seed))
    values = generator.integers(-(2**16), 2**16, shape) / 2.0**15
    scales = np.ldexp(1.0, generator.integers(-3, 4, (*shape[:-1], 1)) * int(spread))
    return torch.from_numpy(values * scales).to(torch.bfloat16)


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """The exact value of a floating-point code without its sign bit, by the format's definition."""
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    assert exponent < 1 << exponent_bits
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


def codes(numerics: Numerics) -> str:
    """Decoding of all codes of E2M1, E4M3 and E8M0, and of all bytes that pack two E2M1 codes."""
    for code in range(8):
        value = float(minifloat(code, 2, 1, 1))
        require(formats.E2M1[code].item() == value, f"E2M1 code {code} is not {value}")
        require(formats.E2M1[code + 8].item() == -value, f"E2M1 code {code + 8} is not {-value}")
    for code in range(127):
        value = float(minifloat(code, 4, 3, 7))
        require(formats.E4M3[code].item() == value, f"E4M3 code {code} is not {value}")
        require(
            formats.E4M3[code + 128].item() == -value, f"E4M3 code {code + 128} is not {-value}"
        )
    require(bool(formats.E4M3[[127, 255]].isnan().all()), "E4M3 codes 127 and 255 are not NaN")
    for code in range(255):
        require(formats.E8M0[code].item() == math.ldexp(1, code - 127), f"E8M0 code {code}")
    require(math.isnan(formats.E8M0[255].item()), "E8M0 code 255 is not NaN")
    both = formats.unpack_fp4(torch.arange(256, dtype=torch.uint8)).reshape(256, 2)
    expected = [[byte % 16, byte // 16] for byte in range(256)]
    require(both.tolist() == expected, "the low nibble is not the even element")
    return "16 E2M1, 256 E4M3, 256 E8M0 codes and 256 packed bytes"


def scales(numerics: Numerics) -> str:
    """The scale of every finite BF16 amax; the E4M3 and E2M1 code of every finite BF16 value."""
    amax = to_f64(np.arange(0x7F80, dtype=np.uint16))
    for name, scale, floor, largest in (
        ("FP8", activation.fp8_scale, 1e-4, 448.0),
        ("FP4", activation.fp4_scale, 6 * 2.0**-126, 6.0),
    ):
        found = scale(torch.from_numpy(amax.astype(np.float32))).numpy()
        product = np.maximum(amax.astype(np.float32), np.float32(floor)) * np.float32(1 / largest)
        # the port takes the exponent from the bits; here it comes from a search in all powers of 2
        powers = np.ldexp(1.0, np.arange(-127, 128))
        expected = np.searchsorted(powers, product.astype(np.float64))
        wrong = np.flatnonzero(found != expected)
        require(not wrong.size, f"{name} scale of amax {amax[wrong[:1]]}: {wrong.size} differ")
    every = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    finite = every[every.isfinite()]
    _nearest("E4M3", formats.e4m3_encode(finite).numpy(), finite, formats.E4M3, 0x80, 127)
    _nearest("E2M1", formats.e2m1_encode(finite).numpy(), finite, formats.E2M1, 0x08, 8)
    return f"2 x {amax.size} scales, 2 x {finite.numel()} codes"


def _nearest(
    name: str,
    found: npt.NDArray[np.uint8],
    values: Tensor,
    table: Tensor,
    sign: int,
    count: int,
) -> None:
    """Require that each code is the nearest value of a table, found by bisection of midpoints.

    table: values of the codes; sign: the sign bit; count: number of codes from 0 up.
    """
    grid = table[:count].double().numpy()
    middles = (grid[1:] + grid[:-1]) / 2
    size = np.abs(values.double().numpy())
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    code = np.where(below == above, below, below + below % 2)
    expected = code + np.where(torch.signbit(values).numpy(), sign, 0)
    wrong = np.flatnonzero(found != expected)
    require(not wrong.size, f"{name} code of {values[wrong[:1]].tolist()}: {wrong.size} differ")


def quantisation(numerics: Numerics) -> str:
    """Activation quantisation to FP8 and FP4 and back against `formulas`, in binary64."""
    x = random_bf16(64, 256, seed=1)
    x[0], x[1] = 0, x[1] * 1e-30
    require_equal(
        to_bits(activation.act_quant_inplace(x, 64)), fp8_round_trip(to_bits(x)), "FP8 steps"
    )
    require_equal(to_bits(activation.fp4_act_quant(x, 32)), fp4_round_trip(to_bits(x)), "FP4 steps")
    return f"{2 * x.numel()} values"


def orthogonal(numerics: Numerics) -> str:
    """Hadamard transform of unit vectors: entries +-1 / sqrt(n), symmetric, orthogonal."""
    n = 128
    rows = activation.hadamard(torch.eye(n, dtype=torch.bfloat16), numerics.acc).double()
    step = float(torch.tensor(n**-0.5).bfloat16())
    require(bool((rows.abs() == step).all()), f"entries other than +-{step}")
    signs = rows / step
    product = signs @ signs.T
    require(torch.equal(product, n * torch.eye(n, dtype=torch.float64)), "rows are not orthogonal")
    require(torch.equal(signs, signs.T), "the matrix is not symmetric")
    require(signs[1, :2].tolist() == [1, -1], "not the natural order")
    x = random_bf16(32, n, seed=2)
    require_equal(to_bits(activation.hadamard(x, numerics.acc)), hadamard(to_bits(x)), "Hadamard")
    return f"order {n}"


def rotation(numerics: Numerics) -> str:
    """Rotary embedding and its inverse against multiplication of complex128 numbers."""
    n, width = 32, 64
    x = random_bf16(n, 3, 128, seed=3)
    angles = np.arange(n)[:, None] * 0.37 ** np.arange(width // 2)
    cos, sin = (f(angles).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    for inverse in (False, True):
        values = to_f64(to_bits(x))[..., -width:]
        phase = (cos + 1j * sin)[:, None]
        pairs = values[..., 0::2] + 1j * values[..., 1::2]
        result = pairs * (phase.conj() if inverse else phase)
        expected = np.stack([result.real, result.imag], -1).reshape(values.shape)
        tables = torch.from_numpy(cos), torch.from_numpy(sin)
        found = to_bits(rotate(x, tables, inverse=inverse))
        require_equal(found[..., :-width], to_bits(x)[..., :-width], "dims before the rotated ones")
        require_equal(found[..., -width:], to_bf16(expected), "rotated dims")
    return f"{2 * n * 3 * width} values, both directions"


def doubly_stochastic(numerics: Numerics) -> str:
    """Sinkhorn iteration: row and column sums within their bounds, and equal to a plain loop."""
    iterations, eps, m = 20, 1e-6, 4
    logits = random_bf16(64, m * m, seed=4).double().reshape(64, m, m)
    found = sinkhorn(logits.to(numerics.acc), iterations, eps).double().numpy()
    require(
        bool((np.abs(found.sum(1) - 1).max(-1) <= column_residual(found, eps)).all()), "columns"
    )
    bound = row_residual(found, iterations, eps)
    require(bool((np.abs(found.sum(2) - 1).max(-1) <= bound).all()), "rows")
    worst = 0.0
    for matrix, result in zip(logits.numpy(), found, strict=True):
        plain = _plain_sinkhorn(matrix, iterations, eps)
        worst = max(worst, float(np.abs(plain / result - 1).max()))
    # 40 divisions by sums of 4 numbers: some tens of roundings in binary64 (or FP32)
    limit = 1e-13 if numerics.accumulate == "float64" else 1e-4
    require(worst <= limit, f"{worst:.1e} from a plain loop, expected {limit:.0e}")
    return f"{len(found)} matrices, {worst:.0e} from a plain loop"


def _plain_sinkhorn(logits: F64, iterations: int, eps: float) -> F64:
    m = len(logits)
    c = [
        [math.exp(v) / sum(math.exp(w) for w in row) + eps for v in row] for row in logits.tolist()
    ]
    for i in range(2 * iterations - 1):
        if i % 2:
            c = [[v / (sum(row) + eps) for v in row] for row in c]
        else:
            sums = [sum(c[i][j] for i in range(m)) + eps for j in range(m)]
            c = [[c[i][j] / sums[j] for j in range(m)] for i in range(m)]
    return np.array(c)


def attention_core(numerics: Numerics) -> str:
    """Sparse attention against dense attention with a mask, and against `formulas`.

    With up to 64 entries, one block of the kernel, both round the same p to BF16 and must be equal.
    With more, the kernel rounds p relative to the maximum of the blocks so far: p differs by at
    most 2^-8 of itself, and so does the result before its own rounding, in all 3 BF16 steps where
    nothing cancels.
    """
    heads, width, n = 4, 128, 200
    q, kv = random_bf16(24, heads, width, seed=5, spread=0), random_bf16(n, width, seed=6, spread=0)
    sink = torch.linspace(-1, 2, heads, dtype=torch.float64)
    for entries in (40, 64, 150):
        generator = np.random.Generator(np.random.PCG64(entries))
        table = np.stack([generator.permutation(n)[:entries] for _ in range(24)])
        table[:, ::5] = -1
        found = sparse_attn(q, kv, torch.from_numpy(table), sink.to(numerics.acc), numerics)
        expected = _dense(to_f64(to_bits(q)), to_f64(to_bits(kv)), table, sink.numpy())
        if entries <= 64 and numerics.accumulate == "float64":
            require_equal(to_bits(found), to_bf16(expected), f"{entries} entries")
        error = np.abs(found.double().numpy() - expected)
        size = np.abs(expected) + np.abs(expected).max(-1, keepdims=True)
        require(bool((error <= 3 * 2.0**-8 * size).all()), f"{entries} entries: far from dense")
        again = attention_sums(to_bits(q), to_bits(kv), table)
        online = again[0] / (again[1] + np.exp(sink.numpy() - again[2]))[..., None]
        if numerics.accumulate == "float64":
            require_equal(to_bits(found), to_bf16(online), f"{entries} entries, online")
    return "40, 64 and 150 entries"


def _dense(q: F64, kv: F64, table: Ints, sink: F64) -> F64:
    """Dense attention with a mask, p rounded to BF16 in the numerator only: [s, H, C]."""
    mask = np.zeros((len(q), len(kv)), bool)
    for row, entries in enumerate(table):
        mask[row, entries[entries >= 0]] = True
    scores = np.einsum("shc,nc->shn", q, kv) * q.shape[-1] ** -0.5
    scores = np.where(mask[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1) + np.exp(sink - top[..., 0])
    return np.asarray(np.einsum("shn,nc->shc", to_f64(to_bf16(p)), kv) / total[..., None])


def products(numerics: Numerics) -> str:
    """Products with FP8, FP4, BF16 and grouped weights, decoded by the formats' definitions."""
    n, k, rows = 192, 384, 5
    generator = np.random.Generator(np.random.PCG64(7))
    x = random_bf16(rows, k, seed=8)
    fp8 = generator.integers(0, 256, (n, k)).astype(np.uint8)
    fp8[(fp8 & 0x7F) == 0x7F] = 0x11
    scale8 = generator.integers(118, 130, (-(-n // 128), k // 128)).astype(np.uint8)
    fp4 = generator.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scale4 = generator.integers(118, 130, (n, k // 32)).astype(np.uint8)
    w8 = QuantizedWeight(torch.from_numpy(fp8), torch.from_numpy(scale8), "fp8")
    w4 = QuantizedWeight(torch.from_numpy(fp4), torch.from_numpy(scale4), "fp4")
    values = to_f64(fp8_round_trip(to_bits(x), 128))
    for name, weight in (("FP8", w8), ("FP4", w4)):
        dense = _values(weight)
        require(
            np.array_equal(dense, dequantize(weight).numpy()), f"{name} weights decode otherwise"
        )
        _product_close(f"{name} product", q_linear(x, weight, numerics), values, dense, numerics)
    plain = random_bf16(n, k, seed=9)
    sums = linear_hi(x, plain, numerics).double().numpy()
    exact = to_f64(to_bits(x)) @ to_f64(to_bits(plain)).T
    limit = 1e-12 if numerics.accumulate == "float64" else 1e-4
    require(bool((np.abs(sums - exact) <= limit * np.abs(exact).max()).all()), "plain product")
    grouped = grouped_linear(x.reshape(rows, 1, k), w8, numerics)
    rounded_weight = to_f64(to_bf16(_values(w8)))
    _product_close("grouped product", grouped[:, 0], to_f64(to_bits(x)), rounded_weight, numerics)
    return f"FP8, FP4, BF16 and grouped, computed by {backend_in_use(numerics)}"


def _values(weight: QuantizedWeight) -> F64:
    """Dequantised weight from exact decoding of each code: F64 [n, k]."""
    codes, scale = weight.codes.numpy(), weight.scale.numpy().astype(int)
    if weight.kind == "fp4":
        low = [float(minifloat(c & 7, 2, 1, 1)) * (-1 if c & 8 else 1) for c in range(16)]
        pairs = np.stack([codes % 16, codes // 16], -1).reshape(len(codes), -1)
        return np.asarray(np.array(low)[pairs] * np.ldexp(1.0, np.repeat(scale, 32, 1) - 127))
    table = [float(minifloat(c & 127, 4, 3, 7)) * (-1 if c & 128 else 1) for c in range(256)]
    blocks = np.repeat(np.repeat(scale, 128, 0)[: len(codes)], 128, 1)[:, : codes.shape[1]]
    return np.asarray(np.array(table)[codes] * np.ldexp(1.0, blocks - 127))


def _product_close(name: str, found: Tensor, x: F64, w: F64, numerics: Numerics) -> None:
    """Require BF16(x w^T) of x [s, k], w [n, k], allowing for another order of summation."""
    exact, sizes = x @ w.T, np.abs(x) @ np.abs(w).T
    slack = sizes * (1e-14 if numerics.accumulate == "float64" else 1e-5)
    seen = ordinals(to_bits(found))
    low, high = ordinals(to_bf16(exact - slack)), ordinals(to_bf16(exact + slack))
    wrong = int(((seen < low) | (seen > high)).sum())
    require(wrong == 0, f"{name}: {wrong} of {found.numel()} values differ")


TASKS: dict[str, Callable[[Numerics], str]] = {
    "codes": codes,
    "scale tables": scales,
    "activation quantisation": quantisation,
    "Hadamard": orthogonal,
    "rotation": rotation,
    "Sinkhorn": doubly_stochastic,
    "sparse attention": attention_core,
    "products": products,
}
"""The checks by name; each returns a summary of what it covered, or raises `CheckFailed`."""
