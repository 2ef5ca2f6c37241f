"""`model.vt` agrees with the released code's control flow on every golden recording."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import v4tool
from tests.conftest import GOLDEN_MINI, LARGE_FILES, MINI_FILES, GoldenFile, needs_golden
from v4tool.checkpoint.layout import layout
from v4tool.config import ModelConfig
from v4tool.names import is_expert, recording_keys
from v4tool.verify.listing import list_nodes
from v4tool.verify.recording import verify_file
from v4tool.verify.results import VerifyResult, counted

LEN3 = MINI_FILES[0]


@cache
def verify(golden: GoldenFile, **options: object) -> VerifyResult:
    """The result, which never changes; several tests look at the same one."""
    return verify_file(golden.path, golden.ckpt, **options)  # type: ignore[arg-type]


def params(*, complete: bool | None = None) -> list[object]:
    """Golden files as parameters: all of them, or only those (not) complete."""
    named = [("mini", g, ()) for g in MINI_FILES]
    named += [("golden", g, (needs_golden,)) for g in LARGE_FILES]
    return [
        pytest.param(g, id=f"{where}-{g.name}", marks=marks)
        for where, g, marks in named
        if complete is None or g.complete == complete
    ]


def keys_of(golden: GoldenFile) -> set[str]:
    """The recorded keys but the ids, which are inputs."""
    return {key for key, _ in golden.tensors() if not key.endswith("input_ids")}


@pytest.mark.parametrize("golden", params())
def test_isolated(golden: GoldenFile) -> None:
    """Every recorded key is compared and holds the very bits; acc-valued ones the same FP32."""
    result = verify(golden, partial=True) if not golden.complete else verify(golden)
    assert result.passed, result.verdict
    assert {c.key for c in result.comparisons if c.judged} == keys_of(golden)
    statuses = counted(result.nodes)
    assert set(statuses) <= {"equal", "ulp", *(() if golden.complete else ("unrecorded",))}
    evidence = result.evidence()
    assert evidence["keys_compared"] == evidence["keys_recorded"] == len(keys_of(golden))
    assert evidence["bf16_bit_equal"] == evidence["bf16_elements"] > 0
    assert not result.findings


@pytest.mark.parametrize("golden", params(complete=True))
def test_chained(golden: GoldenFile) -> None:
    """The same from the ids alone."""
    result = verify(golden, chained=True)
    assert result.passed, result.verdict
    assert result.coverage.compared == len(keys_of(golden))


@pytest.mark.parametrize("golden", params(complete=True))
def test_mtp_decode_is_covered(golden: GoldenFile) -> None:
    """Every key of the MTP decode, its rebuilt window cache and table among them."""
    result = verify(golden)
    mine = [c.key for c in result.comparisons if c.key.startswith("mtp.0.decode.")]
    recorded = {k for k in keys_of(golden) if k.startswith("mtp.0.decode.")}
    assert set(mine) == recorded
    assert len(mine) == len(recorded)
    experts = {k for k in recorded if "experts." in k and "shared" not in k}
    assert len(recorded - experts) == 39
    assert {"in.kv", "in.topk_idxs"} <= {k.split("sparse_attn.")[-1] for k in mine}


@pytest.mark.parametrize("golden", params(complete=False))
def test_partial_says_what_was_not_judged(golden: GoldenFile) -> None:
    """Without --partial absent keys are findings; with it they are named as not judged."""
    strict = verify(golden)
    assert not strict.passed
    assert not strict.failures, "what is there is right all the same"
    assert {f.key for f in strict.findings} == set(strict.coverage.missing)
    result = verify(golden, partial=True)
    assert set(result.coverage.not_judged) == set(strict.coverage.missing)
    assert not set(result.coverage.not_judged) & keys_of(golden)


def without_time(result: VerifyResult) -> VerifyResult:
    return replace(result, seconds=0.0, jobs=1)


def test_threads_and_processes_change_nothing() -> None:
    """The same result, node by node, with 1, 2 and 4 threads and 1, 2 and 3 processes."""
    alone = without_time(verify(LEN3))
    assert len(alone.nodes) > 800
    for threads, jobs in ((2, 1), (4, 1), (1, 2), (2, 3)):
        again = without_time(verify(LEN3, threads=threads, jobs=jobs))
        assert again == alone, (threads, jobs)


def test_processes_agree_on_a_faulty_recording(tmp_path: Path) -> None:
    """Verdict and failures do not depend on who found them."""
    import torch

    from tests.faults.harness import save

    tensors = dict(LEN3.tensors())
    key = "layers.2.attn.wkv.out"
    tensors[key] = tensors[key] * torch.tensor(2.0)
    path = tmp_path / "x.safetensors"
    save(tensors, path)
    one, two = (verify_file(path, LEN3.ckpt, jobs=jobs) for jobs in (1, 2))
    assert without_time(one) == without_time(two)
    assert two.verdict is not None
    assert two.verdict.operator == "q_linear[attn.wkv]"


def test_one_node_or_one_layer() -> None:
    """--node and --layer report a part and do not judge coverage."""
    result = verify(LEN3, node="sparse_attn", layer=3)
    assert result.passed
    assert result.restricted
    assert [c.key for c in result.comparisons] == [
        f"{step}layers.3.attn.sparse_attn.out" for step in ("", "decode.0.", "decode.1.")
    ]
    layer = verify(LEN3, layer=3)
    mine = {k for k in keys_of(LEN3) if re.match(r"(decode\.\d\.)?layers\.3\.", k)}
    assert {c.key for c in layer.comparisons} == mine
    node = verify(LEN3, node="head")
    assert [c.key for c in node.comparisons] == [
        "head.out",
        "decode.0.head.out",
        "decode.1.head.out",
    ]


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    verify(LEN3, progress=lambda done, total, key: seen.append((done, total)))
    assert seen[-1][0] <= seen[-1][1]
    assert len(seen) >= 3 * 5
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_every_key_has_one_node() -> None:
    """`list nodes` finds for each key the very node that judges it in a run."""
    config = ModelConfig.from_file(GOLDEN_MINI / "ckpt" / "config.json")
    keys = recording_keys(config, 3, 2)
    infos, left = list_nodes(keys=keys, weights=layout(config))
    assert not left
    counted_keys = {info.name: info.keys for info in infos}
    assert sum(counted_keys.values()) == len(keys) - 3, "all but three input_ids"
    result = verify(LEN3)
    run: dict[str, set[str]] = {}
    for node in result.nodes:
        for comparison in node.comparisons:
            generic = re.sub(r"ffn\.experts\.\d+", "ffn.experts.<E>", comparison.key)
            run.setdefault(node.kind, set()).add(generic)
    assert {kind: len(keys) for kind, keys in run.items()} == {
        name: count for name, count in counted_keys.items() if count
    }


@pytest.mark.parametrize(
    ("tokens", "experts", "recorded", "published"),
    [(6, 1051, 5953, 1878), (32, 2669, 12425, 3496), (129, 5055, 22029, 5922)],
)
def test_checks_of_the_real_model(tokens: int, experts: int, recorded: int, published: int) -> None:
    """One check for every key of SPEC 6's totals but the ids, more than were published."""
    config = ModelConfig.from_file(Path(v4tool.__file__).parent / "data" / "flash_config.json")
    keys = recording_keys(config, tokens)
    infos, left = list_nodes(keys=[k for k in keys if not is_expert(k)], weights=layout(config))
    assert not left
    checks = sum(info.keys for info in infos) + 4 * experts
    assert checks == recorded - 1
    assert checks > published + 23
