"""The keys of a recording of DeepSeek-V4 with a DSpark head (SPEC section 6, SPEC41 5 and 7)."""

from v4tool import names_v4
from v4tool.config_v4 import V4DSparkConfig
from v4tool.names import Keys, Step, steps_of
from v4tool.names_dspark import draft_block_keys, draft_keys


def layer_keys(config: V4DSparkConfig, layer: int, step: Step) -> Keys:
    """A block's keys without its path in front; drafts have the numbers from n_layers on."""
    if config.is_mtp(layer):
        return draft_block_keys(config, layer, step)
    return names_v4.main_layer_keys(config, layer, step)


def recording_keys(
    config: V4DSparkConfig, length: int, decode: int = 0, *, mtp: bool = True
) -> Keys:
    """Every key of a complete recording of `length` tokens and `decode` steps, each with its draft.

    Routed experts appear once per pass and layer as `experts.<E>.*` with None rows.
    """
    keys: Keys = {}
    for step in steps_of(length, decode):
        keys |= names_v4.main_keys(config, step)
        if mtp:
            keys |= draft_keys(config, step)
    return keys
