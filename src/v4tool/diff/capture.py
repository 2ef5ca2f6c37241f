"""Records a running torch model: forward hooks on the modules that a map names, into one file.

A module's output is recorded as NAME, the elements of a tuple as NAME.0, NAME.1, ..., its
arguments as NAME.in0, NAME.in1, ... in the order of the call, where the map asks for them. Every
call of the model is a pass: the first has bare names, later ones the map's `decode` pattern in
front. Floats become FP32, integers int32 where they fit. Left out: what names mean (`maps`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from v4tool.diff.maps import TensorMap, load_map, pattern
from v4tool.diff.steps import parse_step
from v4tool.errors import InputError, OutputError
from v4tool.record.writer import RecordingWriter
from v4tool.version import __version__

DECODE = "step{i}."
"""What stands before the names of decode step i where the map does not say."""
ELEMENT = re.compile(r"\d+|in\d+")
"""The parts of a rule's name that are elements of an output, or an argument, of a module."""
TENSORS_OF_A_MODULE = 4
"""Header space that is reserved for a module; the writer moves the payload if it is too little."""


@dataclass
class Point:
    """What is recorded of one module: its output, its arguments."""

    output: bool = False
    arguments: bool = False
    embedding: bool = False


@dataclass
class Capture:
    """An open capture. path: the file that is written; calls: of the model so far; names: so far.

    ids: the token ids of every call, where they could be seen.
    """

    path: Path
    rules: TensorMap | None
    writer: RecordingWriter
    calls: int = 0
    names: list[str] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = names_of(self.rules) if self.rules is not None else ()
        self._wanted = [pattern(name) for name, _ in named]
        self._known: dict[str, bool] = {}
        self._times: dict[str, int] = {}

    def begin_call(self, *_: object) -> None:
        """A call of the model begins."""
        self.calls += 1
        self._times.clear()

    def take(self, name: str, value: Any) -> None:
        """Record the tensors of a module's output or argument that the map has a rule for."""
        for inner, tensor in named_tensors(name, value):
            if self.rules is None or self._is_wanted(inner):
                self._put(inner, tensor)

    def take_ids(self, arguments: Sequence[Any]) -> None:
        """Remember the ids of a call: an integer argument [1, s] or [s] of the embedding."""
        found = next((a for a in arguments if isinstance(a, Tensor)), None)
        if found is None or found.is_floating_point() or self._call in self.ids:
            return
        if found.ndim > 1 and found.shape[0] != 1:
            raise InputError(
                f"{self.path}: expected one prompt in a call, found a batch of {found.shape[0]}"
            )
        self.ids[self._call] = [int(token) for token in found.flatten().tolist()]

    @property
    def _call(self) -> int:
        return max(self.calls - 1, 0)

    def _is_wanted(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = any(wanted.fullmatch(name) for wanted in self._wanted)
        return self._known[name]

    def _put(self, name: str, value: Tensor) -> None:
        full = prefix(self.rules, self._call) + name
        times = self._times.get(full, 0)
        self._times[full] = times + 1
        if times:
            full = f"{full}#{times}"
        self.writer.put(full, storable(value))
        self.names.append(full)

    def finish(self) -> None:
        """Write metadata and header, and give the file its name. InputError without a tensor."""
        if not self.names:
            raise InputError(
                f"{self.path}: expected a call of the model inside the block, found none"
            )
        self.writer.metadata |= ids_metadata(self.ids, self.calls)
        self.writer.close()


@contextmanager
def capture(
    model: nn.Module, path: Path, map_name: str | None = None, *, force: bool = False
) -> Iterator[Capture]:
    """Record the modules of `model` that a map names, or all of them, while the block runs.

    path: a .safetensors file; ranks of a process group write NAME.rank0.safetensors and so on. The
    file appears when the block ends, and does not if it raises. Raises InputError for a model that
    the map names no module of, for batches and for a block without a call; OutputError for a file
    that exists (unless force) or cannot be written.
    """
    rules = None if map_name is None else load_map(map_name)
    points = find_points(model, rules, map_name)
    place = rank_metadata()
    target = of_rank(path, place)
    metadata = {
        "written_by": f"v4tool {__version__}, capture",
        "model": type(model).__name__,
        "map": map_name or "",
        **place,
    }
    most = TENSORS_OF_A_MODULE * len(points)
    with RecordingWriter(target, most, metadata, force=force) as writer:
        captured = Capture(target, rules, writer)
        with hooked(model, points, captured):
            yield captured
        captured.finish()


@contextmanager
def hooked(model: nn.Module, points: Mapping[str, Point], captured: Capture) -> Iterator[None]:
    """Keep hooks on the modules; the model's own, which count calls, run first."""
    with ExitStack() as hooks:
        handle = model.register_forward_pre_hook(captured.begin_call, prepend=True)
        hooks.callback(handle.remove)
        for name, point in points.items():
            module = model.get_submodule(name)
            handle = module.register_forward_pre_hook(
                _before(name, point, captured), with_kwargs=True
            )
            hooks.callback(handle.remove)
            if point.output:
                hooks.callback(module.register_forward_hook(_after(name, captured)).remove)
        yield


def _before(name: str, point: Point, captured: Capture) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        if point.embedding:
            captured.take_ids(given)
        for number, value in enumerate(given if point.arguments else ()):
            captured.take(f"{name}.in{number}", value)

    return hook


def _after(name: str, captured: Capture) -> Any:
    return lambda module, args, output: captured.take(name, output)


def find_points(
    model: nn.Module, rules: TensorMap | None, map_name: str | None = None
) -> dict[str, Point]:
    """Module name -> what is recorded of it. InputError where the map names none of the modules."""
    modules = dict(model.named_modules())
    modules.pop("", None)
    if rules is None:
        found = {name: Point(output=True, arguments=True) for name in modules}
    else:
        found = _named_by(rules, modules)
    if not found:
        raise InputError(_no_modules(model, rules, map_name, list(modules)))
    if not any(point.embedding for point in found.values()):
        names = (name for name, module in modules.items() if isinstance(module, nn.Embedding))
        for name in names:
            found.setdefault(name, Point()).embedding = True
            break
    return found


def _no_modules(
    model: nn.Module, rules: TensorMap | None, map_name: str | None, modules: list[str]
) -> str:
    kind = f"{type(model).__name__}"
    if rules is None or not modules:
        return f"capture: expected a model with modules in it, found {kind} without"
    return (
        f"capture: expected modules that map {map_name} names, such as {rules.rules[0].name}, "
        f"found none among {len(modules)} modules of {kind}, such as {modules[-1]}"
    )


def _named_by(rules: TensorMap, modules: Mapping[str, nn.Module]) -> dict[str, Point]:
    """The modules that rules name, with or without an element or argument behind the name."""
    by_length: dict[int, list[tuple[re.Pattern[str], list[str], str]]] = {}
    for text, key in names_of(rules):
        parts = text.split(".")
        for length in range(len(parts), 0, -1):
            entry = (pattern(".".join(parts[:length])), parts[length:], key)
            if "{key}" not in text:
                by_length.setdefault(length, []).append(entry)
            if not ELEMENT.fullmatch(parts[length - 1]):
                break
    found: dict[str, Point] = {}
    for name in modules:
        for compiled, rest, key in by_length.get(name.count(".") + 1, ()):
            child = ".".join([name, *rest[:1]])
            if not compiled.fullmatch(name) or (rest and child in modules):
                continue
            point = found.setdefault(name, Point())
            argument = bool(rest) and rest[0].startswith("in")
            point.arguments |= argument
            point.output |= not argument
            point.embedding |= key == "embed.out"
    return found


def names_of(rules: TensorMap) -> list[tuple[str, str]]:
    """The patterns of names that a map needs, each with the key of its rule."""
    found = []
    for rule in rules.rules:
        others = (parse_step(text).other for text in rule.steps)
        found += [(rule.name, rule.key), *((other, "") for other in others if other is not None)]
    return found


def prefix(rules: TensorMap | None, call: int) -> str:
    """What stands before the names of a call, numbered from 0."""
    if call == 0:
        return ""
    text = (rules.decode if rules is not None else None) or DECODE
    return text.replace("{i+1}", str(call)).replace("{i}", str(call - 1))


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its name, those of a tuple or dictionary as `name.0`, `name.key`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(named_tensors(f"{name}.{k}", v) for k, v in value.items())
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(named_tensors(f"{name}.{i}", v) for i, v in enumerate(value))


def storable(value: Tensor) -> Tensor:
    """The value on the CPU in a dtype that recordings have; of a distributed tensor the whole."""
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    value = value.cpu()
    if value.is_floating_point():
        return value
    if value.dtype == torch.int64 and value.numel():
        low, high = (int(bound) for bound in value.aminmax())
        limits = torch.iinfo(torch.int32)
        return value.int() if limits.min <= low and high <= limits.max else value
    return value.int()


def ids_metadata(ids: Mapping[int, list[int]], calls: int) -> dict[str, str]:
    """The ids of the prompt, and of the decode steps where each had one token."""
    found = {"calls": str(max(calls, 1))}
    if 0 in ids:
        found["input_ids"] = json.dumps(ids[0])
    steps = [ids.get(call, []) for call in range(1, calls)]
    if all(len(step) == 1 for step in steps):
        found["decode_ids"] = json.dumps([step[0] for step in steps])
    return found


def rank_metadata() -> dict[str, str]:
    """Rank and size of the process group, where there is one of several processes."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return {}
    size = distributed.get_world_size()
    return {"rank": str(distributed.get_rank()), "world_size": str(size)} if size > 1 else {}


def of_rank(path: Path, place: Mapping[str, str]) -> Path:
    """The file of this rank. OutputError for another form than safetensors."""
    if path.suffix != ".safetensors":
        raise OutputError(f"{path}: expected a name that ends in .safetensors")
    return path.with_name(f"{path.stem}.rank{place['rank']}{path.suffix}") if place else path
