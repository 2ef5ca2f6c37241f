"""Directory of a profile's checkpoint; one of random values is made on first use.

Left out: which directory a profile means (`profiles.locate`), how random values are drawn
(`synth`), and whether the checkpoint is well formed (`shards`).
"""

from collections.abc import Callable
from pathlib import Path

from v4tool.checkpoint.shards import Checkpoint
from v4tool.checkpoint.synth import SYNTH_VERSION, synth
from v4tool.config import ModelConfig
from v4tool.profiles import Profile, SynthRequest, locate_checkpoint

Remark = Callable[[str], object]
"""Called with one line of text for the user."""


def checkpoint_directory(profile: Profile, remark: Remark) -> Path:
    """The directory of the profile's checkpoint; a random one is made first if it is not there.

    remark: told before and after a checkpoint is made. Raises CheckpointError, ProfileError as
    `locate_checkpoint`, OutputError where the random checkpoint cannot be written.
    """
    found = locate_checkpoint(profile)
    if not isinstance(found, SynthRequest):
        return found
    directory = found.directory(SYNTH_VERSION)
    if not directory.exists():
        remark(f"making the checkpoint of profile {profile.name} in {directory}")
        report = synth(directory, ModelConfig.from_file(found.config), seed=found.seed)
        remark(f"{report.totals.tensors} tensors in {report.seconds:.1f} s")
    return directory


def open_checkpoint(
    profile: Profile, remark: Remark, *, mtp: bool = True, allow_nan: bool = False
) -> Checkpoint:
    """The profile's checkpoint, opened (see `Checkpoint.open`); its notes go to `remark`."""
    directory = checkpoint_directory(profile, remark)
    checkpoint = Checkpoint.open(directory, mtp=mtp, allow_nan=allow_nan)
    for note in checkpoint.notes:
        remark(f"note: {note}")
    return checkpoint
