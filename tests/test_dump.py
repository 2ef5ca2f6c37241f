"""`v4tool dump` on the small golden checkpoint: keys recorded, files, errors."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.cli import Cli, one_line
from tests.conftest import (
    DSPARK_FILES,
    GOLDEN_MINI,
    MINI_FILES,
    GoldenFile,
    difference,
    kind_of,
)
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import Numerics
from v4tool.model.mtp import TOKENS_HELD
from v4tool.model.stream import Sequence, run
from v4tool.names import generic, is_draft, is_expert
from v4tool.record.reader import Recording

CKPT = GOLDEN_MINI / "ckpt"


def ids_text(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def dumped(cli: Cli, out: Path, *args: object) -> dict[str, torch.Tensor]:
    ran = cli("dump", "--ckpt", CKPT, "--out", out, "--quiet", *args)
    assert ran.status == 0, ran.err
    return load_file(out)


@pytest.mark.parametrize("golden", [g for g in MINI_FILES if g.complete], ids=lambda g: g.name)
def test_a_file_equals_the_golden_file(cli: Cli, tmp_path: Path, golden: GoldenFile) -> None:
    """Through the whole program: same keys, values bit for bit (acc within 1 ulp, SPEC 8)."""
    found = dumped(
        cli, tmp_path / "a.safetensors",
        "--input-ids", ids_text(golden.metadata("input_ids")),
        "--decode-ids", ids_text(golden.metadata("decode_ids")),
    )  # fmt: skip
    with Checkpoint.open(CKPT) as checkpoint:
        specs = golden.specs(checkpoint)
    expected = dict(golden.tensors())
    assert found.keys() == expected.keys()
    wrong = {
        key: why
        for key, value in expected.items()
        if (why := difference(value, found[key], kind_of(key, specs)))
    }
    assert not wrong


@pytest.mark.parametrize("golden", [g for g in DSPARK_FILES if g.complete], ids=lambda g: g.name)
def test_drafts_of_a_file_equal_the_golden_file(
    cli: Cli, tmp_path: Path, golden: GoldenFile
) -> None:
    """DSpark through the whole program, with NumPy's product; without it the main stack alone."""
    out, expected = tmp_path / "a.safetensors", dict(golden.tensors())
    ids = (
        "--input-ids", ids_text(golden.metadata("input_ids")),
        "--decode-ids", ids_text(golden.metadata("decode_ids")),
    )  # fmt: skip
    ran = cli("dump", "--ckpt", golden.ckpt, "--out", out, "--quiet", "--backend", "numpy", *ids)
    assert ran.status == 0, ran.err
    found = load_file(out)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    ran = cli("dump", "--ckpt", golden.ckpt, "--out", tmp_path / "b.safetensors", "--no-mtp", *ids)
    assert ran.status == 0, ran.err
    main = load_file(tmp_path / "b.safetensors")
    assert main.keys() == {key for key in expected if not is_draft(key)}
    assert all(torch.equal(main[key], expected[key]) for key in main)


def test_only_the_draft_of_a_step(cli: Cli, tmp_path: Path) -> None:
    """What it starts from, the step's logits, is computed though not recorded."""
    golden, out = DSPARK_FILES[0], tmp_path / "a.safetensors"
    ran = cli(
        "dump", "--ckpt", golden.ckpt, "--out", out, "--quiet", "--only", "decode.0.mtp.output_ids",
        "--input-ids", ids_text(golden.metadata("input_ids")), "--decode-ids",
        ids_text(golden.metadata("decode_ids")[:1]),
    )  # fmt: skip
    assert ran.status == 0, ran.err
    expected = dict(golden.tensors())["decode.0.mtp.output_ids"]
    assert torch.equal(load_file(out)["decode.0.mtp.output_ids"], expected)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 32, 127, 128, 129])
def test_list_keys_predicts_the_dump(cli: Cli, tmp_path: Path, length: int) -> None:
    """Names, shapes and dtypes, experts' rows aside (they depend on the routing)."""
    ids = [(7 * i) % 320 for i in range(length)]
    found = dumped(cli, tmp_path / "a.safetensors", "--input-ids", ids_text(ids), "--decode", 1)
    listed = cli("list", "keys", "--ckpt", CKPT, "--length", length, "--decode", 1, "--json")
    predicted = {row["key"]: (row["dtype"], row["shape"]) for row in json.loads(listed.out)}
    dtypes = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
    assert {generic(key) for key in found} == predicted.keys()
    for key, value in found.items():
        dtype, shape = predicted[generic(key)]
        assert dtypes[value.dtype] == dtype, key
        rows = [n for n in shape if n is not None]
        assert list(value.shape)[len(shape) - len(rows) :] == rows, key


def test_greedy_decode_chooses_the_arg_max(cli: Cli, tmp_path: Path) -> None:
    found = dumped(cli, tmp_path / "a.safetensors", "--input-ids", "35,11,74", "--decode", 3)
    chosen = [int(found[f"decode.{i}.input_ids"]) for i in range(3)]
    logits = [found["head.out"], found["decode.0.head.out"], found["decode.1.head.out"]]
    assert chosen == [int((row == row.max()).nonzero()[0, 1]) for row in logits]
    given = dumped(
        cli, tmp_path / "b.safetensors", "--input-ids", "35,11,74", "--decode-ids", ids_text(chosen)
    )
    assert given.keys() == found.keys()
    assert all(torch.equal(given[key], found[key]) for key in found)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert Recording.open(tmp_path / "a.safetensors").decode_ids == chosen


def test_decode_ids_may_be_given_for_the_first_steps_only(cli: Cli, tmp_path: Path) -> None:
    found = dumped(
        cli, tmp_path / "a.safetensors",
        "--input-ids", "35,11,74", "--decode", 2, "--decode-ids", "181",
    )  # fmt: skip
    assert int(found["decode.0.input_ids"]) == 181
    assert int(found["decode.1.input_ids"]) == int(found["decode.0.head.out"].argmax())


def test_only_records_what_matches(cli: Cli, tmp_path: Path) -> None:
    whole = dumped(cli, tmp_path / "a.safetensors", "--input-ids", "5,6,7,8,9")
    some = dumped(
        cli, tmp_path / "b.safetensors", "--input-ids", "5,6,7,8,9",
        "--only", "*.attn.out", "--only", "layers.0.ffn.experts.*.w2.out",
    )  # fmt: skip
    wanted = {
        k for k in whole
        if k.endswith(".attn.out") or (k.startswith("layers.0.ffn.experts.") and "w2" in k)
    }  # fmt: skip
    assert some.keys() == wanted
    assert any(is_expert(key) for key in wanted)
    assert all(torch.equal(some[key], whole[key]) for key in wanted)


def test_only_may_name_one_expert(cli: Cli, tmp_path: Path) -> None:
    whole = dumped(cli, tmp_path / "a.safetensors", "--input-ids", "5,6,7,8,9")
    key = next(k for k in whole if k.startswith("layers.0.ffn.experts.") and k.endswith(".w1.out"))
    expert = key.split(".")[4]
    some = dumped(
        cli, tmp_path / "b.safetensors", "--input-ids", "5,6,7,8,9",
        "--only", f"layers.0.ffn.experts.{expert}.*",
    )  # fmt: skip
    assert some.keys() == {k for k in whole if k.startswith(f"layers.0.ffn.experts.{expert}.")}


def test_layers_beyond_the_last_one_asked_for_are_not_computed(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    ran = cli("dump", "--ckpt", CKPT, "--out", out, "--input-ids", "5,6,7,8,9", "--layers", "0,2")
    assert ran.status == 0
    found = load_file(out)
    whole = dumped(cli, tmp_path / "b.safetensors", "--input-ids", "5,6,7,8,9")
    assert found.keys() == {
        k for k in whole
        if k.startswith(("layers.0.", "layers.2.")) or k in ("input_ids", "embed.out")
    }  # fmt: skip
    assert all(torch.equal(found[key], whole[key]) for key in found)
    computed = [line.split(" (")[0] for line in ran.err.splitlines() if line.startswith("prefill")]
    assert computed == [f"prefill {p}" for p in ("embed", "layers.0", "layers.1", "layers.2")]


def test_metadata(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    dumped(cli, out, "--input-ids", "5,6", "--threads", "2", "--seed", "9")
    metadata = Recording.open(out).metadata
    assert metadata["format_version"] == "1"
    assert metadata["case"] == "custom"
    assert metadata["profile"] == "nano"
    assert metadata["input_ids"] == "[5, 6]"
    assert metadata["seed"] == "9"
    assert metadata["threads"] == "2"
    assert metadata["accumulate"] == "float64"
    assert metadata["torch"] == torch.__version__
    with Checkpoint.open(CKPT) as checkpoint:
        assert metadata["checkpoint_fingerprint"] == checkpoint.fingerprint


def test_float32_is_selectable_and_close(cli: Cli, tmp_path: Path) -> None:
    """The official code's own precision: not the same bits, but the same model."""
    wide = dumped(cli, tmp_path / "a.safetensors", "--input-ids", "5,6,7")
    narrow = dumped(cli, tmp_path / "b.safetensors", "--input-ids", "5,6,7",
                    "--accumulate", "float32")  # fmt: skip
    assert Recording.open(tmp_path / "b.safetensors").metadata["accumulate"] == "float32"
    # 2^-8 is one unit of BF16: before anything was quantised twice, roundings may differ by no more
    first = "layers.0.attn_norm.out"
    assert torch.allclose(wide[first], narrow[first], rtol=2**-8, atol=0)
    assert wide.keys() == narrow.keys()


def test_stdout_is_json_alone(cli: Cli, tmp_path: Path) -> None:
    ran = cli(
        "dump", "--ckpt", CKPT, "--out", tmp_path / "a.safetensors", "--input-ids", "5", "--json"
    )
    (result,) = json.loads(ran.out)
    assert result["tokens"] == 1
    assert result["path"] == str(tmp_path / "a.safetensors")
    assert result["payload_bytes"] == sum(
        v.nbytes for v in load_file(tmp_path / "a.safetensors").values()
    )
    assert (
        result["payload_sha256"]
        == Recording.open(tmp_path / "a.safetensors").metadata["payload_sha256"]
    )


def test_one_token_works(cli: Cli, tmp_path: Path) -> None:
    assert dumped(cli, tmp_path / "a.safetensors", "--input-ids", "0")["input_ids"].tolist() == [
        [0]
    ]


LENGTHS = (1, 2, 5, 9, 127, 130, 33, 255)


@pytest.mark.parametrize("length", LENGTHS)
def test_nine_decode_steps_stay_finite(cli: Cli, tmp_path: Path, length: int) -> None:
    ids = [(11 * i + length) % 320 for i in range(length)]
    found = dumped(
        cli, tmp_path / "a.safetensors", "--input-ids", ids_text(ids), "--decode", 9,
        "--only", "*.out", "--only", "*.pre",
    )  # fmt: skip
    assert [key for key, value in found.items() if not torch.isfinite(value).all()] == []


BAD = [
    # arguments, words of the one line
    (["--input-ids", ""], "--input-ids: expected at least one token id, found none"),
    (["--input-ids", "1,-2"], "position 1"),
    (["--input-ids", "320"], "expected a whole number from 0 to 319, found 320"),
    (["--input-ids", "1.0"], "1.0"),
    (["--input-ids", "[[1]]"], "--input-ids"),
    (["--text", ""], "text: expected at least one token, found none"),
    (["--text", "a", "--input-ids", "1"], "expected one of them, found both"),
    ([], "no case: name one with --case ID, or --all"),
    (["--case", "baseline7"], "unknown case"),
    (["--case", "baseline6", "--all"], "expected one of them, found both"),
    (["--input-ids", "1", "--case", "baseline6"], "--text and --input-ids go without"),
    (["--input-ids", "1", "--layers", "9"], "--layers: expected 0 to 4, found 9"),
    (["--input-ids", "1", "--layers", "x"], "--layers: expected numbers and ranges"),
    (["--input-ids", "1", "--only", "nothing.*"], "expected a pattern that some key matches"),
    (["--input-ids", "1", "--decode", "-1"], "--decode: expected 0 or more steps, found -1"),
    (["--input-ids", "1", "--decode-ids", "400"], "--decode-ids"),
    (["--input-ids", "1", "--decode", "1", "--decode-ids", "1,2"], "at most 1 ids, found 2"),
    (["--input-ids", "1", "--threads", "0"], "--threads"),
    (["--input-ids", "1", "--accumulate", "float16"], "--accumulate"),
    (["--input-ids", "1", "--profile", "nono"], "nono"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "words"), BAD, ids=[" ".join(a) or "nothing" for a, _ in BAD])
def test_bad_arguments(cli: Cli, tmp_path: Path, args: list[str], words: str) -> None:
    ran = cli("dump", "--ckpt", CKPT, "--out", tmp_path, "--quiet", *args)
    assert words in one_line(ran)
    assert list(tmp_path.iterdir()) == []


def test_ids_of_a_case_outside_the_vocabulary(cli: Cli, tmp_path: Path) -> None:
    """The shipped cases are in the real vocabulary; the small checkpoint has 320 ids."""
    line = one_line(
        cli("dump", "--ckpt", CKPT, "--out", tmp_path, "--quiet", "--case", "baseline6")
    )
    assert "case baseline6: input_ids: position 0" in line
    assert "30594" in line


def test_existing_file_without_force(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    dumped(cli, out, "--input-ids", "1")
    before = out.read_bytes()
    ran = cli("dump", "--ckpt", CKPT, "--out", out, "--quiet", "--input-ids", "2")
    assert f"{out}: exists already; use --force to replace it" in one_line(ran)
    assert out.read_bytes() == before
    dumped(cli, out, "--input-ids", "2", "--force")
    assert load_file(out)["input_ids"].item() == 2


def test_no_checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("V4TOOL_CKPT", raising=False)
    line = one_line(cli("dump", "--profile", "flash", "--case", "baseline6", "--out", tmp_path))
    assert "no checkpoint found: give its directory with --ckpt DIR" in line
    assert "expected a checkpoint directory, found nothing" in one_line(
        cli("dump", "--ckpt", tmp_path / "nowhere", "--case", "baseline6")
    )


def test_a_weight_that_is_found_broken_midway_leaves_no_file(cli: Cli, tmp_path: Path) -> None:
    """A scale of 0xFF is NaN (SPEC 2); only reading the payload shows it."""
    ckpt = tmp_path / "ckpt"
    shutil.copytree(CKPT, ckpt)
    with Checkpoint.open(CKPT) as checkpoint:
        entry = checkpoint._entry("layers.3.attn.wq_b.scale")
        shard = checkpoint._found.files["layers.3.attn.wq_b.scale"]
    with (ckpt / shard).open("r+b") as file:
        file.seek(entry.start)
        file.write(b"\xff")
    out = tmp_path / "out"
    line = one_line(cli("dump", "--ckpt", ckpt, "--out", out, "--quiet", "--input-ids", "1,2"))
    assert "layers.3.attn.wq_b.scale" in line
    assert list(out.iterdir()) == []


def test_stdout_that_closes_early_is_no_error(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "v4tool", "list", "keys"]
    source = str(Path(__file__).parent.parent / "src")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().decode().count("Traceback") == 0


def test_a_directory_of_recordings_has_a_manifest(cli: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "two.toml"
    profile.write_text(
        f'out_dir = "{tmp_path}/out"\n[checkpoint]\npath = "{CKPT}"\n'
        '[[cases]]\nid = "a"\ninput_ids = [1, 2, 3]\n[[cases]]\nid = "b"\ninput_ids = [4]\n'
    )
    for case in ("a", "b"):
        assert cli("dump", "--profile", profile, "--case", case, "--quiet").status == 0
    cases = json.loads((tmp_path / "out" / "prompts.json").read_text())["cases"]
    assert {case: cases[case]["input_ids"] for case in cases} == {"a": [1, 2, 3], "b": [4]}
    found = Recording.open(tmp_path / "out" / cases["a"]["file"])
    assert cases["a"]["payload_sha256"] == found.metadata["payload_sha256"]
    assert cases["a"]["tensors"] == len(found.keys())


@pytest.mark.parametrize(("tokens", "times"), [(TOKENS_HELD, 1), (TOKENS_HELD + 1, 2)])
def test_the_output_matrix_of_a_short_prompt_is_read_once(tokens: int, times: int) -> None:
    """However often that is, MTP's keys come after the main head's: the payload's order."""
    seen: list[str] = []
    read = {"head.weight": 0}
    with Checkpoint.open(CKPT) as checkpoint:
        right = checkpoint.read_rows

        def counted(name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
            read[name] = read.get(name, 0) + stop - start
            return right(name, start, stop, buffer)

        checkpoint.read_rows = counted  # type: ignore[method-assign]
        sequence = Sequence([7] * tokens, lambda key, value: seen.append(key))
        run(checkpoint, checkpoint.config, Numerics(), [sequence])
        assert read["head.weight"] == times * checkpoint.config.vocab_size
    mtp = [key.startswith("mtp.") for key in seen]
    assert seen.index("head.out") < mtp.index(True)
    assert all(mtp[mtp.index(True) :])


def test_the_number_of_torchs_threads_is_put_back(cli: Cli, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        dumped(cli, tmp_path / "a.safetensors", "--input-ids", "1")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_only_the_draft_of_the_prefill(cli: Cli, tmp_path: Path) -> None:
    """A step whose draft is not wanted has none."""
    out = tmp_path / "a.safetensors"
    ran = cli(
        "dump", "--ckpt", DSPARK_FILES[0].ckpt, "--out", out, "--quiet", "--only", "mtp.0.main*",
        "--input-ids", "1,2,3", "--decode-ids", "4",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert load_file(out).keys() == {"mtp.0.main_proj.out", "mtp.0.main_norm.out"}
