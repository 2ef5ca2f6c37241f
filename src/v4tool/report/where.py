"""Output of `list keys KEY --where`: the source lines that compute a key."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from v4tool.report.terminal import lines

if TYPE_CHECKING:  # what shows it need not load torch
    from v4tool.where import KeyLines, SourceLine

NO_NODE = ("vt", "-", "-", "no node: token ids are an input")


def file_name(path: Path) -> str:
    """The file's path, relative to the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def key_lines(found: "KeyLines") -> str:
    """The port's line, the calls that lead to it, and the node of `model.vt`, one line each."""

    def row(title: str, line: "SourceLine") -> tuple[str, ...]:
        return title, f"{file_name(line.path)}:{line.line}", line.function, line.text

    first, *callers = found.port
    rest = [row("from", line) for line in callers]
    rest.append(row("vt", found.node) if found.node else NO_NODE)
    return lines(row("port", first), rest)


def as_dict(found: "KeyLines") -> dict[str, Any]:
    """The lines as plain data for JSON: `port`, its callers in `from`, and `vt`."""

    def entry(line: "SourceLine") -> dict[str, Any]:
        return {"file": file_name(line.path), "line": line.line,
                "function": line.function, "text": line.text}  # fmt: skip

    first, *callers = found.port
    return {
        "key": found.key,
        "port": entry(first),
        "from": [entry(line) for line in callers],
        "vt": entry(found.node) if found.node else None,
    }
