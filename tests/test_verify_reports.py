"""Reports of `verify`, of a passing and a failing recording: JSON, JUnit XML, HTML, terminal."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from tests.conftest import MINI_FILES
from tests.faults.harness import save
from v4tool.errors import InputError, OutputError
from v4tool.report.verify import (
    check_report_path,
    kinds_table,
    nodes_table,
    result_tree,
    summary_table,
    write_report,
)
from v4tool.verify.listing import list_nodes
from v4tool.verify.recording import verify_file
from v4tool.verify.results import VerifyResult

LEN3 = MINI_FILES[0]
WRONG_KEY = "layers.2.attn.sparse_attn.out"
WRONG_KEYS = [WRONG_KEY, "layers.2.attn.rope.o_inv.out", "layers.2.attn.wo_b.in"]
"""The damaged key, and what the description computes from it."""


@pytest.fixture(scope="module")
def good() -> VerifyResult:
    return verify_file(LEN3.path, LEN3.ckpt)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> VerifyResult:
    """Head 1 of the second token is twice too large in one layer; one key is missing."""
    tensors = dict(LEN3.tensors())
    tensors[WRONG_KEY][0, 1, 1] *= 2
    del tensors["norm.out"]
    path = tmp_path_factory.mktemp("bad") / "bad.safetensors"
    save(tensors, path)
    return verify_file(path, LEN3.ckpt)


def printed(*things: object) -> str:
    console = Console(width=300, record=True, file=sys.stderr)
    for thing in things:
        console.print(thing)
    return console.export_text()


def test_json(good: VerifyResult, bad: VerifyResult, tmp_path: Path) -> None:
    """Everything is in it, and it is JSON in the strict sense."""
    path = tmp_path / "deep" / "report.json"
    write_report([good, bad], path)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    first, second = json.loads(path.read_text(), parse_constant=refuse)
    assert first["passed"] is True
    assert first["verdict"] is None
    assert first["evidence"]["bf16_bit_equal_share"] == 1.0
    assert len(first["nodes"]) == len(good.nodes)
    assert second["passed"] is False
    assert second["verdict"]["operator"] == "sparse_attn"
    assert second["verdict"]["key"] == WRONG_KEY
    assert second["findings"][0]["key"] == "norm.out"
    wrong = [c for n in second["nodes"] for c in n["comparisons"] if c["per_token"]]
    assert [c["key"] for c in wrong] == WRONG_KEYS
    assert [error > 0 for error in wrong[0]["per_token"]] == [False, True, False]
    assert wrong[0]["worst"]["where"]["head"] == 1
    assert not list(path.parent.glob("*.partial"))


def test_junit(good: VerifyResult, bad: VerifyResult, tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    write_report([good, bad], path)
    root = ET.parse(path).getroot()
    one, two = root.findall("testsuite")
    assert (one.get("tests"), one.get("failures")) == ("816", "0")
    assert two.get("failures") == "4"
    failing = [c for c in two.findall("testcase") if c.find("failure") is not None]
    assert [c.get("name") for c in failing] == [*WRONG_KEYS, "norm.out"]
    assert failing[0].get("classname") == "layers.2.sparse_attn"
    assert len(two.findall("testcase")) == int(two.get("tests") or 0)


@pytest.fixture(scope="module")
def page(good: VerifyResult, bad: VerifyResult, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The HTML page of both."""
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    path = tmp_path_factory.mktemp("html") / "report.html"
    write_report([good, bad], path)
    return path.read_text()


def test_html(good: VerifyResult, bad: VerifyResult, page: str, tmp_path: Path) -> None:
    """Maps, strips and figures are there."""
    assert page.count("<svg") == 3 + 3 + 1, "three passes each, and the strips of the bad one"
    assert "first wrong operator: sparse_attn of layers.2" in page
    assert "3 wrong keys" in page
    assert "layers.4" in page
    again = tmp_path / "again.html"
    write_report([good, bad], again)
    assert again.read_text() == page, "the same results give the same page"


def test_the_page_makes_no_request(page: str) -> None:
    """No address of another place, no script, no style or font from elsewhere."""
    assert not re.search(r"https?:|//[\w.-]+/", re.sub(r"base64,[^\"]*", "", page))
    assert not re.search(r"<(?:script|link|iframe|object|embed|base)\b|@import", page)
    linked = re.findall(r"""(?:src|href|srcset|action|poster)\s*=\s*["']?([^"'\s>]*)""", page)
    linked += re.findall(r"""url\(["']?([^"')]*)""", page)
    assert [link for link in linked if not link.startswith(("data:image/png;", "#"))] == []


def test_the_page_adapts_to_dark_mode_and_narrow_screens(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "@media (prefers-color-scheme: dark)" in page
    assert "@media (max-width: 700px)" in page
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    colours = set(re.findall(r"(?:fill|stroke): (#?\w+)", drawn))
    assert colours == {"none", "currentColor", "#808080"}, "no black text on a dark page"
    assert page.count('<div class="wide">') == page.count("<svg") + page.count("<table")


def test_labels_lie_inside_their_drawing(page: str) -> None:
    """Points; a character of a label is at least 3.5 wide."""
    for drawn in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        rows = re.findall(r'text-anchor: end" x="([\d.-]+)" y="([\d.-]+)"[^>]*>([^<]+)', drawn)
        columns = re.findall(r'translate\(([\d.-]+) ([\d.-]+)\) rotate\(-90\)">([^<]+)', drawn)
        assert rows
        cut = [text for x, y, text in rows if float(x) < 3.5 * len(text) or float(y) < 7]
        cut += [text for x, y, text in columns if float(x) < 7 or float(y) < 3.5 * len(text)]
        assert cut == []


def test_relative_l2_comes_before_the_cosine(tmp_path: Path) -> None:
    """A shared expert times 1.5: relative L2 0.5, cosine 1."""
    tensors = dict(LEN3.tensors())
    key = "layers.1.ffn.shared_experts.w2.out"
    tensors[key] *= 1.5
    save(tensors, tmp_path / "scaled.safetensors")
    result = verify_file(tmp_path / "scaled.safetensors", LEN3.ckpt)
    assert f"{key}: outside, relative L2 0.5; cosine 1.000000; " in printed(result_tree(result))
    write_report([result], tmp_path / "r.json")
    [first, *_] = [
        comparison
        for node in json.loads((tmp_path / "r.json").read_text())[0]["nodes"]
        for comparison in node["comparisons"]
        if comparison["status"] == "outside"
    ]
    assert (first["key"], first["relative_l2"]) == (key, 0.5)
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    write_report([result], tmp_path / "r.html")
    cells = '<td data-name="relative L2">0.5</td><td data-name="cosine">1.000000</td>'
    assert cells in (tmp_path / "r.html").read_text()


def test_terminal(good: VerifyResult, bad: VerifyResult) -> None:
    text = printed(summary_table([good, bad]), result_tree(bad), kinds_table(bad))
    assert re.search(r"len3\.safetensors +isolated +878 +816/816 +816/816 +100\.0000%", text)
    assert "FAILED" in text
    assert "first wrong operator: sparse_attn of layers.2" in text
    assert "norm.out: every output of a node is recorded" in text
    assert "worst at token 1, head 1" in text


def test_nodes() -> None:
    infos, _ = list_nodes()
    text = printed(nodes_table(infos))
    assert "hc_split" in text
    assert "{prefix}attn.sparse_attn.out" in text


def test_refused(good: VerifyResult, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected \.json, \.xml, \.html, found '\.txt'"):
        check_report_path(Path("report.txt"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OutputError, match=r"report\.json: "):
        write_report([good], blocked / "report.json")


def test_html_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"install v4tool\[report\]"):
        check_report_path(Path("report.html"))
