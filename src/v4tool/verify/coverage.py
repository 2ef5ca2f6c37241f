"""Coverage of a recording by a run: counts of compared keys, findings for uncovered and missing."""

from collections.abc import Iterable

from v4tool.checkpoint.shards import Checkpoint
from v4tool.errors import Finding
from v4tool.verify.results import Coverage, NodeResult
from v4tool.verify.tensors import RecordedTensors, is_input


def coverage_of(keys: Iterable[str], nodes: Iterable[NodeResult]) -> Coverage:
    """Match the recorded keys with the comparisons of a run; token ids are inputs, not counted."""
    recorded = {key for key in keys if not is_input(key)}
    compared, missing, absent = set[str](), set[str](), set[str]()
    for node in nodes:
        for comparison in node.comparisons:
            if comparison.judged:
                compared.add(comparison.key)
            elif comparison.status == "missing":
                missing.add(comparison.key)
            else:
                absent.add(comparison.key)
    return Coverage(
        recorded=len(recorded),
        compared=len(recorded & compared),
        uncovered=tuple(sorted(recorded - compared - absent)),
        missing=tuple(sorted(missing)),
        not_judged=tuple(sorted(absent - compared)),
    )


def coverage_findings(coverage: Coverage) -> list[Finding]:
    """Findings for recorded keys that no node outputs, and for outputs that are not recorded."""
    uncovered = [
        Finding(key, "every recorded key is the output of a node", "a node", "none")
        for key in coverage.uncovered
    ]
    missing = [
        Finding(key, "every output of a node is recorded", "the key (or --partial)", "nothing")
        for key in coverage.missing
    ]
    return uncovered + missing


def checkpoint_findings(recording: RecordedTensors, checkpoint: Checkpoint) -> list[Finding]:
    """A finding if the recording's metadata name another checkpoint's fingerprint."""
    recorded = recording.metadata.get("checkpoint_fingerprint")
    if recorded is None or recorded == checkpoint.fingerprint:
        return []
    rule = "the recording is of this checkpoint"
    return [Finding("checkpoint_fingerprint", rule, checkpoint.fingerprint, recorded)]


def no_ids(recording: RecordedTensors) -> Finding:
    """The finding for a recording without `input_ids`, or with a shape other than [1, tokens]."""
    found = "none"
    if "input_ids" in recording:
        found = str(list(recording.specs["input_ids"][1]))
    return Finding("input_ids", "the prompt's ids are needed", "I64 [1, tokens]", found)
