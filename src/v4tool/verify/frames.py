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
    """Ends the running pass: the rest of it is not asked for."""


class NodeFailed(Exception):
    """A node could not be computed, and its outputs are not all recorded."""


@dataclass(frozen=True)
class RunScope:
    """What is to be run.

    units: those to be run (None: all); the outputs of others are read from the recording.
    last_layer: the pass ends after this main layer (None: all run). mtp: run the MTP layer.
    chained: hand on computed values. partial: keys may be absent. known: generic keys that a
    recording may have; an output with another key is a mistake of the description (None: not
    checked). fail_fast: end with the first unit that fails.
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
    """One running node: its keys and templates, the unit and block that it belongs to.

    args: its positional inputs. inputs: those that are unkeyed outputs of other nodes. called: it
    has called other nodes; received: addresses of the values that these returned. recorded: its
    results are wanted.
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
        """The node's name in messages."""
        return label(self.spec, self.templates)


@dataclass(frozen=True)
class Judged:
    """One returned value.

    comparison: None for an unkeyed one. judges: the unkeyed output of an inner node that it is.
    value: what is handed on.
    """

    comparison: Comparison | None
    judges: ValueRef | None
    value: Any
