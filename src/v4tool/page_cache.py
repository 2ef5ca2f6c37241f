"""Page cache hints for byte ranges of a file: read ahead, drop, start write-back.

Linux has `posix_fadvise`, macOS `F_RDADVISE` (read ahead only). On other systems the functions do
nothing. Results do not depend on them.
"""

import fcntl
import os
import struct
import sys

_F_RDADVISE = 44
"""From macOS's <sys/fcntl.h>."""


def memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def will_need(fd: int, offset: int, length: int) -> None:
    """Start reading these bytes of a file into the page cache; returns at once."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
    elif sys.platform == "darwin":
        hint = struct.pack("qi", offset, min(length, 0x7FFFFFFF))  # struct radvisory
        fcntl.fcntl(fd, _F_RDADVISE, hint)


def dont_need(fd: int, offset: int, length: int) -> None:
    """Tell the system that these bytes of a file may be dropped from the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def write_back(fd: int, offset: int, length: int) -> None:
    """Start writing these bytes of a file to the disk; returns at once.

    On Linux, POSIX_FADV_DONTNEED starts write-back of dirty pages and keeps them in the cache.
    """
    dont_need(fd, offset, length)
