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
from v4tool.report.units import seconds
from v4tool.verify.results import STATUS_MEANING, Comparison, NodeResult, VerifyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Grid = np.ndarray[tuple[int, int], np.dtype[np.float64]]

COLOURS = {
    "bit for bit": "#2e7d32",
    "right": "#a5d6a7",
    "not judged": "#bdbdbd",
    "differs": "#ffb300",
    "wrong": "#c62828",
}
"""Colours of the heat map's cells, from best to worst."""
NOTHING = "#ffffff"
STRIPS = 40
"""Failing keys whose errors are drawn token by token."""
ROWS = 400
"""Failing keys in the table."""
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .7em; text-align: left;
border-bottom: 1px solid #ddd; vertical-align: top }
.pass { color: #2e7d32 } .fail { color: #c62828 }
code { font-size: 12px } svg { max-width: 100%; height: auto } .key span { display: inline-block;
width: 1em; height: 1em; margin: 0 .3em 0 1em; vertical-align: -2px; border: 1px solid #ccc }
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
        "time": f"{seconds(result.seconds)} in {result.jobs} processes",
    }
    return _table([], [[name, value] for name, value in rows.items()])


def _legend() -> str:
    items = "".join(
        f'<span style="background:{colour}"></span>{name}' for name, colour in COLOURS.items()
    )
    return f'<p class="key">{items}</p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{titles}</tr>' if head else ''}{lines}</table>"


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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 0.2 * len(columns), 2.6 + 0.17 * len(rows)))
    axes = figure.add_axes((0.12, 0.02, 0.87, 0.9 * len(rows) / (len(rows) + 15)))
    colours = ListedColormap(list(COLOURS.values())).with_extremes(bad=NOTHING)
    axes.imshow(
        np.ma.masked_invalid(grid), colours, vmin=-0.5, vmax=len(COLOURS) - 0.5, aspect="auto",
        interpolation="none",
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=2)
    return figure


# -------------------------------------------------------------------- the strips


def _strips(result: VerifyResult) -> str:
    failing = [c for c in result.comparisons if c.fails and c.per_token][:STRIPS]
    if not failing:
        return ""
    return (
        "<h3>Where the first wrong keys are wrong</h3>"
        "<p>The largest error of each token (block, row), relative to the key's largest value, "
        "as a power of ten; white is right.</p>" + _svg(_strip_figure(failing))
    )


def _strip_figure(failing: Sequence[Comparison]) -> "Figure":
    from matplotlib.figure import Figure

    width = max(len(c.per_token) for c in failing)
    grid = np.full((len(failing), width), np.nan)
    for i, comparison in enumerate(failing):
        errors = np.array(comparison.per_token)
        with np.errstate(divide="ignore"):
            powers = np.where(np.isfinite(errors), np.log10(errors), 2.0)
        grid[i, : len(errors)] = np.where(errors > 0, powers, np.nan)
    figure = Figure(figsize=(12, 1.0 + 0.18 * len(failing)))
    axes = figure.add_axes(
        (0.33, 0.55 / (1.0 + 0.18 * len(failing)), 0.58, 0.9 - 0.4 / (1 + len(failing)))
    )
    shown = axes.imshow(
        np.ma.masked_invalid(grid),
        "inferno_r",
        vmin=-7,
        vmax=0,
        aspect="auto",
        interpolation="none",
    )
    axes.set_yticks(range(len(failing)), [c.key for c in failing], fontsize=7)
    axes.set_xlabel(failing[0].axis, fontsize=8)
    axes.tick_params(labelsize=7, length=2)
    figure.colorbar(shown, cax=figure.add_axes((0.93, 0.2, 0.012, 0.7))).ax.tick_params(labelsize=7)
    return figure


def _svg(figure: "Figure") -> str:
    """A figure as inline SVG, text kept as text; equal data give equal bytes."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "v4tool"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


# -------------------------------------------------------------------- the tables


def _failures(result: VerifyResult) -> str:
    rows = []
    for node in result.failures:
        rows += [_row(node, c) for c in node.comparisons if c.fails]
    if not rows:
        return ""
    head = ["key", "node", "status", "max abs", "max rel", "ulp", "cosine", "outside", "passes at",
            "worst element"]  # fmt: skip
    more = f"<p>… {len(rows) - ROWS} more</p>" if len(rows) > ROWS else ""
    return f"<h3>{len(rows)} wrong keys</h3>{_table(head, rows[:ROWS])}{more}"


def _row(node: NodeResult, c: Comparison) -> list[str]:
    worst = c.note
    if c.worst is not None:
        place = ", ".join(f"{name} {i}" for name, i in c.worst.where.items())
        worst = f"{place}: {c.worst.recorded:.6g}, computed {c.worst.computed:.6g}. {c.note}"
    return [
        c.key, node.label, f"{c.status}: {STATUS_MEANING[c.status]}", f"{c.max_abs:.3g}",
        f"{c.max_rel:.3g}", str(c.ulps), f"{c.cosine:.6f}", f"{c.share_outside:.2%}",
        f"{c.least_tolerance:.3g}", worst,
    ]  # fmt: skip


def _findings(result: VerifyResult) -> str:
    if not result.findings:
        return ""
    rows = [[f.severity, f.key, f.rule, f.expected, f.found] for f in result.findings[:ROWS]]
    table = _table(["", "key", "rule", "expected", "found"], rows)
    return f"<h3>{len(result.findings)} findings</h3>{table}"
