"""Where a `.vt` file's tensors come from: weights as safetensors gives them, recorded values."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from v4tool.checkpoint.shards import Checkpoint
from v4tool.record.reader import Recording

OWN_DESCRIPTION = Path(__file__).with_name("model.vt")
INPUT = re.compile(r"(decode\.\d+\.)?input_ids")
RAW_CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}


class Weights(Protocol):
    """Gives a weight by its checkpoint key; KeyError where there is none."""

    def __call__(self, key: str) -> Tensor: ...


class Recorded(Protocol):
    """Tensors under keys of a recording, read one at a time.

    specs: key -> (dtype, shape); metadata: the recording's.
    """

    specs: Any
    metadata: dict[str, str]

    def __contains__(self, key: object) -> bool: ...

    def read(self, key: str) -> Tensor:
        """One tensor, the caller's own; KeyError where there is none."""
        ...


class RecordedTensors:
    """A recording's tensors, each a copy; the file is mapped anew every `AT_ONCE` bytes.

    What is mapped and was touched counts as resident until it is let go: of a file of 5 GiB that
    would be all of it.
    """

    AT_ONCE = 1 << 28

    def __init__(self, path: Path) -> None:
        with Recording.open(path) as recording:
            self.metadata, self.specs = recording.metadata, recording.specs
        self.path = path
        self._taken = 0
        self._file: Any = safe_open(str(path), framework="pt")

    def __contains__(self, key: object) -> bool:
        return key in self.specs

    def read(self, key: str) -> Tensor:
        """One tensor; KeyError if the recording has no such key."""
        if key not in self.specs:
            raise KeyError(key)
        if self._taken > self.AT_ONCE:
            self._taken = 0
            self._file = safe_open(str(self.path), framework="pt")
        value: Tensor = self._file.get_tensor(key).clone()
        self._taken += value.nbytes
        return value


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
