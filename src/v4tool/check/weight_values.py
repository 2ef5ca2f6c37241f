"""Base class of checks against weights, conversion of checkpoint tensors, comparison of sums.

Used by the modules that check recorded values against weights (`weights`, `products`,
`coefficients`) and by the tests of the kernels (`kernels`). Left out: which weight belongs to which
key.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import F64, Bits, format_number
from v4tool.check.block_pass import BlockPass
from v4tool.check.findings import Findings

if TYPE_CHECKING:
    from torch import Tensor

    from v4tool.checkpoint.shards import Checkpoint

ULPS = 1
"""Largest distance of FP32 values rounded from binary64 sums in another order (SPEC 8)."""


class WeightCheck:
    """Base class of checks of one block in one pass that read the checkpoint's weights."""

    def __init__(self, block: BlockPass, checkpoint: "Checkpoint") -> None:
        self.block, self.checkpoint, self.config = block, checkpoint, block.config
        self.tensors, self.findings = block.tensors, block.findings


def to_bits(values: "Tensor") -> Bits:
    """A BF16 tensor as 16-bit patterns of the same shape."""
    import torch

    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def to_numpy(values: "Tensor") -> F64:
    """A BF16 or FP32 tensor as a binary64 array of the same shape."""
    return np.asarray(values.double().numpy())


def to_tensor(bits: Bits) -> "Tensor":
    """16-bit patterns as a BF16 tensor of the same shape."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def compare_sums(
    findings: Findings,
    rule: str,
    key: str,
    found: npt.NDArray[np.float32],
    expected: F64,
    size: F64,
    sources: Sequence[str],
) -> None:
    """Report where FP32 values differ from binary64 sums by more than the order of summation may.

    Allowed is 1 ulp of FP32, or 1e-14 of size, the sum of the terms' magnitudes; sources: the keys
    that the sums come from.
    """
    findings.applied(rule, [key, *sources], found.size)
    gap = np.abs(found.astype(np.float64) - expected)
    allowed = np.maximum(ULPS * np.spacing(np.abs(found)).astype(np.float64), 1e-14 * size)
    wrong = np.flatnonzero(~(gap <= allowed).reshape(-1))
    if wrong.size:
        i = int(wrong[0])
        findings.report(
            key, rule,
            f"{format_number(expected.reshape(-1)[i])} at {findings.indices(key, i, found.shape)} "
            f"(from {', '.join(sources)})",
            f"{format_number(found.reshape(-1)[i])}; {wrong.size} of {found.size} values differ",
        )  # fmt: skip
