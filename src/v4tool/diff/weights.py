"""Weights that several runs over a candidate share, up to a limit of memory.

Left out: which weights a node has (`model.vt`).
"""

from collections.abc import Callable

from torch import Tensor

from v4tool.checkpoint.shards import Checkpoint
from v4tool.verify.tensors import CheckpointWeights

LIMIT = 2**28
"""Bytes of stored weights that are kept; dequantised ones take eight times that of FP8."""
VALUES = "_v4tool_values"


class CachedWeights(CheckpointWeights):
    """Reads weights, and keeps the first ones for the next run."""

    def __init__(self, checkpoint: Checkpoint, limit: int = LIMIT) -> None:
        super().__init__(checkpoint)
        self.free = limit
        self.kept: dict[str, Tensor] = {}

    def __call__(self, key: str) -> Tensor:
        if key in self.kept:
            return self.kept[key]
        value = super().__call__(key)
        size = value.numel() * value.element_size()
        # nine times: the values that `dequantised_once` keeps beside the codes are binary64
        if 9 * size <= self.free:
            self.free -= 9 * size
            self.kept[key] = value
            setattr(value, VALUES, None)
        return value


def dequantised_once(values: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The function of codes and scales, its result kept with codes that `CachedWeights` keeps."""

    def kept(codes: Tensor, scale: Tensor) -> Tensor:
        if not hasattr(codes, VALUES):
            return values(codes, scale)
        found: Tensor | None = getattr(codes, VALUES)
        if found is None:
            found = values(codes, scale)
            setattr(codes, VALUES, found)
        return found

    return kept
