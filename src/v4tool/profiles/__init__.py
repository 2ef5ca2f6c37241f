"""Profiles and cases from TOML, location of a profile's checkpoint, and tokenization.

Follows SPEC section 7. `setting_values` parses single settings, `schema` holds the models of a file
and of a resolved `Profile`, `toml_files` reads a file and words its errors, `resolve` resolves a
profile, `locate` finds its checkpoint, `custom` makes cases of a user's own prompts, `tokens`
encodes and decodes text. Left out: nothing here opens or makes a checkpoint, and nothing is
downloaded.
"""

from v4tool.profiles.custom import custom_case, with_decode
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
    "custom_case",
    "decode",
    "encode",
    "load",
    "locate_checkpoint",
    "parse_ids",
    "shipped_directory",
    "shipped_tokenizer",
    "usable_cores",
    "validate_ids",
    "with_decode",
]
