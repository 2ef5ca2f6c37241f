"""stdout and stderr that survive a closed pipe and any encoding.

`use_robust_streams` replaces `sys.stdout` and `sys.stderr` once, in `cli.main`. A reader that has
gone (`v4tool list keys | head -2`) is no error: what is still written is dropped, the command runs
to its end and keeps its exit status. What an encoding cannot show is escaped (`\\u4f60`).
"""

import codecs
import io
import sys
from typing import Any, TextIO

from v4tool.errors import OutputError


class PipeFile(io.FileIO):
    """A file descriptor that drops everything after the first write that fails.

    A closed pipe is silent. Any other failure (a full disk) raises OutputError once where `strict`.
    """

    def __init__(self, descriptor: int, name: str, *, strict: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.label, self.strict, self.failed = name, strict, False

    def write(self, data: Any, /) -> int:
        """Write bytes; the number of bytes written or dropped."""
        if self.failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            self.failed = True
        except OSError as error:
            self.failed = True
            if self.strict:
                problem = f"{self.label}: cannot be written: {error.strerror}"
                raise OutputError(problem) from None
        return memoryview(data).nbytes


def use_robust_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr`, where they are files, pipes or terminals."""
    sys.stdout = robust(sys.stdout, "stdout", strict=True)
    sys.stderr = robust(sys.stderr, "stderr", strict=False)


def robust(stream: TextIO, name: str, *, strict: bool) -> TextIO:
    """The stream over a `PipeFile`, with escapes; itself where it is closed or in memory."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)  # no buffer with PYTHONUNBUFFERED
    if not isinstance(raw, io.FileIO) or isinstance(raw, PipeFile):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(PipeFile(raw.fileno(), name, strict=strict)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.write_through,
    )


def flush_stdout() -> None:
    """Write what is buffered; OutputError where it cannot be written. stdout may be closed."""
    if sys.stdout is not None:
        sys.stdout.flush()


def shows_unicode(stream: TextIO | None) -> bool:
    """Whether every character can be written to a stream as it is; of a closed one too."""
    return stream is None or codecs.lookup(stream.encoding).name in ("utf-8", "utf-16", "utf-32")
