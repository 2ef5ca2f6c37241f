"""Source distribution and wheel: complete, built without network, the same bits as the checkout."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from v4tool import selftest

pytestmark = pytest.mark.slow

GENERATED = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
FILES = ("CHANGELOG.md", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
C_SOURCES = {".c", ".h"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built; built in place, the build would find files of earlier ones."""
    directory = tmp_path_factory.mktemp("tree")
    for name in ("src", "profiles"):
        shutil.copytree(ROOT / name, directory / name, ignore=GENERATED)
    for name in FILES:
        shutil.copy(ROOT / name, directory)
    return directory


@pytest.fixture(scope="module")
def sources(tree: Path) -> set[str]:
    """The package's files, as paths from `src`."""
    return {str(p.relative_to(tree / "src")) for p in (tree / "src").rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def dist(tree: Path, sources: set[str]) -> Path:
    """The directory with the source distribution and the wheel that is built from it."""
    build(tree)
    return tree / "dist"


def build(tree: Path, *options: str) -> None:
    """Run `build` with the installed setuptools, so that nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, str(tree)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_source_distribution_holds_all_sources(dist: Path, sources: set[str]) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {f"src/{name}" for name in sources} <= names
    assert {f"profiles/{p.name}" for p in (ROOT / "profiles").glob("*.toml")} <= names
    assert {*FILES} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_holds_the_package_and_the_kernel(dist: Path, sources: set[str]) -> None:
    (path,) = dist.glob("*-cp311-abi3-*.whl")
    names = {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}
    assert names == {
        *(name for name in sources if Path(name).suffix not in C_SOURCES),
        *(f"v4tool/_profiles/{p.name}" for p in (ROOT / "profiles").glob("*.toml")),
        "v4tool/quant/_kernel.abi3.so",
    }


def test_the_wheel_gives_the_payload_hash(dist: Path, tmp_path: Path) -> None:
    (path,) = dist.glob("*.whl")
    zipfile.ZipFile(path).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import v4tool\n"
        "from v4tool.selftest import compare_payload\n"
        "print(v4tool.__file__, compare_payload(2, 'c'), sep='\\n')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        str(tmp_path / "v4tool" / "__init__.py"),
        f"found {selftest.PAYLOAD}, expected {selftest.PAYLOAD}",
    ]


def test_without_the_kernel_the_wheel_is_for_any_machine(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("V4TOOL_NO_EXT", "1")
    build(tree, "--wheel", "--outdir", str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]
