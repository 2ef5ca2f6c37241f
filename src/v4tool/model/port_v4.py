"""The forward pass of DeepSeek-V4 with MTP (`Port`; SPEC section 5)."""

from torch import Tensor

from v4tool.model.block import block, large_weights
from v4tool.model.mtp import heads_with_mtp
from v4tool.model.port import Streams
from v4tool.model.scope import Scope
from v4tool.model.sequence import LayerRange, Sequence, Watch

__all__ = ["draft_passes", "enter", "heads", "large_weights", "through"]


def enter(x_TMD: Tensor) -> Streams:
    """The embeddings in every stream."""
    return Streams(x_TMD)


def through(scope: Scope, streams: Streams, layer: int) -> Streams:
    """One block of the main stack."""
    return Streams(block(scope, streams.x, layer))


def heads(
    scope: Scope,
    sequences: list[Sequence],
    streams: Streams,
    ends: LayerRange,
    watch: Watch,
    name: str,
) -> Tensor | None:
    """The main head, and MTP after the prefill."""
    return heads_with_mtp(scope, sequences, streams.x, ends, watch, name)


def draft_passes(passes: int) -> int:
    """MTP follows the prefill."""
    return 1
