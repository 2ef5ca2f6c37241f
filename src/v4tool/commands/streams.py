"""Output streams that ignore a closed pipe and escape characters that the encoding lacks.

`use_robust_streams` replaces `sys.stdout` and `sys.stderr` once, in `cli.main`. If the reader has
closed the pipe (`v4tool list keys | head -2`), the remaining output is dropped, the command runs to
its end and keeps its exit status. Characters that cannot be encoded are escaped (`\\u4f60`).
"""

import codecs
import io
import sys
from typing import Any, TextIO

from v4tool.errors import OutputError


class PipeFile(io.FileIO):
    """A file descriptor that drops all output after the first failed write.

    A closed pipe is not an error. Another failure (a full disk) raises OutputError once if strict.
    """

    def __init__(self, descriptor: int, name: str, *, strict: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.label, self.strict, self.failed = name, strict, False

    def write(self, data: Any, /) -> int:
        """Write bytes; returns the number of bytes written or dropped."""
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
    """Replace `sys.stdout` and `sys.stderr` if they are files, pipes or terminals."""
    sys.stdout = robust(sys.stdout, "stdout", strict=True)
    sys.stderr = robust(sys.stderr, "stderr", strict=False)


def robust(stream: TextIO, name: str, *, strict: bool) -> TextIO:
    """A text stream over a `PipeFile`, with escapes; `stream` itself if closed or in memory."""
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
    """Flush stdout, which may be closed. OutputError if it cannot be written."""
    if sys.stdout is not None:
        sys.stdout.flush()


def shows_unicode(stream: TextIO | None) -> bool:
    """Whether the stream's encoding has every character; True if it is closed (None)."""
    return stream is None or codecs.lookup(stream.encoding).name in ("utf-8", "utf-16", "utf-32")
