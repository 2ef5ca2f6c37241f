"""The documents against the code: every command, option, file and case stands in them."""

import re
import subprocess
import sys
from pathlib import Path

import typer
from typer.core import TyperGroup

from tests.conftest import ROOT
from v4tool.cli import app
from v4tool.profiles import load

README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


def commands() -> dict[str, list[str]]:
    """Every command of the program with its options, as typed."""
    found: dict[str, list[str]] = {}

    def walk(name: str, command: object) -> None:
        if isinstance(command, TyperGroup):
            for child, inner in command.commands.items():
                walk(f"{name} {child}", inner)
            return
        options = [o for p in command.params for o in (*p.opts, *p.secondary_opts)]  # type: ignore[attr-defined]
        found[name] = [o for o in options if o.startswith("--")]

    walk("v4tool", typer.main.get_command(app))
    return found


def test_derived_parts_of_the_documents_are_as_make_docs_writes_them() -> None:
    command = [sys.executable, ROOT / "docs" / "generate.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_every_command_and_option_is_documented() -> None:
    section = r"^##+ `(v4tool [\w -]+)`$(.*?)(?=^##+ `|\Z)"
    sections = dict(re.findall(section, COMMANDS, re.M | re.S))
    missing = [
        f"{name} {option}"
        for name, options in commands().items()
        for option in options
        if option not in sections.get(name, "")
    ]
    assert missing == []
    assert len(commands()) >= 11


def test_every_command_that_the_readme_shows_exists() -> None:
    known = commands()
    shown = re.findall(r"^v4tool ((?:list )?[a-z]+)(.*)$", README, re.M)
    assert len(shown) > 10
    for name, rest in shown:
        assert f"v4tool {name}" in known, name
        for option in re.findall(r"(--[a-z][a-z-]*)", rest):
            assert option in known[f"v4tool {name}"], f"{name} {option}"


def test_the_tree_has_a_line_for_every_file() -> None:
    sources = [p for p in (ROOT / "src" / "v4tool").rglob("*") if p.suffix in (".py", ".vt", ".c")]
    files = [p.relative_to(ROOT / "src" / "v4tool") for p in sources if p.name != "__init__.py"]
    tree = README.split("## The tree")[1]
    assert [str(f) for f in files if not in_tree(f, tree)] == []


def in_tree(file: Path, tree: str) -> bool:
    """Whether the tree names the file below its folder's heading."""
    folder = "" if file.parent == Path() else f"{file.parent}/"
    pattern = rf"^  {re.escape(folder)}\n((?:    .*\n)*)" if folder else r"((?:.*\n)*)"
    part = re.search(pattern, tree, re.M)
    return part is not None and re.search(rf"\b{re.escape(file.name)}\b", part[1]) is not None


def test_the_readme_names_every_case() -> None:
    cases = load("nano", options={}, environ={}).cases
    assert [case.id for case in cases if f"`{case.id}`" not in README] == []


def test_the_picture_of_the_architecture_names_the_packages() -> None:
    picture = re.search(r"```mermaid\n(.*?)```", ARCHITECTURE, re.S)
    assert picture is not None
    named = set(re.findall(r'\b(\w+)\["\1"\]', picture[1]))
    package = ROOT / "src" / "v4tool"
    packages = {p.parent.name for p in package.glob("*/*.py")} - {"commands"}
    assert packages <= named
    assert [
        n for n in named if not (package / n).is_dir() and not (package / f"{n}.py").exists()
    ] == []


def test_every_relative_link_of_the_documents_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [(p, m) for p in pages for m in re.findall(r"\]\(([^)#:]+)\)", p.read_text("utf-8"))]
    assert len(links) > 10
    assert [str(p) for p, link in links if not (p.parent / link).exists()] == []
