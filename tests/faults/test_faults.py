"""Each injected fault is found and named, and no earlier node is reported."""

from pathlib import Path

import pytest

from tests.conftest import needs_golden
from tests.faults import attention, compressor, formats, heads, hyper, moe, rotation
from tests.faults.harness import (
    Fault,
    execution_order,
    first_of,
    record,
    verify,
    without_expert,
)

MODULES = (hyper, rotation, attention, compressor, moe, formats, heads)
FAULTS = [fault for module in MODULES for fault in module.FAULTS]


def params() -> list[object]:
    return [pytest.param(f, id=f.name, marks=[needs_golden] if f.larger else []) for f in FAULTS]


@pytest.mark.parametrize("fault", params())
def test_fault(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recording.safetensors"
    with monkeypatch.context() as patch:
        fault.inject(patch)
        found = record(fault, path)
    if fault.needs is not None:
        assert fault.needs(found), "the prompt has no value that this fault changes"
    result = verify(fault, path)
    verdict = result.verdict
    assert verdict is not None, "the fault was not found"
    assert not result.passed
    assert (without_expert(verdict.operator), without_expert(verdict.key)) == (
        fault.operator,
        fault.key,
    ), verdict.sentence()
    assert verdict.block == fault.block
    assert verdict.suspects == fault.suspects
    assert fault.status in (None, verdict.status)
    wrong = [c.key for c in result.comparisons if c.fails]
    assert first_of(wrong, execution_order(fault)) == fault.key, "something upstream is accused"


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
