"""The optional C extension and the packages; everything else of the build stands in pyproject.toml.

Without a working compiler, or with V4TOOL_NO_EXT=1 in the environment, the package is built without
it and computes the same bits with NumPy.
"""

import os
import sys

from setuptools import Extension, find_packages, setup

# products are exact, so that fusing them with sums changes no bit; no function that takes a wide
# vector is called from outside its file, which is what -Wpsabi would warn of
FLAGS = ["-std=c11", "-O3", "-ffp-contract=fast", "-Wno-psabi"]
KERNEL = Extension(
    "v4tool.quant._kernel",
    sources=[f"src/v4tool/quant/{name}.c" for name in ("_kernel", "_product_any", "_product_avx2")],
    depends=["src/v4tool/quant/_kernel.h", "src/v4tool/quant/_product.h"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,
    extra_compile_args=[] if sys.platform == "win32" else FLAGS,
)

WANTED = os.environ.get("V4TOOL_NO_EXT", "0") in ("", "0")

setup(
    # the top-level profiles/ is shipped as data of the package
    packages=[*find_packages("src"), "v4tool._profiles"],
    package_dir={"": "src", "v4tool._profiles": "profiles"},
    ext_modules=[KERNEL] if WANTED else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if WANTED else {},
)
