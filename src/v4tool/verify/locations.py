"""Where a key lies: which unit of work, which block, and what a person calls its node."""

import re
from collections.abc import Iterable
from typing import Any

from v4tool.verify.language import NodeSpec

UNIT = re.compile(r"(?:decode\.\d+\.)?(layers\.\d+|mtp\.\d+)\.")
BLOCK = re.compile(r"((?:decode\.\d+\.)?layers\.\d+|mtp\.\d+\.\w+|decode\.\d+)\.")
ENDS = "ends"
"""The unit of what belongs to no layer: embedding, final norm, head."""
SHARED_TEMPLATES = frozenset({"prefix", "wprefix", "stage", "layer", "phase"})
"""Templates that say where a node is, not which of its uses it is."""


def unit_of(keys: Iterable[str | None]) -> str | None:
    """The layer, or MTP, that keys belong to in any pass; None for other keys."""
    matches = (UNIT.match(key) for key in keys if key is not None)
    return next((match[1] for match in matches if match), None)


def layer_number(unit: str) -> int | None:
    """The number of a main layer's unit."""
    kind, _, number = unit.partition(".")
    return int(number) if kind == "layers" else None


def block_of(keys: Iterable[str]) -> str | None:
    """Where keys lie: `decode.0.layers.3`, `mtp.0.prefill`, `decode.0`; None at the top level."""
    matches = map(BLOCK.match, keys)
    return next((match[1] for match in matches if match), None)


def label(spec: NodeSpec, templates: dict[str, Any]) -> str:
    """A node's kind with what tells its uses apart: `q_linear[attn.wq_a]`."""
    distinct = [str(v) for name, v in templates.items() if name not in SHARED_TEMPLATES]
    return f"{spec.name}[{', '.join(distinct)}]" if distinct else spec.name
