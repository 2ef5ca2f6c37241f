"""Recognises rows of an embedding table: a wrong look-up is another input, not wrong arithmetic."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v4tool.verify.results import Comparison

AT_MOST = 8
"""Rows that are looked up in the table; these suffice to tell the two cases apart."""


def other_rows(
    found: Comparison, recorded: Tensor, weights: dict[str, Tensor], args: tuple[Any, ...]
) -> Comparison:
    """The comparison with status `input` if the node looks ids up in a table and the recording
    holds other rows.

    recorded: [..., D]. The node must have one two-dimensional weight [V, D] and integer ids as its
    one tensor.
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
    there = [row_of(table, rows[i]) for i in wrong[:AT_MOST]]
    if not there or any(row is None for row in there):
        return found
    pairs = ", ".join(f"{int(wanted[i])} -> {row}" for i, row in zip(wrong, there, strict=False))
    more = f", … ({len(wrong)} in all)" if len(wrong) > AT_MOST else ""
    return replace(found, status="input", note=f"the embeddings of other ids: {pairs}{more}")


def _row(table: Tensor, index: Tensor) -> Tensor:
    return table[int(index)].to(torch.float32)


def row_of(table: Tensor, row: Tensor) -> int | None:
    """The first row of a table [V, D] with exactly these FP32 values, or None."""
    candidates = (table[:, 0].to(torch.float32) == row[0]).nonzero().flatten()
    for index in candidates.tolist():
        if torch.equal(table[index].to(torch.float32), row):
            return int(index)
    return None
