"""`check --anchors`: applies to the release only; compares arg-max and log-probabilities."""

import math

import numpy as np
import pytest

from tests.conftest import GOLDEN_MINI
from v4tool import profiles
from v4tool.check.anchors import check_anchors, judge, log_softmax, run_anchors
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import Numerics
from v4tool.errors import CheckpointError
from v4tool.profiles import Case, Expect


def test_they_do_not_apply_to_another_checkpoint() -> None:
    cases = profiles.load("flash", options={}, environ={}).cases
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        result = check_anchors(checkpoint, cases, Numerics())
    assert result.rows == []
    assert not result.ok
    assert result.does_not_apply is not None
    assert result.does_not_apply.startswith("its configuration is not the release's: dim,")


def test_the_flash_profile_has_the_published_cases() -> None:
    cases = {c.id: c for c in profiles.load("flash", options={}, environ={}).cases if c.expect}
    assert sorted(cases) == [
        "anchor-7x8", "anchor-division", "anchor-france", "anchor-translate"
    ]  # fmt: skip
    assert cases["anchor-division"].input_ids[:4] == (0, 128803, 7805, 418)
    assert cases["anchor-division"].expect == Expect(id=926, margin=8.5, runner_up=11154)


def test_log_softmax_of_known_values() -> None:
    found = log_softmax(np.array([1000.0, 1000.0, 1000.0 + math.log(2)]))
    assert found == pytest.approx([math.log(0.25), math.log(0.25), math.log(0.5)], abs=1e-12)


def logits_with(probability: float) -> np.ndarray:  # type: ignore[type-arg]
    """Three tokens, token 1 with this probability, the rest shared."""
    rest = (1 - probability) / 2
    return np.log(np.array([rest, probability, rest]))


@pytest.mark.parametrize(
    ("expect", "probability", "ok", "reason"),
    [
        (Expect(id=1), 0.4, True, "the arg-max alone"),
        (Expect(id=0), 0.4, False, "another arg-max"),
        (Expect(id=1, logprob=(-0.06, -0.05)), 0.95, True, "within the published range"),
        (Expect(id=1, logprob=(-0.06, -0.05)), 0.59, True, "0.47 nats below it"),
        (Expect(id=1, logprob=(-0.06, -0.05)), 0.56, False, "0.52 nats below it"),
        (Expect(id=1, margin=1.0, runner_up=2), 0.5, True, "a margin of 0.69, half a nat allowed"),
        (Expect(id=1, margin=1.3, runner_up=2), 0.5, False, "0.61 too small"),
        (Expect(id=1, margin=1.3, runner_up=2, within=0.7), 0.5, True, "0.61 allowed"),
    ],
)
def test_judgement(expect: Expect, probability: float, ok: bool, reason: str) -> None:
    row = judge("a", expect, logits_with(probability))
    assert row.ok is ok, reason
    assert row.logprob == pytest.approx(float(logits_with(probability)[expect.id]), abs=1e-12)


def test_all_cases_go_through_in_one_pass() -> None:
    """On the small checkpoint: the logits are those of the golden recording."""
    from safetensors.torch import load_file

    golden = load_file(GOLDEN_MINI / "len6.safetensors")
    ids = tuple(golden["input_ids"].reshape(-1).tolist())
    best = int(golden["head.out"].argmax())
    expected = float(golden["head.out"].double().log_softmax(-1).max())
    cases = [
        Case(id="right", input_ids=ids, expect=Expect(id=best, logprob=(expected, expected))),
        Case(id="wrong", input_ids=ids, expect=Expect(id=(best + 1) % 320)),
        Case(id="none", input_ids=ids),
    ]
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        rows = run_anchors(checkpoint, cases, Numerics())
        with pytest.raises(CheckpointError, match="no case of the profile"):
            run_anchors(checkpoint, cases[2:], Numerics())
    assert [(row.case, row.ok, row.found) for row in rows] == [
        ("right", True, best), ("wrong", False, best)
    ]  # fmt: skip
    # the recorded logits are rounded to FP32
    assert rows[0].logprob == pytest.approx(expected, abs=1e-6)
