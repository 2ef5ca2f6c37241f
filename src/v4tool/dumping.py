"""Runs cases through a checkpoint in one pass and writes their recordings.

Decides which keys are recorded (`Selection`), how far the model is computed (`layer_range_of`) and
what the files' metadata say. Left out: the arithmetic (`model`), the file (`record.writer`) and how
progress is shown (`report`).
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
from v4tool.errors import InputError, OutputError
from v4tool.model import stream
from v4tool.names import (
    Keys,
    generic,
    is_expert,
    layer_of,
    matches,
    most_tensors,
    pass_of,
    recording_keys,
)
from v4tool.not_finite import FiniteCheck, all_finite
from v4tool.profiles import Case, Profile, validate_ids
from v4tool.quant.linear import backend_in_use
from v4tool.record import manifest
from v4tool.record.writer import RecordingWriter
from v4tool.version import __version__

FORMAT_VERSION = "1"
TOP_LEVEL = ("input_ids", "embed.out")
"""Recorded even where only some layers are asked for: they say which input the layers belong to."""


@dataclass(frozen=True)
class Selection:
    """What of a recording is wanted: shell patterns over keys, main layers (None: all), MTP or
    not.
    """

    only: tuple[str, ...] | None = None
    layers: frozenset[int] | None = None
    mtp: bool = True

    def wants(self, key: str, experts: int = 0) -> bool:
        """Whether a key is recorded; a generic one, whether it is for one of `experts` experts."""
        if self.only is not None and not matches(key, self.only, experts):
            return False
        if self.layers is None or layer_of(key) in self.layers:
            return True
        return key.removeprefix(pass_of(key)) in TOP_LEVEL and not key.startswith("mtp.")

    def keys(self, config: ModelConfig, case: Case) -> Keys:
        """The wanted keys of a case. InputError for a pattern or a layer that there is not."""
        experts = config.n_routed_experts
        mtp = self.mtp and config.mtp_supported
        every = recording_keys(config, len(case.input_ids), case.decode, mtp=mtp)
        for layer in sorted(self.layers or ()):
            if not 0 <= layer < config.n_layers:
                raise InputError(f"--layers: expected 0 to {config.n_layers - 1}, found {layer}")
        for glob in self.only or ():
            if not any(matches(key, [glob], experts) for key in every):
                raise InputError(f"--only: expected a pattern that some key matches, found {glob}")
        wanted = {key: spec for key, spec in every.items() if self.wants(key, experts)}
        if not wanted:
            raise InputError("--only and --layers together leave nothing to record")
        return wanted


def layer_range_of(config: ModelConfig, case: Case, keys: Keys) -> stream.LayerRange:
    """Which part of the model has to be computed for these keys of this case."""
    mtp = any(key.startswith("mtp.") for key in keys)
    chooses_ids = case.decode > len(case.decode_ids)
    ends = {"norm.out", "head.out"}
    head = chooses_ids or any(key.removeprefix(pass_of(key)) in ends for key in keys)
    if mtp or head:
        return stream.LayerRange(config.n_layers, head=head, mtp=mtp)
    layers = [n for n in map(layer_of, keys) if n is not None]
    return stream.LayerRange(max(layers) + 1 if layers else 0, head=False, mtp=False)


def union(layer_ranges: Iterable[stream.LayerRange]) -> stream.LayerRange:
    """The smallest layer range that covers all given ones."""
    every = list(layer_ranges)
    return stream.LayerRange(
        max(e.layers for e in every), any(e.head for e in every), any(e.mtp for e in every)
    )


@dataclass(frozen=True)
class DumpResult:
    """One recording that was written.

    keys: generic names of what was asked for; seconds: of the whole pass that it was part of;
    peak_rss, bytes_read: of the process and the checkpoint by the end of that pass, in bytes;
    not_finite: keys with NaN or infinity; first_not_finite: the first one and what it has.
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
    """One case's tap: passes on what is wanted to the case's writer and counts experts.

    check: looks at every value, wanted or not.
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
        """Record the value if its key is wanted. NotFiniteError as `FiniteCheck.see`, for values
        that are recorded up to a buffer later.
        """
        if is_expert(key) and key.endswith("w1.out"):
            self.experts += 1
            self.progress.expert()
        if generic(key) in self.wanted and self.selection.wants(key):
            self.writer.put(key, value)
        elif not all_finite(value):
            self.writer.look()
            self.check.see(key, value)


class Progress(Protocol):
    """Who wants to know how far a dump is."""

    def watch(self, name: str, place: str) -> None: ...

    def expert(self) -> None: ...


class NoProgress:
    """A progress that shows nothing."""

    def watch(self, name: str, place: str) -> None:
        """Ignore the place."""

    def expert(self) -> None:
        """Ignore the expert."""


def steps(config: ModelConfig, cases: Iterable[Case], selection: Selection) -> int:
    """How many times a dump calls `Progress.watch`."""
    cases = list(cases)
    layer_range = union(
        layer_range_of(config, case, selection.keys(config, case)) for case in cases
    )
    passes = 1 + max(case.decode for case in cases)
    return passes * (1 + layer_range.layers + layer_range.head) + layer_range.mtp


def peak_rss() -> int:
    """The most memory this process has had resident, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def numerics_of(profile: Profile) -> Numerics:
    """The numerics that a profile asks for."""
    return Numerics(accumulate=profile.accumulate, threads=profile.threads, backend=profile.backend)


def metadata_of(
    profile: Profile, checkpoint: Checkpoint, case: Case, selection: Selection
) -> dict[str, str]:
    """What a recording says of itself, but for its payload hash and the decode ids chosen."""
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
    """Where each case's recording goes: below `out` or `directory`, or the one file that `out`
    names.

    OutputError, before anything is computed, for a file that exists (without force), for one file
    and several cases, and for two cases that would share a file.
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
    selection: Selection = Selection(),
    force: bool = False,
    keep_going: bool = False,
    progress: Progress = NoProgress(),  # noqa: B008  (has no state)
) -> list[DumpResult]:
    """Run the cases through the checkpoint in one pass and write each one's recording.

    paths: one file a case (see `output_paths`). keep_going: record NaN and infinity. progress: told
    each module before it runs.
    Nothing stands under a final name before it is whole; on any error all of them are discarded.
    Raises InputError for ids outside the vocabulary, OutputError where a file cannot be written,
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
        # torch's own threads would only compete with ours; a caller gets its number back
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
        complete=selection == Selection(),
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


def run_of(profile: Profile, result: DumpResult) -> manifest.Run:
    """What the manifest keeps of the run that recorded a case."""
    case = result.case
    return manifest.Run(
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
    """Describe finished recordings in the `prompts.json` beside them (see `record.manifest`)."""
    for result in results:
        run = run_of(profile, result)
        manifest.record_dump(result.path.parent, result.path, config, run)


def is_one_file(out: Path | None) -> bool:
    """Whether --out names one recording and not a directory of them, which has a manifest."""
    return out is not None and out.suffix == ".safetensors" and not out.is_dir()
