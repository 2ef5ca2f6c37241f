"""Lazy reader of a recording: metadata, dtypes and shapes when it is opened, a tensor on request.

Left out: whether the contents are right, which `check` decides; the file only has to be readable.
torch is imported only when a torch tensor is asked for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from v4tool.errors import RecordingError
from v4tool.names import ITEMSIZE
from v4tool.untrusted import kind_of, parse_json, shortened

if TYPE_CHECKING:
    from torch import Tensor


class Recording:
    """An open recording; use as a context manager.

    `recording[key]` is a NumPy array, `recording.torch(key)` a torch tensor, read on request.
    path: of the file. metadata: strings of `__metadata__`. specs: key -> (safetensors dtype,
    shape). RecordingError if it is not a readable safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if kind_of(path) == "a pipe or device":
            raise RecordingError(f"{path}: expected a recording, found a pipe or device")
        try:
            self._file = safe_open(str(path), framework="np")
        except FileNotFoundError:
            raise RecordingError(f"{path}: no such recording") from None
        except (SafetensorError, OSError) as error:
            reason = shortened(str(error), 200)
            raise RecordingError(f"{path}: not a readable safetensors file: {reason}") from None
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.specs: dict[str, tuple[str, tuple[int, ...]]] = {
            key: self._spec(key)
            for key in self._file.keys()  # noqa: SIM118  (no mapping)
        }

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a recording; RecordingError if it is not a readable safetensors file."""
        return cls(Path(path))

    def _spec(self, key: str) -> tuple[str, tuple[int, ...]]:
        view = self._file.get_slice(key)
        return view.get_dtype(), tuple(view.get_shape())

    def keys(self) -> list[str]:
        """All keys, in no particular order."""
        return list(self.specs)

    def spec(self, key: str) -> tuple[str, tuple[int, ...]]:
        """The safetensors dtype and the shape of a key."""
        return self.specs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, key: object) -> bool:
        return key in self.specs

    def __getitem__(self, key: str) -> npt.NDArray[Any]:
        """One tensor as a NumPy array of its own: float32, int32 or int64.

        KeyError if the recording has no such key; RecordingError if it cannot be read, or has
        another dtype than a recording's.
        """
        dtype, _ = self.specs[key]
        if dtype not in ITEMSIZE:
            wanted = ", ".join(ITEMSIZE)
            raise RecordingError(f"{self.path}: {key}: expected one of {wanted}, found {dtype}")
        try:
            value: npt.NDArray[Any] = np.asarray(self._file.get_tensor(key))
        except (SafetensorError, OSError) as error:
            raise RecordingError(f"{self.path}: {key}: cannot be read: {error}") from None
        return value

    def torch(self, key: str) -> "Tensor":
        """One tensor as a torch tensor of its own; dtypes and errors as of `recording[key]`."""
        import torch

        return torch.from_numpy(self[key])

    @property
    def input_ids(self) -> list[int]:
        """The prompt's token ids from the metadata; RecordingError if missing or no list."""
        return self._ids("input_ids", required=True)

    @property
    def decode_ids(self) -> list[int]:
        """The decode steps' token ids from the metadata; empty if it has none."""
        return self._ids("decode_ids", required=False)

    def _ids(self, field: str, *, required: bool) -> list[int]:
        if field not in self.metadata and not required:
            return []
        try:
            ids = parse_json(self.metadata[field])
        except (KeyError, ValueError):
            ids = None
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            found = shortened(self.metadata.get(field, "nothing"))
            raise RecordingError(
                f"{self.path}: metadata {field}: expected a list of ids, found {found}"
            )
        return ids

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)
