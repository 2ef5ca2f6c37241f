"""The payload hash of `check --port`: equal for all backends; the cause of a difference."""

import pytest

from tests.quant_operands import FAST
from v4tool import selftest
from v4tool.model import block
from v4tool.selftest import payload_row, tiny_config

FROZEN = "52380a89d3e4dd52021c94ccb37cab468acf505425ea6c7736c5a5ca9b82ad0b"


def test_what_is_recorded_has_all_kinds_of_layers() -> None:
    config = tiny_config()
    assert config.compress_ratios == (0, 4, 128, 4, 128, 0)
    assert [config.is_hash(layer) for layer in range(config.n_layers)] == [True, True] + [False] * 3
    tokens = len(selftest.CASE.input_ids)
    assert tokens > config.window_size
    assert tokens // 4 > config.index_topk, "the choice of blocks is a real one"
    assert len(selftest.CASE.decode_ids) == selftest.CASE.decode == 2


@pytest.mark.parametrize("backend", ["readable", *FAST])
def test_every_backend_gives_the_hash(backend: str) -> None:
    row = payload_row(2, backend)
    assert (row.name, row.status) == ("payload hash", "ok")
    assert row.detail == f"found {FROZEN}, expected {FROZEN}"


def test_a_wrong_port_fails_and_both_hashes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    original = block.hc_post
    monkeypatch.setattr(block, "hc_post", lambda *a, **k: original(*a, **k).neg())
    row = payload_row(1, "auto")
    assert row.status == "failed"
    assert row.detail.endswith(f", expected {FROZEN}: the recording differs")
    assert len(row.detail.split(",")[0]) == len("found ") + 64


def test_another_random_checkpoint_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selftest.SIZES, "q_lora_rank", 256)
    row = payload_row(1, "auto")
    assert row.status == "failed"
    assert row.detail.endswith(": the random checkpoint it is made from differs")
