"""Unit (layer or MTP in any pass) and block of a key, and a node's label for messages."""

import re
from collections.abc import Iterable
from typing import Any

from v4tool.verify.language import NodeSpec

UNIT = re.compile(r"(?:decode\.\d+\.)?(layers\.\d+|mtp\.\d+)\.")
BLOCK = re.compile(r"((?:decode\.\d+\.)?layers\.\d+|mtp\.\d+\.\w+|decode\.\d+)\.")
ENDS = "ends"
"""The unit of keys that belong to no layer: embedding, final norm, head."""
SHARED_TEMPLATES = frozenset({"prefix", "wprefix", "stage", "layer", "phase"})
"""Templates that name a pass, layer or path; the others distinguish uses of a node in a block."""


def unit_of(keys: Iterable[str | None]) -> str | None:
    """The unit of the first key that has one, `layers.3` or `mtp.0` in any pass; else None."""
    matches = (UNIT.match(key) for key in keys if key is not None)
    return next((match[1] for match in matches if match), None)


def layer_number(unit: str) -> int | None:
    """The layer number of a unit `layers.N`; None for MTP and `ENDS`."""
    kind, _, number = unit.partition(".")
    return int(number) if kind == "layers" else None


def block_of(keys: Iterable[str]) -> str | None:
    """Pass and block of keys: `decode.0.layers.3`, `mtp.0.prefill`, `decode.0`; None if neither."""
    matches = map(BLOCK.match, keys)
    return next((match[1] for match in matches if match), None)


def label(spec: NodeSpec, templates: dict[str, Any]) -> str:
    """A node's name with the template values that distinguish its uses: `q_linear[attn.wq_a]`."""
    distinct = [str(v) for name, v in templates.items() if name not in SHARED_TEMPLATES]
    return f"{spec.name}[{', '.join(distinct)}]" if distinct else spec.name
