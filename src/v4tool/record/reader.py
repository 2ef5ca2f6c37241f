"""A recording read lazily: its keys and shapes at once, a tensor when it is asked for.

Left out: whether what is in the file is right. That is for `check`; here a file only has to be
readable.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from v4tool.errors import RecordingError
from v4tool.untrusted import kind_of, parse_json, shortened


class Recording:
    """An open recording. Attributes: `path`, `metadata` (strings), `specs` (key -> (dtype,
    shape)).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if kind_of(path) == "a pipe or device":
            raise RecordingError(f"{path}: expected a recording, found a pipe or device")
        try:
            self._file = safe_open(str(path), framework="pt")
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

    def read(self, key: str) -> Tensor:
        """One tensor, a copy. KeyError if the recording has no such key."""
        if key not in self.specs:
            raise KeyError(key)
        value: Tensor = self._file.get_tensor(key)
        return value

    @property
    def input_ids(self) -> list[int]:
        """The prompt's ids as the metadata states them; RecordingError if it does not."""
        return self._ids("input_ids", required=True)

    @property
    def decode_ids(self) -> list[int]:
        """The ids of the decode steps as the metadata states them; none where it does not."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)
