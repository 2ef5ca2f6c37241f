"""Output of `--version`: versions of v4tool, Python and torch, and the backend."""

import platform

from v4tool.version import __version__


def version_lines(verbose: bool) -> list[str]:
    """v4tool's version; verbose: also of Python and torch, and the backend of matrix products."""
    lines = [f"v4tool {__version__}"]
    if verbose:
        import torch

        from v4tool.config import Numerics
        from v4tool.quant.linear import backend_in_use

        lines += [
            f"python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"product {backend_in_use(Numerics())}",
        ]
    return lines
