"""Compares a candidate, operator by operator: arithmetic, residues, verdict."""

from v4tool.checkpoint.shards import Checkpoint
from v4tool.diff.matching import Candidate
from v4tool.diff.results import DiffResult
from v4tool.diff.running import DiffJob, run
from v4tool.diff.search import find_arithmetic
from v4tool.diff.verdict import find_verdict, judged, operator_rows
from v4tool.verify.tensors import decode_steps


def diff_candidate(
    candidate: Candidate,
    checkpoint: Checkpoint,
    *,
    name: str = "",
    map_name: str = "",
) -> DiffResult:
    """Judge a candidate's tensors, under our keys, against the operators of `model.vt`.

    candidate: float or integer tensors by key; shapes may differ from ours where the number of
    elements is the same. Raises VtError where `model.vt` cannot be loaded.
    """
    job = DiffJob(candidate, checkpoint)
    preset, arithmetic = find_arithmetic(job)
    final = run(job, arithmetic, trace=True)
    residues = judged(final.residues)
    reached = {residue.key for residue in residues}
    ids = {key for key in candidate.specs if key.endswith("input_ids")}
    return DiffResult(
        candidate=name,
        map=map_name,
        tokens=int(candidate.specs["input_ids"][1][-1]),
        decode=decode_steps(candidate.specs),
        arithmetic=preset,
        operators=operator_rows(arithmetic, residues, final.nodes),
        residues=residues,
        verdict=find_verdict(job, arithmetic, residues, final.nodes),
        unmatched=tuple(candidate.unmatched),
        unjudged=tuple(sorted(set(candidate.specs) - reached - ids)),
    )
