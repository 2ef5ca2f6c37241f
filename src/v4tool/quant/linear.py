"""Matrix products of the forward pass, and their order of accumulation (SPEC sections 3 to 5).

With `accumulate = float64` every product of an x [M, K] and a weight [N, K] is, for each element,
by definition

    acc = 0
    for each group along K, in increasing order (the last one may be shorter):
        g = 0
        for k in the group, in increasing order: g = g + x[k] * w[k]
        acc = acc + g

in binary64, where x[k] and w[k] are the dequantised values, and a group has 32 elements for FP4
weights, 128 for all others. The order does not depend on threads, M, N or the machine, nor on how
many elements one scale covers (`block` of a weight: 128 in V4, 32 in V4.1). Each x[k] * w[k] is
exact in binary64 (at most 8 + 24 bits), so fused multiply-add gives the same bits. With one scale
on both sides a group's g is exact too (at most 18 + 18 bits and 7 for the number of terms), so only
the order of the groups matters. A sum is never -0, and every NaN has the same bits.

Three backends compute it, equal bit for bit: the readable one (`_readable_product`), the C kernel
(`_c_product`) and one for installations without a compiler (`_numpy_product`). `accumulate =
float32` is torch's FP32 product of the same values, in the readable backend only; its last bits
depend on torch's build and threads.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from v4tool.errors import V4ToolError
from v4tool.quant import _readable_product as readable
from v4tool.quant._weight import QuantizedWeight, StoredWeight, Weight, dequantize, in_memory
from v4tool.quant.activation import act_quant, to_bf16

if TYPE_CHECKING:
    from v4tool.config import Numerics

__all__ = [
    "QuantizedWeight",
    "StoredWeight",
    "Weight",
    "backend_in_use",
    "batched_linear_hi",
    "dequantize",
    "grouped_linear",
    "in_memory",
    "linear_hi",
    "q_linear",
]


class _Backend(Protocol):
    """A backend of matrix products; see `_readable_product` for shapes and dtypes."""

    def quantized(self, x: Tensor, w: Weight, threads: int) -> Tensor: ...

    def plain(self, x: Tensor, w: Tensor, threads: int) -> Tensor: ...

    def grouped(self, x: Tensor, w: Weight, threads: int) -> Tensor: ...


KERNEL_INTERFACE = 2
"""Of the C kernel's functions, as `_c_product` calls them; `_kernel.c` holds the same number."""


@cache
def extension_problem() -> str | None:
    """Why the C kernel cannot be used, or None."""
    try:
        kernel = import_module("v4tool.quant._kernel")
    except ImportError as problem:
        return str(problem)
    if getattr(kernel, "INTERFACE", None) != KERNEL_INTERFACE:
        return "it was built from the source of another version; install v4tool again"
    return None


def backend_in_use(numerics: "Numerics") -> str:
    """The backend of matrix products: "readable", "numpy" or "c".

    V4ToolError if the requested backend is not available.
    """
    asked = numerics.backend
    if numerics.accumulate == "float32":
        if asked in ("numpy", "c"):
            raise V4ToolError(f"backend: accumulate float32 needs readable or auto, found {asked}")
        return "readable"
    problem = extension_problem()
    if asked == "auto":
        return "numpy" if problem else "c"
    if asked == "c" and problem:
        raise V4ToolError(f"backend: c expected, but the C kernel is not installed ({problem})")
    return asked


@cache
def _backend(name: str) -> _Backend:
    return import_module(f"v4tool.quant._{name}_product")


def _backend_for(x: Tensor, numerics: "Numerics") -> _Backend:
    """The backend for x; on other devices than the CPU the readable one."""
    return _backend(backend_in_use(numerics) if x.device.type == "cpu" else "readable")


def q_linear(x: Tensor, w: Weight, numerics: "Numerics") -> Tensor:
    """Quantise x to FP8 in the weight's blocks, multiply by it, round to BF16 (SPEC 3).

    BF16 [..., K] and [N, K] -> BF16 [..., N].
    """
    rows = x.reshape(-1, x.shape[-1])
    if numerics.accumulate == "float32":
        values = readable.activation(*act_quant(rows, w.block), w.block)
        out = to_bf16(F.linear(values.float(), dequantize(in_memory(w)).float()))
    else:
        out = _backend_for(rows, numerics).quantized(rows, w, numerics.threads)
    return out.reshape(*x.shape[:-1], w.shape[0])


def linear_hi(x: Tensor, w: Tensor, numerics: "Numerics") -> Tensor:
    """acc(x) times acc(w) transposed, kept in acc (SPEC 5).

    BF16 [..., K] and BF16 or F32 [N, K] -> acc [..., N].
    """
    if numerics.accumulate == "float32":
        return F.linear(x.float(), w.float())
    rows = x.reshape(-1, x.shape[-1])
    out = _backend_for(rows, numerics).plain(rows, w, numerics.threads)
    return out.reshape(*x.shape[:-1], w.shape[0])


def batched_linear_hi(x: Tensor, w: Tensor, numerics: "Numerics") -> Tensor:
    """`linear_hi` of each x with its own w.

    BF16 [S, M, K] and BF16 [S, N, K] -> acc [S, M, N]. The C kernel takes all of them in one
    call, on one thread.
    """
    if x.device.type == "cpu" and backend_in_use(numerics) == "c":
        from v4tool.quant import _c_product

        return _c_product.batched(x, w)
    return torch.stack([linear_hi(a, b, numerics) for a, b in zip(x, w, strict=True)])


def grouped_linear(x: Tensor, w: Weight, numerics: "Numerics") -> Tensor:
    """Product with wo_a: each group has its own rows of the weight (SPEC 5, attention step 7).

    BF16 [..., G, K] and FP8 [G * R, K] -> BF16 [..., G, R]. The weight is BF16(element * scale);
    x is not quantised.
    """
    rows = x.reshape(-1, *x.shape[-2:])
    if numerics.accumulate == "float32":
        weights = readable.bf16_values(in_memory(w), x.shape[-2]).float()
        out = to_bf16(torch.einsum("mgk,grk->mgr", rows.float(), weights))
    else:
        out = _backend_for(rows, numerics).grouped(rows, w, numerics.threads)
    return out.reshape(*x.shape[:-1], w.shape[0] // x.shape[-2])
