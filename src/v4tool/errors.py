"""Exceptions for a user's mistakes (`V4ToolError`), and `Finding`, one defect of data.

`V4ToolError` and its kinds are caught in one place (`cli.main`) and turned into one line on stderr
and exit status 2. A `Finding` is data: `check` and `verify` collect them, go on, and exit with
status 1.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal


def printable(text: str) -> str:
    """The text in one line: line ends, control and other invisible characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class V4ToolError(Exception):
    """A user's mistake or an unusable environment: one line, exit status 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(V4ToolError):
    """A checkpoint's `config.json` has a missing, unknown or senseless field."""


class ProfileError(V4ToolError):
    """A profile, a case or a resolved setting cannot be used."""


class CheckpointError(V4ToolError):
    """A checkpoint is missing, incomplete, damaged or of another layout."""


class InputError(V4ToolError):
    """Token ids, text, layers or patterns given by the user cannot be used."""


class OutputError(V4ToolError):
    """A result cannot be written where it was asked for."""


class NotFiniteError(V4ToolError):
    """A pass over a checkpoint gives NaN or infinity."""


class RecordingError(V4ToolError):
    """A recording cannot be opened at all (what is merely wrong in it is a `Finding`)."""


class VtError(V4ToolError):
    """A `.vt` description breaks a rule of its language."""


@dataclass(frozen=True)
class Finding:
    """One defect of data.

    key: the tensor or field it is about; rule: the rule that is broken, in a few stable words;
    expected, found: what the rule demands and what is there, readable by a person.
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
