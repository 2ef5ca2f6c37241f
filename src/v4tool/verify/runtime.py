"""Runs the nodes of a `.vt` file and holds every output against the recording.

The file is executed with `vt_lang` being the module made here. A node's weights are bound while it
runs and let go afterwards; each returned value with a key is compared, and then handed on: as
computed (chained), or as recorded (isolated), so that an error does not spread. What is kept in acc
is recorded rounded to FP32: the computed value goes on where it rounds to the recorded one, else
the recorded one. A mismatch is data, and so is a node that fails on damaged inputs: the run goes on
with what is recorded.

Left out: which nodes are called (`walk`), and who is to blame (`verdict`).
"""

import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from v4tool.errors import V4ToolError, VtError
from v4tool.names import generic
from v4tool.verify.compare import Rule, bf16_valued, compare
from v4tool.verify.language import Description, NodeSpec
from v4tool.verify.lookup import other_rows
from v4tool.verify.results import Comparison, NodeResult, ValueRef
from v4tool.verify.sources import Recorded, Weights

UNIT = re.compile(r"(?:decode\.\d+\.)?(layers\.\d+|mtp\.\d+)\.")
ENDS = "ends"
"""The unit of what belongs to no layer: embedding, final norm, head."""


class StopPass(Exception):
    """Nothing more of this pass is asked for, or can be computed."""


class NodeFailed(Exception):
    """A node could not be computed, and the recording has nothing to go on with."""


@dataclass(frozen=True)
class Scope:
    """What is to be run: units of the outermost level (None: all), and which of them nothing
    records.

    last_layer: later main layers end the pass (None: all run). mtp: without it the MTP layer gives
    nothing. chained: hand on computed values. partial: keys may be absent. known: generic keys that
    some recording has (a key beyond them is a mistake of the description). fail_fast: end with the
    unit that fails.
    """

    units: frozenset[str] | None = None
    last_layer: int | None = None
    mtp: bool = True
    chained: bool = False
    partial: bool = False
    known: frozenset[str] | None = None
    fail_fast: bool = False


@dataclass
class Frame:
    """One node that is running.

    called: it has called other nodes; received: memory of what these gave it. recorded: its results
    are wanted.
    """

    spec: NodeSpec
    templates: dict[str, Any]
    unit: str
    inputs: tuple[ValueRef, ...]
    called: bool = False
    recorded: bool = True
    received: set[int] = field(default_factory=set)


@dataclass
class Runtime:
    """Executes a description against one recording; `results` collects what was found."""

    description: Description
    recording: Recorded
    weights: Weights
    rule: Rule
    scope: Scope
    environment: dict[str, str]
    watch: Callable[[str], None] = lambda place: None
    results: list[NodeResult] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._keys = frozenset(self.recording.specs)
        self._frames: list[Frame] = []
        self._pass, self._outer, self._inner = 0, 0, 0
        self._unkeyed: dict[int, tuple[Tensor, ValueRef, int]] = {}
        self._rounded: set[str] = set()

    # ---------------------------------------------------------------- loading and calling

    def load(self) -> None:
        """Execute the file's top level. VtError where it fails."""
        code = compile(self.description.source, str(self.description.path), "exec")
        self.namespace = {"__name__": "vt_description", "__file__": str(self.description.path)}
        with self._surroundings():
            try:
                exec(code, self.namespace)
            except V4ToolError:
                raise
            except Exception as error:
                raise VtError(
                    f"{self.description.path.name}: fails when it is loaded: {_why(error)}"
                ) from None

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """vt_lang importable and its environment variables set, as the file expects; all put back
        after."""
        module, threads = sys.modules.get("vt_lang"), torch.get_num_threads()
        before = {name: os.environ.get(name) for name in self.environment}
        sys.modules["vt_lang"] = self._module()
        os.environ.update(self.environment)
        try:
            with torch.no_grad():
                yield
        finally:
            sys.modules.pop("vt_lang")
            if module is not None:
                sys.modules["vt_lang"] = module
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            torch.set_num_threads(threads)

    def _module(self) -> types.ModuleType:
        module = types.ModuleType("vt_lang")
        contents = {
            "NodeChecker": self._node_checker,
            "register_safetensors": lambda weights, dump: None,
            "load_weight": self._weight,
            "load_activation": self._activation,
        }
        module.__dict__.update(contents)
        return module

    def _weight(self, key: str) -> Tensor:
        try:
            return self.weights(key)
        except KeyError:
            raise VtError(
                f"{self.description.path.name}: weight {key} is not in the checkpoint"
            ) from None

    def _activation(self, key: str) -> Tensor:
        if key not in self._keys:
            raise NodeFailed(f"{key} is not in the recording")
        return self.recording.read(key)

    def run_pass(self, number: int, node: str, *args: Any) -> str | None:
        """Call one of the file's outermost nodes; the reason if it could not be run to its end."""
        self._pass, self._outer, self._inner = number, 0, 0
        self._frames, self._unkeyed = [], {}
        with self._surroundings():
            torch.set_num_threads(int(self.environment.get("VT_NUM_THREADS", "1")))
            try:
                self.namespace[node](*args)
            except StopPass as stopped:
                return str(stopped) or None
            except NodeFailed as failed:
                return str(failed)
        return None

    def _node_checker(
        self, weights: object, outputs: object, templates: object
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """The decorator of nodes; what it declares was read from the source already."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            spec = self.description.nodes[function.__name__]

            def node(*args: Any, **kwargs: Any) -> Any:
                return self._call(spec, function, args, kwargs)

            node.__name__, node.__doc__ = function.__name__, function.__doc__
            return node

        return decorate

    # ---------------------------------------------------------------- one call of one node

    def _call(
        self,
        spec: NodeSpec,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        templates = self._templates(spec, kwargs)
        keys = [None if k is None else k.format(**templates) for k in spec.outputs]
        frame = Frame(spec, templates, self._unit(keys), self._refs(args, kwargs))
        depth = len(self._frames)
        if depth:
            self._frames[-1].called = True
        if depth == 1:
            self._outer, self._inner = self._outer + 1, 0
            self._stop_behind_last_layer(frame.unit)
            if not self._wanted(frame.unit, keys):
                return self._from_recording(keys)
            frame.recorded = self._asked_for(frame.unit)
        elif depth:
            frame.recorded = self._frames[-1].recorded
        self._frames.append(frame)
        try:
            return self._run(frame, function, args, kwargs, keys)
        finally:
            self._frames.pop()
            if depth == 1:
                self._forget_inner()

    def _templates(self, spec: NodeSpec, kwargs: dict[str, Any]) -> dict[str, Any]:
        for name in spec.templates:
            if name not in kwargs:
                raise self.description.error(spec, f"called without template {name} as a keyword")
        return {name: kwargs[name] for name in spec.templates}

    def _run(
        self,
        frame: Frame,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keys: list[str | None],
    ) -> Any:
        started = time.perf_counter()
        try:
            weights = self._load_weights(frame)
        except KeyError as missing:
            reason = f"weight {missing.args[0]} is not in the checkpoint"
            if self.scope.known is not None:
                raise self.description.error(frame.spec, reason) from None
            return self._give_up(frame, keys, "error", reason)
        with self._bound(weights):
            try:
                result = function(*args, **kwargs)
            except (V4ToolError, StopPass):
                raise
            except NodeFailed as failed:
                return self._give_up(frame, keys, "unjudged", str(failed))
            except Exception as error:
                return self._give_up(frame, keys, "error", _why(error))
            values = result if isinstance(result, tuple) else (result,)
            if not keys:
                self._finish(frame, (), (), started)
                return result
            self._check_values(frame.spec, values)
            choice = self._same_choice(frame.spec, args, weights)
            comparisons, judges, handed = [], [], []
            for key, value in zip(keys, values, strict=True):
                comparison, judge, on = self._judge(frame, key, value, choice, weights, args)
                handed.append(on)
                if comparison is not None:
                    comparisons.append(comparison)
                    judges.append(judge)
        self._finish(frame, tuple(comparisons), tuple(judges), started, keys, handed)
        return tuple(handed) if isinstance(result, tuple) else handed[0]

    def _load_weights(self, frame: Frame) -> dict[str, Tensor]:
        """The node's weights by their local names; KeyError for one that is not there."""
        keys = frame.spec.weights.items()
        return {name: self.weights(key.format(**frame.templates)) for name, key in keys}

    @contextmanager
    def _bound(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Weights as globals of the file; what an outer node bound there comes back after."""
        missing = object()
        before = {name: self.namespace.get(name, missing) for name in weights}
        self.namespace.update(weights)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is missing:
                    self.namespace.pop(name, None)
                else:
                    self.namespace[name] = value

    def _check_values(self, spec: NodeSpec, values: tuple[Any, ...]) -> None:
        if len(values) != len(spec.outputs):
            problem = f"gives {len(values)} values, declares {len(spec.outputs)}"
            raise self.description.error(spec, problem)
        for key, value in zip(spec.outputs, values, strict=True):
            if key is not None and not isinstance(value, Tensor):
                problem = f"gives {type(value).__name__} for {key}, not a tensor"
                raise self.description.error(spec, problem)

    def _judge(
        self,
        frame: Frame,
        key: str | None,
        value: Any,
        choice: Callable[[Tensor, Tensor], bool] | None,
        weights: dict[str, Tensor],
        args: tuple[Any, ...],
    ) -> tuple[Comparison | None, ValueRef | None, Any]:
        """Compare one returned value: (comparison, the inner value that it judges, what is handed
        on)."""
        if key is None:
            return None, None, value
        judge = self._ref(value)
        if key not in self._keys:
            return self._absent(frame, key), judge, value
        recorded = self.recording.read(key)
        loose = frame.unit in self._rounded
        found = compare(key, value, recorded, self.rule, loose=loose, same_choice=choice)
        if found.fails:
            found = other_rows(found, recorded, weights, args)
        on = value if self.scope.chained else self._hand_on(frame.unit, value, recorded)
        return found, judge, on

    def _absent(self, frame: Frame, key: str) -> Comparison:
        if self.scope.partial:
            return Comparison(key, "unrecorded")
        known = self.scope.known
        if known is not None and generic(key) not in known:
            raise self.description.error(frame.spec, f"output {key} is in no recording")
        return Comparison(key, "missing", note="expected by the description, not in the recording")

    def _hand_on(self, unit: str, value: Tensor, recorded: Tensor) -> Tensor:
        """The recorded value in the computed one's form, where it has that form at all."""
        if value.shape != recorded.shape:
            return value
        if not value.is_floating_point():
            return value if recorded.is_floating_point() else recorded.to(value.dtype)
        recorded = recorded.to(torch.float32)
        if value.dtype == torch.bfloat16:
            return recorded.to(torch.bfloat16) if bf16_valued(recorded) else recorded
        same = value.to(torch.float32) == recorded
        if bool(same.all()):
            return value
        self._rounded.add(unit)
        return torch.where(same, value, recorded.to(value.dtype))

    def _same_choice(
        self, spec: NodeSpec, args: tuple[Any, ...], weights: dict[str, Tensor]
    ) -> Callable[[Tensor, Tensor], bool] | None:
        """What the file offers for choices that may differ and be as good (`EQUALLY_GOOD`)."""
        offered = self.namespace.get("EQUALLY_GOOD", {}).get(spec.name)
        if offered is None:
            return None

        def judged(computed: Tensor, recorded: Tensor) -> bool:
            try:
                return bool(offered(args, weights, computed, recorded))
            except Exception:  # a damaged table may point anywhere; it is then no equal choice
                return False

        return judged

    def _give_up(self, frame: Frame, keys: list[str | None], status: str, reason: str) -> Any:
        """A node that could not be computed: go on with what is recorded of it, if all of it is."""
        found = tuple(
            Comparison(key, status if key in self._keys else "missing", note=reason)  # type: ignore[arg-type]
            for key in keys
            if key is not None and (key in self._keys or not self.scope.partial)
        )
        self._finish(frame, found, (None,) * len(found), time.perf_counter())
        if not keys or any(key is None or key not in self._keys for key in keys):
            raise NodeFailed(f"{label(frame.spec, frame.templates)}: {reason}")
        return self._from_recording(keys)

    def _from_recording(self, keys: list[str | None]) -> Any:
        values = [None if key is None or key not in self._keys else _typed(self.recording.read(key))
                  for key in keys]  # fmt: skip
        return values[0] if len(values) == 1 else tuple(values)

    def _finish(
        self,
        frame: Frame,
        comparisons: tuple[Comparison, ...],
        judges: tuple[ValueRef | None, ...],
        started: float,
        keys: list[str | None] = [],  # noqa: B006  (never written)
        values: list[Any] = [],  # noqa: B006
    ) -> None:
        """Put the node's result on record and remember its values that no key judges."""
        self._inner += 1
        order = (self._pass, self._outer, self._inner)
        unkeyed = []
        for position, (key, value) in enumerate(zip(keys, values, strict=True)):
            if key not in self._keys and self._made_here(frame, value):
                unkeyed.append(position)
                self._remember(value, ValueRef(order, position))
        if len(self._frames) > 1:
            self._frames[-2].received |= {_memory(v) for v in values if isinstance(v, Tensor)}
        if not frame.recorded or (not comparisons and not keys):
            return
        names = [c.key for c in comparisons] or [k for k in keys if k is not None]
        self.results.append(
            NodeResult(
                order=order,
                kind=frame.spec.name,
                label=label(frame.spec, frame.templates),
                block=self._block(names),
                line=frame.spec.line,
                comparisons=comparisons,
                composite=frame.called,
                unkeyed_inputs=frame.inputs,
                unkeyed_outputs=tuple(unkeyed),
                judges=judges,
                seconds=time.perf_counter() - started,
            )
        )
        if len(self._frames) == 2:
            self._end_of_unit(names)

    def _end_of_unit(self, names: list[str]) -> None:
        self.watch(names[0] if names else "")
        if self.scope.fail_fast and any(result.fails for result in self.results):
            raise StopPass("stopped at the first failure")

    # ---------------------------------------------------------------- units and origins

    def _unit(self, keys: list[str | None]) -> str:
        """The layer (or MTP, or the ends) that a node's keys belong to; an inner node's as its
        caller's."""
        for key in keys:
            match = UNIT.match(key) if key is not None else None
            if match:
                return match[1]
        if len(self._frames) > 1:
            return self._frames[1].unit
        return ENDS

    def _block(self, names: list[str]) -> str:
        """Where the keys of the running outermost node lie: `decode.0.layers.3`, `mtp.0.prefill`,
        or ``."""
        key = next((n for n in names), "")
        match = re.match(r"((?:decode\.\d+\.)?layers\.\d+|mtp\.\d+\.\w+|decode\.\d+)\.", key)
        if match:
            return match[1]
        for frame in reversed(self._frames[1:]):
            for output in frame.spec.keys:
                outer = re.match(r"((?:decode\.\d+\.)?layers\.\d+|mtp\.\d+\.\w+|decode\.\d+)\.",
                                 output.format(**frame.templates))  # fmt: skip
                if outer:
                    return outer[1]
        return ""

    def _asked_for(self, unit: str) -> bool:
        return self.scope.units is None or unit in self.scope.units

    def _stop_behind_last_layer(self, unit: str) -> None:
        last, (kind, _, number) = self.scope.last_layer, unit.partition(".")
        if last is not None and (kind != "layers" or int(number) > last) and self._outer > 2:
            raise StopPass

    def _wanted(self, unit: str, keys: list[str | None]) -> bool:
        """Whether an outermost node has to run; if not, what it gives stands in the recording or is
        not used."""
        if unit.startswith("mtp.") and not self.scope.mtp:
            return False
        if self._asked_for(unit) or not keys:
            return True
        return any(key is None or key not in self._keys for key in keys)

    def _refs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ValueRef, ...]:
        found = [self._ref(value) for value in (*args, *kwargs.values())]
        return tuple(dict.fromkeys(ref for ref in found if ref is not None))

    def _ref(self, value: Any) -> ValueRef | None:
        """The origin of a value that no key judges, recognised by its memory (views share it)."""
        if not isinstance(value, Tensor) or not value.numel():
            return None
        entry = self._unkeyed.get(_memory(value))
        return entry[1] if entry else None

    def _made_here(self, frame: Frame, value: Any) -> bool:
        """Whether a node computed a tensor itself and does not pass on what another one gave it."""
        if not isinstance(value, Tensor) or _memory(value) in frame.received:
            return False
        return self._ref(value) is None

    def _remember(self, value: Tensor, ref: ValueRef) -> None:
        """Keep an unjudged value alive until its unit ends, so that its memory is not another's."""
        if value.numel():
            depth = len(self._frames)
            self._unkeyed[_memory(value)] = (value, ref, depth)

    def _forget_inner(self) -> None:
        self._unkeyed = {k: v for k, v in self._unkeyed.items() if v[2] <= 2}


def label(spec: NodeSpec, templates: dict[str, Any]) -> str:
    """A node's kind with the templates that tell its uses apart: `q_linear[attn.wq_a]`."""
    distinct = [
        str(value)
        for name, value in templates.items()
        if name not in ("prefix", "wprefix", "stage", "layer")
    ]
    return f"{spec.name}[{', '.join(distinct)}]" if distinct else spec.name


def _memory(value: Tensor) -> int:
    """Where a tensor's storage lies; views have their base's."""
    return value.untyped_storage().data_ptr()


def _typed(recorded: Tensor) -> Tensor:
    """A recorded value as the model holds it: BF16 where it is a BF16 value."""
    if not recorded.is_floating_point():
        return recorded
    recorded = recorded.to(torch.float32)
    return recorded.to(torch.bfloat16) if bf16_valued(recorded) else recorded.to(torch.float64)


def _why(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
