"""Reports of a verification, of a good and a bad one: JSON, JUnit XML, HTML, the terminal."""

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


def test_html(good: VerifyResult, bad: VerifyResult, tmp_path: Path) -> None:
    """Self-contained: nothing is loaded from elsewhere; maps, strips and figures are there."""
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    path = tmp_path / "report.html"
    write_report([good, bad], path)
    text = path.read_text()
    assert "<script" not in text
    loaded = re.findall(r'(?:src|href)="([^"#][^"]*)"', text)
    assert all(link.startswith("data:") for link in loaded), loaded[:3]
    assert text.count("<svg") == 3 + 3 + 1, "three passes each, and the strips of the bad one"
    assert "first wrong operator: sparse_attn of layers.2" in text
    assert "3 wrong keys" in text
    assert "layers.4" in text
    again = tmp_path / "again.html"
    write_report([good, bad], again)
    assert again.read_bytes() == path.read_bytes(), "the same results give the same page"


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
