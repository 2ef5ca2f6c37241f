"""`check` has no findings on the golden recordings, and reports the rules it applied."""

import pytest

from tests.conftest import GOLDEN_MINI, GoldenFile, golden_params
from v4tool.check.explain import covers, explain
from v4tool.check.recording import CheckResult, check_recording
from v4tool.check.rules import RULES
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.errors import RecordingError
from v4tool.names import generic
from v4tool.record.scan import read_header

CONFIG = ModelConfig.from_file(GOLDEN_MINI / "ckpt")
LONGEST = GOLDEN_MINI / "len33.safetensors"


@pytest.mark.parametrize("golden", golden_params())
def test_nothing_is_found(golden: GoldenFile) -> None:
    config = ModelConfig.from_file(golden.ckpt)
    result = check_recording(golden.path, config=config, partial=not golden.complete)
    assert result.findings == []
    assert result.ok


@pytest.mark.parametrize("golden", golden_params())
def test_nothing_is_found_with_the_checkpoint(golden: GoldenFile) -> None:
    with Checkpoint.open(golden.ckpt) as checkpoint:
        result = check_recording(
            golden.path,
            config=checkpoint.config,
            checkpoint=checkpoint,
            deep=True,
            partial=not golden.complete,
        )
    assert result.findings == []
    if golden.complete:
        ids = 1 + len(golden.metadata("decode_ids"))
        assert result.covered == result.keys - ids, "only the ids themselves are not covered"


@pytest.fixture(scope="module")
def longest() -> CheckResult:
    """The most complete small recording: 33 tokens, three decode steps."""
    return check_recording(LONGEST, config=CONFIG)


def test_every_identity_is_applied(longest: CheckResult) -> None:
    applied = {row.rule.id for row in longest.rules if row.values}
    # ratio 128 has no complete block in 36 tokens, so its table has no columns to compare
    expected = {r.id for r in RULES.values() if r.family in ("identity", "values")}
    assert expected - applied == {"all blocks"}


def test_explain_claims_nothing_that_the_check_does_not_do(longest: CheckResult) -> None:
    """The keys that `explain` counts from names alone are covered when a file is checked."""
    entries = read_header(LONGEST).entries
    for row in longest.rules:
        if row.rule.family == "identity":
            claimed = {key for key in entries if covers(row.rule, generic(key), CONFIG)}
            assert claimed <= row.covered, row.rule.id
            assert claimed or row.rule.id == "all blocks"


def test_explain_lists_what_only_weights_cover() -> None:
    explanation = explain(CONFIG, 33, 3)
    keys = explanation.only_weights.keys()
    assert {"attn.wo_b.in", "ffn.experts.<E>.w1.out", "ffn.shared_experts.w3.out"} <= keys
    assert not {"attn.out", "ffn.out", "layers.<n>.out", "attn.wq_b.out"} & keys
    counts = {row.id: row.keys for row in explanation.identities}
    # 5 layers and MTP, in the prefill and the MTP decode, and 5 layers in each of 3 decode steps
    assert counts["q"] == 2 * (5 + 2 + 3 * 5)
    assert counts["hash routing"] == 2 * 4
    assert counts["embedding"] == 1 + 3 + 2


def test_a_missing_recording_is_one_line() -> None:
    with pytest.raises(RecordingError, match=r"nothing\.safetensors: cannot be read: No such file"):
        check_recording(GOLDEN_MINI / "nothing.safetensors", config=CONFIG)


def test_reads_every_byte_once(longest: CheckResult) -> None:
    header = 8 + int.from_bytes(LONGEST.read_bytes()[:8], "little")
    assert longest.bytes_read == LONGEST.stat().st_size - header
