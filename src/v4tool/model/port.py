"""`Port`: the forward pass of one architecture, as `stream` runs it; `Streams` between its blocks.

An architecture's description names the module (`port_v4`, `port_v4_dspark`); what the architectures
share (attention core, experts, hyper-connections, output head) lies in modules of its own.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.model.scope import Scope
from v4tool.model.sequence import LayerRange, Sequence, Watch


@dataclass(frozen=True)
class Streams:
    """What one block hands to the next: the residual streams x BF16 [T, M, D] and what belongs to
    the tokens beside them.

    tapped: BF16 [T, D] each, the means of the streams that a draft head reads, so far.
    """

    x: Tensor
    tapped: tuple[Tensor, ...] = ()


class Port(Protocol):
    """The parts of a forward pass in which architectures differ."""

    def enter(self, x_TMD: Tensor) -> Streams:
        """What the first block gets of the repeated embeddings."""
        ...

    def through(self, scope: Scope, streams: Streams, layer: int) -> Streams:
        """One block of the main stack."""
        ...

    def large_weights(self, config: ModelConfig, layer: int) -> tuple[str, ...]:
        """Names of a block's large weights that are always read, to prefetch."""
        ...

    def heads(
        self,
        scope: Scope,
        sequences: list[Sequence],
        streams: Streams,
        ends: LayerRange,
        watch: Watch,
        name: str,
    ) -> Tensor | None:
        """The main head and the draft head of one pass, as far as `ends` has them; returns the
        main logits, acc [n, V].
        """
        ...

    def draft_passes(self, passes: int) -> int:
        """In how many passes of the main stack the draft head runs."""
        ...


def port_of(config: ModelConfig) -> Port:
    """The forward pass of a configuration's architecture."""
    found: Port = config.architecture.load("port")
    return found
