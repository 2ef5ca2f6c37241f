"""Regenerates recordings from the frozen ids of a manifest, and replaces those that pass.

The new recordings of all cases come from one pass over the weights into a temporary directory
beside the old ones. Each is checked, with the checkpoint, and verified; only then does it replace
the old one. If regen is killed, every recording that it has not replaced is as it was, and the
manifest fits. Left out: what verifying means (the caller passes it), and new prompts (`dumping`).
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from v4tool.check.recording import CheckResult, check_recording
from v4tool.checkpoint.shards import Checkpoint
from v4tool.dumping import DumpResult, NoProgress, Progress, dump_cases, run_of
from v4tool.errors import Finding, InputError, OutputError
from v4tool.profiles import Case, Profile
from v4tool.record.manifest import Entry, Manifest, replace_recording
from v4tool.record.statistics import describe
from v4tool.verify.recording import verify_file

LEFT_ALONE = ("baseline6",)
"""Cases that are made anew only when they are named."""
WORKPLACE = ".regen"


@dataclass(frozen=True)
class Verified:
    """What a verification says: whether it passed, evidence for the manifest, what was wrong."""

    passed: bool
    evidence: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)


Verify = Callable[[Path], Verified]
"""Judges the recording in a file."""


def verifier(checkpoint: Path, *, jobs: int = 1, threads: int = 1) -> Verify:
    """The verification against `model.vt` and the checkpoint in that directory."""

    def verify(recording: Path) -> Verified:
        result = verify_file(recording, checkpoint, jobs=jobs, threads=threads)
        failures = [
            Finding(c.key, "verify", f"what node {node.label} computes", c.status)
            for node in result.failures
            for c in node.comparisons
            if c.fails
        ]
        return Verified(result.passed, result.evidence(), [*result.findings, *failures])

    return verify


@dataclass(frozen=True)
class Planned:
    """One case of the manifest: its entry, and why it is left alone, if it is."""

    entry: Entry
    left_alone: str | None = None


@dataclass(frozen=True)
class RegenResult:
    """One case that was made anew.

    same_payload: whether the payload is the one that the manifest had; replaced: whether it
    took the old one's place, which it does when nothing was found wrong.
    """

    case: str
    path: Path
    payload_sha256: str
    expected_sha256: str
    replaced: bool
    check: CheckResult
    verified: Verified

    @property
    def same_payload(self) -> bool:
        """Whether the same bits came out again."""
        return self.payload_sha256 == self.expected_sha256

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "case": self.case,
            "file": str(self.path),
            "payload_sha256": self.payload_sha256,
            "expected_sha256": self.expected_sha256,
            "same_payload": self.same_payload,
            "replaced": self.replaced,
            "findings": [f.as_dict() for f in (*self.check.findings, *self.verified.findings)],
            "evidence": self.verified.evidence,
        }


def plan(directory: Path, case_ids: Sequence[str] | None) -> list[Planned]:
    """What `regen` would do: every case of the manifest, or those named. InputError for an
    unknown one.

    Recordings of which something was left out are not made anew: their manifest does not say
    what.
    """
    manifest = Manifest.load(directory)
    if not manifest.cases:
        raise InputError(
            f"{directory}: no prompts.json with cases; make references with `v4tool dump`"
        )
    unknown = [case for case in case_ids or () if case not in manifest.cases]
    if unknown:
        known = ", ".join(manifest.cases)
        raise InputError(
            f"{directory}: no case {', '.join(unknown)} in its manifest; it has {known}"
        )
    chosen = manifest.cases if case_ids is None else dict.fromkeys(case_ids)
    return [_planned(manifest.cases[case], named=case_ids is not None) for case in chosen]


def _planned(entry: Entry, *, named: bool) -> Planned:
    if entry.id in LEFT_ALONE and not named:
        return Planned(entry, "made anew only when it is named")
    if not entry.complete:
        return Planned(entry, "recorded only in part; dump it again")
    return Planned(entry)


def regenerate(
    profile: Profile,
    checkpoint: Checkpoint,
    planned: Sequence[Planned],
    directory: Path,
    *,
    verify: Verify,
    progress: Progress = NoProgress(),  # noqa: B008  (has no state)
) -> list[RegenResult]:
    """Make the planned cases' references anew in one pass over the weights, and replace those
    that pass.

    verify: judges a recording beside its final place. OutputError where files cannot be written
    or another regen is at work in the directory.
    """
    checkpoint.config.architecture.require("regen")
    entries = [p.entry for p in planned if p.left_alone is None]
    if not entries:
        return []
    place = directory / WORKPLACE
    with _alone(directory):
        shutil.rmtree(place, ignore_errors=True)
        try:
            results = _dump(profile, checkpoint, entries, place, progress)
            return [
                _judge_and_replace(profile, checkpoint, entry, result, directory, verify)
                for entry, result in zip(entries, results, strict=True)
            ]
        finally:
            shutil.rmtree(place, ignore_errors=True)


class _alone:
    """The lock that keeps two regens out of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = FileLock(str(directory / f"{WORKPLACE}.lock"), timeout=0)

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise OutputError(f"{self._directory}: another regen is at work here") from None
        except OSError as error:
            raise OutputError(f"{self._directory}: cannot be written: {error.strerror}") from None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _dump(
    profile: Profile,
    checkpoint: Checkpoint,
    entries: Sequence[Entry],
    place: Path,
    progress: Progress,
) -> list[DumpResult]:
    """All cases into the workplace, from the frozen ids alone."""
    cases = [frozen_case(entry) for entry in entries]
    paths = [place / entry.file for entry in entries]
    return dump_cases(profile, checkpoint, cases, paths, force=True, progress=progress)


def frozen_case(entry: Entry) -> Case:
    """The case as the manifest has it; its text goes along for people and is never encoded."""
    return Case(
        id=entry.id,
        subject=entry.subject,
        text=entry.text,
        input_ids=entry.input_ids,
        decode=len(entry.decode_ids),
        decode_ids=entry.decode_ids,
        file=entry.file,
    )


def _judge_and_replace(
    profile: Profile,
    checkpoint: Checkpoint,
    entry: Entry,
    result: DumpResult,
    directory: Path,
    verify: Verify,
) -> RegenResult:
    fresh = describe(result.path, checkpoint.config, run_of(profile, result))
    check = check_recording(
        result.path,
        config=checkpoint.config,
        ids=entry.input_ids,
        decode_ids=entry.decode_ids,
        case=entry.id,
        manifest=fresh,
        checkpoint=checkpoint,
    )
    verified = verify(result.path) if check.ok else Verified(False, {})
    passed = check.ok and verified.passed
    if passed:
        fresh = fresh.model_copy(update={"verification": verified.evidence})
        replace_recording(directory, result.path, fresh)
    return RegenResult(
        entry.id, directory / entry.file, fresh.payload_sha256, entry.payload_sha256,
        passed, check, verified,
    )  # fmt: skip
