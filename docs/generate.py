"""Writes the parts of the documents that are derived from the code.

`python docs/generate.py` rewrites docs/commands.md (every command as `--help` shows it) and the
list of modules in README.md (the first sentence of each module's docstring). With `--check`
nothing is written; the exit status is 1 and the files are named if they differ from the code.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.core import TyperGroup

from v4tool.cli import app

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "v4tool"
WIDTH = 110
OTHER_SUMMARIES = {
    "verify/model.vt": "The second description of the model, node by node.",
    "data/": "The configurations of the release and of nano.",
}


def commands_page() -> str:
    """The text of docs/commands.md."""
    root = typer.main.get_command(app)
    parts = [f"# `v4tool`\n\n{root.help}\n"]
    for name, command in walk("v4tool", root):
        if name != "v4tool":
            parts.append(f"## `{name}`\n\n{paragraphs(command.help)}\n")
        parts.append("```\n" + usage(name, command) + "\n```\n")
        if isinstance(command, TyperGroup):
            rows = [(child, summary(c)) for child, c in command.commands.items()]
            parts.append(listing("Commands", rows))
        records = [(p.param_type_name, p.get_help_record(context(command)))
                   for p in command.params]  # fmt: skip
        for kind in ("argument", "option"):
            rows = [record for found, record in records if found == kind and record]
            if kind == "option":
                rows.append(("--help", "Show this message and exit."))
            if rows:
                parts.append(listing(f"{kind.capitalize()}s", rows))
    return "\n".join(parts)


def walk(name: str, command: object) -> Iterator[tuple[str, object]]:
    """Every command below a command, itself first, with its full name."""
    yield name, command
    if isinstance(command, TyperGroup):
        for child, inner in command.commands.items():
            yield from walk(f"{name} {child}", inner)


def context(command: object) -> object:
    """A context to ask a command's parameters in."""
    return command.context_class(command)


def usage(name: str, command: object) -> str:
    """The usage line of a command."""
    return " ".join(["$", name, *command.collect_usage_pieces(context(command))])


def paragraphs(text: str | None) -> str:
    """The help text of a command with its paragraphs on one line each."""
    return "\n\n".join(" ".join(p.split()) for p in (text or "").split("\n\n"))


def summary(command: object) -> str:
    """The first sentence of a command's help text, whole."""
    return first_sentence(paragraphs(command.help))


def first_sentence(text: str) -> str:
    """The text up to its first full stop at the end of a word."""
    text = " ".join(text.split("\n\n")[0].split())
    match = re.match(r".*?[^.\s]\.(?=\s|$)(?! [a-z(])", text)
    return match[0] if match else text


def listing(title: str, rows: list[tuple[str, str]]) -> str:
    """A list of names with what they mean."""
    return "\n".join(
        [f"{title}:\n", *(f"* `{name}`: {' '.join(text.split())}" for name, text in rows), ""]
    )


def module_lines() -> str:
    """One line for every file of the package, by folder, with its first sentence."""
    files = sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".vt", ".c", ".h"))
    lines, folder = [], Path()
    for file in sorted(files, key=lambda p: (len(p.relative_to(PACKAGE).parts), p)):
        relative = file.relative_to(PACKAGE)
        if file.name == "__init__.py" and not file.read_text(encoding="utf-8").strip():
            continue
        if relative.parent != folder:
            folder = relative.parent
            lines.append(f"  {folder}/")
        indent = "    " if folder != Path() else "  "
        lines.append(f"{indent}{relative.name:<22}{sentence_of(file)}")
    return "\n".join([*lines, f"  {'data/':<24}{OTHER_SUMMARIES['data/']}"])


def sentence_of(file: Path) -> str:
    """The first sentence of a module's docstring or of a C file's opening comment."""
    relative, text = str(file.relative_to(PACKAGE)), file.read_text(encoding="utf-8")
    if relative in OTHER_SUMMARIES:
        return OTHER_SUMMARIES[relative]
    if file.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    comment = re.search(r"/\*+(.*?)\*/", text, re.S)
    body = re.sub(r"^\s*\* ?", "", comment[1], flags=re.M) if comment else ""
    return first_sentence(body.strip())


def readme_page(text: str) -> str:
    """README's text with its list of modules made anew."""
    block = re.compile(r"(?<=^src/v4tool/\n)(.*?)(?=^docs/ )", re.M | re.S)
    return block.sub(lambda _: module_lines() + "\n", text, count=1)


def pages() -> dict[Path, str]:
    """Every derived file with the text that it should have."""
    readme = ROOT / "README.md"
    return {
        ROOT / "docs" / "commands.md": commands_page(),
        readme: readme_page(readme.read_text(encoding="utf-8")),
    }


def main() -> int:
    """Write the derived files, or with --check name those that differ."""
    different = [p for p, text in pages().items() if p.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in different:
            print(f"{path.relative_to(ROOT)}: expected what `make docs` writes")
        return 1 if different else 0
    for path in different:
        path.write_text(pages()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
