"""Results of `verify`: tables and a tree for the terminal, and reports as JSON or JUnit XML.

The HTML page is in `verify_html`. `write_report` chooses by the file's suffix.
"""

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from v4tool.errors import InputError, OutputError, printable
from v4tool.report.terminal import plain_table
from v4tool.report.units import seconds
from v4tool.verify.listing import NodeInfo
from v4tool.verify.results import (
    STATUS_MEANING,
    Comparison,
    NodeResult,
    VerifyResult,
    counted,
)

SUFFIXES = (".json", ".xml", ".html")
KEYS_SHOWN = 40
"""Failing keys in the terminal's tree; all of them are in the files."""


def write_report(results: Sequence[VerifyResult], path: Path) -> None:
    """Write all results as `.json`, `.xml` (JUnit) or `.html`, by way of a partial file.

    InputError for another suffix, OutputError where the file cannot be written.
    """
    check_report_path(path)
    if path.suffix == ".html":
        from v4tool.report.verify_html import page

        text = page(results)
    else:
        text = as_json(results) if path.suffix == ".json" else as_junit(results)
    beside = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OutputError(f"{path}: {error.strerror}") from None


def check_report_path(path: Path) -> None:
    """Check a report's suffix, and for HTML that matplotlib is installed; InputError otherwise."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"--report {path}: expected {', '.join(SUFFIXES)}, found {path.suffix!r}")
    if path.suffix == ".html":
        from v4tool.report.verify_html import require_plots

        require_plots()


def as_json(results: Iterable[VerifyResult]) -> str:
    """The results with every comparison, as a JSON list."""
    return json.dumps([r.as_dict() for r in results], indent=1, ensure_ascii=False, allow_nan=False)


def as_junit(results: Iterable[VerifyResult]) -> str:
    """JUnit XML: one suite per recording, one test case per compared key and per finding."""
    root = ET.Element("testsuites", name="v4tool verify")
    for result in results:
        root.append(_suite(result))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(result: VerifyResult) -> ET.Element:
    keys = [(node, c) for node in result.nodes for c in node.comparisons]
    errors = [f for f in result.findings if f.severity == "error"]
    suite = ET.Element(
        "testsuite",
        name=f"{Path(result.recording).name} ({result.mode})",
        tests=str(len(keys) + len(errors)),
        failures=str(sum(c.fails for _, c in keys) + len(errors)),
        skipped=str(sum(not c.judged for _, c in keys)),
        time=f"{result.seconds:.3f}",
    )
    for node, comparison in keys:
        suite.append(_case(node, comparison))
    for finding in errors:
        case = ET.SubElement(suite, "testcase", classname="recording", name=printable(finding.key))
        ET.SubElement(case, "failure", message=finding.line(), type=finding.rule)
    if result.verdict is not None:
        ET.SubElement(suite, "system-out").text = result.verdict.sentence()
    return suite


def _case(node: NodeResult, comparison: Comparison) -> ET.Element:
    share = node.seconds / max(len(node.comparisons), 1)
    case = ET.Element(
        "testcase",
        classname=f"{node.block or 'model'}.{node.label}",
        name=comparison.key,
        time=f"{share:.4f}",
    )
    if comparison.fails:
        message = f"{comparison.status}: {figures(comparison)}"
        ET.SubElement(case, "failure", message=message, type=comparison.status)
    elif not comparison.judged:
        ET.SubElement(case, "skipped", message=STATUS_MEANING[comparison.status])
    return case


def figures(comparison: Comparison) -> str:
    """The statistics of one failing key in one line."""
    if comparison.status in ("shape", "dtype", "error"):
        return comparison.note
    parts = []
    if comparison.kind != "int":
        parts += [f"relative L2 {comparison.relative_l2:.3g}", f"cosine {comparison.cosine:.6f}"]
    parts += [
        f"{comparison.share_outside:.2%} of {comparison.count} elements",
        f"max abs {comparison.max_abs:.3g}",
    ]
    if comparison.kind != "int":
        unit = "BF16" if comparison.kind == "bf16" else "FP32"
        parts += [
            f"max rel {comparison.max_rel:.3g}",
            f"{comparison.ulps} {unit} ulp",
            f"least tolerance {comparison.least_tolerance:.3g}",
        ]
    if comparison.worst is not None:
        worst = comparison.worst
        place = ", ".join(f"{name} {i}" for name, i in worst.where.items())
        parts.append(f"worst at {place}: {worst.recorded:.6g}, computed {worst.computed:.6g}")
    if comparison.note:
        parts.append(comparison.note)
    return "; ".join(parts)


def summary_table(results: Iterable[VerifyResult]) -> Table:
    """One row per recording: nodes run, checks passed, keys compared, equal bits, time, result."""
    table = plain_table(
        "recording", "mode", "nodes", "checks", "keys", "bit-equal", "time", "result",
        right=("nodes", "checks", "keys", "bit-equal", "time"),
        spare=("time", "nodes", "mode", "keys", "bit-equal"),
    )  # fmt: skip
    for result in results:
        evidence = result.evidence()
        table.add_row(
            Path(result.recording).name,
            result.mode,
            str(evidence["node_runs"]),
            f"{evidence['node_checks_passed']}/{evidence['node_checks']}",
            f"{evidence['keys_compared']}/{evidence['keys_recorded']}",
            f"{evidence['bf16_bit_equal_share']:.4%}",
            seconds(result.seconds),
            Text("passed", "green") if result.passed else Text("FAILED", "bold red"),
        )
    return table


def result_tree(result: VerifyResult) -> Tree:
    """The failures of one recording as a tree: verdict, findings, failing nodes by block."""
    tree = Tree(Text(Path(result.recording).name, "bold"))
    if result.verdict is not None:
        tree.add(Text(result.verdict.sentence(), "bold red"))
    for finding in result.findings[:KEYS_SHOWN]:
        tree.add(Text(finding.line(), "red" if finding.severity == "error" else "yellow"))
    _more(tree, len(result.findings) - KEYS_SHOWN, "findings")
    shown, blocks = 0, dict[str, Tree]()
    for node in result.failures:
        wrong = [c for c in node.comparisons if c.fails]
        if shown < KEYS_SHOWN:
            block = node.block or "model"
            branch = blocks.setdefault(block, tree.add(block) if block not in blocks else tree)
            leaf = branch.add(Text(node.label, "red"))
            for comparison in wrong:
                leaf.add(Text(f"{comparison.key}: {comparison.status}, {figures(comparison)}"))
        shown += len(wrong)
    _more(tree, shown - KEYS_SHOWN, "failing keys")
    for line in notes(result):
        tree.add(Text(line, "dim"))
    return tree


def _more(tree: Tree, count: int, what: str) -> None:
    if count > 0:
        tree.add(Text(f"… {count} more {what} (write them all with --report FILE.json)", "dim"))


def notes(result: VerifyResult) -> list[str]:
    """Remarks on the comparison: statuses other than equal, tolerance, restrictions."""
    lines = []
    for status, count in counted(result.nodes).items():
        if status not in ("equal", "missing"):
            lines.append(f"{count} keys {status}: {STATUS_MEANING[status]}")
    if not result.exact:
        lines.append("judged by tolerance alone, not bit for bit")
    if result.restricted:
        lines.append("only some nodes or layers were asked for: coverage is not judged")
    if result.stopped:
        lines.append("stopped at the first layer with a failure: coverage is not judged")
    return lines


def kinds_table(result: VerifyResult) -> Table:
    """One row per node: runs, keys compared, equal, wrong, not judged, seconds."""
    table = plain_table(
        "node", "runs", "keys", "equal", "wrong", "not judged", "seconds",
        right=("runs", "keys", "equal", "wrong", "not judged", "seconds"),
        spare=("seconds", "runs", "not judged", "equal"),
    )  # fmt: skip
    kinds: dict[str, list[NodeResult]] = {}
    for node in result.nodes:
        kinds.setdefault(node.kind, []).append(node)
    for kind, nodes in kinds.items():
        comparisons = [c for node in nodes for c in node.comparisons]
        table.add_row(
            kind,
            str(len(nodes)),
            str(len(comparisons)),
            str(sum(c.status == "equal" for c in comparisons)),
            str(sum(c.fails for c in comparisons)),
            str(sum(not c.judged for c in comparisons)),
            f"{sum(node.seconds for node in nodes if not node.composite):.2f}",
        )
    return table


def nodes_table(infos: Iterable[NodeInfo]) -> Table:
    """One row per node of a description: number of keys, outputs, summary (`list nodes`)."""
    table = plain_table(
        "node", "keys", "outputs", "summary", right=("keys",), spare=("summary", "outputs"),
        prose=("outputs", "summary"),
    )  # fmt: skip
    for info in infos:
        table.add_row(info.name, str(info.keys), " ".join(info.outputs), info.summary)
    return table
