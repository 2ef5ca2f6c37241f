"""Streaming forward pass: the layers one after another, each for all sequences at once.

Follows SPEC section 5. A `Sequence` is one prompt with its tap. `run` computes the prefill, the MTP
prefill and decode step, and the decode steps of the main stack for all prompts; sequences with
fewer steps end earlier. Of a layer only the state that decode needs (`LayerState`) is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from v4tool.config import ModelConfig, Numerics
from v4tool.model.block import (
    block,
    embed,
    head_input,
    large_weights,
    last_rows,
    logits,
    mtp,
    tap_logits,
)
from v4tool.model.prefetch import PrefetchingWeights
from v4tool.model.scope import LayerState, Scope, Segment, Tap, Weights
from v4tool.names import Step, steps_of

EMBEDDING = "embed.weight"
MATRIX = "head.weight"

Watch = Callable[[str, str], None]
"""Called before a module runs: the pass (`prefill`, `decode.0`, `mtp`), the module (`layers.3`)."""


@dataclass
class Sequence:
    """One prompt: token ids, number of decode steps, token ids of the decode steps if given.

    `run` extends decode_ids to `decode` entries: ids that are not given are chosen greedily, the
    arg-max of the previous logits, the lowest index on ties.
    """

    ids: list[int]
    tap: Tap
    decode: int = 0
    decode_ids: list[int] = field(default_factory=list)
    states: dict[int, LayerState] = field(default_factory=dict)

    def segment(self, step: Step, ids: list[int]) -> Segment:
        """The tokens of one pass."""
        return Segment(step, torch.tensor(ids, dtype=torch.int64), self.states, self.tap)

    def main_segment(self, number: int) -> Segment:
        """The tokens of a main-stack pass: 0 is the prefill, i the decode step i - 1."""
        step = steps_of(len(self.ids), self.decode)[number]
        segment = self.segment(step, self.ids if number == 0 else [self.decode_ids[number - 1]])
        self.tap(f"{step.prefix}input_ids", segment.ids.unsqueeze(0))
        return segment

    def mtp_segments(self) -> tuple[Segment, Segment]:
        """The tokens of the MTP prefill (the prompt) and of the MTP decode step (its last id)."""
        length = len(self.ids)
        return (
            self.segment(Step("mtp.0.prefill.", length, 0), self.ids),
            self.segment(Step("mtp.0.decode.", 1, length), self.ids[-1:]),
        )


@dataclass(frozen=True)
class LayerRange:
    """The part of the model to compute: main layers below `layers`, the head, the MTP block."""

    layers: int
    head: bool = True
    mtp: bool = True

    @classmethod
    def whole(cls, config: ModelConfig) -> "LayerRange":
        """All of the model."""
        return cls(config.n_layers, mtp=config.mtp_supported)


def through_layers(scope: Scope, layer_range: LayerRange, watch: Watch, name: str) -> Tensor:
    """Embedding and main layers of one pass; returns the last layer's streams: BF16 [T, M, D]."""
    watch(name, "embed")
    x = embed(scope, EMBEDDING).unsqueeze(1).repeat(1, scope.config.hc_mult, 1)
    for layer in range(layer_range.layers):
        watch(name, f"layers.{layer}")
        upcoming = large_weights(scope.config, layer + 1) if layer + 1 < layer_range.layers else ()
        place = replace(scope / "layers" / str(layer), upcoming=upcoming)
        x = place.tap("out", block(place, x, layer))
    return x


HEAD_NAMES, MTP_HEAD_NAMES = ("head.out",), ("head.out", "logits.out", "out")
"""Keys under which the logits of the main stack and of MTP are recorded (SPEC section 6)."""
TOKENS_HELD = 192
"""Most tokens for which the MTP block's values are kept in memory, so that the output matrix (1 GiB
in the release) is read once; 0.4 MB per token. With more tokens it is read twice.
"""


def mtp_scope(scope: Scope, sequences: list[Sequence]) -> Scope:
    """Scope of the MTP block: MTP prefill and decode of all sequences as one batch."""
    prefills, decodes = zip(*(sequence.mtp_segments() for sequence in sequences), strict=True)
    return replace(scope, segments=prefills + decodes, path="mtp.0.", record="")


def mtp_streams(scope: Scope, x_TMD: Tensor) -> Tensor:
    """Input streams of MTP, [T + n, M, D]: those of prefill, then each prompt's last for decode."""
    return torch.cat([x_TMD, last_rows(scope, x_TMD)])


def main_head(scope: Scope, x_TMD: Tensor) -> Tensor:
    """Logits of the main stack, acc [n, V]; they are recorded."""
    result = logits(scope, head_input(scope, x_TMD), MATRIX)
    tap_logits(scope, HEAD_NAMES, result)
    return result


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


def through_heads(
    scope: Scope,
    sequences: list[Sequence],
    x_TMD: Tensor,
    ends: LayerRange,
    watch: Watch,
    name: str,
) -> Tensor | None:
    """Compute the heads of a layer range; returns the main logits, acc [n, V], if it has them."""
    if ends.head:
        watch(name, "head")
    if ends.head and ends.mtp and len(x_TMD) <= TOKENS_HELD:
        watch("mtp", "mtp.0")
        return both_heads(scope, sequences, x_TMD)
    result = main_head(scope, x_TMD) if ends.head else None
    if ends.mtp:
        watch("mtp", "mtp.0")
        mtp_head(scope, sequences, x_TMD)
    return result


def greedy(sequences: list[Sequence], logits_nV: Tensor, number: int) -> None:
    """Append the arg-max of the logits to sequences that have no id for decode step `number`.

    The logits are compared in FP32, as recorded; ties go to the lowest index. NaN counts as minus
    infinity, so the id is 0 if all logits are NaN.
    """
    comparable = logits_nV.float().nan_to_num(-math.inf, math.inf, -math.inf)
    for sequence, row in zip(sequences, comparable, strict=True):
        if len(sequence.decode_ids) == number < sequence.decode:
            sequence.decode_ids.append(int((row == row.max()).nonzero()[0]))


def run(
    weights: Weights,
    config: ModelConfig,
    numerics: Numerics,
    sequences: list[Sequence],
    layer_range: LayerRange | None = None,
    watch: Watch = lambda name, place: None,
) -> None:
    """Run the forward pass of all sequences; results go to the sequences' taps.

    layer_range: the part of the model to compute (default: all). Decode steps without given ids
    need the whole main stack.
    """
    layer_range = layer_range or LayerRange.whole(config)
    with PrefetchingWeights(weights) as prefetching:
        for number in range(1 + max(sequence.decode for sequence in sequences)):
            going = [s for s in sequences if s.decode >= number]
            name = f"decode.{number - 1}" if number else "prefill"
            segments = tuple(sequence.main_segment(number) for sequence in going)
            scope = Scope(prefetching, config, numerics, segments)
            x = through_layers(scope, layer_range, watch, name)
            ends = replace(layer_range, mtp=layer_range.mtp and number == 0)
            result = through_heads(scope, going, x, ends, watch, name)
            if result is not None:
                greedy(going, result, number)
