"""Strict reader of a shard's safetensors header: CheckpointError for the first defect.

The format and its rules are in `safetensors_header`; tensor names must be printable besides. Left
out: which tensors a checkpoint must have (`inspection.py`) and reading them (`shards.py`).
"""

from dataclasses import dataclass
from pathlib import Path

from v4tool.errors import CheckpointError
from v4tool.file_kinds import PEEK, not_safetensors
from v4tool.safetensors_header import Entry, HeaderFields, HeaderRules, parse_header

RULES = HeaderRules(printable_names=True)


@dataclass(frozen=True)
class Header:
    """A file's header.

    digest: SHA-256 (hex) of its `length` bytes, the length field included; size: of the whole file;
    tensors: in the order of the header.
    """

    digest: str
    length: int
    size: int
    tensors: dict[str, Entry]


def read_header(path: Path) -> Header:
    """Parse and check one file's header.

    Raises CheckpointError, one line that begins with the file's name, for a file of another kind
    and for whatever the format forbids: a cut or padded file, an invalid length or byte range, a
    duplicate name, an unknown dtype.
    """
    try:
        header = HeaderFields(size=path.stat().st_size)
        with path.open("rb") as file:
            if other := not_safetensors(file.read(PEEK)):
                raise ValueError(f"expected a safetensors file, found {other}")
            file.seek(0)
            for defect in parse_header(file, header, RULES):
                raise ValueError(defect.message)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path.name}: {e}") from None
    return Header(header.sha256, header.payload, header.size, header.entries)
