"""Runs the nodes of a `.vt` file against one recording and collects the results.

A node's weights are loaded before it runs and released after it; `judging` compares the values
that it returns and chooses those that are handed on. A node that fails on damaged inputs is a
result as well: the run goes on with the recorded outputs. Left out: which passes are run (`passes`,
`recording`), and which node is wrong (`verdict`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from v4tool.errors import V4ToolError, VtError
from v4tool.verify.compare import Rule
from v4tool.verify.frames import Frame, Judged, NodeFailed, RunScope, StopPass
from v4tool.verify.judging import Judge, OutputJudge
from v4tool.verify.language import Description, NodeSpec
from v4tool.verify.locations import ENDS, block_of, layer_number, unit_of
from v4tool.verify.provenance import OUTERMOST, Provenance, memory
from v4tool.verify.results import Comparison, NodeResult, ValueRef
from v4tool.verify.tensors import Recorded, Weights
from v4tool.verify.vt_module import execute, one_line, vt_environment, vt_lang


@dataclass
class Runtime:
    """Executes a description against one recording; `results` collects what was found."""

    description: Description
    recording: Recorded
    weights: Weights
    rule: Rule
    scope: RunScope
    environment: dict[str, str]
    watch: Callable[[str], None] = lambda key: None
    results: list[NodeResult] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._judge = self._make_judge()
        self._module = vt_lang(
            {
                "NodeChecker": self._node_checker,
                "register_safetensors": lambda weights, dump: None,
                "load_weight": self._weight,
                "load_activation": self._activation,
            }
        )
        self._frames: list[Frame] = []
        self._pass, self._outer, self._inner, self._layers_seen = 0, 0, 0, False
        self._provenance = Provenance()

    def _make_judge(self) -> Judge:
        """Who compares values and hands them on. A subclass may judge by other rules."""
        return OutputJudge(self.description, self.recording, self.rule, self.scope)

    # ---------------------------------------------------------------- loading and calling

    def load(self) -> None:
        """Execute the file's top level. VtError where it fails."""
        with vt_environment(self._module, self.environment):
            self.namespace = execute(self.description)
        self._judge.equally_good = self.namespace.get("EQUALLY_GOOD", {})

    def run_pass(self, number: int, node: str, *args: Any) -> str | None:
        """Call the node of a pass; the reason if it could not be run to its end."""
        self._pass, self._outer, self._inner, self._layers_seen = number, 0, 0, False
        self._frames, self._provenance = [], Provenance()
        with vt_environment(self._module, self.environment):
            try:
                self.namespace[node](*args)
            except StopPass:
                return None
            except NodeFailed as failed:
                return str(failed)
        return None

    def _node_checker(
        self, weights: object, outputs: object, templates: object
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """The decorator of nodes; its arguments were read from the source by `language`."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            spec = self.description.nodes[function.__name__]

            def node(*args: Any, **kwargs: Any) -> Any:
                return self._call(spec, function, args, kwargs)

            node.__name__, node.__doc__ = function.__name__, function.__doc__
            return node

        return decorate

    def _weight(self, key: str) -> Tensor:
        try:
            return self.weights(key)
        except KeyError:
            name = self.description.path.name
            raise VtError(f"{name}: weight {key} is not in the checkpoint") from None

    def _activation(self, key: str) -> Tensor:
        if key not in self._judge.keys:
            raise NodeFailed(f"{key} is not in the recording")
        return self.recording.read(key)

    # ---------------------------------------------------------------- one call of one node

    def _call(
        self,
        spec: NodeSpec,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        frame = self._frame(spec, args, kwargs)
        outermost = len(self._frames) == OUTERMOST - 1
        if self._frames:
            self._frames[-1].called = True
        if outermost:
            self._outer, self._inner = self._outer + 1, 0
            self._stop_after_last_layer(frame.unit)
            if not self._has_to_run(frame):
                return self._judge.from_recording(frame.keys)
        self._frames.append(frame)
        try:
            return self._run(frame, function, kwargs)
        finally:
            self._frames.pop()
            if outermost:
                self._provenance.drop_inner()

    def _frame(self, spec: NodeSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        for name in spec.templates:
            if name not in kwargs:
                raise self.description.error(spec, f"called without template {name} as a keyword")
        templates = {name: kwargs[name] for name in spec.templates}
        keys = tuple(None if key is None else key.format(**templates) for key in spec.outputs)
        inside = len(self._frames) >= OUTERMOST
        outer = self._frames[-1] if inside else None
        unit = unit_of(keys) or (outer.unit if outer else ENDS)
        own = block_of(key for key in keys if key is not None)
        return Frame(
            spec=spec,
            templates=templates,
            keys=keys,
            unit=unit,
            block=own or (outer.block if outer else ""),
            args=args,
            inputs=self._provenance.of_all((*args, *kwargs.values())),
            recorded=outer.recorded if outer else self.scope.asks_for(unit),
        )

    def _stop_after_last_layer(self, unit: str) -> None:
        """End the pass at the first node after the last layer asked for."""
        if self.scope.last_layer is None:
            return
        number = layer_number(unit)
        if number is None:
            if self._layers_seen:
                raise StopPass
        elif number > self.scope.last_layer:
            raise StopPass
        else:
            self._layers_seen = True

    def _has_to_run(self, frame: Frame) -> bool:
        """Whether an outermost node must run; if not, its outputs are recorded, or unused."""
        if frame.unit.startswith("mtp.") and not self.scope.mtp:
            return False
        if self.scope.asks_for(frame.unit) or not frame.keys:
            return True
        return any(key is None or key not in self._judge.keys for key in frame.keys)

    def _run(self, frame: Frame, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        try:
            weights = self._load_weights(frame)
        except KeyError as missing:
            reason = f"weight {missing.args[0]} is not in the checkpoint"
            if self.scope.known is not None:
                raise self.description.error(frame.spec, reason) from None
            return self._give_up(frame, "error", reason)
        with self._bound(weights):
            try:
                result = self._compute(frame, function, kwargs)
            except (V4ToolError, StopPass):
                raise
            except NodeFailed as failed:
                return self._give_up(frame, "unjudged", str(failed))
            except Exception as error:
                return self._give_up(frame, "error", one_line(error))
            if not frame.keys:
                self._finish(frame, [])
                return result
            judged = self._judge.judge_all(frame, result, weights, self._provenance)
        self._finish(frame, judged)
        handed = tuple(j.value for j in judged)
        return handed if isinstance(result, tuple) else handed[0]

    def _compute(self, frame: Frame, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """What the node's function returns, with its weights bound."""
        return function(*frame.args, **kwargs)

    def _load_weights(self, frame: Frame) -> dict[str, Tensor]:
        """The node's weights by their local names; KeyError if the checkpoint lacks one."""
        keys = frame.spec.weights.items()
        return {name: self.weights(key.format(**frame.templates)) for name, key in keys}

    @contextmanager
    def _bound(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Context with the weights as globals of the file; restores those of an outer node."""
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

    # ---------------------------------------------------------------- a node that fails

    def _give_up(self, frame: Frame, status: Literal["error", "unjudged"], reason: str) -> Any:
        """The recorded outputs of a node that could not be computed; NodeFailed if one is not."""
        found = [Comparison(k, status, note=reason) for k in frame.keys if k in self._judge.keys]
        found += [
            self._judge.absent(frame, k) for k in frame.keys if k and k not in self._judge.keys
        ]
        self._finish(frame, [Judged(comparison, None, None) for comparison in found])
        if not frame.keys or any(key not in self._judge.keys for key in frame.keys):
            raise NodeFailed(f"{frame.label}: {reason}")
        return self._judge.from_recording(frame.keys)

    # ---------------------------------------------------------------- adding the result

    def _finish(self, frame: Frame, judged: list[Judged]) -> None:
        """Add the node's result and remember its unkeyed outputs."""
        self._inner += 1
        order = (self._pass, self._outer, self._inner)
        unkeyed = self._remember(frame, judged, order)
        if not frame.recorded or not frame.keys:
            return
        compared = [j for j in judged if j.comparison is not None]
        self.results.append(
            NodeResult(
                order=order,
                kind=frame.spec.name,
                label=frame.label,
                block=frame.block,
                line=frame.spec.line,
                comparisons=tuple(j.comparison for j in compared if j.comparison is not None),
                composite=frame.called,
                unkeyed_inputs=frame.inputs,
                unkeyed_outputs=unkeyed,
                judges=tuple(j.judges for j in compared),
                seconds=time.perf_counter() - frame.started,
            )
        )
        if len(self._frames) == OUTERMOST:
            self._end_of_unit(next((key for key in frame.keys if key), frame.label))

    def _remember(
        self, frame: Frame, judged: list[Judged], order: tuple[int, int, int]
    ) -> tuple[int, ...]:
        """Remember the values that this node made itself and that are not judged: positions."""
        depth, unkeyed = len(self._frames), []
        values = [j.value for j in judged]
        for position, value in enumerate(values):
            if not isinstance(value, Tensor) or self._is_judged(judged[position]):
                continue
            if memory(value) not in frame.received and self._provenance.of(value) is None:
                unkeyed.append(position)
                self._provenance.add(value, ValueRef(order, position), depth)
        if depth > 1:
            self._frames[-2].received |= {memory(v) for v in values if isinstance(v, Tensor)}
        return tuple(unkeyed)

    @staticmethod
    def _is_judged(one: Judged) -> bool:
        return one.comparison is not None and one.comparison.judged

    def _end_of_unit(self, key: str) -> None:
        self.watch(key)
        if self.scope.fail_fast and any(result.fails for result in self.results):
            raise StopPass
