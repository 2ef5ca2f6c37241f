"""The optional C extension; everything else of the build stands in pyproject.toml.

Without a working compiler, or with V4TOOL_NO_EXT=1 in the environment, the package is built without
it and computes the same bits with NumPy.
"""

import os
import sys

from setuptools import Extension, setup

KERNEL = Extension(
    "v4tool.quant._kernel",
    sources=["src/v4tool/quant/_kernel.c"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,
    extra_compile_args=[] if sys.platform == "win32" else ["-std=c11", "-O3", "-ffp-contract=fast"],
)

setup(ext_modules=[] if os.environ.get("V4TOOL_NO_EXT", "0") not in ("", "0") else [KERNEL])
