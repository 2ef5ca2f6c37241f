"""The architectures of the family: what each has of its own, and where it is found.

The only place that tells them apart. A configuration carries its `Architecture`; whoever needs a
part that belongs to one architecture asks it for that part by name. Everything that is not named
here (number formats, products, the sparse attention, experts, recording, comparison) exists once
and takes its sizes from the configuration. The modules named here are imported when they are asked
for: they lie above this one, and some need torch.
"""

import re
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from v4tool.errors import UnsupportedError


@dataclass(frozen=True)
class Architecture:
    """One architecture; its parts as `module:name`.

    config: the class of its `config.json`; layout: the tensors of its checkpoint; keys: the keys of
    its recordings; port: its forward pass. commands: what v4tool can do with it. unused: pattern of
    the tensors that no pass reads. draft_marks: tensors that tell its draft block from those of
    another design.
    """

    id: str
    title: str
    config: str
    layout: str
    keys: str | None = None
    port: str | None = None
    commands: frozenset[str] = frozenset()
    unused: str = r"(?!)"
    draft_marks: tuple[str, ...] = ()

    def load(self, part: str) -> Any:
        """The object that a part names. UnsupportedError where the architecture has none."""
        name = getattr(self, part)
        if name is None:
            raise UnsupportedError(f"{self.title}: there is no description of its {part} yet")
        return resolve_name(name)

    def require(self, command: str) -> None:
        """UnsupportedError, one line, for a command that does not know this architecture."""
        if command not in self.commands:
            known = ", ".join(sorted(self.commands)) or "list tensors"
            raise UnsupportedError(
                f"{command}: {self.title} is not supported; what works with it: {known}"
            )

    def reads(self, tensor: str) -> bool:
        """Whether some pass reads the tensor of that name."""
        return re.match(self.unused, tensor) is None


V4 = Architecture(
    "v4",
    "DeepSeek-V4 with MTP",
    config="v4tool.config_v4:V4Config",
    layout="v4tool.checkpoint.layout_v4:v4_shards",
    keys="v4tool.names_v4",
    port="v4tool.model.port_v4",
    commands=frozenset(
        {"check", "check --port", "dump", "list keys --where", "regen", "synth", "verify"}
    ),
    draft_marks=("mtp.0.enorm.weight", "mtp.0.hnorm.weight"),
)
V4_DSPARK = Architecture(
    "v4-0731",
    "DeepSeek-V4 with DSpark",
    config="v4tool.config_v4:V4DSparkConfig",
    layout="v4tool.checkpoint.layout_v4:v4_dspark_shards",
    keys="v4tool.names_v4_dspark",
    port="v4tool.model.port_v4_dspark",
    commands=frozenset({"dump", "synth"}),
)
V41 = Architecture(
    "v4.1",
    "DeepSeek-V4.1",
    config="v4tool.config_v41:V41Config",
    layout="v4tool.checkpoint.layout_v41:v41_shards",
    unused=r"vision\.|aligner\.|image_|.*\.gate\.bias_vl$",
)

_MODEL_TYPE_V41 = "deepseek_v41"
_ONLY_V41 = "kv_source_layer_ids"
"""A field that tells a configuration without `model_type` (the inference code's form)."""
_DSPARK = "dspark_block_size"
"""A field that tells a DSpark head from MTP."""


def choose(raw: dict[str, Any]) -> Architecture:
    """The architecture of a `config.json`, by `model_type` and the fields that it has.

    What is of no known type is read as V4, whose reader names what is missing.
    """
    if raw.get("model_type") == _MODEL_TYPE_V41 or _ONLY_V41 in raw:
        return V41
    return V4_DSPARK if _DSPARK in raw else V4
