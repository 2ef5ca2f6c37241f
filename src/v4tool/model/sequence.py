"""`Sequence`: one prompt with its tap and states; `LayerRange`: the part of the model to compute.

Left out: the passes themselves (`stream`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from v4tool.config import ModelConfig
from v4tool.model.scope import LayerState, Segment, Tap
from v4tool.names import Step, steps_of

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
    """The part of the model to compute: main layers below `layers`, the head, the draft blocks."""

    layers: int
    head: bool = True
    mtp: bool = True

    @classmethod
    def whole(cls, config: ModelConfig) -> "LayerRange":
        """All of the model."""
        return cls(config.n_layers, mtp=config.mtp_supported)
