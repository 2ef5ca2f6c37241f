"""Selection of recordings for `check` and `verify`, and the check that both of them run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from v4tool.commands.options import chosen_cases
from v4tool.errors import InputError

if TYPE_CHECKING:
    from v4tool.check.recording import CheckResult
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.config import ModelConfig
    from v4tool.profiles import Case, Profile
    from v4tool.record.manifest import Entry

DumpOption = Annotated[
    list[Path] | None, typer.Option("--dump", help="File of a recording, in place of a case.")
]
PartialOption = Annotated[bool, typer.Option("--partial", help="Keys may be missing.")]


@dataclass(frozen=True)
class RecordingToJudge:
    """One recording and the case that it must belong to (None: the one in its metadata)."""

    path: Path
    case: "Case | None"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The case's token ids; None without a case."""
        return self.case.input_ids if self.case else None

    def entry(self) -> "Entry | None":
        """The recording's entry in the manifest of its directory, or None."""
        from v4tool.record.manifest import Manifest

        return Manifest.entry_beside(self.path, self.case.id if self.case else None)


def recordings_to_judge(
    profile: "Profile",
    cases: list[str] | None,
    every: bool,
    files: list[Path] | None,
    directory: Path | None,
) -> list[RecordingToJudge]:
    """The recordings named by --case, --all or --dump; with --all only files that exist."""
    if files:
        if cases or every:
            raise InputError("--dump goes without --case and --all")
        return [RecordingToJudge(path, None) for path in files]
    folder = directory or profile.out_dir
    found = [
        RecordingToJudge(folder / case.file, case) for case in chosen_cases(profile, cases, every)
    ]
    if every:
        found = [recording for recording in found if recording.path.exists()]
    if not found:
        raise InputError(f"{folder}: expected recordings of the profile's cases, found none")
    return found


def check_one(
    recording: RecordingToJudge,
    config: "ModelConfig",
    checkpoint: "Checkpoint | None",
    *,
    partial: bool = False,
    deep: bool = False,
    quiet: bool = True,
) -> "CheckResult":
    """Check one recording, with a progress bar over the bytes read."""
    from v4tool.check.recording import check_recording
    from v4tool.report.progress import bytes_progress

    total = recording.path.stat().st_size if recording.path.is_file() else 0
    with bytes_progress(recording.path.name, total, quiet=quiet) as progress:
        return check_recording(
            recording.path,
            config=config,
            ids=recording.ids,
            case=recording.case.id if recording.case else "",
            manifest=recording.entry(),
            checkpoint=checkpoint,
            deep=deep,
            partial=partial,
            progress=progress,
        )
