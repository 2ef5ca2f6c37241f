"""`Selection`: the keys of a recording to write, and the part of the model needed for them.

Follows SPEC section 6. Left out: which values a file then has (`dumping`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from v4tool.config import ModelConfig
from v4tool.errors import InputError
from v4tool.model.stream import LayerRange
from v4tool.names import Keys, is_draft, layer_of, matches, pass_of, recording_keys
from v4tool.profiles import Case

TOP_LEVEL = ("input_ids", "embed.out")
"""Recorded even if only some layers are: they identify the input."""


@dataclass(frozen=True)
class Selection:
    """Which keys to record: shell patterns of keys and main layers (None: all), MTP or not."""

    only: tuple[str, ...] | None = None
    layers: frozenset[int] | None = None
    mtp: bool = True

    def wants(self, key: str, experts: int = 0) -> bool:
        """Whether a key is recorded; a generic key, whether it is for one of `experts` experts."""
        if self.only is not None and not matches(key, self.only, experts):
            return False
        if self.layers is None or layer_of(key) in self.layers:
            return True
        return key.removeprefix(pass_of(key)) in TOP_LEVEL and not is_draft(key)

    def keys(self, config: ModelConfig, case: Case) -> Keys:
        """The keys of a case to record. InputError for a pattern or layer that matches none."""
        config.architecture.require("dump")
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


EVERYTHING = Selection()
"""All keys of a recording."""


def layer_range_of(config: ModelConfig, case: Case, keys: Keys) -> LayerRange:
    """The part of the model that has to be computed for these keys of a case."""
    mtp = any(map(is_draft, keys))
    chooses_ids = case.decode > len(case.decode_ids)
    head = chooses_ids or any(map(_needs_head, keys))
    if mtp or head:
        return LayerRange(config.n_layers, head=head, mtp=mtp)
    layers = [n for n in map(layer_of, keys) if n is not None]
    return LayerRange(max(layers) + 1 if layers else 0, head=False, mtp=False)


def _needs_head(key: str) -> bool:
    """Whether a key is of the main head, or of the draft of a decode step, which starts from it."""
    prefix = pass_of(key)
    in_step = prefix.startswith("decode.")
    return key.removeprefix(prefix) in {"norm.out", "head.out"} or (in_step and is_draft(key))


def union(layer_ranges: Iterable[LayerRange]) -> LayerRange:
    """The smallest layer range that covers all given ones."""
    every = list(layer_ranges)
    return LayerRange(
        max(e.layers for e in every), any(e.head for e in every), any(e.mtp for e in every)
    )
