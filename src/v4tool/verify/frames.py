"""Data of a running `.vt` description: scope of a run, frame of a node, judged values, exceptions.

Left out: running nodes (`runtime`) and comparing their values (`judging`).
"""

import time
from dataclasses import dataclass, field
from typing import Any

from v4tool.verify.language import NodeSpec
from v4tool.verify.locations import label
from v4tool.verify.results import Comparison, ValueRef


class StopPass(Exception):
    """Nothing more of this pass is asked for, or can be computed."""


class NodeFailed(Exception):
    """A node could not be computed, and the recording has nothing to go on with."""


@dataclass(frozen=True)
class RunScope:
    """What is to be run.

    units: of the outermost level (None: all); what others give is taken from the recording.
    last_layer: main layers behind it end the pass (None: all run). mtp: without it the MTP layer
    gives nothing. chained: hand on computed values. partial: keys may be absent. known: generic
    keys that some recording has (an output beyond them is a mistake of the description; None: not
    held against it). fail_fast: end with the unit that fails.
    """

    units: frozenset[str] | None = None
    last_layer: int | None = None
    mtp: bool = True
    chained: bool = False
    partial: bool = False
    known: frozenset[str] | None = None
    fail_fast: bool = False

    def asks_for(self, unit: str) -> bool:
        """Whether a unit's results are wanted."""
        return self.units is None or unit in self.units


@dataclass
class Frame:
    """One node that is running: its keys and templates, the unit and block that it belongs to.

    args: its positional inputs. inputs: those that no key judges. called: it has called other
    nodes; received: memory of what these gave it. recorded: its results are wanted.
    """

    spec: NodeSpec
    templates: dict[str, Any]
    keys: tuple[str | None, ...]
    unit: str
    block: str
    args: tuple[Any, ...]
    inputs: tuple[ValueRef, ...]
    recorded: bool
    called: bool = False
    received: set[int] = field(default_factory=set)
    started: float = field(default_factory=time.perf_counter)

    @property
    def label(self) -> str:
        """What a person calls the node."""
        return label(self.spec, self.templates)


@dataclass(frozen=True)
class Judged:
    """One returned value: its comparison, the inner value that it judges, and what is handed on."""

    comparison: Comparison | None
    judges: ValueRef | None
    value: Any
