"""Errors of integer results: tables exactly, choices by the margin of their scores.

Experts and blocks are chosen by scores that two right engines compute with different last bits, so
that near ties fall differently. A choice is judged by how much worse the chosen scores are than the
best ones, relative to the spread of the scores in that row (SPEC section 5, Indexer and MoE).
"""

import torch
from torch import Tensor

from v4tool.verify.frames import Frame


def choice_error(
    frame: Frame, value: Tensor, recorded: Tensor, weights: dict[str, Tensor]
) -> float:
    """The error of recorded indices: 0 where each row holds the same numbers in any order.

    For `index_choice` and `gate_select` the largest margin by which a chosen score lies below the
    worst of the best ones; for other tables the share of entries that differ.
    """
    computed, given = value.long().sort(-1).values, recorded.long().sort(-1).values
    if torch.equal(computed, given):
        return 0.0
    if frame.spec.name == "gate_select":
        scores = frame.args[0].double()
        if "bias_w" in weights:
            scores = scores + weights["bias_w"].double()
        return _margin(scores, value.long(), recorded.long())
    if frame.spec.name == "index_choice":
        score, _, offset = frame.args
        return _margin(score.double(), _blocks(value, offset), _blocks(recorded, offset))
    return float((computed != given).double().mean())


def _blocks(table: Tensor, offset: int) -> Tensor:
    """Table entries as numbers of blocks, -1 for none."""
    return torch.where(table < 0, -1, table.long() - offset)


def _margin(scores: Tensor, computed: Tensor, recorded: Tensor) -> float:
    """How far the worst recorded choice lies below the worst computed one, in spreads of a row."""
    if bool((recorded >= scores.shape[-1]).any()) or bool(
        ((recorded < 0).sum(-1) != (computed < 0).sum(-1)).any()
    ):
        return 1.0
    in_order = recorded.sort(-1).values
    if bool(((in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)).any()):
        return 1.0
    spread = (scores.amax(-1) - scores.amin(-1)).clamp(min=1e-30)
    here, there = (_worst_score(scores, choice) for choice in (computed, recorded))
    return float(((here - there) / spread).clamp(min=0, max=1).amax())


def _worst_score(scores: Tensor, choice: Tensor) -> Tensor:
    """The least score that a row chooses; +inf where it chooses none."""
    found = scores.gather(-1, choice.clamp(min=0))
    return torch.where(choice < 0, torch.inf, found).amin(-1).nan_to_num(posinf=0.0)
