"""The MTP block: prefill over the prompt and one decode step after it (SPEC section 5, MTP block).

T tokens of the batch, M streams, D dim, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from v4tool.model.block import EMBEDDING, block, embed, head_input
from v4tool.model.head import HEAD_NAMES, MATRIX, last_rows, logits, main_head, tap_logits
from v4tool.model.scope import Scope, Segment, Tap
from v4tool.model.sequence import LayerRange, Sequence, Watch
from v4tool.quant.activation import to_bf16

MTP_HEAD_NAMES = ("head.out", "logits.out", "out")
"""Keys under which the logits of MTP are recorded (SPEC section 6)."""
TOKENS_HELD = 192
"""Most tokens for which the MTP block's values are kept in memory, so that the output matrix (1 GiB
in the release) is read once; 0.4 MB per token. With more tokens it is read twice.
"""


def mtp_input(scope: Scope, h_TMD: Tensor, embedding: str) -> Tensor:
    """Projected embedding plus each projected stream: BF16 [T, M, D] (SPEC 5, MTP block)."""
    e = scope.tap("enorm.out", scope.norm("enorm", embed(scope, embedding)))
    e = scope.linear("e_proj", e).unsqueeze(1)
    h = scope.tap("hnorm.out", scope.norm("hnorm", h_TMD))
    h = scope.linear("h_proj", h)
    return to_bf16(e.to(scope.acc) + h.to(scope.acc))


def mtp(scope: Scope, h_TMD: Tensor, embedding: str) -> Tensor:
    """The MTP block, without the output matrix: streams [T, M, D] -> BF16 [segments, D]."""
    x = block(scope, mtp_input(scope, h_TMD, embedding), scope.config.n_layers)
    return head_input(scope, x)


def mtp_scope(scope: Scope, sequences: list[Sequence]) -> Scope:
    """Scope of the MTP block: MTP prefill and decode of all sequences as one batch."""
    prefills, decodes = zip(*(sequence.mtp_segments() for sequence in sequences), strict=True)
    return replace(scope, segments=prefills + decodes, path="mtp.0.", record="")


def mtp_streams(scope: Scope, x_TMD: Tensor) -> Tensor:
    """Input streams of MTP, [T + n, M, D]: those of prefill, then each prompt's last for decode."""
    return torch.cat([x_TMD, last_rows(scope, x_TMD)])


def mtp_head(scope: Scope, sequences: list[Sequence], x_TMD: Tensor) -> None:
    """Compute the MTP block and its logits, which are recorded."""
    place = mtp_scope(scope, sequences)
    rows = mtp(place, mtp_streams(scope, x_TMD), EMBEDDING)
    tap_logits(place, MTP_HEAD_NAMES, logits(place, rows, MATRIX))


def both_heads(scope: Scope, sequences: list[Sequence], x_TMD: Tensor) -> Tensor:
    """As `main_head`, then `mtp_head`, but with one read of the output matrix."""
    held: list[tuple[Tap, str, Tensor]] = []

    def holding(segment: Segment) -> Segment:
        return replace(
            segment, tap=lambda key, value: held.append((segment.tap, key, value.clone()))
        )

    place = mtp_scope(scope, sequences)
    deferred = replace(place, segments=tuple(map(holding, place.segments)))
    y_main = head_input(scope, x_TMD)
    y_mtp = mtp(deferred, mtp_streams(scope, x_TMD), EMBEDDING)
    both = logits(scope, torch.cat([y_main, y_mtp]), MATRIX)
    main, of_mtp = both[: len(y_main)], both[len(y_main) :]
    tap_logits(scope, HEAD_NAMES, main)
    for tap, key, value in held:
        tap(key, value)
    tap_logits(place, MTP_HEAD_NAMES, of_mtp)
    return main


def heads_with_mtp(
    scope: Scope,
    sequences: list[Sequence],
    x_TMD: Tensor,
    ends: LayerRange,
    watch: Watch,
    name: str,
) -> Tensor | None:
    """The heads of a pass (see `Port.heads`); MTP runs after the prefill alone."""
    with_mtp = ends.mtp and scope.segments[0].step.start == 0
    if ends.head:
        watch(name, "head")
    if ends.head and with_mtp and len(x_TMD) <= TOKENS_HELD:
        watch("mtp", "mtp.0")
        return both_heads(scope, sequences, x_TMD)
    result = main_head(scope, head_input(scope, x_TMD)) if ends.head else None
    if with_mtp:
        watch("mtp", "mtp.0")
        mtp_head(scope, sequences, x_TMD)
    return result
