"""Compares what a node returned with the recording and chooses the values that are handed on.

Chained runs hand on computed values, isolated ones recorded values, so that an error does not
spread. A value accumulated without rounding (acc) is recorded rounded to FP32: the computed value
goes on where it rounds to the recorded one, else the recorded one. Left out: comparing two tensors
(`compare`) and running nodes (`runtime`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from v4tool.names import generic
from v4tool.verify.compare import Rule, SameChoice, bf16_valued, compare
from v4tool.verify.embedding_rows import other_rows
from v4tool.verify.frames import Frame, Judged, RunScope
from v4tool.verify.language import Description
from v4tool.verify.provenance import Provenance
from v4tool.verify.results import Comparison
from v4tool.verify.tensors import Recorded


class Judge(Protocol):
    """Compares returned values with recorded ones and chooses the values that are handed on.

    keys: those of the recording. equally_good: the file's `EQUALLY_GOOD`: function by node name.
    """

    keys: frozenset[str]
    equally_good: Mapping[str, Callable[..., Any]]

    def judge_all(
        self, frame: Frame, result: Any, weights: dict[str, Tensor], provenance: Provenance
    ) -> list[Judged]:
        """Compare the values that a node returned."""
        ...

    def absent(self, frame: Frame, key: str) -> Comparison:
        """The comparison of a key that is not recorded."""
        ...

    def from_recording(self, keys: tuple[str | None, ...]) -> Any:
        """What is recorded under a node's keys, in the form in which the node returns it."""
        ...


@dataclass
class OutputJudge:
    """Judges the outputs of nodes against one recording.

    equally_good: the file's `EQUALLY_GOOD`: function by node name. keys: the recording's.
    """

    description: Description
    recording: Recorded
    rule: Rule
    scope: RunScope
    equally_good: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = frozenset(self.recording.specs)
        self._rounded: set[str] = set()

    def judge_all(
        self, frame: Frame, result: Any, weights: dict[str, Tensor], provenance: Provenance
    ) -> list[Judged]:
        """Compare the values that a node returned; VtError where they are not as declared."""
        values = result if isinstance(result, tuple) else (result,)
        if len(values) != len(frame.keys):
            problem = f"gives {len(values)} values, declares {len(frame.keys)}"
            raise self.description.error(frame.spec, problem)
        choice = self._same_choice(frame, weights)
        return [
            self._judge(frame, key, value, choice, weights, provenance)
            for key, value in zip(frame.keys, values, strict=True)
        ]

    def _judge(
        self,
        frame: Frame,
        key: str | None,
        value: Any,
        choice: SameChoice | None,
        weights: dict[str, Tensor],
        provenance: Provenance,
    ) -> Judged:
        if key is None:
            return Judged(None, None, value)
        if not isinstance(value, Tensor):
            problem = f"gives {type(value).__name__} for {key}, not a tensor"
            raise self.description.error(frame.spec, problem)
        inner = provenance.of(value)
        if key not in self.keys:
            return Judged(self.absent(frame, key), inner, value)
        recorded = self.recording.read(key)
        loose = frame.unit in self._rounded
        found = compare(key, value, recorded, self.rule, loose=loose, same_choice=choice)
        if found.fails:
            found = other_rows(found, recorded, weights, frame.args)
        on = value if self.scope.chained else self._hand_on(frame.unit, value, recorded)
        return Judged(found, inner, on)

    def absent(self, frame: Frame, key: str) -> Comparison:
        """The comparison of a key that the recording lacks; VtError if no recording has it."""
        if self.scope.partial:
            return Comparison(key, "unrecorded")
        known = self.scope.known
        if known is not None and generic(key) not in known:
            raise self.description.error(frame.spec, f"output {key} is in no recording")
        return Comparison(key, "missing")

    def _hand_on(self, unit: str, value: Tensor, recorded: Tensor) -> Tensor:
        """The recorded value in the computed one's dtype; the computed one if it does not fit."""
        if value.shape != recorded.shape:
            return value
        if not value.is_floating_point():
            return value if recorded.is_floating_point() else recorded.to(value.dtype)
        recorded = recorded.to(torch.float32)
        if value.dtype == torch.bfloat16:
            return recorded.to(torch.bfloat16) if bf16_valued(recorded) else recorded
        same = value.to(torch.float32) == recorded
        if bool(same.all()):
            return value
        self._rounded.add(unit)
        return torch.where(same, value, recorded.to(value.dtype))

    def _same_choice(self, frame: Frame, weights: dict[str, Tensor]) -> SameChoice | None:
        """The function of the file's `EQUALLY_GOOD` for this node, or None."""
        offered = self.equally_good.get(frame.spec.name)
        if offered is None:
            return None

        def judged(computed: Tensor, recorded: Tensor) -> bool:
            try:
                return bool(offered(frame.args, weights, computed, recorded))
            except Exception:  # indices of a damaged table may be out of range
                return False

        return judged

    def from_recording(self, keys: tuple[str | None, ...]) -> Any:
        """What is recorded under a node's keys, in the form in which the node returns it."""
        values = [self._recorded_value(key) for key in keys]
        return values[0] if len(values) == 1 else tuple(values)

    def _recorded_value(self, key: str | None) -> Tensor | None:
        """A recorded value in the model's dtype: BF16 if all elements are BF16 values."""
        if key is None or key not in self.keys:
            return None
        recorded = self.recording.read(key)
        if not recorded.is_floating_point():
            return recorded
        recorded = recorded.to(torch.float32)
        return recorded.to(torch.bfloat16 if bf16_valued(recorded) else torch.float64)
