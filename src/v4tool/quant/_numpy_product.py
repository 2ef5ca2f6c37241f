"""NumPy backend of `linear`: decodes weights by table look-up and multiplies with a BLAS.

A BLAS has its own order of summation, which does not matter if no partial sum is rounded; that is
proved for each use. For a range of K let l be the sum of |x|, m the largest |w|, and u and v units
of x and w: powers of two of which all those x and all those w are multiples. Then every product and
every partial sum, in any order, is a multiple of u * v and at most l * m. If l * m <= 2^53 * u * v,
all of them are exact in binary64.

The bound is computed for each group along K and, as a sum, for all of K. If it holds for all of K
(nearly always for quantised x and weights), the product is one BLAS call. If it holds for a group,
the group's sums are one call, and the groups are added in order. The remaining sums, and all with a
NaN or an infinity, are computed term by term in the order of the definition.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from v4tool.quant._readable_product import activation
from v4tool.quant._weight import BF16_OF_FP8, FP8_VALUES, QuantizedWeight, Weight, in_memory
from v4tool.quant.activation import act_quant, to_bf16
from v4tool.quant.formats import E2M1, E8M0, unpack_fp4
from v4tool.threads import ScratchBuffers, parallel_for

F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

threadpool_limits(1, user_api="blas")  # parallel_for has the threads; a BLAS's own would spin

_X_ROWS = 256
_W_ROWS = 128
_K = 128  # elements of a group along K, but for FP4 weights
_GROUPS = 16  # groups per call if they are summed separately: bounds memory
_PRODUCTS, _SUMS = 2**16, 2**16  # at a time, in sums term by term
_LIMIT = 2.0**53 * (1 - 2.0**-40)  # a little below 2^53: the bounds themselves are rounded

_E8M0: F64 = E8M0.double().numpy()
_BYTES = E2M1[unpack_fp4(torch.arange(256, dtype=torch.uint8).unsqueeze(-1)).int()].double()
_FP4_VALUES = (E8M0.double()[:, None, None] * _BYTES).numpy().view(np.complex128).ravel()
"""[256 * scale + byte]: the two values of a byte, stored as one complex number."""

_scratch = ScratchBuffers()


@dataclass(frozen=True)
class _Operand:
    """Rows of x or w, [rows, groups, group], zero-padded, with bounds for the proof of exactness.

    size: for x the sum of the magnitudes of each group, [rows, groups]; for w the largest magnitude
    of each group in any row, [groups]. unit: a power of two of which the values of a group are
    multiples, of the same shape; infinite if all are zero.
    """

    values: F64
    size: F64
    unit: F64


_Rows = Callable[[int, int], _Operand]
"""Some rows of a weight, start ... stop."""


def quantized(x: Tensor, w: Weight, threads: int) -> Tensor:
    """BF16 [M, K], quantised by act_quant, times w [N, K] -> BF16 [M, N]."""
    w = in_memory(w)
    codes, scale = act_quant(x, w.block)
    group, rows = (32, _fp4_rows(w)) if w.kind == "fp4" else (_K, _fp8_rows(w, FP8_VALUES, 0.0))
    out = torch.empty(codes.shape[0], w.shape[0], dtype=torch.bfloat16)
    for some in _x_chunks(codes.shape[0]):
        values = _grouped(activation(codes[some], scale[some], w.block), group)
        least = _E8M0[scale[some].numpy()] * 2.0**-9
        if w.block > group:
            least = np.repeat(least, w.block // group, axis=1)[:, : values.shape[1]]
        operand = _x_operand(values, 4, _merged(least, group // w.block, np.min, np.inf))
        _multiply(operand, rows, range(w.shape[0]), out[some], threads)
    return out


def plain(x: Tensor, w: Tensor, threads: int) -> Tensor:
    """BF16 [M, K] times BF16 or F32 [N, K] -> binary64 [M, N]."""
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.float64)
    for some in _x_chunks(x.shape[0]):
        _multiply(_bf16_operand(x[some]), _plain_rows(w), range(w.shape[0]), out[some], threads)
    return out


def grouped(x: Tensor, w: Weight, threads: int) -> Tensor:
    """BF16 [M, G, K] times BF16 of the values of w [G * R, K] -> BF16 [M, G, R]."""
    w = in_memory(w)
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    rows, per_group = _fp8_rows(w, BF16_OF_FP8, 2.0**-133), w.shape[0] // x.shape[1]
    for some in _x_chunks(x.shape[0]):
        for g in range(x.shape[1]):
            w_rows = range(g * per_group, (g + 1) * per_group)
            _multiply(_bf16_operand(x[some, g]), rows, w_rows, out[some], threads)
    return out.view(x.shape[0], x.shape[1], per_group)


def _x_chunks(rows: int) -> list[slice]:
    return [slice(start, min(start + _X_ROWS, rows)) for start in range(0, rows, _X_ROWS)]


def _multiply(x: _Operand, w: _Rows, w_rows: range, out: Tensor, threads: int) -> None:
    """out[:, w_rows] = x times rows `w_rows` of w, transposed."""

    def task(i: int) -> None:
        start = w_rows.start + i * _W_ROWS
        stop = min(start + _W_ROWS, w_rows.stop)
        with np.errstate(all="ignore"):
            sums = torch.from_numpy(_sums(x, w(start, stop)))
        sums.nan_to_num_(torch.nan, torch.inf, -torch.inf)
        out[:, start:stop] = sums if out.dtype == torch.float64 else to_bf16(sums)

    parallel_for(task, -(-len(w_rows) // _W_ROWS), threads)


# ---- operands ------------------------------------------------------------------------------------


def _grouped(x: Tensor, group: int) -> F64:
    """[M, K] -> binary64 [M, groups, group], zero-padded."""
    values = np.zeros((x.shape[0], -(-x.shape[1] // group), group))
    torch.from_numpy(values).view(x.shape[0], -1)[:, : x.shape[1]] = x
    return values


def _unit(smallest: F64, bits: int, least: F64 | float) -> F64:
    """A unit of values with `bits` significant bits and this smallest magnitude; inf for inf.

    least: lower bound of the unit, that of subnormal values.
    """
    unit = np.maximum(np.ldexp(1.0, np.frexp(smallest)[1] - bits), least)
    return np.where(np.isinf(smallest), np.inf, unit)


def _x_operand(values: F64, bits: int, least: F64 | float) -> _Operand:
    magnitude = np.abs(values)
    size = magnitude.sum(axis=-1)
    magnitude[magnitude == 0] = np.inf
    return _Operand(values, size, _unit(magnitude.min(axis=-1), bits, least))


def _bf16_operand(x: Tensor) -> _Operand:
    return _x_operand(_grouped(x, 128), 8, 2.0**-133)


def _buffer(rows: int, groups: int, group: int) -> F64:
    size = rows * groups * group
    flat: F64 = _scratch.take("w", size, torch.float64)[:size].numpy()
    return flat.reshape(rows, groups, group)


def _fp4_rows(w: QuantizedWeight) -> _Rows:
    codes, scale = w.codes.numpy(), w.scale.numpy()

    def rows(start: int, stop: int) -> _Operand:
        index = _index(codes[start:stop], scale[start:stop], 16)
        values = _buffer(stop - start, scale.shape[1], 32)
        _FP4_VALUES.take(index, out=values.view(np.complex128), mode="clip")
        factor = _E8M0[scale[start:stop]]
        return _Operand(values, 6 * factor.max(axis=0), 0.5 * factor.min(axis=0))

    return rows


def _fp8_rows(w: QuantizedWeight, table: Tensor, least: float) -> _Rows:
    """Reader of an FP8 weight. table: value of each scale and code; least: as of `_unit`, or 0."""
    codes, scale, flat = w.codes.numpy(), w.scale.numpy(), table.numpy().ravel()
    merge = _K // w.block  # scales in a group, where a group has several
    largest, unit = table[:, 0x7E].numpy()[scale], np.maximum(_E8M0[scale] * 2.0**-9, least)
    largest, unit = _merged(largest, merge, np.max, 0.0), _merged(unit, merge, np.min, np.inf)
    scale = np.pad(scale, ((0, 0), (0, -scale.shape[1] % merge)))

    def rows(start: int, stop: int) -> _Operand:
        blocks = np.arange(start, stop) // w.block
        index = _index(codes[start:stop], scale[blocks], w.block)
        values = _buffer(stop - start, largest.shape[1], _K)
        flat.take(index, out=values.reshape(index.shape), mode="clip")
        nan = ((codes[start:stop] & 0x7F) == 0x7F).any()
        size = np.full(largest.shape[1], np.nan) if nan else largest[blocks].max(axis=0)
        return _Operand(values, size, unit[blocks].min(axis=0))

    return rows


def _merged(x: F64, count: int, reduction: Callable[..., F64], fill: float) -> F64:
    """The reduction of `count` neighbours each (0 or 1: x itself), the last ones of fewer."""
    if count <= 1:
        return x
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % count)), constant_values=fill)
    return reduction(padded.reshape(len(x), -1, count), axis=2)


def _index(codes: U8, scale: U8, group: int) -> npt.NDArray[np.int64]:
    """256 * scale + code, code 0 as padding: [rows, K], [rows, groups] -> [rows, groups, group]."""
    missing = scale.shape[1] * group - codes.shape[1]
    padded = np.pad(codes, ((0, 0), (0, missing))) if missing else codes
    shifted = (scale.astype(np.int64) << 8)[..., None]
    flat: npt.NDArray[np.int64] = _scratch.take("index", padded.size, torch.int64).numpy()
    index = flat[: padded.size].reshape(*scale.shape, group)
    np.add(padded.reshape(index.shape), shifted, out=index)
    return index


def _plain_rows(w: Tensor) -> _Rows:
    groups, columns = -(-w.shape[1] // 128), w.shape[1]
    bits, least = (24, 2.0**-149) if w.dtype == torch.float32 else (8, 2.0**-133)

    def rows(start: int, stop: int) -> _Operand:
        values = _buffer(stop - start, groups, 128)
        flat = torch.from_numpy(values).view(stop - start, -1)
        flat[:, :columns] = w[start:stop]
        flat[:, columns:] = 0
        largest, smallest = _extremes(F.pad(w[start:stop], (0, groups * 128 - columns)))
        return _Operand(values, largest, _unit(smallest, bits, least))

    return rows


def _extremes(w: Tensor) -> tuple[F64, F64]:
    """Largest and smallest non-zero magnitude in each 128 columns of BF16 or F32 [rows, K].

    Bits without the sign are ordered as magnitudes, NaN last.
    """
    as_int = torch.int32 if w.dtype == torch.float32 else torch.int16
    most = torch.iinfo(as_int).max
    bits = (w.view(as_int) & most).view(w.shape[0], -1, 128)
    largest = bits.amax((0, 2)).view(w.dtype).double()
    smallest = torch.where(bits == 0, most, bits).amin((0, 2)).view(w.dtype).double()
    return largest.numpy(), torch.where(largest == 0, torch.inf, smallest).numpy()


# ---- sums ----------------------------------------------------------------------------------------


def _sums(x: _Operand, w: _Operand) -> F64:
    """x times w transposed, [rows of x, rows of w]."""
    whole = x.size @ w.size <= _LIMIT * (x.unit * w.unit).min(axis=1)
    if whole.all():
        return _in_one(x.values, w.values)
    out = np.empty((x.values.shape[0], w.values.shape[0]))
    out[whole] = _in_one(x.values[whole], w.values)
    rest = ~whole
    out[rest] = _by_group(_Operand(x.values[rest], x.size[rest], x.unit[rest]), w)
    return out


def _in_one(x: F64, w: F64) -> F64:
    """One BLAS call, for exact sums; 0 is added because by definition a sum is never -0."""
    columns = x.shape[1] * x.shape[2]
    # torch's BLAS: in NumPy's, threads may block each other
    x_rows, w_rows = (torch.from_numpy(a.reshape(-1, columns)) for a in (x, w))
    out: F64 = torch.mm(x_rows, w_rows.T).numpy()
    out += 0.0
    return out


def _by_group(x: _Operand, w: _Operand) -> F64:
    """Sums of the groups by BLAS where exact, else term by term; then the groups in order."""
    inexact = ~(x.size * w.size <= _LIMIT * x.unit * w.unit)
    acc = np.zeros((x.values.shape[0], w.values.shape[0]))
    for start in range(0, x.values.shape[1], _GROUPS):
        some = slice(start, start + _GROUPS)
        x_some, w_some = x.values[:, some].transpose(1, 0, 2), w.values[:, some].transpose(1, 2, 0)
        sums = np.matmul(x_some, w_some)
        _one_by_one(x_some, w_some, inexact[:, some].T, sums)
        for g in sums:
            acc += g
    return acc


def _one_by_one(x: F64, w: F64, where: npt.NDArray[np.bool_], sums: F64) -> None:
    """sums[g, m] = x[g, m] times w[g], in increasing k, for each g, m where `where` is true.

    x [groups, M, group], w [groups, group, R], where [groups, M], sums [groups, M, R].
    """
    if np.count_nonzero(where) * 8 > where.size:
        sums[where] = _all_one_by_one(x, w)[where]
        return
    marked = np.argwhere(where)
    step = max(1, _PRODUCTS // (w.shape[1] * w.shape[2]))
    for start in range(0, len(marked), step):
        g, m = marked[start : start + step].T
        products = x[g, m][:, :, None] * w[g]
        sums[g, m] = np.add.accumulate(products, axis=1, out=products)[:, -1]


def _all_one_by_one(x: F64, w: F64) -> F64:
    """As `_one_by_one` for all g, m; some rows of x at a time, so that sums stay in the cache."""
    x_k = torch.from_numpy(x).permute(2, 0, 1).contiguous().unsqueeze(-1)  # [group, groups, M, 1]
    w_k = torch.from_numpy(w).transpose(0, 1).contiguous().unsqueeze(2)  # [group, groups, 1, R]
    sums = torch.zeros(x.shape[0], x.shape[1], w.shape[2], dtype=torch.float64)
    step = max(1, _SUMS // (sums.shape[0] * sums.shape[2]))
    for start in range(0, x.shape[1], step):
        some = sums[:, start : start + step]
        for k in range(x.shape[2]):
            some.addcmul_(x_k[k, :, start : start + step], w_k[k])
    out: F64 = sums.numpy()
    return out
