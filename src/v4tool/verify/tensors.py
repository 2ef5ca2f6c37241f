"""Loads the tensors of a `.vt` run: weights from the checkpoint, recorded values from the file."""

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
RAW_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}


class Weights(Protocol):
    """Returns a weight by its checkpoint key; KeyError if there is none."""

    def __call__(self, key: str) -> Tensor: ...


class Recorded(Protocol):
    """Tensors under keys of a recording, read one at a time.

    specs: key -> (dtype, shape); metadata: the recording's.
    """

    @property
    def specs(self) -> Any: ...

    @property
    def metadata(self) -> dict[str, str]: ...

    def __contains__(self, key: object) -> bool: ...

    def read(self, key: str) -> Tensor:
        """One tensor, the caller's own; KeyError where there is none."""
        ...


class RecordedTensors:
    """Reads tensors of a recording, each as a copy, with bounded resident memory.

    The file is memory-mapped by safetensors; pages that were read stay resident until the mapping
    is closed. It is therefore mapped again after every `REMAP_BYTES` read.
    """

    REMAP_BYTES = 1 << 28

    def __init__(self, path: Path) -> None:
        with Recording.open(path) as recording:
            self.metadata, self.specs = recording.metadata, recording.specs
        self.path = path
        self._bytes_read = 0
        self._file: Any = safe_open(str(path), framework="pt")

    def __contains__(self, key: object) -> bool:
        return key in self.specs

    def read(self, key: str) -> Tensor:
        """One tensor; KeyError if the recording has no such key."""
        if key not in self.specs:
            raise KeyError(key)
        if self._bytes_read > self.REMAP_BYTES:
            self._bytes_read = 0
            self._file = safe_open(str(self.path), framework="pt")
        value: Tensor = self._file.get_tensor(key).clone()
        self._bytes_read += value.nbytes
        return value


class CheckpointWeights:
    """Weights of an open checkpoint, each in the dtype that `safetensors` would return."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __call__(self, key: str) -> Tensor:
        if key not in self.checkpoint:
            raise KeyError(key)
        value = self.checkpoint.read(key)
        dtype = RAW_DTYPES.get(self.checkpoint.specs[key].dtype)
        return value.view(dtype) if dtype is not None and value.dtype == torch.uint8 else value


def is_input(key: str) -> bool:
    """Whether a key holds token ids, which no node computes."""
    return INPUT.fullmatch(key) is not None


def decode_steps(keys: Iterable[str]) -> int:
    """Number of decode steps of the main stack in a recording: its highest step number + 1."""
    numbers = [k.split(".")[1] for k in keys if k.startswith("decode.")]
    return 1 + max((int(n) for n in numbers if n.isdigit()), default=-1)
