"""Output head: last rows, logits by the output matrix, their arg max (SPEC section 5, Head).

T tokens of the batch, n segments, D dim, V vocabulary.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from v4tool.model.scope import Scope
from v4tool.quant.linear import linear_hi
from v4tool.threads import ordered_map

MATRIX = "head.weight"
HEAD_ROWS = 4096
"""Rows of the output matrix that are in memory at a time; the whole is 1 GiB in the release."""
HEAD_NAMES = ("head.out",)
"""Keys under which the logits of the main stack are recorded (SPEC section 6)."""


def last_rows(scope: Scope, x: Tensor) -> Tensor:
    """The last token's row of each segment: [T, ...] -> [segments, ...]."""
    return torch.stack([part[-1] for _, part in scope.parts(x)])


def logits(scope: Scope, y_nD: Tensor, matrix: str) -> Tensor:
    """Logits of some rows; the matrix [V, D] is read in pieces: BF16 [n, D] -> acc [n, V]."""
    size = scope.config.vocab_size
    row_bytes = scope.weights.nbytes(matrix) // size

    def piece(start: int) -> Tensor:
        stop = min(start + HEAD_ROWS, size)
        buffer = scope.buffers.take("codes", (stop - start) * row_bytes, torch.uint8)
        return linear_hi(
            y_nD, scope.weights.read_rows(matrix, start, stop, buffer), scope.single.numerics
        )

    return torch.cat(list(ordered_map(piece, range(0, size, HEAD_ROWS), scope.threads)), dim=1)


def tap_logits(scope: Scope, names: Iterable[str], logits_nV: Tensor) -> None:
    """Pass each segment's row of logits to its tap as [1, V], under each name."""
    for name in names:
        for segment, row in zip(scope.segments, logits_nV, strict=True):
            scope.tap_for(segment, name, row.unsqueeze(0))


def main_head(scope: Scope, y_nD: Tensor) -> Tensor:
    """Logits of the main stack, acc [n, V], recorded; y BF16 [n, D]."""
    result = logits(scope, y_nD, MATRIX)
    tap_logits(scope, HEAD_NAMES, result)
    return result


def arg_max(logits_nV: Tensor) -> list[int]:
    """The token with the largest logit of each row, [n, V].

    The logits are compared in FP32, as recorded; ties go to the lowest index. NaN counts as minus
    infinity, so the id is 0 if all logits are NaN.
    """
    comparable = logits_nV.float().nan_to_num(-math.inf, math.inf, -math.inf)
    return [int((row == row.max()).nonzero()[0]) for row in comparable]
