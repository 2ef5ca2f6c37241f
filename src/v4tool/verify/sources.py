"""Where a `.vt` file's tensors come from: weights as safetensors would give them, recorded values
as they are."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from v4tool.checkpoint.shards import Checkpoint

OWN_DESCRIPTION = Path(__file__).with_name("model.vt")
INPUT = re.compile(r"(decode\.\d+\.)?input_ids")
RAW_CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}


class Weights(Protocol):
    """Gives a weight by its checkpoint key; KeyError where there is none."""

    def __call__(self, key: str) -> Tensor: ...


class Recorded(Protocol):
    """A recording: keys and tensors (see `record.reader.Recording`)."""

    metadata: dict[str, str]

    def keys(self) -> list[str]: ...

    def spec(self, key: str) -> tuple[str, tuple[int, ...]]: ...

    def read(self, key: str) -> Tensor: ...

    def __contains__(self, key: object) -> bool: ...


class CheckpointWeights:
    """Weights of an open checkpoint, each in the dtype that safetensors would give it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __call__(self, key: str) -> Tensor:
        if key not in self.checkpoint:
            raise KeyError(key)
        value = self.checkpoint.read(key)
        dtype = RAW_CODES.get(self.checkpoint.specs[key].dtype)
        return value.view(dtype) if dtype is not None and value.dtype == torch.uint8 else value


def is_input(key: str) -> bool:
    """Whether a key holds token ids, which no node computes."""
    return INPUT.fullmatch(key) is not None


def decode_steps(keys: Iterable[str]) -> int:
    """How many decode steps of the main stack a recording has: the last one's number + 1."""
    numbers = [k.split(".")[1] for k in keys if k.startswith("decode.")]
    return 1 + max((int(n) for n in numbers if n.isdigit()), default=-1)
