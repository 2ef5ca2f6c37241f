"""The forward pass of DeepSeek-V4 with a DSpark head (`Port`; SPEC section 5, SPEC41 section 7).

The main stack is V4's; the draft head reads the streams that leave its target layers, and its
blocks are V4's blocks.
"""

from functools import partial

from torch import Tensor

from v4tool.model import port_v4
from v4tool.model.attention import keys_values, queries
from v4tool.model.block import Attention, block, large_weights
from v4tool.model.compress import Rotary
from v4tool.model.dspark import Parts, heads_with_drafts, tap_streams
from v4tool.model.hyper import hc_head
from v4tool.model.port import Streams
from v4tool.model.scope import Scope
from v4tool.model.sequence import LayerRange, Sequence, Watch

__all__ = ["draft_passes", "enter", "heads", "large_weights", "through"]

enter = port_v4.enter


def through(scope: Scope, streams: Streams, layer: int) -> Streams:
    """One block of the main stack; the head reads the streams that leave it."""
    left = Streams(block(scope, streams.x, layer), streams.tapped)
    return tap_streams(scope, left, layer)


def _draft_block(scope: Scope, streams: Streams, layer: int, attention: Attention) -> Streams:
    return Streams(block(scope, streams.x, layer, attention))


def _draft_queries(scope: Scope, x_TD: Tensor, rotary: Rotary) -> Tensor:
    return queries(scope, x_TD, rotary)[1]


def _collapse(scope: Scope, streams: Streams) -> Tensor:
    return hc_head(scope, streams.x)


def heads(
    scope: Scope,
    sequences: list[Sequence],
    streams: Streams,
    ends: LayerRange,
    watch: Watch,
    name: str,
) -> Tensor | None:
    """The main head and the draft head."""
    ahead = partial(large_weights, scope.config)
    parts = Parts(enter, _draft_block, _draft_queries, keys_values, _collapse, ahead)
    return heads_with_drafts(parts, scope, sequences, streams, ends, watch, name)


def draft_passes(passes: int) -> int:
    """The draft head takes part in every pass."""
    return passes
