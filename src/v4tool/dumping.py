"""Runs the model on one or several cases in one pass over the weights and writes recordings.

Determines the files' names and metadata. Left out: which keys are recorded (`selection`), the
arithmetic (`model`), the file format (`record.writer`) and the display of progress (`report`).
"""

import json
import resource
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig, Numerics
from v4tool.errors import OutputError
from v4tool.model import stream
from v4tool.names import Keys, generic, is_expert, most_tensors
from v4tool.not_finite import FiniteCheck, all_finite
from v4tool.profiles import Case, Profile, validate_ids
from v4tool.quant.linear import backend_in_use
from v4tool.record.manifest import Run
from v4tool.record.statistics import record_dump
from v4tool.record.writer import RecordingWriter
from v4tool.selection import EVERYTHING, Selection, layer_range_of, union
from v4tool.version import __version__

FORMAT_VERSION = "1"


@dataclass(frozen=True)
class DumpResult:
    """One recording that was written.

    complete: whether all keys were recorded; seconds: of the whole pass, with all of its cases;
    peak_rss, bytes_read: of the process and of the checkpoint at the end of the pass, in bytes;
    not_finite: keys with NaN or infinity; first_not_finite: the first of them and its values.
    """

    case: Case
    decode_ids: tuple[int, ...]
    path: Path
    complete: bool
    tensors: int
    experts: int
    payload_bytes: int
    payload_sha256: str
    metadata: dict[str, str]
    seconds: float
    peak_rss: int
    bytes_read: int
    not_finite: int = 0
    first_not_finite: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **fields,
            "case": self.case.id,
            "tokens": len(self.case.input_ids),
            "path": str(self.path),
        }


class CaseRecorder:
    """The tap of one case: passes selected values to the case's writer, and counts experts.

    check: told of every value that is not finite, selected or not.
    """

    def __init__(
        self,
        case: Case,
        keys: Keys,
        selection: Selection,
        writer: RecordingWriter,
        check: FiniteCheck,
        progress: "Progress",
    ) -> None:
        self.case, self.selection, self.writer, self.progress = case, selection, writer, progress
        self.check = check
        self.wanted = frozenset(keys)
        self.experts = 0

    def tap(self, key: str, value: Tensor) -> None:
        """Record a value if its key is selected.

        NotFiniteError as `FiniteCheck.see`; of recorded values up to one buffer later.
        """
        if is_expert(key) and key.endswith("w1.out"):
            self.experts += 1
            self.progress.expert()
        if generic(key) in self.wanted and self.selection.wants(key):
            self.writer.put(key, value)
        elif not all_finite(value):
            self.writer.inspect_new()
            self.check.see(key, value)


class Progress(Protocol):
    """Receiver of a dump's progress: `watch` per module, `expert` per routed expert."""

    def watch(self, name: str, place: str) -> None: ...

    def expert(self) -> None: ...


class NoProgress:
    """A `Progress` that does nothing."""

    def watch(self, name: str, place: str) -> None:
        """Do nothing."""

    def expert(self) -> None:
        """Do nothing."""


def steps(config: ModelConfig, cases: Iterable[Case], selection: Selection) -> int:
    """Number of times a dump calls `Progress.watch`."""
    cases = list(cases)
    layer_range = union(
        layer_range_of(config, case, selection.keys(config, case)) for case in cases
    )
    passes = 1 + max(case.decode for case in cases)
    return stream.watched(config, passes, layer_range)


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def numerics_of(profile: Profile) -> Numerics:
    """The `Numerics` of a profile."""
    return Numerics(accumulate=profile.accumulate, threads=profile.threads, backend=profile.backend)


def metadata_of(
    profile: Profile, checkpoint: Checkpoint, case: Case, selection: Selection
) -> dict[str, str]:
    """A recording's metadata, except the chosen decode ids, which `_finish` sets."""
    numerics = numerics_of(profile)
    fields = {
        "format": "v4tool-recording",
        "format_version": FORMAT_VERSION,
        "case": case.id,
        "profile": profile.name,
        "input_ids": json.dumps(list(case.input_ids)),
        # room for the ids that greedy decoding will choose
        "decode_ids": json.dumps([checkpoint.config.vocab_size] * case.decode),
        "seed": str(profile.seed),
        "threads": str(profile.threads),
        "accumulate": numerics.accumulate,
        "product": backend_in_use(numerics),
        "torch": torch.__version__,
        "v4tool": __version__,
        "checkpoint_fingerprint": checkpoint.fingerprint,
    }
    if selection.only is not None:
        fields["only"] = json.dumps(selection.only)
    if not selection.mtp:
        fields["mtp"] = "false"
    if selection.layers is not None:
        fields["layers"] = json.dumps(sorted(selection.layers))
    return fields


def output_paths(
    cases: Iterable[Case], out: Path | None, directory: Path, *, force: bool
) -> list[Path]:
    """The file of each case: in `out` or else `directory`, or `out` itself if it names a file.

    OutputError for a file that exists (without force), for one file and several cases, and for two
    cases with the same file.
    """
    cases = list(cases)
    if out is not None and is_one_file(out):
        if len(cases) > 1:
            raise OutputError(f"--out {out}: expected a directory for {len(cases)} cases")
        paths = [out]
    else:
        paths = [(out or directory) / case.file for case in cases]
    shared = {path for path in paths if paths.count(path) > 1}
    if shared:
        raise OutputError(f"{min(shared)}: several cases would be written to this file")
    for path in paths:
        if path.exists() and not force:
            raise OutputError(f"{path}: exists already; use --force to replace it")
    return paths


def dump_cases(
    profile: Profile,
    checkpoint: Checkpoint,
    cases: list[Case],
    paths: list[Path],
    *,
    selection: Selection = EVERYTHING,
    force: bool = False,
    keep_going: bool = False,
    progress: Progress = NoProgress(),  # noqa: B008  (has no state)
) -> list[DumpResult]:
    """Run the model on all cases in one pass over the weights and write their recordings.

    paths: one file per case (see `output_paths`). keep_going: record NaN and infinity. progress:
    called before each module runs.
    A file gets its final name when it is complete; on an error all of them are discarded.
    Raises InputError for ids outside the vocabulary, OutputError if a file cannot be written,
    NotFiniteError for the first key with NaN or infinity.
    """
    config, started = checkpoint.config, time.monotonic()
    for case in cases:
        validate_ids(case.input_ids, config.vocab_size, where=f"case {case.id}: input_ids")
        if case.decode_ids:
            validate_ids(case.decode_ids, config.vocab_size, where=f"case {case.id}: decode_ids")
    keys = [selection.keys(config, case) for case in cases]
    layer_range = union(
        layer_range_of(config, case, wanted) for case, wanted in zip(cases, keys, strict=True)
    )
    recorders, sequences = [], []
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        for case, path, wanted in zip(cases, paths, keys, strict=True):
            metadata = metadata_of(profile, checkpoint, case, selection)
            tensors = most_tensors(config, wanted, len(case.input_ids))
            check = FiniteCheck(case.id, checkpoint, keep_going=keep_going)
            writer = stack.enter_context(
                RecordingWriter(path, tensors, metadata, force=force, inspect=check.see)
            )
            recorder = CaseRecorder(case, wanted, selection, writer, check, progress)
            ids, decode_ids = list(case.input_ids), list(case.decode_ids)
            recorders.append(recorder)
            sequences.append(stream.Sequence(ids, recorder.tap, case.decode, decode_ids))
        # torch's own threads would compete with ours; the caller's number is restored
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stream.run(checkpoint, config, numerics_of(profile), sequences, layer_range, progress.watch)
        return [
            _finish(recorder, sequence, checkpoint, selection, started)
            for recorder, sequence in zip(recorders, sequences, strict=True)
        ]


def _finish(
    recorder: CaseRecorder,
    sequence: stream.Sequence,
    checkpoint: Checkpoint,
    selection: Selection,
    started: float,
) -> DumpResult:
    writer = recorder.writer
    writer.metadata["decode_ids"] = json.dumps(sequence.decode_ids)
    digest = writer.close()
    return DumpResult(
        case=recorder.case,
        decode_ids=tuple(sequence.decode_ids),
        path=writer.path,
        complete=selection == EVERYTHING,
        tensors=writer.tensors,
        experts=recorder.experts,
        payload_bytes=writer.payload_bytes,
        payload_sha256=digest,
        metadata=dict(writer.metadata),
        seconds=time.monotonic() - started,
        peak_rss=peak_rss(),
        bytes_read=checkpoint.bytes_read,
        not_finite=len(recorder.check.keys),
        first_not_finite=recorder.check.first,
    )


def run_of(profile: Profile, result: DumpResult) -> Run:
    """The fields of a manifest entry that come from the run rather than from the file."""
    case = result.case
    return Run(
        id=case.id,
        subject=case.subject,
        text=case.text,
        input_ids=case.input_ids,
        decode_ids=result.decode_ids,
        complete=result.complete,
        profile=profile.name,
        numerics={key: result.metadata[key] for key in ("accumulate", "product")},
        threads=profile.threads,
        seed=profile.seed,
        checkpoint_fingerprint=result.metadata["checkpoint_fingerprint"],
        seconds=round(result.seconds, 3),
        peak_rss_bytes=result.peak_rss,
    )


def enter_in_manifest(profile: Profile, config: ModelConfig, results: Iterable[DumpResult]) -> None:
    """Add finished recordings to the manifest of their directory (see `record.manifest`)."""
    for result in results:
        run = run_of(profile, result)
        record_dump(result.path.parent, result.path, config, run)


def is_one_file(out: Path | None) -> bool:
    """Whether --out names a single file, for which no manifest is written."""
    return out is not None and out.suffix == ".safetensors" and not out.is_dir()
