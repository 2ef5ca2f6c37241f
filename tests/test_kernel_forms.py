"""The products in every form that there is give the same bits, whatever machine runs the test.

The C kernel is compiled here, with the flags of `setup.py`, once for the compiler's baseline (SSE2
or NEON, the form for processors without AVX2), once with AVX2 and once with AVX-512. Forms that the
processor cannot run are skipped.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import v4tool
from tests.conftest import GOLDEN_MINI, ROOT
from tests.product_battery import digest
from tests.quant_operands import needs_kernel

CKPT = GOLDEN_MINI / "ckpt"
IDS = [251, 247, 122, 75, 79, 300]
CAPABILITY = torch.backends.cpu.get_cpu_capability()
"""DEFAULT, AVX2, AVX512, or a name of another architecture."""
CC = shlex.split(sysconfig.get_config_var("CC") or "cc")
INCLUDE = Path(sysconfig.get_path("include"))

# the kernel asks the processor at run time and would take AVX2 in preference
BASELINE = "-Dv4tool_product_avx2=v4tool_product_any"


@dataclass(frozen=True)
class Form:
    """How one form of the kernel is compiled, and which processors run it."""

    sources: tuple[str, ...]
    flags: tuple[str, ...]
    capabilities: tuple[str, ...] | None


FORMS = {
    "baseline": Form(("_kernel", "_product_any"), (BASELINE,), None),
    "AVX2": Form(("_kernel", "_product_any", "_product_avx2"), (), ("AVX2", "AVX512")),
    "AVX-512": Form(
        ("_kernel", "_product_any"), (BASELINE, "-march=x86-64-v4"), ("AVX512",)
    ),
}  # fmt: skip


def flags_of_setup() -> list[str]:
    found = re.search(r"^FLAGS = (\[.*\])$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert found
    flags: list[str] = ast.literal_eval(found[1])
    return flags


def compiled(form: Form, directory: Path) -> Path:
    """The extension module in one form."""
    source = ROOT / "src" / "v4tool" / "quant"
    library = directory / "_kernel.abi3.so"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    command = [
        *CC, "-shared", "-fPIC", *undefined, *flags_of_setup(), *form.flags,
        "-DPy_LIMITED_API=0x030B0000", f"-I{INCLUDE}", "-o", str(library),
        *(str(source / f"{name}.c") for name in form.sources),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the readable form gives, which is the definition."""
    out = tmp_path_factory.mktemp("readable") / "a.safetensors"
    [result] = v4tool.dump(CKPT, input_ids=IDS, decode=2, out=out, backend="readable")
    return {"products": [digest("readable")], "payload": result.payload_sha256}


@pytest.mark.skipif(
    shutil.which(CC[0]) is None or not (INCLUDE / "Python.h").exists(),
    reason="no C compiler, or no headers of Python",
)
@pytest.mark.parametrize("name", FORMS)
def test_the_c_kernel(name: str, expected: dict[str, object], tmp_path: Path) -> None:
    form = FORMS[name]
    if form.capabilities and CAPABILITY not in form.capabilities:
        pytest.skip(f"this processor has {CAPABILITY}")
    library, out = compiled(form, tmp_path), tmp_path / "a.safetensors"
    command = [sys.executable, "-m", "tests.product_battery"]
    ran = subprocess.run(
        [*command, str(library), str(CKPT), json.dumps(IDS), str(out)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == expected


@pytest.mark.parametrize("backend", ["numpy", pytest.param("c", marks=needs_kernel)])
def test_the_installed_forms(backend: str, expected: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    [result] = v4tool.dump(CKPT, input_ids=IDS, decode=2, out=out, backend=backend)
    found = {"products": [digest(backend)], "payload": result.payload_sha256}
    assert found == expected
