"""Manifest `prompts.json` of a directory of recordings: one entry a case; reading and updating it.

An entry holds the prompt, the settings and checkpoint of the run, the hashes and checksums of the
recording, which paths of the model it covers, and the figures of its verification. Updates take a
file lock and replace the file atomically, so that concurrent runs do not lose each other's entries
and a killed run leaves the old file. Left out: making the entry of a recording (`statistics`),
checking one (`check`), and tokenization (ids are stored beside the text).
"""

import base64
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from v4tool.errors import OutputError, RecordingError
from v4tool.record.scan import read_header
from v4tool.untrusted import read_small

MANIFEST = "prompts.json"
LOCK_SECONDS = 60.0
FORMAT = 1

SEMANTICS: Mapping[str, str] = {
    "revision": "2026-06-08",
    "follows": (
        "the release's inference code after its changes of 2026-04-27 (shared experts got the "
        "SwiGLU limit) and 2026-06-08 (in-place act_quant really rounds to FP8)"
    ),
    "model.py": "ce962f1face79d4f633d36436576214057a7e11443c9789935e1deb5c6cd1d71",
    "kernel.py": "59b325083d7103975cba025bd0d60ea343bb82d8fff53088afb7c04bd380c0c2",
    "refuses": "mtp blocks of another design than config.json says (DSpark's without its fields)",
}
"""Revision of the released code that the port follows, and the SHA-256 of two of its files."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Blocks(_Frozen):
    """Complete compressed blocks of one ratio after the prefill, and the tokens left over."""

    complete: int
    trailing: int


class Coverage(_Frozen):
    """Which paths of the model a case reaches.

    blocks: by ratio. window_exceeded: the prompt is longer than the sliding window.
    topk_truncated: the indexer has more blocks than it may choose. clamp_hits: number of values
    beyond the SwiGLU limit, by kind of expert and projection. experts_reached: number of routed
    experts by pass and layer.
    """

    blocks: dict[str, Blocks]
    window_exceeded: bool
    topk_truncated: bool
    clamp_hits: dict[str, int]
    experts_reached: dict[str, int]


class Run(_Frozen):
    """The part of an entry that the run itself knows: prompt, settings, checkpoint.

    complete: no key was left out on request. numerics: plain data (accumulate, product).
    seconds, peak_rss_bytes: duration and peak memory of the run.
    """

    id: str
    subject: str
    text: str | None
    input_ids: tuple[int, ...]
    decode_ids: tuple[int, ...]
    complete: bool
    profile: str
    numerics: dict[str, Any]
    threads: int
    seed: int
    checkpoint_fingerprint: str
    seconds: float
    peak_rss_bytes: int


class Entry(Run):
    """One case: the run and its recording.

    length: tokens of the prompt. payload_sha256, header_sha256: of the payload and of all bytes
    before it; together they cover the same bytes as file_sha256. checksums: base64 of one
    little-endian uint32 a tensor in order of the sorted keys, the sum of its 32-bit words, which
    shows which tensor is damaged. verification: `VerifyResult.evidence()`, None before a `verify`.
    """

    length: int
    file: str
    tensors: int
    payload_bytes: int
    payload_sha256: str
    header_sha256: str
    file_sha256: str
    mtp_decode_start_pos: int | None
    coverage: Coverage
    verification: dict[str, Any] | None = None
    versions: dict[str, str]
    semantics: str = SEMANTICS["revision"]
    checksums: str = Field(repr=False)

    def sums(self) -> list[int]:
        """The checksums as integers, in order of the sorted keys; empty if they are damaged."""
        try:
            raw = base64.b64decode(self.checksums, validate=True)
            return [int(word) for word in np.frombuffer(raw, "<u4")]
        except ValueError:
            return []


class Manifest(_Frozen):
    """All entries of a directory, by case id.

    pending: entries of recordings that are being replaced (see `replace_recording`). If the run is
    killed meanwhile, the recording on disk is described by its entry in `cases` or in `pending`.
    """

    format: int = FORMAT
    semantics: dict[str, str] = Field(default_factory=lambda: dict(SEMANTICS))
    cases: dict[str, Entry] = Field(default_factory=dict)
    pending: dict[str, Entry] = Field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path | str) -> Self:
        """Read a directory's manifest; empty if there is none. RecordingError if it is damaged."""
        path = Path(directory) / MANIFEST
        try:
            return cls.model_validate_json(read_small(path))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise RecordingError(
                f"{path}: {where}: {first['msg']}; {error.error_count()} problems in all"
            ) from None
        except ValueError as error:
            raise RecordingError(f"{path}: cannot be read: {error}") from None

    def entry_of(self, case_id: str, recording: Path | str) -> Entry | None:
        """The entry that describes a recording: the pending one if its header hash is equal."""
        pending = self.pending.get(case_id)
        if pending is not None and read_header(recording).sha256 == pending.header_sha256:
            return pending
        return self.cases.get(case_id)

    @classmethod
    def entry_beside(cls, recording: Path, case_id: str | None = None) -> Entry | None:
        """A recording's entry in the manifest of its directory; by file name if no case is named.

        RecordingError if the manifest is damaged.
        """
        manifest = cls.load(recording.parent)
        named = (id for id, entry in manifest.cases.items() if entry.file == recording.name)
        case_id = case_id if case_id is not None else next(named, None)
        return None if case_id is None else manifest.entry_of(case_id, recording)

    def text(self) -> str:
        """The manifest as JSON with one line a field."""
        parts = [f'"format": {self.format}', f'"semantics": {_fields_of(self.semantics, 2)}']
        parts.append(f'"cases": {_entries(self.cases)}')
        if self.pending:
            parts.append(f'"pending": {_entries(self.pending)}')
        return "{\n " + ",\n ".join(parts) + "\n}\n"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _entries(entries: Mapping[str, Entry]) -> str:
    lines = [
        f"{_text(name)}: {_fields_of(entry.model_dump(mode='json'), 3)}"
        for name, entry in entries.items()
    ]
    return "{\n  " + ",\n  ".join(lines) + "\n }" if lines else "{}"


def _fields_of(values: Mapping[str, Any], depth: int) -> str:
    lines = [f"{' ' * depth}{_text(name)}: {_text(value)}" for name, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * (depth - 1) + "}"


def lock(directory: Path) -> FileLock:
    """The file lock of a directory's manifest."""
    return FileLock(str(directory / f".{MANIFEST}.lock"), timeout=LOCK_SECONDS)


def change(directory: Path | str, edit: Callable[[Manifest], Manifest]) -> Manifest:
    """Replace a directory's manifest by `edit(manifest)`, atomically and under the lock.

    OutputError if it cannot be written; RecordingError if the old one is damaged.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    beside = path.with_name(f"{MANIFEST}.partial")
    if not directory.is_dir():
        raise OutputError(f"{path}: cannot be written: {directory} is no directory")
    try:
        with lock(directory):
            changed = edit(Manifest.load(directory))
            with beside.open("w", encoding="utf-8") as file:
                file.write(changed.text())
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            return changed
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or "another run holds its lock"
        raise OutputError(f"{path}: cannot be written: {reason}") from None


def update_entry(directory: Path | str, case_id: str, entry: Entry) -> None:
    """Replace the entry of a case, or append it; a pending entry of the case is removed."""

    def edit(old: Manifest) -> Manifest:
        pending = {name: e for name, e in old.pending.items() if name != case_id}
        cases = {**old.cases, case_id: entry}
        return old.model_copy(update={"cases": cases, "pending": pending})

    change(directory, edit)


def replace_recording(directory: Path | str, fresh: Path, entry: Entry) -> None:
    """Replace a case's recording by the file `fresh`, and its entry by `entry`.

    Two files cannot be replaced in one atomic operation: the new entry is first added as pending,
    then the recording is renamed, then the new entry replaces the old one. Killed at any moment,
    the recording under the case's name is complete and has an entry.
    """
    directory = Path(directory)

    def announce(old: Manifest) -> Manifest:
        return old.model_copy(update={"pending": {**old.pending, entry.id: entry}})

    change(directory, announce)
    fresh.replace(directory / entry.file)
    update_entry(directory, entry.id, entry)


def record_verification(
    directory: Path | str, case_id: str, payload_sha256: str, evidence: Mapping[str, Any]
) -> bool:
    """Store a verification in a case's entry; False if there is none or its payload differs.

    evidence: plain data for JSON (`VerifyResult.evidence()`).
    """
    done = False

    def edit(old: Manifest) -> Manifest:
        nonlocal done
        entry = old.cases.get(case_id)
        if entry is None or entry.payload_sha256 != payload_sha256:
            return old
        done = True
        changed = entry.model_copy(update={"verification": dict(evidence)})
        return old.model_copy(update={"cases": {**old.cases, case_id: changed}})

    change(directory, edit)
    return done
