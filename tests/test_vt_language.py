"""The static rules of `.vt` files: a violation is one line with file, node and line."""

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import MINI_FILES
from v4tool.errors import VtError
from v4tool.verify.language import (
    ATTRIBUTES,
    BUILTINS,
    DTYPES,
    METHODS,
    TORCH_FUNCTIONS,
    read_description,
)
from v4tool.verify.recording import verify_file
from v4tool.verify.tensors import OWN_DESCRIPTION

GOLDEN = MINI_FILES[0]
HEAD = """import torch
import vt_lang as vt

def helper(x):
    return x.repeat(1, 2)
"""
NODE = """
@vt.NodeChecker({weights}, {outputs}, {templates})
def node({parameters}):
    {body}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.vt"
    path.write_text(text)
    return path


def node(
    body: str = "return x",
    weights: str = "{}",
    outputs: str = "[None]",
    templates: str = "[]",
    parameters: str = "x",
) -> str:
    return HEAD + NODE.format(
        weights=weights, outputs=outputs, templates=templates, parameters=parameters, body=body
    )


ALLOWED = [
    "return torch.matmul(x, x.T) + x.sum(dim=-1).unsqueeze(0)",
    "return helper(x)",
    "return torch.where(x > 0, x, -x).to(torch.bfloat16)",
    "return torch.cat([y for y in (x, x)], dim=0)",
    "return x.reshape(x.shape[0], -1)[:, 0].float().clamp(min=0)",
    "return torch.stack(list(reversed([x, x])))",
    "return vt.load_activation('input_ids')",
    "return max(x.numel(), int(x.size(0)))",
    "return torch.nn.functional.silu(x)",
]


@pytest.mark.parametrize("body", ALLOWED)
def test_allowed(tmp_path: Path, body: str) -> None:
    assert list(read_description(written(tmp_path, node(body))).nodes) == ["node"]


FORBIDDEN = [
    ("return torch.fft.fft(x)", "method fft"),
    ("return torch.cos(x)", "torch.cos"),
    ("return x.repeat(1, 2)", "method repeat"),
    ("return x.data", "attribute data"),
    ("return torch.pi", "torch.pi"),
    ("return torch.float8_e4m3fn", "torch.float8_e4m3fn"),
    ("return open('x')", "builtin open"),
    ("return unknown(x)", "unknown is bound nowhere"),
    ("return vt.register_safetensors('a', 'b')", "vt.register_safetensors"),
    ("import os; return x", "statement import"),
    ("global y; return x", "statement global"),
    ("with x: return x", "statement with"),
    ("return (lambda: x).__globals__", "attribute __globals__"),
]


@pytest.mark.parametrize(("body", "words"), FORBIDDEN)
def test_forbidden(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(VtError, match=re.escape(words)) as caught:
        read_description(written(tmp_path, node(body)))
    assert str(caught.value).startswith("mine.vt:9: node node: ")
    assert "\n" not in str(caught.value)


def test_an_import_is_for_helpers(tmp_path: Path) -> None:
    text = "import math\n" + node("return math.sqrt(2)")
    with pytest.raises(VtError, match="imported math is for helpers"):
        read_description(written(tmp_path, text))


DECLARED = [
    (node(outputs="['{layer}.out']"), "placeholder {layer} is not a template"),
    (node(templates="['layer']", parameters="x, layer"), "template layer is used in no key"),
    (
        node(outputs="['{layer}.out']", templates="['layer']"),
        "template layer is no parameter",
    ),
    (node(weights="{'x': 'w'}"), "weight x has a name that the file binds itself"),
    (node(weights="{'helper': 'w'}"), "weight helper has a name that the file binds itself"),
    (node(weights="{'max': 'w'}"), "weight max has the name of a builtin"),
    (node(weights="{'w': 3}"), "expected {local name: checkpoint key}"),
    (node(outputs="[helper]"), "must be literals"),
    (HEAD + "@vt.NodeChecker({}, [])\ndef node(x):\n    return x\n", "found weights, outputs"),
    (HEAD + "@vt.NodeChecker\ndef node(x):\n    return x\n", "expected weights, outputs"),
    (HEAD, "no function is decorated"),
    (HEAD + "def node(:\n", "not Python"),
    (
        node("return node(x, 0)", outputs="['{layer}']", templates="['layer']",
             parameters="x, layer"),
        "calls node without template layer as a keyword",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), DECLARED)
def test_declarations(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(VtError, match=re.escape(words)) as caught:
        read_description(written(tmp_path, text))
    assert str(caught.value).startswith("mine.vt:")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VtError, match=r"nothing\.vt: No such file"):
        read_description(tmp_path / "nothing.vt")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.vt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(VtError, match=r"mine\.vt: not UTF-8 text"):
        read_description(path)


# ------------------------------------------------------------------ rules seen only when it runs

LLM = '\n@vt.NodeChecker({}, [], [])\ndef llm():\n    node(vt.load_activation("input_ids"))\n'


def run(tmp_path: Path, text: str) -> None:
    verify_file(GOLDEN.path, GOLDEN.ckpt, vt_file=written(tmp_path, text))


RUN = [
    (node(weights="{'w': 'no.such.weight'}"), "node node: weight no.such.weight is not in the"),
    (node(outputs="['no.such.out']"), "node node: output no.such.out is in no recording"),
    (node("return x, x"), "gives 2 values, declares 1"),
    (node("return [x]", outputs="['embed.out']"), "gives list for embed.out, not a tensor"),
    (node("return vt.load_weight('no.such')"), "weight no.such is not in the checkpoint"),
    (node() + "\n1 / 0\n", "fails when it is loaded: ZeroDivisionError"),
    (node() + "\nreturn 1\n", "fails when it is loaded: SyntaxError: 'return' outside function"),
]


@pytest.mark.parametrize(("text", "words"), RUN)
def test_rules_at_run(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(VtError, match=re.escape(words)) as caught:
        run(tmp_path, text + LLM)
    assert str(caught.value).startswith("mine.vt:")
    assert "\n" not in str(caught.value)


def test_without_llm(tmp_path: Path) -> None:
    with pytest.raises(VtError, match="no node llm"):
        run(tmp_path, node())


def test_another_description(tmp_path: Path) -> None:
    """A small description of the embedding alone: judged by tolerance, the rest is not covered."""
    text = node(
        "return table.index_select(0, x.reshape(-1)).reshape(1, -1, 128)",
        weights="{'table': 'embed.weight'}",
        outputs="['embed.out']",
    )
    result = verify_file(GOLDEN.path, GOLDEN.ckpt, vt_file=written(tmp_path, text + LLM))
    assert not result.exact
    assert result.description == "mine.vt"
    assert [(c.key, c.status) for c in result.comparisons] == [("embed.out", "equal")]
    assert result.coverage.compared == 1
    assert len(result.coverage.uncovered) == result.coverage.recorded - 1
    assert not result.passed


def test_a_description_does_not_change_output_or_environment(tmp_path: Path) -> None:
    """Environment, vt_lang and thread count are as before, whatever the file did."""
    import os
    import sys

    import torch

    text = node() + LLM + "\ntorch.set_num_threads(3)\n"
    before = dict(os.environ)
    run(tmp_path, text)
    assert dict(os.environ) == before
    assert "vt_lang" not in sys.modules
    assert torch.get_num_threads() == 1


# ------------------------------------------------------------------ the shipped description


def test_the_model_keeps_the_rules() -> None:
    nodes = read_description(OWN_DESCRIPTION).nodes
    assert 27 <= len(nodes) <= 45
    assert {"llm", "mtp_decode", "llm_decode", "hc_post", "sparse_attn"} <= set(nodes)
    assert nodes["llm"].outputs == ()
    assert all(spec.doc for spec in nodes.values())


def test_model_vt_imports_nothing_of_v4tool() -> None:
    """No import but the standard library, torch and vt_lang."""
    tree = ast.parse(OWN_DESCRIPTION.read_text())
    imported = {
        alias.name.split(".")[0]
        for element in ast.walk(tree)
        if isinstance(element, ast.Import)
        for alias in element.names
    } | {e.module for e in ast.walk(tree) if isinstance(e, ast.ImportFrom)}
    assert imported == {"functools", "json", "math", "os", "pathlib", "torch", "vt_lang"}


def test_the_language_is_the_published_subset() -> None:
    """Sizes of the operator lists, and a few that are in none of them."""
    sizes = [len(s) for s in (TORCH_FUNCTIONS, METHODS, ATTRIBUTES, DTYPES, BUILTINS)]
    assert sizes == [48, 60, 8, 10, 17]
    assert not {"cos", "repeat", "topk", "einsum", "sort", "scatter", "relu"} & METHODS
