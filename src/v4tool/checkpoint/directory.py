"""Directory of a profile's checkpoint; one of random values is made on first use.

Left out: which directory a profile means (`profiles.locate`), how random values are drawn
(`synth`), and whether the checkpoint is well formed (`shards`).
"""

from collections.abc import Callable
from pathlib import Path

from v4tool.checkpoint.outdated import outdated
from v4tool.checkpoint.shards import Checkpoint
from v4tool.checkpoint.synth import SYNTH_VERSION, synth
from v4tool.config import ModelConfig
from v4tool.profiles import Profile, SynthRequest, locate_checkpoint

Remark = Callable[[str], object]
"""Called with one line of text for the user."""


def checkpoint_directory(profile: Profile, remark: Remark) -> Path:
    """The directory of the profile's checkpoint; a random one is made first if it is not there.

    One that is there is made anew if it is not what `synth` makes now (see `outdated`). remark:
    told before a checkpoint is made, and after the first time. Raises CheckpointError, ProfileError
    as `locate_checkpoint`, OutputError where the random checkpoint cannot be written.
    """
    found = locate_checkpoint(profile)
    if not isinstance(found, SynthRequest):
        return found
    directory, config = found.directory(SYNTH_VERSION), ModelConfig.from_file(found.config)
    if not directory.exists():
        remark(f"making the checkpoint of profile {profile.name} in {directory}")
        report = synth(directory, config, seed=found.seed)
        remark(f"{report.totals.tensors} tensors in {report.seconds:.1f} s")
    elif difference := outdated(directory, config, found.seed):
        remark(
            f"making the checkpoint of profile {profile.name} anew in {directory}: what is there "
            f"is not what this version makes ({difference})"
        )
        synth(directory, config, seed=found.seed, replace=True)
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
