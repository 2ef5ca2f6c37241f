"""Detects embeddings of other token ids: recorded rows that the table has at another index.

Such a recording was made from another input, which is reported instead of wrong arithmetic.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v4tool.verify.results import Comparison

AT_MOST = 8
"""Wrong rows that are searched for in the table and shown in the note."""


def other_rows(
    found: Comparison, recorded: Tensor, weights: dict[str, Tensor], args: tuple[Any, ...]
) -> Comparison:
    """The comparison with status `input` if the node is an embedding look-up and the wrong recorded
    rows are other rows of its table; else `found` unchanged.

    recorded: FP32 [..., D]. weights, args: of the node, which is a look-up if it has one weight
    [V, D] and one tensor argument, integer ids [...].
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    tables = list(weights.values())
    if len(tables) != 1 or len(tensors) != 1 or tensors[0].is_floating_point():
        return found
    table, ids = tables[0], tensors[0]
    if table.dim() != 2 or recorded.shape != (*ids.shape, table.shape[1]):
        return found
    rows = recorded.reshape(-1, table.shape[1])
    wanted = ids.flatten()
    wrong = [i for i in range(len(rows)) if not torch.equal(rows[i], _row(table, wanted[i]))]
    indices = [row_of(table, rows[i]) for i in wrong[:AT_MOST]]
    if not indices or any(index is None for index in indices):
        return found
    pairs = ", ".join(f"{int(wanted[i])} -> {row}" for i, row in zip(wrong, indices, strict=False))
    more = f", … ({len(wrong)} in all)" if len(wrong) > AT_MOST else ""
    return replace(found, status="input", note=f"the embeddings of other ids: {pairs}{more}")


def _row(table: Tensor, index: Tensor) -> Tensor:
    return table[int(index)].to(torch.float32)


def row_of(table: Tensor, row: Tensor) -> int | None:
    """The index of the first row of a table [V, D] that equals `row`, FP32 [D]; else None."""
    candidates = (table[:, 0].to(torch.float32) == row[0]).nonzero().flatten()
    for index in candidates.tolist():
        if torch.equal(table[index].to(torch.float32), row):
            return int(index)
    return None
