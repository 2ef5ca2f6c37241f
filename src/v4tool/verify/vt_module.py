"""What a `.vt` file finds around it: the module `vt_lang`, environment variables, no gradients."""

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
    """The module that `import vt_lang` gives."""
    module = types.ModuleType("vt_lang")
    module.__dict__.update(contents)
    return module


@contextmanager
def surroundings(module: types.ModuleType, environment: Mapping[str, str]) -> Iterator[None]:
    """vt_lang importable, the variables set, torch's threads as asked for; all put back after."""
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
    """The names that the file's top level binds. VtError, in one line, where it fails."""
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
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
