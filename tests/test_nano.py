"""The default profile end to end: depth and vocabulary of the release, keys, layout."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from v4tool import dumping
from v4tool.checkpoint.directory import open_checkpoint
from v4tool.checkpoint.shards import Checkpoint
from v4tool.names import EXPERT_OUTPUTS, Keys, generic, is_expert, layer_of, pass_of, recording_keys
from v4tool.profiles import Profile, load
from v4tool.record.reader import Recording

DTYPES = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
LENGTHS = {"baseline6": 6, "prompt32": 32, "prompt129": 129}
PAYLOADS = {
    "prompt3": "c6b756c7635b9ac9bec6dfea3c743cca3e2ece5db29be0f43b097c2dfc58139b",
    "prompt4": "e382cb7cbcdf1a190aa921c4d017f682da179a80cee23eb5610c803ea88c81ca",
    "baseline6": "e99d86d42cedb266b09e17ea28ed2415ce4efe861de0ee150a662b25a244e618",
    "prompt32": "3c07de91cbdccd5f35a0f490a65a0c02371a8758680a376063a838106aa045af",
    "prompt127": "8a2d608db3e0b38e82d8a016a536c1e84239f82aebda03cc9bc4cb3deec05f6d",
    "prompt128": "7997b45bc7d3e17ad72a83ab46aebac888492790adf0f4c495c1a780085b8b8f",
    "prompt129": "89a0508d7112a21ce4ee1c6367d680248ce8457a3dc298d394f7c4ace3ec51fd",
}
"""SHA-256 of the payloads, seed 0. The machines on which they were measured: README, Limits. They
change only with the model's description or the generator of random checkpoints, on purpose."""


@pytest.fixture(scope="module")
def nano() -> Profile:
    return load("nano", options={"threads": 2}, environ={})


@pytest.fixture(scope="module")
def checkpoint(nano: Profile) -> Iterator[Checkpoint]:
    with open_checkpoint(nano, remark=lambda _: None) as opened:
        yield opened


@pytest.fixture(scope="module")
def results(
    nano: Profile, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dumping.DumpResult]:
    """All cases but the longest, dumped in one pass; the files of LENGTHS are kept."""
    directory: Path = tmp_path_factory.mktemp("nano")
    cases = [nano.case(case_id) for case_id in PAYLOADS]
    paths = dumping.output_paths(cases, directory, directory, force=False)
    results = dumping.dump_cases(nano, checkpoint, cases, paths)
    for result in results:
        if result.case.id not in LENGTHS:
            result.path.unlink()
    return {result.case.id: result for result in results}


@pytest.fixture(scope="module")
def recordings(results: dict[str, dumping.DumpResult]) -> dict[str, Recording]:
    """The three cases of SPEC section 7."""
    return {case: Recording.open(results[case].path) for case in LENGTHS}


def test_payload_hashes(results: dict[str, dumping.DumpResult]) -> None:
    """The same bits on every machine: what a dump of each case has always given."""
    assert {case: result.payload_sha256 for case, result in results.items()} == PAYLOADS


def base_keys_by_place(recording: Recording) -> dict[str, int]:
    """Base keys of every main layer and MTP pass of a recording."""
    counts: dict[str, int] = {}
    for key in recording:
        place = pass_of(key) or (f"layers.{layer_of(key)}" if layer_of(key) is not None else "")
        counts[place] = counts.get(place, 0) + (not is_expert(key))
    return counts


@pytest.mark.parametrize(
    ("case", "total", "ratio_128"), [("baseline6", 1749, 33), ("prompt32", 1749, 33),
                                     ("prompt129", 1809, 36)]
)  # fmt: skip
def test_key_counts(
    checkpoint: Checkpoint, recordings: dict[str, Recording], case: str, total: int, ratio_128: int
) -> None:
    """SPEC 6: base keys in all, by type of layer and of both MTP passes."""
    counts = base_keys_by_place(recordings[case])
    by_ratio = {0: 31, 4: 45, 128: ratio_128}
    expected = {f"layers.{n}": by_ratio[checkpoint.config.ratio(n)] for n in range(43)}
    assert counts == {**expected, "": 4, "mtp.0.prefill.": 39, "mtp.0.decode.": 39}
    assert sum(counts.values()) == total


@pytest.mark.parametrize("case", LENGTHS)
def test_what_is_listed_is_what_is_written(
    checkpoint: Checkpoint, recordings: dict[str, Recording], case: str
) -> None:
    """Names, dtypes and shapes; an expert's rows depend on the routing."""
    listed: Keys = recording_keys(checkpoint.config, LENGTHS[case])
    recording = recordings[case]
    assert {generic(key) for key in recording} == listed.keys()
    for key in recording:
        spec, (dtype, shape) = listed[generic(key)], recording.spec(key)
        assert dtype == spec.dtype, key
        assert all(n in (None, m) for n, m in zip(spec.shape, shape, strict=True)), key


def test_experts_come_in_fours_and_are_those_that_the_gate_names(
    checkpoint: Checkpoint, recordings: dict[str, Recording]
) -> None:
    recording = recordings["prompt32"]
    keys = set(recording.keys())
    for layer in range(checkpoint.config.n_layers):
        chosen = recording.torch(f"layers.{layer}.ffn.gate.out.1")
        for expert in range(checkpoint.config.n_routed_experts):
            rows = int((chosen == expert).sum())
            names = [f"layers.{layer}.ffn.experts.{expert}.{o}" for o in EXPERT_OUTPUTS]
            found = [recording.spec(name)[1][0] for name in names if name in keys]
            assert found == ([rows] * 4 if rows else [])


def test_values_are_finite(recordings: dict[str, Recording]) -> None:
    recording = recordings["prompt129"]
    bad = [k for k in recording if not torch.isfinite(recording.torch(k)).all()]
    assert bad == []


def test_long_prompt_truncates_top_k(nano: Profile, checkpoint: Checkpoint) -> None:
    """525 complete blocks of 4 are more than the 512 that the indexer may choose (SPEC 1)."""
    tokens = len(nano.case("prompt2100").input_ids)
    assert (tokens, tokens // 4, checkpoint.config.index_topk) == (2100, 525, 512)
    keys = recording_keys(checkpoint.config, tokens)
    assert keys["layers.2.attn.indexer.out"].shape == (1, 2100, 512)


@pytest.mark.slow
def test_long_prompt(nano: Profile, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """prompt2100 whole: what is listed is written, and rows past 2051 really lose candidates."""
    case = nano.case("prompt2100")
    paths = dumping.output_paths([case], tmp_path, tmp_path, force=False)
    dumping.dump_cases(nano, checkpoint, [case], paths)
    recording = Recording.open(paths[0])
    listed = recording_keys(checkpoint.config, 2100)
    assert {generic(key) for key in recording} == listed.keys()
    for key in recording:
        spec, (dtype, shape) = listed[generic(key)], recording.spec(key)
        assert dtype == spec.dtype, key
        assert all(n in (None, m) for n, m in zip(spec.shape, shape, strict=True)), key
    chosen = recording.torch("layers.2.attn.indexer.out")[0]
    assert (chosen[2046] >= 0).sum() == 511
    assert (chosen[2047] >= 0).sum() == 512
    assert (chosen[2099] >= 0).sum() == 512
    assert len(set(chosen[2099].tolist())) == 512
