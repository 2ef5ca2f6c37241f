"""Streaming forward pass: the layers one after another, each for all sequences at once.

Follows SPEC section 5. A `Sequence` is one prompt with its tap. `run` computes the prefill and the
decode steps of the main stack for all prompts, with the draft head where the architecture's `Port`
has it; sequences with fewer steps end earlier. Of a layer only the state that decode needs
(`LayerState`) is kept.
"""

from dataclasses import replace

from torch import Tensor

from v4tool.config import ModelConfig, Numerics
from v4tool.model.block import EMBEDDING, embed
from v4tool.model.head import arg_max
from v4tool.model.port import Streams, port_of
from v4tool.model.prefetch import PrefetchingWeights
from v4tool.model.scope import Scope, Weights
from v4tool.model.sequence import LayerRange, Sequence, Watch

__all__ = ["LayerRange", "Sequence", "run", "through_layers", "watched"]


def through_layers(scope: Scope, layer_range: LayerRange, watch: Watch, name: str) -> Streams:
    """Embedding and main layers of one pass; returns what the last layer hands on."""
    port, last = port_of(scope.config), layer_range.layers - 1
    watch(name, "embed")
    embedded = embed(scope, EMBEDDING)
    streams = port.enter(embedded.unsqueeze(1).repeat(1, scope.config.hc_mult, 1))
    for layer in range(layer_range.layers):
        watch(name, f"layers.{layer}")
        upcoming = port.large_weights(scope.config, layer + 1) if layer < last else ()
        place = replace(scope / "layers" / str(layer), upcoming=upcoming)
        streams = port.through(place, streams, layer)
        place.tap("out", streams.x)
    return streams


def greedy(sequences: list[Sequence], logits_nV: Tensor, number: int) -> None:
    """Append the arg-max of the logits to sequences that have no id for decode step `number`."""
    for sequence, token in zip(sequences, arg_max(logits_nV), strict=True):
        if len(sequence.decode_ids) == number < sequence.decode:
            sequence.decode_ids.append(token)


def watched(config: ModelConfig, passes: int, layer_range: LayerRange) -> int:
    """How many times `run` calls `watch` in so many passes of the main stack."""
    drafts = port_of(config).draft_passes(passes) if layer_range.mtp else 0
    return passes * (1 + layer_range.layers + layer_range.head) + drafts


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
    layer_range, port = layer_range or LayerRange.whole(config), port_of(config)
    with PrefetchingWeights(weights) as prefetching:
        for number in range(1 + max(sequence.decode for sequence in sequences)):
            going = [s for s in sequences if s.decode >= number]
            name = f"decode.{number - 1}" if number else "prefill"
            segments = tuple(sequence.main_segment(number) for sequence in going)
            scope = Scope(prefetching, config, numerics, segments)
            streams = through_layers(scope, layer_range, watch, name)
            result = port.heads(scope, going, streams, layer_range, watch, name)
            if result is not None:
                greedy(going, result, number)
