"""v4tool: bit-exact reference activations for DeepSeek-V4-Flash."""

from importlib import import_module

# `check` and `verify` are packages as well as functions of the API. Python binds a submodule to an
# attribute of its parent once, when it first loads it: so both (empty) packages are loaded here and
# the functions bound after them stay. `from v4tool.verify.results import ...` finds the package in
# sys.modules; `import v4tool.verify.results as r` would look at the attribute, and fails.
for _package in ("v4tool.check", "v4tool.verify"):
    import_module(_package)

from v4tool.api import capture, check, dump, open_recording, verify  # noqa: E402  (after the packages)
from v4tool.errors import V4ToolError  # noqa: E402
from v4tool.version import __version__  # noqa: E402

__all__ = [
    "V4ToolError",
    "__version__",
    "capture",
    "check",
    "dump",
    "open_recording",
    "verify",
]
