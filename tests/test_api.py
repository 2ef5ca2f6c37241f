"""The Python API: examples of the documents, import time, exported names, refused arguments."""

import doctest
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import v4tool
from tests.cli import Cli
from tests.conftest import GOLDEN_MINI, MINI_FILES, ROOT
from v4tool.record.manifest import Manifest

CKPT = GOLDEN_MINI / "ckpt"
LEN6 = MINI_FILES[1].path
FENCE = re.compile(r"^```pycon\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def beside_ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a directory with the small checkpoint in `ckpt`, without V4TOOL_ variables."""
    for name in [name for name in os.environ if name.startswith("V4TOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").symlink_to(CKPT)


@pytest.mark.usefixtures("beside_ckpt")
@pytest.mark.parametrize("page", ["docs/api.md", "README.md"])
def test_the_examples_of_the_documents(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(FENCE.findall(text))
    test = doctest.DocTestParser().get_doctest(code, {}, page, page, 0)
    assert len(test.examples) >= 5
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert "".join(said) == ""


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    return ran.stdout.strip()


def test_the_import_is_fast() -> None:
    heavy = ("torch", "numpy", "pydantic", "safetensors", "typer", "rich", "tokenizers")
    code = f"import sys, v4tool; print([m for m in {heavy} if m in sys.modules])"
    assert fresh(code) == "[]"


@pytest.mark.parametrize(
    "imports",
    [
        "import v4tool.verify.recording, v4tool.check.recording; import v4tool",
        "import v4tool; import v4tool.verify.recording, v4tool.check.recording",
        "from v4tool.verify import recording; import v4tool",
        "import v4tool.cli; import v4tool",
    ],
)
def test_check_and_verify_stay_functions_in_whatever_order_the_packages_load(imports: str) -> None:
    """A submodule takes its parent's attribute once, when it is first loaded (see __init__)."""
    code = (
        f"{imports}\n"
        "from v4tool.verify.recording import verify_file\n"
        "from v4tool.check.recording import check_recording\n"
        "names = (v4tool.dump, v4tool.check, v4tool.verify, v4tool.open_recording)\n"
        "print([f.__module__ + '.' + f.__name__ for f in names])"
    )
    functions = ["dump", "check", "verify", "open_recording"]
    assert fresh(code) == str([f"v4tool.api.{name}" for name in functions])


def test_dump_writes_what_the_command_writes(cli: Cli, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    options = ("--input-ids", "5,6,7", "--decode", 2, "--decode-ids", 9, "--only", "*.out")
    assert cli("dump", "--ckpt", CKPT, "--out", theirs, "--quiet", *options).status == 0
    [result] = v4tool.dump(
        CKPT, input_ids=[5, 6, 7], decode=2, decode_ids=[9], only=["*.out"], out=ours
    )
    assert theirs.read_bytes() == ours.read_bytes()
    assert (result.path, result.decode_ids[0], result.complete) == (ours, 9, False)
    assert result.tensors == len(load_file(ours))


def test_cases_of_a_profile_share_a_pass_and_get_a_manifest(tmp_path: Path) -> None:
    profile = tmp_path / "two.toml"
    profile.write_text(
        f'out_dir = "{tmp_path}/out"\n[checkpoint]\npath = "{CKPT}"\n'
        '[[cases]]\nid = "a"\ninput_ids = [1, 2, 3]\n[[cases]]\nid = "b"\ninput_ids = [4]\n'
    )
    results = v4tool.dump(profile=profile, case=["a", "b"], threads=1)
    assert [result.path.parent for result in results] == [tmp_path / "out"] * 2
    entries = Manifest.load(tmp_path / "out").cases
    assert [entries[id].payload_sha256 for id in "ab"] == [r.payload_sha256 for r in results]
    assert v4tool.check(results[0].path, profile=profile).ok
    assert v4tool.verify(results[1].path, profile=profile).passed
    # the manifest's entry is part of what is checked: "b" is not the file that it describes
    results[1].path.write_bytes(results[0].path.read_bytes())
    rules = {finding.rule for finding in v4tool.check(results[1].path, profile=profile).findings}
    assert {"payload sha256", "header sha256"} <= rules


def test_check_without_weights_and_of_other_ids() -> None:
    assert v4tool.check(LEN6, CKPT, weights=False).ok
    ids = [251, 247, 122, 75, 79, 301]
    result = v4tool.check(LEN6, CKPT, input_ids=ids, weights=False)
    assert not result.ok
    assert {finding.key for finding in result.findings} == {"__metadata__.input_ids"}


def test_verify_of_one_node_and_with_several_processes() -> None:
    whole = v4tool.verify(LEN6, ckpt=CKPT)
    assert whole == v4tool.verify(LEN6, ckpt=CKPT, jobs=2)
    assert (whole.passed, whole.verdict, whole.mode) == (True, None, "isolated")
    part = v4tool.verify(LEN6, ckpt=CKPT, node="hc_pre", layer=2)
    assert {node.kind for node in part.nodes} == {"hc_pre"}
    assert part.restricted


def test_the_caller_s_torch_and_environment_are_left_as_they_were(tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        return (*modes, torch.get_num_threads(), dict(os.environ), "vt_lang" in sys.modules)

    before = state()
    torch.set_num_threads(2)
    try:
        between = state()
        v4tool.dump(CKPT, input_ids=[1, 2], out=tmp_path / "a.safetensors")
        v4tool.check(tmp_path / "a.safetensors", CKPT, deep=True)
        v4tool.verify(tmp_path / "a.safetensors", CKPT)
        assert state() == between
    finally:
        torch.set_num_threads(1)
    assert state() == before


BAD = [
    # arguments of dump, words of the message
    ({}, "expected one of case, input_ids and text, found 0 of them"),
    ({"case": "baseline6", "text": "a"}, "case, input_ids and text, found 2 of them"),
    ({"case": []}, "case: expected at least one case, found none"),
    ({"case": "baseline7"}, "unknown case 'baseline7' (did you mean baseline6?)"),
    ({"case": "baseline6"}, "case baseline6: input_ids: position 0"),
    ({"input_ids": []}, "input_ids: expected at least one token id, found none"),
    ({"input_ids": [1, 320]}, "position 1: expected a whole number from 0 to 319, found 320"),
    ({"input_ids": [1.0]}, "input_ids: position 0: expected a whole number"),
    ({"input_ids": [1], "decode_ids": [-1]}, "decode_ids: position 0: expected a whole number"),
    ({"input_ids": [1], "decode": -1}, "--decode: expected 0 or more steps, found -1"),
    ({"input_ids": [1], "layers": [5]}, "--layers: expected 0 to 4, found 5"),
    ({"input_ids": [1], "only": ["x"]}, "--only: expected a pattern that some key matches"),
    ({"input_ids": [1], "accumulate": "float16"}, "expected one of float64, float32"),
    ({"input_ids": [1], "profile": "nono"}, "unknown profile 'nono'"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[words for _, words in BAD])
def test_a_mistake_is_one_line(tmp_path: Path, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(v4tool.V4ToolError) as caught:
        v4tool.dump(CKPT, out=tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_remarks_go_to_the_logger(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A profile's random checkpoint is made on first use, also without the command line."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    profile = tmp_path / "tiny.toml"
    profile.write_text(f'[checkpoint]\nconfig = "{CKPT}/config.json"\nsynth = true\n')
    with caplog.at_level(logging.INFO, logger="v4tool"):
        [result] = v4tool.dump(input_ids=[3, 4], profile=profile, out=tmp_path / "a.safetensors")
    made, tensors = (record.message.split(" in ")[0] for record in caplog.records)
    assert made == "making the checkpoint of profile tiny"
    assert re.fullmatch(r"\d+ tensors", tensors)
    assert v4tool.verify(result.path, profile=profile).passed
    assert capsys.readouterr() == ("", "")
