"""`list keys KEY --where`: the source lines that compute a key, in the port and in model.vt."""

import json
import re
import subprocess
import sys

import pytest
import torch

from tests.cli import Cli, one_line
from tests.conftest import GOLDEN_MINI, MINI_FILES, ROOT, GoldenFile
from v4tool.checkpoint.layout import layout
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.errors import InputError
from v4tool.names import pass_of
from v4tool.verify.language import PLACEHOLDER, read_description
from v4tool.verify.tensors import OWN_DESCRIPTION
from v4tool.where import PORT, KeyLines, SourceLine, ZeroWeights, lines_of, narrow

CKPT = GOLDEN_MINI / "ckpt"
MINI = ModelConfig.from_file(CKPT / "config.json")
FLASH = ModelConfig.from_file(ROOT / "src" / "v4tool" / "data" / "flash_config.json")
NODES = read_description(OWN_DESCRIPTION).nodes


def row(line: SourceLine) -> str:
    """The text of a file's line."""
    return line.path.read_text(encoding="utf-8").splitlines()[line.line - 1]


def problem(key: str, found: KeyLines) -> str | None:
    """Why these lines cannot be those of the key, or None."""
    for line in found.port:
        if line.path.parent != PORT or line.text.split("(")[0] not in row(line):
            return f"not a line of the port: {line}"
    if found.node is None:
        return None if key.endswith("input_ids") else "no node"
    outputs = [re.escape(PLACEHOLDER.sub("@", o)) for o in NODES[found.node.function].keys]
    if not any(re.fullmatch(o.replace("@", ".*"), key) for o in outputs):
        return f"{found.node.function} has no such output"
    if not row(found.node).startswith(f"def {found.node.function}("):
        return f"not the line of its node: {found.node}"
    module = key.removeprefix(pass_of(key)).removesuffix(".out")
    if f"{module}.weight" in layout(MINI) and module not in ("embed", "head"):
        name = f'"{module.split(".")[-1]}"'
        return None if any(name in line.text for line in found.port) else f"no line with {name}"
    return None


@pytest.mark.parametrize(
    "golden", [pytest.param(g, id=g.name) for g in MINI_FILES if g.name != "len129"]
)
def test_every_key_of_a_recording(golden: GoldenFile, mini: Checkpoint) -> None:
    """Prefill, decode and MTP: a line of the port, the node that has the key among its outputs, and
    for the output of a module with a weight the call that names it.
    """
    length = len(golden.metadata("input_ids"))
    keys = [key.replace("<E>", "1") for key in golden.specs(mini)]
    wrong = {key: problem(key, lines_of(MINI, key, length)) for key in keys}
    assert {key: why for key, why in wrong.items() if why} == {}


PINNED = [
    # key, tokens, functions of the port from the innermost on, node, why
    ("embed.out", 6, "embed", "embedding", "the only embedding of a pass of the main stack"),
    ("mtp.0.prefill.embed.out", 6, "embed mtp_input", "embedding", "the main stack embeds as well"),
    ("layers.2.attn.wq_a.out", 6, "queries", "q_linear", "a product with one caller"),
    ("layers.2.attn.q_norm.out", 6, "queries", "rms_norm", "nested in the same line"),
    ("layers.2.attn.rope.rot.2.out", 6, "Rotary.rotate_batch indexer", "rope", "indexer's query"),
    ("layers.2.attn.rope.rot.3.out", 6, "Rotary.rotate_at compressor indexer", "rope",
     "a compressor's rows, of the indexer's compressor"),
    ("layers.2.attn.rope.rot.4.out", 6, "Rotary.rotate_at compressor compressed", "rope",
     "the same of the attention's compressor"),
    ("layers.3.attn.rope.rot.2.out", 128, "Rotary.rotate_at", "rope", "there is no indexer"),
    ("layers.2.attn.indexer.out", 3, "_choices", "index_choice", "a tensor without columns"),
    ("layers.2.attn.compressor.out", 6, "quantize_kv compressed.<lambda>", "compressor_out",
     "window rows are quantised there too"),
    ("layers.0.attn.sparse_attn.in.kv", 6, "attended_rows", "attn_kv", "rows of the window"),
    ("layers.0.attn.sparse_attn.in.topk_idxs", 6, "window_table", "attn_table",
     "made as I64: another dtype of the same integers is no computation"),
    ("layers.0.ffn.experts.<E>.w1.out", 6, "expert.linear expert moe.routed", "q_linear", "routed"),
    ("layers.0.ffn.shared_experts.w2.out", 6, "expert.linear expert moe", "expert_down", "shared"),
    ("layers.2.ffn.gate.out.1", 6, "choose_experts", "gate_hash", "by token id"),
    ("layers.3.ffn.gate.out.1", 6, "choose_experts", "gate_select", "by score"),
    ("layers.4.hc_ffn.comb", 6, "sinkhorn hc_split hc_pre block", "hc_split", "second of a block"),
    ("layers.4.out", 6, "hc_post.mixed hc_post block", "decoder_layer", "second of a block"),
    ("decode.1.head.out", 6, "logits", "head", "read in pieces"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "tokens", "functions", "node", "why"), PINNED)
def test_kinds_of_keys_of_the_release(
    key: str, tokens: int, functions: str, node: str, why: str
) -> None:
    found = lines_of(FLASH, key, tokens)
    assert [line.function for line in found.port] == functions.split(), why
    assert found.node is not None
    assert found.node.function == node, why


TEXTS = [
    ("layers.2.attn.wq_a.out", 6, 'scope.linear("wq_a", x_TD)'),
    ("layers.2.attn.q_norm.out", 6, 'scope.norm("q_norm", scope.linear("wq_a", x_TD))'),
    ("layers.2.ffn.gate.out.1", 6,
     'scope.weights.gather_rows(f"{scope.path}gate.tid2eid", scope.ids)'),
    # a decode step before the window is full, and one after: position 127 fills it
    ("decode.1.layers.0.attn.sparse_attn.in.topk_idxs", 125,
     "torch.where(table > step.start, -1, table)"),
    ("decode.2.layers.0.attn.sparse_attn.in.topk_idxs", 125,
     "torch.cat([ring[newest + 1 :], ring[: newest + 1]])"),
    ("mtp.0.decode.attn.sparse_attn.in.topk_idxs", 2100,
     "torch.cat([ring[newest + 1 :], ring[: newest + 1]])"),
    ("input_ids", 6, "torch.tensor(ids, dtype=torch.int64)"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "tokens", "text"), TEXTS)
def test_text_of_the_innermost_expression(key: str, tokens: int, text: str) -> None:
    assert lines_of(FLASH, key, tokens).port[0].text == text


def test_an_expression_of_several_rows_comes_in_one() -> None:
    found = lines_of(FLASH, "layers.2.attn.compressor.wkv.out", 6)
    assert found.port[1].text == (
        'compressor(scope / "compressor", x_TD, ratio, states, '
        "lambda x: quantize_kv(x, config), rotary)"
    )


def test_keys_that_a_recording_does_not_have() -> None:
    for key, length, complaint in [
        ("layers.43.attn.out", 6, "expected a layer up to 42, found 43"),
        ("layers.3.attn.compressor.out", 127, "a prompt of 127 tokens"),
        ("decode.0.layers.2.attn.compressor.out", 6, "a prompt of 6 tokens"),
        ("layers.0.attn.nothing.out", 6, "a prompt of 6 tokens"),
        ("embed.out", 0, "at least 1 token, found 0"),
    ]:
        with pytest.raises(InputError, match=complaint):
            lines_of(FLASH, key, length)


def test_mtp_of_another_design_has_no_lines_but_the_main_stack_has() -> None:
    fields = FLASH.to_release_dict() | {"num_nextn_predict_layers": 3}
    fields["compress_ratios"] += [0, 0]
    config = ModelConfig.from_dict(fields)
    with pytest.raises(InputError, match="these mtp blocks are of another design"):
        lines_of(config, "mtp.0.prefill.embed.out", 6)
    assert lines_of(config, "head.out", 6).port[0].function == "logits"


def test_a_narrow_model_keeps_what_decides_over_branches() -> None:
    for layer in range(FLASH.n_layers):
        small = narrow(FLASH, layer)
        assert (small.ratio(0), small.is_hash(0)) == (FLASH.ratio(layer), FLASH.is_hash(layer))
        assert (small.ratio(1), small.window_size) == (0, FLASH.window_size)


def test_zero_weights_have_the_dtypes_and_shapes_of_a_checkpoint(mini: Checkpoint) -> None:
    zeros = ZeroWeights(layout(MINI))
    for name in mini.specs:
        found, stored = zeros.read(name), mini.read(name)
        assert (found.dtype, found.shape) == (stored.dtype, stored.shape), name
        assert zeros.nbytes(name) == mini.nbytes(name), name
    rows = torch.tensor([1, 0])
    assert zeros.gather_rows("embed.weight", rows).shape == (2, MINI.dim)
    assert zeros.read_rows("head.weight", 2, 5).shape == (3, MINI.dim)


def test_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = cli("list", "keys", "layers.1.attn.wq_a.out", "--where", "--ckpt", CKPT)
    port, vt = shown.out.splitlines()
    assert re.fullmatch(
        r'port  src/v4tool/model/attention.py:\d+ +queries +scope.linear\("wq_a", x_TD\)', port
    )
    assert re.fullmatch(r"vt    src/v4tool/verify/model.vt:\d+ +q_linear +def q_linear\(.*", vt)
    shown = cli("list", "keys", "input_ids", "--where", "--ckpt", CKPT)
    assert shown.out.splitlines()[1].split("  ")[-1].strip() == "no node: token ids are an input"


def test_command_as_json(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert may have its number; elsewhere than in the checkout, files have their full path."""
    monkeypatch.chdir(ROOT / "tests")
    key = "layers.1.ffn.experts.7.w1.out"
    found = json.loads(cli("list", "keys", key, "--where", "--json", "--ckpt", CKPT).out)
    assert found["key"] == "layers.1.ffn.experts.<E>.w1.out"
    assert found["port"]["file"] == str(PORT / "moe.py")
    assert [call["text"].split("(")[0] for call in found["from"]] == ["linear", "expert"]
    assert found["vt"]["function"] == "q_linear"
    found = json.loads(cli("list", "keys", "input_ids", "--where", "--json", "--ckpt", CKPT).out)
    assert found["vt"] is None


def test_one_key_alone(cli: Cli) -> None:
    shown = cli("list", "keys", "layers.1.attn.out", "--ckpt", CKPT)
    assert shown.out.splitlines()[1].split() == [
        "layers.1.attn.out", "F32", "[1,", "6,", "128]", "bf16",
    ]  # fmt: skip


def test_mistakes(cli: Cli) -> None:
    def complaint(*args: object) -> str:
        return one_line(cli("list", "keys", *args, "--where", "--ckpt", CKPT))

    assert "--where: expected one KEY" in complaint()
    assert complaint("layers.1.attn.wqa.out") == (
        "v4tool: layers.1.attn.wqa.out: expected a key of 6 tokens, 0 decode steps (--case, "
        "--length and --decode choose others), found none of that name; the nearest is "
        "layers.1.attn.wq_a.out"
    )
    assert "experts.8" in complaint("layers.1.ffn.experts.8.out")
    assert "found none of that name" in complaint("*")
    assert "decode.0.head.out" in complaint("decode.0.head.out")
    assert "no key matches" in complaint("norm.out", "--layer", "1")


def test_without_columns_in_the_code_whole_lines_are_shown() -> None:
    """`python -X no_debug_ranges` compiles code that knows its lines alone."""
    program = (
        "import sys, torch, v4tool.config\n"
        "sys.dont_write_bytecode, sys.pycache_prefix = True, '/nonexistent'\n"  # compile anew
        "from v4tool.config import ModelConfig\nfrom v4tool.where import lines_of\n"
        f"config = ModelConfig.from_file({str(CKPT / 'config.json')!r})\n"
        "print(lines_of(config, 'layers.0.attn.wq_b.out', 3).port[0].text)"
    )
    ran = subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", "-c", program],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.startswith('q = scope.linear("wq_b", qr).unflatten(')
