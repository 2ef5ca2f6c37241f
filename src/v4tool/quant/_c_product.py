"""C backend of `linear`: packs x, splits the weight's rows among threads, calls `_kernel.c`.

x is packed once into the order in which the kernel reads it. Each thread reads the rows of the
weight that it multiplies, so that they are in its L2 cache. The kernel takes raw addresses: this
module checks dtypes, shapes and strides, and keeps the tensors alive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from v4tool.quant import _kernel
from v4tool.quant._weight import BF16_OF_FP8, FP8_VALUES, StoredWeight, Weight
from v4tool.quant.formats import E4M3, E8M0, e4m3_encode
from v4tool.threads import ScratchBuffers, parallel_for

_FP4, _FP8, _BF16, _F32, _BF16_BY_K = range(5)  # enum kind
_X_ROWS = 384  # packed at a time: bounds memory; the weight is decoded again for each chunk
_W_ROWS = 128  # most rows of the weight in a task
_X_ROWS_SHARED = 32  # rows of x in a task if the weight is a single tile, cheap to decode again
_FEW_X_ROWS = 32  # up to here reading the weight takes the time, so tasks are limited by _W_BYTES
_LEAST = 1 << 22  # least number of products in a task if there are several tasks
_W_BYTES = 1 << 21  # most bytes of the weight in a task; larger tasks synchronise threads less

_E4M3 = E4M3.double()
_E8M0 = E8M0.double()
_CODE = e4m3_encode(torch.arange(32768, dtype=torch.int16).view(torch.bfloat16))
"""The E4M3 code of every BF16 magnitude, by its bits."""


_scratch = ScratchBuffers()


@dataclass(frozen=True)
class _X:
    """Packed rows of x for the kernel. scale, wide: for FP4 weights only."""

    rows: int
    values: Tensor
    scale: Tensor | None = None
    wide: Tensor | None = None


@dataclass(frozen=True)
class _W:
    """A weight for the kernel. scale: codes, if quantised; table: of values, if FP8; block: its
    rows and columns under one scale.

    rows(start, stop): the codes of these rows, valid until the next call in the same thread.
    """

    kind: int
    shape: tuple[int, int]
    row_bytes: int
    rows: Callable[[int, int], Tensor]
    scale: Tensor | None = None
    table: Tensor | None = None
    block: int = _kernel.BLOCK

    @classmethod
    def of(cls, w: Weight, table: Tensor | None, x_rows: int) -> Self:
        """Wrap a quantised weight for a product with `x_rows` rows of x."""
        if isinstance(w, StoredWeight) and x_rows > _X_ROWS:
            w = w.whole()
        kind, row_bytes = (_FP4, w.shape[1] // 2) if w.kind == "fp4" else (_FP8, w.shape[1])
        read = w.read if isinstance(w, StoredWeight) else _rows_of(w.codes)
        return cls(kind, w.shape, row_bytes, read, w.scale.contiguous(), table, w.block)


def _rows_of(codes: Tensor) -> Callable[[int, int], Tensor]:
    codes = codes.contiguous()
    return lambda start, stop: codes[start:stop]


def quantized(x: Tensor, w: Weight, threads: int) -> Tensor:
    """BF16 [M, K], quantised as by act_quant, times w [N, K] -> BF16 [M, N]."""
    table, pack = (None, _pack_for_fp4) if w.kind == "fp4" else (FP8_VALUES, _pack_fp8)
    weight = _W.of(w, table, x.shape[0])
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    for some, result in _chunks(x, out):
        _multiply(pack(_rows(some), w.block), weight, range(w.shape[0]), result, threads)
    return out


def plain(x: Tensor, w: Tensor, threads: int) -> Tensor:
    """BF16 [M, K] times BF16 or F32 [N, K] -> binary64 [M, N]."""
    kind = _F32 if w.dtype == torch.float32 else _BF16
    row_bytes = w.shape[1] * w.element_size()
    weight = _W(kind, (w.shape[0], w.shape[1]), row_bytes, _rows_of(w))
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.float64)
    single = w.shape[0] <= _kernel.TILE  # one tile: only the rows of x can be divided
    chunks = _chunks(x, out, _X_ROWS_SHARED if single else _X_ROWS)
    worth_it = min(x.shape[0], _X_ROWS_SHARED) * w.numel() >= _LEAST
    outer, inner = (threads if worth_it else 1, 1) if single else (1, threads)

    def task(i: int) -> None:
        some, result = chunks[i]
        _multiply(_pack_bf16(_rows(some)), weight, range(w.shape[0]), result, inner)

    parallel_for(task, len(chunks), outer)
    return out


def batched(x: Tensor, w: Tensor) -> Tensor:
    """Batched product: BF16 [S, M, K] times BF16 [S, N, K] -> binary64 [S, M, N]."""
    count, m, k = x.shape
    n = w.shape[1]
    out = torch.empty(count, m, n, dtype=torch.float64)
    by_k = w.stride(1) == 1 and w.stride(2) == n
    if not (by_k or (w.stride(2) == 1 and w.stride(1) == k)):
        w = w.contiguous()
    x = x if x.stride(2) == 1 else x.contiguous()
    tiles = -(-n // _kernel.TILE)
    packed = _packed(m, k, torch.float64)
    acc = _scratch.take("acc", tiles * _kernel.TILE * m, torch.float64)
    _kernel.batched(
        count, m, n, k, x.data_ptr(), x.stride(0), x.stride(1), _BF16_BY_K if by_k else _BF16,
        w.data_ptr(), w.stride(0), packed.data_ptr(), acc.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def grouped(x: Tensor, w: Weight, threads: int) -> Tensor:
    """BF16 [M, G, K] times BF16 of the values of w [G * R, K] -> BF16 [M, G, R]."""
    weight = _W.of(w, BF16_OF_FP8, x.shape[0])
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16)
    groups = x.shape[1]
    per_group = w.shape[0] // groups
    # divide among threads by groups if there are enough of them: threads synchronise less
    outer, inner = (threads, 1) if groups >= 2 * threads else (1, threads)
    for some, result in _chunks(x, out):

        def task(g: int, some: Tensor = some, result: Tensor = result) -> None:
            w_rows = range(g * per_group, (g + 1) * per_group)
            _multiply(_pack_bf16(_rows(some[:, g])), weight, w_rows, result, inner)

        parallel_for(task, groups, outer)
    return out.view(x.shape[0], groups, per_group)


def _chunks(x: Tensor, out: Tensor, most: int = _X_ROWS) -> list[tuple[Tensor, Tensor]]:
    """Chunks of at most `most` rows of x, nearly equal in size, with the same rows of out."""
    chunks = -(-x.shape[0] // most)
    if chunks <= 1:
        return [(x, out)] * chunks
    return list(zip(x.tensor_split(chunks), out.tensor_split(chunks), strict=True))


def _packed(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Scratch bytes for packed x; one buffer for both dtypes, of which only one is in use."""
    padded = -(-columns // _kernel.BLOCK) * _kernel.BLOCK
    return _scratch.take("x", rows * padded * dtype.itemsize, torch.uint8)


def _rows(x: Tensor) -> Tensor:
    """x with contiguous columns, as the kernel requires; its rows may have any stride."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _pack_fp8(x: Tensor, group: int) -> _X:
    rows, columns = x.shape
    packed = _X(rows, _packed(rows, columns, torch.float64))
    _kernel.pack_fp8(
        x.data_ptr(), x.stride(0), group, _CODE.data_ptr(), _E4M3.data_ptr(), _E8M0.data_ptr(),
        rows, columns, packed.values.data_ptr(),
    )  # fmt: skip
    return packed


def _pack_for_fp4(x: Tensor, group: int) -> _X:
    rows, columns = x.shape
    blocks = -(-columns // _kernel.BLOCK)
    scale = _scratch.take("x_scale", rows * blocks * _kernel.GROUPS, torch.float64)
    wide = _scratch.take("wide", rows * blocks, torch.uint8)
    packed = _X(rows, _packed(rows, columns, torch.float32), scale, wide)
    _kernel.pack_fp8_for_fp4(
        x.data_ptr(), x.stride(0), group, _CODE.data_ptr(), _E4M3.data_ptr(), _E8M0.data_ptr(),
        rows, columns, packed.values.data_ptr(), scale.data_ptr(), wide.data_ptr(),
    )  # fmt: skip
    return packed


def _pack_bf16(x: Tensor) -> _X:
    rows, columns = x.shape
    packed = _X(rows, _packed(rows, columns, torch.float64))
    _kernel.pack_bf16(x.data_ptr(), x.stride(0), rows, columns, packed.values.data_ptr())
    return packed


def _multiply(x: _X, w: _W, w_rows: range, out: Tensor, threads: int) -> None:
    """out[:, w_rows] = x times rows `w_rows` of w, transposed; out: contiguous [rows of x, N]."""
    tile = _kernel.TILE
    most = _W_BYTES // w.row_bytes if x.rows <= _FEW_X_ROWS else _W_ROWS
    if threads > 1:  # several tasks per thread, but none so small that scheduling dominates
        share = max(len(w_rows) // (4 * threads), _LEAST // (x.rows * w.shape[1]))
        most = min(most, share)
    step = max(tile, min(most // tile, -(-len(w_rows) // tile)) * tile)

    def task(i: int) -> None:
        start = w_rows.start + i * step
        stop = min(start + step, w_rows.stop)
        acc = _scratch.take("acc", step * x.rows, torch.float64)
        codes = w.rows(start, stop)
        first_row = codes.data_ptr() - start * w.row_bytes
        _kernel.product(
            w.kind, w.block, x.rows, *w.shape,
            x.values.data_ptr(), _address(x.scale), _address(x.wide), first_row,
            _address(w.scale), _address(w.table), start, stop,
            acc.data_ptr(), out.data_ptr(), out.dtype == torch.bfloat16,
        )  # fmt: skip

    parallel_for(task, -(-len(w_rows) // step), threads)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
