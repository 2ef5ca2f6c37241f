"""The commands `check`, `verify` and `regen`: their output and exit status."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cli import Cli, one_line
from tests.conftest import GOLDEN_MINI
from tests.recordings import entry_of
from v4tool.config import ModelConfig
from v4tool.record.manifest import change
from v4tool.selftest import PAYLOAD

CKPT = GOLDEN_MINI / "ckpt"
LEN6 = GOLDEN_MINI / "len6.safetensors"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Golden len6 with the lowest BF16 bit of one value of layer 2's attention flipped."""
    tensors = load_file(LEN6)
    with safe_open(str(LEN6), "pt") as file:
        metadata = file.metadata()
    words = tensors["layers.2.attn.wo_b.in"].view(dtype=tensors["layers.0.ffn.gate.out.1"].dtype)
    words[0, 3, 5] ^= 1 << 16
    path = tmp_path / "damaged.safetensors"
    save_file(tensors, path, metadata)
    return path


def test_check_passes_a_golden_file(cli: Cli) -> None:
    ran = cli("check", "--dump", LEN6, "--ckpt", CKPT, "--quiet", "--json")
    assert ran.status == 0, ran.out
    (result,) = json.loads(ran.out)
    assert result["ok"]
    assert result["keys"] == 1074
    assert [f for f in result["findings"] if f["severity"] == "error"] == []


def test_deep_check_names_the_damaged_key(cli: Cli, damaged: Path) -> None:
    ran = cli("check", "--dump", damaged, "--ckpt", CKPT, "--quiet", "--deep")
    assert ran.status == 1
    assert "layers.2.attn.wo_b.in" in ran.out
    assert "FAILED" in ran.out


def test_check_of_no_file(cli: Cli, tmp_path: Path) -> None:
    line = one_line(
        cli("check", "--dump", tmp_path / "none.safetensors", "--ckpt", CKPT, "--quiet")
    )
    assert "none.safetensors" in line
    assert "expected recordings" in one_line(
        cli("check", "--all", "--from", tmp_path, "--ckpt", CKPT, "--quiet")
    )


def test_check_explains_itself(cli: Cli) -> None:
    rows = json.loads(cli("check", "--explain", "--json").out)
    assert all(row["keys"] >= 0 and row["says"] for row in rows["identities"])
    assert sum(row["keys"] for row in rows["identities"]) > 1000


def test_verify_passes_a_golden_file(cli: Cli, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = cli("verify", "--dump", LEN6, "--ckpt", CKPT, "--quiet", "--jobs", 1, "--report", report)
    assert ran.status == 0, ran.out
    assert "passed" in ran.out
    assert "1070/1070" in ran.out  # 1074 keys, four of them ids
    assert json.loads(report.read_text())


def test_verify_names_the_first_wrong_operator(cli: Cli, damaged: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    ran = cli("verify", "--dump", damaged, "--ckpt", CKPT, "--quiet", "--jobs", 1,
              "--report", report)  # fmt: skip
    assert ran.status == 1
    assert "layers.2.attn.wo_b.in" in ran.out
    failures = [
        case.get("name")
        for case in ET.parse(report).iter("testcase")
        if case.find("failure") is not None
    ]
    assert "layers.2.attn.wo_b.in" in failures


def test_verify_mistakes(cli: Cli, tmp_path: Path) -> None:
    base = ("verify", "--dump", LEN6, "--ckpt", CKPT, "--quiet")
    assert "--report" in one_line(cli(*base, "--report", tmp_path / "report.doc"))
    assert "nonsense" in one_line(cli(*base, "--node", "nonsense"))
    bad = tmp_path / "bad.vt"
    bad.write_text("import vt_lang as vt\nthis is no python\n")
    line = one_line(cli(*base, "--vt", bad))
    assert "bad.vt" in line
    assert "2" in line


def test_evidence_goes_into_the_manifest(cli: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "one.toml"
    profile.write_text(
        f'out_dir = "{tmp_path}/out"\n[checkpoint]\npath = "{CKPT}"\n'
        '[[cases]]\nid = "a"\ninput_ids = [1, 2, 3, 4]\n'
    )
    options = ("--profile", profile, "--case", "a", "--quiet")
    assert cli("dump", *options).status == 0
    assert cli("verify", *options, "--jobs", 1).status == 0
    entry = json.loads((tmp_path / "out" / "prompts.json").read_text())["cases"]["a"]
    assert entry["verification"]["passed"]
    assert entry["verification"]["keys_compared"] == entry["tensors"] - 1
    assert "node checks" in cli("list", "cases", "--profile", profile).out
    shutil.rmtree(tmp_path / "out")


def test_check_after_a_replacement_that_was_killed(cli: Cli, tmp_path: Path) -> None:
    """The recording has been renamed, its entry is still the pending one."""
    recording = tmp_path / LEN6.name
    shutil.copy(LEN6, recording)
    entry = entry_of(recording, ModelConfig.from_file(CKPT / "config.json"))
    old = entry.model_copy(update={"payload_sha256": "0" * 64, "header_sha256": "0" * 64})
    call = ("check", "--dump", recording, "--ckpt", CKPT, "--quiet", "--json")
    change(tmp_path, lambda found: found.model_copy(update={"cases": {"a": old}}))
    assert cli(*call).status == 1
    change(tmp_path, lambda found: found.model_copy(update={"pending": {"a": entry}}))
    assert cli(*call).status == 0


def test_regen(cli: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "one.toml"
    profile.write_text(
        f'out_dir = "{tmp_path}/out"\n[checkpoint]\npath = "{CKPT}"\n'
        '[[cases]]\nid = "a"\ninput_ids = [1, 2, 3, 4]\n'
    )
    options = ("--profile", profile, "--quiet")
    assert "no prompts.json" in one_line(cli("regen", *options))
    assert cli("dump", *options, "--case", "a").status == 0
    before = (tmp_path / "out" / "prompts.json").read_bytes()
    planned = json.loads(cli("regen", *options, "--dry-run", "--json").out)
    assert planned == [{"case": "a", "left_alone": None}]
    assert (tmp_path / "out" / "prompts.json").read_bytes() == before
    (result,) = json.loads(cli("regen", *options, "--threads", 1, "--json").out)
    assert result["same_payload"]
    assert result["replaced"]
    assert "the same bits" in cli("regen", *options, "--threads", 1).out
    assert "no case b" in one_line(cli("regen", *options, "--case", "b"))


def test_anchors_do_not_apply_elsewhere(cli: Cli) -> None:
    ran = cli("check", "--anchors", "--profile", "flash", "--ckpt", CKPT, "--quiet")
    assert ran.status == 1
    assert "the anchors do not apply to this checkpoint" in ran.out


def test_the_port_checks_itself(cli: Cli) -> None:
    ran = cli("check", "--port", "--quick", "--ckpt", CKPT, "--quiet", "--json")
    rows = {row["name"]: row["status"] for row in json.loads(ran.out)}
    assert ran.status == 0, rows
    assert {"structure", "weights"} <= rows.keys()
    assert rows["payload hash"] == "ok"


def test_the_port_check_shows_both_payload_hashes(cli: Cli) -> None:
    """In the table too, whole: what a user copies into a report."""
    ran = cli("check", "--port", "--quick", "--layer", 0, "--ckpt", CKPT, "--quiet")
    (line,) = (line for line in ran.out.splitlines() if line.startswith("payload hash"))
    assert line.count(PAYLOAD) == 2
