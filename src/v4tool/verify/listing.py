"""Lists the nodes of a description and assigns each key of a recording to the node that outputs it.

Nothing is run: keys are matched with the nodes' output patterns. Of several matching nodes whose
weights the checkpoint has, the one with the fewest characters in placeholders is chosen.
"""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from v4tool.names import pass_of
from v4tool.verify.language import PLACEHOLDER, NodeSpec, read_description
from v4tool.verify.tensors import OWN_DESCRIPTION, is_input

LEADING = r"mtp\.\d+\.\w+\.|(?:decode\.\d+\.)?(?:layers\.\d+\.)?"
"""Regular expression of a placeholder at the start of a key: a pass and a block."""
VALUES = {"layer": r"\d+", "expert": r"\d+|<E>", "phase": r"\w+"}


@dataclass(frozen=True)
class NodeInfo:
    """One node of a description.

    summary: first line of its docstring. weights, outputs: key patterns. keys: number of the given
    keys that it outputs; example: one of these.
    """

    name: str
    summary: str
    line: int
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    templates: tuple[str, ...]
    keys: int
    example: str


def list_nodes(
    vt_file: Path | str | None = None,
    keys: Iterable[str] = (),
    weights: Container[str] = (),
) -> tuple[list[NodeInfo], list[str]]:
    """The nodes in the file's order, and the keys that no node outputs (token ids are inputs).

    keys: of a recording, or those of `names.recording_keys` (experts as `<E>`). weights: the
    checkpoint's tensor names (`checkpoint.layout.layout`). VtError if the file breaks a rule.
    """
    nodes = list(read_description(vt_file or OWN_DESCRIPTION).nodes.values())
    found: dict[str, list[str]] = {spec.name: [] for spec in nodes}
    left = []
    for key in keys:
        owner = owner_of(key, nodes, weights)
        if owner is not None:
            found[owner].append(key)
        elif not is_input(key):
            left.append(key)
    return [_info(spec, found[spec.name]) for spec in nodes], left


def _info(spec: NodeSpec, keys: list[str]) -> NodeInfo:
    return NodeInfo(
        name=spec.name,
        summary=spec.doc.splitlines()[0] if spec.doc else "",
        line=spec.line,
        weights=tuple(spec.weights.values()),
        outputs=spec.keys,
        templates=spec.templates,
        keys=len(keys),
        example=keys[0] if keys else "",
    )


def owner_of(key: str, nodes: Iterable[NodeSpec], weights: Container[str]) -> str | None:
    """The node that outputs a key: fewest characters in placeholders, then most weights."""
    candidates = [
        (sum(map(len, values.values())), -len(spec.weights), number, spec.name)
        for number, spec in enumerate(nodes)
        for output in spec.keys
        for values in [_bind(output, key)]
        if values is not None and _has_weights(spec, key, values, weights)
    ]
    return min(candidates)[-1] if candidates else None


def _bind(output: str, key: str) -> dict[str, str] | None:
    """The values of an output pattern's placeholders in a key; None if it does not match."""
    pattern, last = "", 0
    for found in PLACEHOLDER.finditer(output):
        name = found[1]
        pattern += re.escape(output[last : found.start()])
        seen = f"(?P<{name}>" in pattern
        values = LEADING if found.start() == 0 else VALUES.get(name, r"[\w.<>]+")
        pattern += f"(?P={name})" if seen else f"(?P<{name}>{values})"
        last = found.end()
    match = re.fullmatch(pattern + re.escape(output[last:]), key)
    return match.groupdict() if match else None


def _has_weights(spec: NodeSpec, key: str, values: dict[str, str], weights: Container[str]) -> bool:
    block = re.match(r"(?:decode\.\d+\.)?(layers\.\d+\.)|(mtp\.\d+\.)", key)
    default = (block[1] or block[2]) if block and pass_of(key) != key else ""
    bound = {name: values.get(name, default) for name in spec.templates}
    return all(
        full.format(**bound).replace("<E>", "0") in weights for full in spec.weights.values()
    )
