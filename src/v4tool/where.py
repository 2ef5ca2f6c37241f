"""Finds the source lines that compute a key: in the port (`model`) and in `verify/model.vt`.

The lines are derived by running. `lines_of` runs the part of the port that has the key, on a narrow
model with zero weights and no checkpoint, and traces which expression of the port produced every
tensor; the expression behind the tensor that is recorded under the key is the answer. Ratios,
routing and window are the model's own, and the tokens are as few as take the same branches.
Left out: the lines in `quant` and `model/layers.py`, which many keys share; the expression of the
port that calls them is named.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import currentframe
from itertools import islice
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from v4tool import model
from v4tool.checkpoint.layout import TensorSpec, layout
from v4tool.checkpoint.shards import TORCH_DTYPES
from v4tool.checkpoint.synth import reduce
from v4tool.config import ModelConfig, Numerics
from v4tool.config_fields import ACT_BLOCK, FP4_GROUP, KV_BLOCK
from v4tool.errors import InputError
from v4tool.model import stream
from v4tool.names import generic, layer_of, pass_of
from v4tool.verify.language import read_description
from v4tool.verify.listing import owner_of
from v4tool.verify.tensors import OWN_DESCRIPTION

PORT = Path(model.__path__[0])
SHARED = ("scope.py", "layers.py", "prefetch.py")
"""Files of the port that hold what all modules use; their callers are named instead."""
WRITES = ("__setitem__", "__iadd__", "__imul__")
"""Functions that change their first argument, besides those whose name ends with `_`."""


@dataclass(frozen=True)
class SourceLine:
    """One expression: its file, line (from 1), the function or node that it is in, its text."""

    path: Path
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class KeyLines:
    """Where a key is computed.

    port: the expression whose value is recorded; where its function is called from several places,
    the call that leads to the key follows, outwards until it is the only one. node: the node of
    `model.vt` that computes the key, None for token ids, which no node computes.
    """

    key: str
    port: tuple[SourceLine, ...]
    node: SourceLine | None


def lines_of(config: ModelConfig, key: str, length: int) -> KeyLines:
    """The lines that compute a key of a prompt of `length` tokens.

    key: as `names.recording_keys` lists it, or with a routed expert's number. InputError where no
    recording of this configuration and length has the key.
    """
    config.architecture.require("list keys --where")
    layer = layer_of(key)
    if length < 1:
        raise InputError(f"{key}: expected a prompt of at least 1 token, found {length}")
    if key.startswith("mtp.") and not config.mtp_supported:
        raise InputError(f"{key}: {config.mtp_problem}")
    if layer is not None and layer >= config.n_layers:
        raise InputError(f"{key}: expected a layer up to {config.n_layers - 1}, found {layer}")
    small = narrow(config, layer or 0)
    wanted = _narrow_key(key, layer)
    trace, recorded = _run(small, *_tokens(config, key, layer, length))
    if wanted not in recorded:
        raise InputError(f"{key}: expected a key that a prompt of {length} tokens records")
    port = tuple(_source_line(*call) for call in trace.distinct(recorded[wanted]))
    return KeyLines(key, port, _node(small, wanted))


def narrow(config: ModelConfig, layer: int) -> ModelConfig:
    """The configuration with one main layer, and widths as small as the fields' rules allow."""
    fields = reduce(config, layers=[layer]).model_dump()
    rope = config.rope_head_dim
    widths = dict.fromkeys(("dim", "q_lora_rank", "o_lora_rank", "moe_inter_dim"), ACT_BLOCK)
    counts = dict.fromkeys(
        ("vocab_size", "n_heads", "o_groups", "index_n_heads", "n_routed_experts"), 1
    )
    return type(config).model_validate(fields | widths | counts | {
        "n_activated_experts": 1,
        "head_dim": rope + KV_BLOCK,
        "index_head_dim": max(FP4_GROUP, 1 << (rope - 1).bit_length()),
    })  # fmt: skip


class ZeroWeights:
    """Weights of a layout, all zeros, made when they are read (the `Weights` of `model.scope`).

    A table of experts by token id must then allow only expert 0, as `narrow` gives it.
    """

    def __init__(self, specs: dict[str, TensorSpec]) -> None:
        self.specs = specs

    def nbytes(self, name: str) -> int:
        """Bytes of a weight as a checkpoint stores it."""
        return self.specs[name].nbytes

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """A whole weight, in the dtype in which `Checkpoint.read` gives it."""
        spec = self.specs[name]
        return torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """Some rows of a weight."""
        return self.read(name)[start:stop]

    def gather_rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a weight by number."""
        return self.read(name)[ids]

    def advise(self, names: list[str]) -> None:
        """Nothing has to be read ahead."""


Call = tuple[CodeType, int]
"""An expression that is being evaluated: the code it is in, and the offset of its instruction."""
Chain = tuple[Call, ...]
"""The expressions of the port that are being evaluated, innermost first."""


class ProducerTrace(TorchFunctionMode):
    """Traces, for every tensor that torch makes in this thread, the port's expressions behind it.

    A view keeps the producer of the memory it looks at, and integers in another dtype that of the
    integers; a function that writes into a tensor becomes its producer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._producers: dict[int, Chain] = {}
        self._chains: set[Chain] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, and note who produced its results."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = {_memory(tensor) for tensor in _tensors(args)}
        written = {_memory(args[0])} if _writes(name) else set()
        made = {_memory(tensor) for tensor in _tensors(result)} - given
        if made or written:
            chain = _port_chain(currentframe())
            self._chains.add(chain)
            if name == "to" and not result.is_floating_point():
                chain = self._producers.get(_memory(args[0]), chain)
            self._producers |= dict.fromkeys(made | written, chain)
        return result

    def producer(self, value: Tensor) -> Chain:
        """The expressions behind a tensor that was made under the trace."""
        return self._producers[_memory(value)]

    def distinct(self, chain: Chain) -> Iterator[Call]:
        """The chain as far as it distinguishes the value: up to a call that has only one caller."""
        for call in chain:
            yield call
            callers = {c[c.index(call) + 1 :] for c in self._chains if call in c}
            if len(callers) == 1:
                return


def _memory(tensor: Tensor) -> int:
    """The storage of a tensor: its views have the same."""
    handle: int = tensor.untyped_storage()._cdata
    return handle


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors among a function's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _writes(name: str) -> bool:
    return name in WRITES or (name.endswith("_") and not name.endswith("__"))


def _port_chain(frame: FrameType | None) -> Chain:
    """The expressions of the port in a stack, innermost first."""
    chain = []
    while frame is not None:
        if _is_port(frame.f_code.co_filename):
            chain.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(chain)


@cache
def _is_port(file: str) -> bool:
    path = Path(file)
    return path.parent == PORT and path.name not in SHARED


def _source_line(code: CodeType, instruction: int) -> SourceLine:
    """The source of an expression, in one line."""
    positions = islice(code.co_positions(), instruction // 2, None)
    first, last, start, stop = next(positions)
    assert first is not None
    rows = [getline(code.co_filename, n) for n in range(first, (last or first) + 1)]
    # without columns (`python -X no_debug_ranges`) the whole line has to do; they count bytes
    rows[-1] = rows[-1].encode()[:stop].decode()
    rows[0] = rows[0].encode()[start:].decode()
    function = code.co_qualname.replace("<locals>.", "")
    return SourceLine(Path(code.co_filename), first, function, _joined(rows))


def _joined(rows: Iterable[str]) -> str:
    """An expression of several rows in one, without the spaces that breaking it put in brackets."""
    return re.sub(r"(?<=[(\[{]) |,? (?=[)\]}])", "", " ".join("".join(rows).split()))


def _tokens(
    config: ModelConfig, key: str, layer: int | None, length: int
) -> tuple[int, int, stream.LayerRange]:
    """Tokens of the prompt, decode steps, and the part of the model that computes the key.

    A position keeps its place in its block of `ratio` tokens, and which side of the window's end
    it is on.
    """
    ratio = 0 if layer is None else config.ratio(layer)
    decode, mtp = re.match(r"decode\.(\d+)\.", key), key.startswith("mtp.")
    head = not mtp and key.removeprefix(pass_of(key)) in ("norm.out", "head.out")
    layer_range = stream.LayerRange(0 if layer is None else 1, head=head, mtp=mtp)
    if not decode and not mtp:
        return min(length, max(ratio, 1)), 0, layer_range
    position, window = length + (int(decode[1]) if decode else 0), config.window_size
    if position > window:
        position = window + (position - window) % max(ratio, 1)
    return position, 1 if decode else 0, layer_range


def _narrow_key(key: str, layer: int | None) -> str:
    """The key's name in the narrow run: one decode step, layer 0, any expert."""
    key = re.sub(r"^decode\.\d+\.", "decode.0.", generic(key))
    return key if layer is None else key.replace(f"layers.{layer}.", "layers.0.", 1)


@lru_cache(maxsize=8)
def _run(
    config: ModelConfig, tokens: int, decode: int, layer_range: stream.LayerRange
) -> tuple[ProducerTrace, dict[str, Chain]]:
    """Run a part of the narrow model: the trace, and the expressions behind every key recorded.

    One thread, so that a stack reaches from an operator to the pass.
    """
    recorded: dict[str, Chain] = {}

    def tap(key: str, value: Tensor) -> None:
        recorded.setdefault(generic(key), trace.producer(value))

    sequence = stream.Sequence([0] * tokens, tap, decode, [0] * decode)
    with ProducerTrace() as trace:
        weights = ZeroWeights(layout(config))
        stream.run(weights, config, Numerics(threads=1), [sequence], layer_range)
    return trace, recorded


def _node(config: ModelConfig, key: str) -> SourceLine | None:
    """The node of `model.vt` that computes a key of this configuration."""
    nodes = read_description(OWN_DESCRIPTION).nodes
    name = owner_of(key, nodes.values(), layout(config))
    if name is None:
        return None
    line = nodes[name].line
    return SourceLine(OWN_DESCRIPTION, line, name, getline(str(OWN_DESCRIPTION), line).strip())
