"""Profiles and cases, the checkpoint that a profile means, and token ids from text.

Follows SPEC section 7. `values` reads single settings, `schema` says what a file may hold and what
a settled `Profile` is, `toml` reads a file and words its errors, `settle` settles a profile,
`locate` says where its checkpoint is, `tokens` turns text into ids and back. Left out: nothing here
opens or makes a checkpoint, and nothing is ever downloaded.
"""

from v4tool.profiles.locate import SynthRequest, cached_snapshot, locate_checkpoint
from v4tool.profiles.resolve import available, load, shipped_directory
from v4tool.profiles.schema import Case, CheckpointSettings, Expect, Profile
from v4tool.profiles.setting_values import usable_cores
from v4tool.profiles.tokens import decode, encode, parse_ids, shipped_tokenizer, validate_ids

__all__ = [
    "Case",
    "CheckpointSettings",
    "Expect",
    "Profile",
    "SynthRequest",
    "available",
    "cached_snapshot",
    "decode",
    "encode",
    "load",
    "locate_checkpoint",
    "parse_ids",
    "shipped_directory",
    "shipped_tokenizer",
    "usable_cores",
    "validate_ids",
]
