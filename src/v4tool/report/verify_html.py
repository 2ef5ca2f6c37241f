"""Report of `verify` as one HTML page: heat map of blocks x keys, errors per token, tables.

The plots are drawn by matplotlib (the extra `report`) and put inline as SVG; the page needs no
network and no script. Left out: comparisons that passed, beyond their cell in the map.
"""

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from v4tool.errors import InputError
from v4tool.report.units import number_of, seconds
from v4tool.verify.results import STATUS_MEANING, Comparison, NodeResult, VerifyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

Grid = np.ndarray[tuple[int, int], np.dtype[np.float64]]

COLOURS = {
    "bit for bit": "#2e7d32",
    "right": "#a5d6a7",
    "not judged": "#9e9e9e",
    "differs": "#ffb300",
    "wrong": "#c62828",
}
"""Colours of the heat map's cells, from best to worst."""
STRIPS = 40
"""Failing keys whose errors are drawn token by token."""
POWERS = -7.0, 0.0
"""Range of the strips' colours: powers of ten of the error relative to the key's largest value."""
ERRORS = ("#ffe08a", "#fd8d3c", "#d7191c", "#a3007d")
"""Colours of the strips, from the least error to the largest."""
ROWS = 400
"""Failing keys in the table."""
METADATA = ("Creator", "Date", "Format", "Type")
"""What matplotlib would say of itself in an SVG."""
CHARACTER = 0.055
"""Inches that a character of a label takes at most."""
STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --good: #2e7d32;
--bad: #c62828 }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #16181c; --line: #3a3d44;
--good: #81c784; --bad: #ff8a80 } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; padding: 0 1em;
max-width: 1200px; color: var(--text); background: var(--page); overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .7em; text-align: left;
border-bottom: 1px solid var(--line); vertical-align: top }
.pass { color: var(--good) } .fail { color: var(--bad) }
.wide { overflow-x: auto } .wide table { overflow-wrap: normal }
.list td:last-child { min-width: 15em }
svg { display: block; color: var(--text) } svg text { fill: currentColor }
.key span { display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1em;
vertical-align: -2px; border: 1px solid var(--line) }
.key .scale { width: 8em; margin: 0 .5em }
@media (max-width: 700px) {
  .list tr { display: block; border-bottom: 1px solid var(--line); padding: .5em 0 }
  .list tr.head { display: none } .list td { display: flex; border: 0; padding: .1em 0 }
  .list td::before { content: attr(data-name); flex: 0 0 7em; opacity: .7 }
}
"""


def require_plots() -> None:
    """Raise InputError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "--report: an HTML page needs matplotlib: install v4tool[report]"
        ) from None


def page(results: Sequence[VerifyResult]) -> str:
    """The page as text, to be written as UTF-8."""
    require_plots()
    body = "\n".join(_section(result) for result in results)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>v4tool verify</title><style>{STYLE}</style></head>\n"
        f"<body><h1>v4tool verify</h1>\n{body}\n</body></html>\n"
    )


def _section(result: VerifyResult) -> str:
    state = "pass" if result.passed else "fail"
    parts = [
        f"<h2>{escape(Path(result.recording).name)}</h2>",
        f'<p class="{state}"><b>{"passed" if result.passed else "failed"}</b></p>',
    ]
    if result.verdict is not None:
        parts.append(f'<p class="fail"><b>{escape(result.verdict.sentence())}</b></p>')
    parts += [_facts(result), _legend(), *_maps(result), _strips(result), _failures(result)]
    parts.append(_findings(result))
    return "\n".join(part for part in parts if part)


def _facts(result: VerifyResult) -> str:
    evidence = result.evidence()
    rows = {
        "description": f"{result.description}, {result.mode}",
        "checkpoint": Path(result.checkpoint).name,
        "input": f"{result.tokens} tokens, {result.decode} decode steps",
        "node checks": f"{evidence['node_checks_passed']} of {evidence['node_checks']} passed",
        "keys": f"{evidence['keys_compared']} of {evidence['keys_recorded']} compared",
        "BF16 elements": f"{evidence['bf16_bit_equal']} of {evidence['bf16_elements']} bit-equal",
        "time": f"{seconds(result.seconds)} in {number_of(result.jobs, 'process', 'processes')}",
    }
    return _table([], [[name, value] for name, value in rows.items()])


def _legend() -> str:
    items = "".join(
        f'<span style="background:{colour}"></span>{name}' for name, colour in COLOURS.items()
    )
    return f'<p class="key">{items}</p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; one with a head becomes a list of records where the page is narrow."""
    titles = "".join(f"<th>{escape(h)}</th>" for h in head)
    first = f'<tr class="head">{titles}</tr>' if head else ""
    lines = "".join(f"<tr>{_cells(head, row)}</tr>" for row in rows)
    return f'<div class="wide"><table{" class=list" if head else ""}>{first}{lines}</table></div>'


def _cells(head: Sequence[str], row: Sequence[str]) -> str:
    if not head:
        return "".join(f"<td>{escape(cell)}</td>" for cell in row)
    named = zip(head, row, strict=True)
    return "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in named)


# -------------------------------------------------------------------- the map


def level(comparison: Comparison) -> int:
    """Index into COLOURS for a comparison."""
    if comparison.status == "equal":
        return 0
    if not comparison.judged:
        return 2
    if not comparison.fails:
        return 1
    return 3 if comparison.status == "differs" else 4


def column_of(key: str) -> str:
    """The heat map's column of a key: its name inside the block, routed experts as one."""
    inner = re.sub(r"^(decode\.\d+\.)?(layers\.\d+\.)?|^mtp\.\d+\.\w+\.", "", key)
    return re.sub(r"experts\.\d+\.", "experts.*.", inner)


def cells(
    nodes: Iterable[NodeResult],
) -> tuple[list[str], list[str], Grid]:
    """Blocks, keys inside a block, and the worst level of each cell (NaN: no such key)."""
    worst: dict[tuple[str, str], int] = {}
    for node in nodes:
        for comparison in node.comparisons:
            place = node.block or "model", column_of(comparison.key)
            worst[place] = max(worst.get(place, 0), level(comparison))
    rows = list(dict.fromkeys(row for row, _ in worst))
    columns = list(dict.fromkeys(column for _, column in worst))
    grid = np.full((len(rows), len(columns)), np.nan)
    for (row, column), value in worst.items():
        grid[rows.index(row), columns.index(column)] = value
    return rows, columns, grid


def _maps(result: VerifyResult) -> list[str]:
    """One heat map for the prefill with MTP, and one per decode step."""
    passes: dict[str, list[NodeResult]] = {}
    for node in result.nodes:
        if node.comparisons:
            step = re.match(r"decode\.\d+", node.block)
            passes.setdefault(step[0] if step else "prefill and MTP", []).append(node)
    return [f"<h3>{name}</h3>{_svg(_map(*cells(nodes)))}" for name, nodes in passes.items()]


def _map(rows: list[str], columns: list[str], grid: Grid) -> "Figure":
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(list(COLOURS.values()))
    figure, axes = _canvas(rows, len(columns) * 0.2, 0.17, top=CHARACTER * max(map(len, columns)))
    _draw(axes, grid, colours, (-0.5, len(COLOURS) - 0.5))
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=2)
    return figure


def _canvas(
    rows: Sequence[str], width: float, row_height: float, *, top: float = 0.0, bottom: float = 0.0
) -> tuple["Figure", "Axes"]:
    """A figure with one plot of this width and row height and room for labels, in inches."""
    from matplotlib.figure import Figure

    left, edge = CHARACTER * max(map(len, rows)) + 0.15, 0.15
    inside = row_height * len(rows)
    size = left + width + edge, bottom + inside + top + 2 * edge
    figure = Figure(figsize=size, facecolor="none")
    box = left / size[0], (bottom + edge) / size[1], width / size[0], inside / size[1]
    return figure, figure.add_axes(box, facecolor="#80808026")


def _draw(axes: "Axes", grid: Grid, colours: "Colormap", limits: tuple[float, float]) -> None:
    """Draw the cells; a NaN is left empty."""
    axes.imshow(
        np.ma.masked_invalid(grid), colours, vmin=limits[0], vmax=limits[1], aspect="auto",
        interpolation="none",
    )  # fmt: skip


# -------------------------------------------------------------------- the strips


def _strips(result: VerifyResult) -> str:
    failing = [c for c in result.comparisons if c.fails and c.per_token][:STRIPS]
    if not failing:
        return ""
    gradient = f"background:linear-gradient(to right,{','.join(ERRORS)})"
    return (
        "<h3>Where the first wrong keys are wrong</h3>"
        "<p>The largest error of each token (block, row), relative to the key's largest value; "
        "empty is right.</p>"
        f'<p class="key">{10 ** POWERS[0]:g}<span class="scale" style="{gradient}"></span>'
        f"{10 ** POWERS[1]:g} and more</p>{_svg(_strip_figure(failing))}"
    )


def _strip_figure(failing: Sequence[Comparison]) -> "Figure":
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    grid = np.full((len(failing), max(len(c.per_token) for c in failing)), np.nan)
    for i, comparison in enumerate(failing):
        errors = np.array(comparison.per_token)
        with np.errstate(divide="ignore"):
            powers = np.where(np.isfinite(errors), np.log10(errors), POWERS[1])
        grid[i, : len(errors)] = np.where(errors > 0, powers, np.nan)
    rows = [c.key for c in failing]
    figure, axes = _canvas(rows, 8.0, 0.18, bottom=0.35)
    _draw(axes, grid, LinearSegmentedColormap.from_list("errors", ERRORS), POWERS)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(failing[0].axis, fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    return figure


def _svg(figure: "Figure") -> str:
    """A figure as inline SVG with its text as text, the same bytes for the same data.

    Black becomes the text's colour; the namespaces' addresses, which HTML does not need, are left
    out.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "v4tool"}):
        figure.savefig(out, format="svg", facecolor="none", metadata=dict.fromkeys(METADATA))
    text = out.getvalue()[out.getvalue().index("<svg") :]
    text = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", text.replace("#000000", "currentColor"))
    return f'<div class="wide">{text}</div>'


# -------------------------------------------------------------------- the tables


def _failures(result: VerifyResult) -> str:
    rows = []
    for node in result.failures:
        rows += [_row(node, c) for c in node.comparisons if c.fails]
    if not rows:
        return ""
    head = ["key", "node", "status", "relative L2", "cosine", "outside", "max abs", "max rel",
            "ulp", "passes at", "worst element"]  # fmt: skip
    return f"<h3>{number_of(len(rows), 'wrong key')}</h3>{_table(head, rows[:ROWS])}{_more(rows)}"


def _more(rows: Sequence[object]) -> str:
    return f"<p>… {len(rows) - ROWS} more (all with --report FILE.json)</p>" * (len(rows) > ROWS)


def _row(node: NodeResult, c: Comparison) -> list[str]:
    worst = c.note
    if c.worst is not None:
        place = ", ".join(f"{name} {i}" for name, i in c.worst.where.items())
        worst = f"{place}: {c.worst.recorded:.6g}, computed {c.worst.computed:.6g}. {c.note}"
    meaning = STATUS_MEANING[c.status]
    status = meaning if meaning.startswith(c.status) else f"{c.status}: {meaning}"
    return [
        c.key, node.label, status, f"{c.relative_l2:.3g}",
        f"{c.cosine:.6f}", f"{c.share_outside:.2%}", f"{c.max_abs:.3g}", f"{c.max_rel:.3g}",
        str(c.ulps), f"{c.least_tolerance:.3g}", worst,
    ]  # fmt: skip


def _findings(result: VerifyResult) -> str:
    if not result.findings:
        return ""
    rows = [[f.severity, f.key, f.rule, f.expected, f.found] for f in result.findings]
    table = _table(["severity", "key", "rule", "expected", "found"], rows[:ROWS])
    return f"<h3>{number_of(len(rows), 'finding')}</h3>{table}{_more(rows)}"
