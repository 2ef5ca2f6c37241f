"""Execution environment of a `.vt` file: the module `vt_lang`, environment variables, `no_grad`."""

import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from v4tool.errors import V4ToolError, VtError
from v4tool.verify.language import Description


def vt_lang(contents: Mapping[str, Callable[..., Any]]) -> types.ModuleType:
    """A module `vt_lang` with these functions, for `import vt_lang` in a `.vt` file."""
    module = types.ModuleType("vt_lang")
    module.__dict__.update(contents)
    return module


@contextmanager
def vt_environment(module: types.ModuleType, environment: Mapping[str, str]) -> Iterator[None]:
    """Context with `vt_lang` importable, the environment variables and torch's number of threads
    (`VT_NUM_THREADS`, default 1) set, and gradients off; the former state is restored at its end.
    """
    own, threads = sys.modules.get("vt_lang"), torch.get_num_threads()
    before = {name: os.environ.get(name) for name in environment}
    sys.modules["vt_lang"] = module
    os.environ.update(environment)
    try:
        with torch.no_grad():
            torch.set_num_threads(int(environment.get("VT_NUM_THREADS", "1")))
            yield
    finally:
        sys.modules.pop("vt_lang")
        if own is not None:
            sys.modules["vt_lang"] = own
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        torch.set_num_threads(threads)


def execute(description: Description) -> dict[str, Any]:
    """Execute the file's top level and return its namespace; VtError, in one line, if it raises."""
    namespace: dict[str, Any] = {
        "__name__": "vt_description",
        "__file__": str(description.path),
    }
    try:
        exec(compile(description.source, str(description.path), "exec"), namespace)
    except V4ToolError:
        raise
    except Exception as error:
        name = description.path.name
        raise VtError(f"{name}: fails when it is loaded: {one_line(error)}") from None
    return namespace


def one_line(error: BaseException) -> str:
    """Type and message of an exception in one line, at most 200 characters of message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
