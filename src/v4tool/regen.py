"""Records the cases of a manifest again from their frozen ids, and replaces files that pass.

The new recordings of all cases come from one pass over the weights into a temporary directory
beside the old ones. Each one is checked with the checkpoint, verified, and then replaces the old
one. If the process is killed, the recordings not yet replaced are unchanged and the manifest is
consistent. Left out: the verification (passed by the caller), and new prompts (`dumping`).
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
"""Cases that are recorded again only when they are named."""
WORKPLACE = ".regen"


@dataclass(frozen=True)
class Verified:
    """Result of a verification: whether it passed, figures for the manifest, findings."""

    passed: bool
    evidence: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)


Verify = Callable[[Path], Verified]
"""Verifies the recording in a file."""


def verifier(checkpoint: Path, *, jobs: int = 1, threads: int = 1) -> Verify:
    """A `Verify` that uses `model.vt` and the checkpoint in a directory."""

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
    """One case of the manifest. left_alone: why it is skipped, None if it is not."""

    entry: Entry
    left_alone: str | None = None


@dataclass(frozen=True)
class RegenResult:
    """Result of one case that was recorded again.

    payload_sha256: of the new recording, expected_sha256: in the manifest; replaced: whether the
    new file replaced the old one, which it does if check and verification passed.
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
        """Whether the new payload equals the one in the manifest."""
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
    """The plan for every case of the manifest, or for those named. InputError for an unknown one.

    Incomplete recordings are skipped: the manifest does not say which keys they lack.
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
        return Planned(entry, "recorded again only when it is named")
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
    """Record the planned cases again in one pass over the weights; replace the files that pass.

    verify: called with each new recording, in a temporary directory. OutputError if files cannot be
    written or another regen is running in the directory.
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
    """Lock of a directory against a second regen; OutputError if it is held."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = FileLock(str(directory / f"{WORKPLACE}.lock"), timeout=0)

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise OutputError(f"{self._directory}: another regen is running here") from None
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
    """Record all cases from their frozen ids into the temporary directory `place`."""
    cases = [frozen_case(entry) for entry in entries]
    paths = [place / entry.file for entry in entries]
    return dump_cases(profile, checkpoint, cases, paths, force=True, progress=progress)


def frozen_case(entry: Entry) -> Case:
    """A manifest entry as a case: its frozen ids are used, its text is not encoded again."""
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
