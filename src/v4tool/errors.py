"""Exception classes for unusable input (`V4ToolError`), and `Finding`, one defect of data.

`cli.main` catches `V4ToolError` and prints one line to stderr, exit status 2. A `Finding` is data:
`check` and `verify` collect findings, continue, and exit with status 1.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal


def printable(text: str) -> str:
    """The text in one line: line ends and non-printable characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class V4ToolError(Exception):
    """Base class: unusable input or environment. The message is one line; exit status 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(V4ToolError):
    """A checkpoint's `config.json` has a missing, contradictory or invalid field."""


class UnsupportedError(V4ToolError):
    """What is asked for is not defined for the model's architecture."""


class ProfileError(V4ToolError):
    """A profile, case or setting is invalid or missing."""


class CheckpointError(V4ToolError):
    """A checkpoint is missing, incomplete, damaged or has another layout."""


class InputError(V4ToolError):
    """Token ids, text, layers or patterns given by the user are invalid."""


class OutputError(V4ToolError):
    """A file cannot be written, or would replace another one."""


class NotFiniteError(V4ToolError):
    """A pass over a checkpoint gives NaN or infinity."""


class RecordingError(V4ToolError):
    """A recording or its manifest cannot be read (defects inside a recording are findings)."""


class VtError(V4ToolError):
    """A `.vt` description violates the language's rules or fails to run."""


@dataclass(frozen=True)
class Finding:
    """One defect of data.

    key: the tensor or field; rule: id of the violated rule; expected, found: what the rule demands
    and what the data has, as text. severity: a note does not make a check fail.
    """

    key: str
    rule: str
    expected: str
    found: str
    severity: Literal["error", "note"] = "error"

    def line(self) -> str:
        """The finding in one line."""
        return printable(f"{self.key}: {self.rule}: expected {self.expected}, found {self.found}")

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data for JSON."""
        return asdict(self)
