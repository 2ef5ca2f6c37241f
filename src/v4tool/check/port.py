"""Self-test of the port on a checkpoint (`check --port`): layout, weights, kernels, single layers.

Each check gives one row: the tensors are those of the layout (SPEC section 2); no weight is NaN or
infinite; each kernel equals an independent formula (`kernels`); one layer of each type runs on the
real weights, reads all of its tensors and has finite outputs of the right shapes. A short test
before a long dump. Left out: the values of the layers' outputs, which need a reference.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from v4tool.check import kernels
from v4tool.check.kernels import CheckFailed
from v4tool.checkpoint.inspection import inspect
from v4tool.checkpoint.layout import TensorSpec, layout
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig, Numerics
from v4tool.errors import CheckpointError, InputError
from v4tool.model.block import block
from v4tool.model.scope import Scope, Segment
from v4tool.names import Step, bf16, generic, is_expert, layer_keys

if TYPE_CHECKING:
    from v4tool.names import Keys

Status = Literal["ok", "failed", "skipped"]
Progress = Callable[[int], None]
"""Called with the number of bytes of weights checked since the last call."""

NAN_CODES = {"F8_E4M3": (0x7F, 0xFF), "F8_E8M0": (0xFF,)}
"""Codes that are NaN; every FP4 code is finite."""
PIECE_BYTES = 64 << 20
"""Bytes of a weight that are in memory at a time."""
QUICK_ROWS = 128
"""Rows of each weight that a quick check reads."""
QUICK_TENSORS = 2000
"""Weights that a quick check reads, spread evenly over the checkpoint."""
TOKENS = 130
"""Length of the prompt that layers are run on: more than one compressed block of 128 tokens."""
QUICK_TOKENS = 9
OUTSIDE = ("embed", "enorm", "hnorm", "e_proj", "h_proj", "norm", "hc_head", "head", "logits")
"""Names below `mtp.<i>` that belong to MTP's input or head and not to its block start so."""


@dataclass(frozen=True)
class PortRow:
    """Result of one check: its name, status, a summary or the failure, and seconds taken."""

    name: str
    status: Status
    detail: str
    seconds: float


def check_port(
    directory: Path | str,
    *,
    quick: bool = False,
    layer: int | None = None,
    numerics: Numerics | None = None,
    progress: Progress | None = None,
) -> list[PortRow]:
    """Run all checks of the port on a checkpoint and return their rows in order.

    A failed check does not stop the others. quick: a sample of the weights and a short prompt;
    layer: run only this main layer (default: one of each type); progress: called with bytes of
    weights checked, `weight_bytes` in all. Raises InputError if there is no such layer.
    """
    numerics = numerics or Numerics()
    rows = [run_row("structure", lambda: structure(directory))]
    try:
        checkpoint = Checkpoint.open(directory)
    except CheckpointError as error:
        rows[0] = PortRow("structure", "failed", str(error), rows[0].seconds)
        checkpoint = None
    for name, task in kernels.TASKS.items():
        rows.append(run_row(name, lambda task=task: task(numerics)))  # type: ignore[misc]
    if checkpoint is None:
        return [
            *rows,
            PortRow("weights and layers", "skipped", "the checkpoint cannot be read", 0.0),
        ]
    with checkpoint:
        rows += list(
            _with_weights(checkpoint, quick, layer, numerics, progress or (lambda _: None))
        )
    return rows


def _with_weights(
    checkpoint: Checkpoint, quick: bool, layer: int | None, numerics: Numerics, progress: Progress
) -> Iterator[PortRow]:
    config = checkpoint.config
    if layer is not None and not 0 <= layer < config.n_layers:
        raise InputError(f"--layer: expected 0 to {config.n_layers - 1}, found {layer}")
    yield run_row("weights", lambda: weights(checkpoint, quick=quick, progress=progress))
    layers = layer_types(config) if layer is None else {f"layer {layer}": layer}
    for name, number in layers.items():
        yield run_row(name, lambda n=number: one_layer(checkpoint, n, numerics, quick=quick))  # type: ignore[misc]


def run_row(name: str, task: Callable[[], str]) -> PortRow:
    """Run one check, which returns a summary or raises `CheckFailed` or CheckpointError."""
    started = time.monotonic()
    try:
        status: Status = "ok"
        detail = task()
    except (CheckFailed, CheckpointError) as problem:
        status, detail = "failed", str(problem)
    return PortRow(name, status, detail, time.monotonic() - started)


def structure(directory: Path | str) -> str:
    """Names, dtypes and shapes equal the layout: no tensor is missing or different, and no unknown
    one may be a misnamed one of the layout.
    """
    rows = inspect(directory)
    wrong = [row for row in rows if row.status not in ("ok", "extra")]
    if wrong:
        kinds = {status: [r.name for r in wrong if r.status == status] for status in
                 ("missing", "unexpected", "different")}  # fmt: skip
        shown = "; ".join(
            f"{len(names)} {kind}, first {names[0]}" for kind, names in kinds.items() if names
        )
        raise CheckFailed(shown)
    extra = sum(row.status == "extra" for row in rows)
    beside = f"{extra} that it does not know" if extra else "nothing else"
    return f"{len(rows) - extra} tensors, all of the layout and {beside}"


def weight_bytes(config: ModelConfig, *, quick: bool) -> int:
    """Number of bytes of weights that `check_port` will read, for a progress bar."""
    config.architecture.require("check --port")
    specs = layout(config)
    return sum(_part(specs[name], quick).nbytes for name in _names_to_check(specs, quick))


def _names_to_check(specs: dict[str, TensorSpec], quick: bool) -> list[str]:
    names = [name for name, spec in specs.items() if spec.dtype != "I64"]
    if not quick:
        return names
    step = max(1, len(names) // QUICK_TENSORS)
    # an expert has six tensors: a step that shares a factor with 6 would miss some kinds of them
    while math.gcd(step, 6) > 1:
        step += 1
    return names[::step]


def _part(spec: TensorSpec, quick: bool) -> TensorSpec:
    """The part of a tensor that is read: its first QUICK_ROWS rows if the check is quick."""
    rows = min(QUICK_ROWS, spec.shape[0]) if quick else spec.shape[0]
    return TensorSpec(spec.dtype, (rows, *spec.shape[1:]), spec.shard)


def weights(checkpoint: Checkpoint, *, quick: bool, progress: Progress) -> str:
    """No weight is NaN or infinite; NaN scales are refused when they are read."""
    names = _names_to_check(checkpoint.specs, quick)
    checked = 0
    for name in names:
        spec = _part(checkpoint.specs[name], quick)
        row_bytes = max(1, spec.nbytes // spec.shape[0])
        for part in _pieces(checkpoint, name, spec):
            if bad := _not_finite(spec.dtype, part):
                raise CheckFailed(f"{name}: {bad} values are NaN or infinite")
            checked += len(part) * row_bytes
            progress(len(part) * row_bytes)
    share = "a sample of" if quick else "all"
    return f"{share} {len(names)} tensors, {checked / 2**30:.2f} GiB: no NaN, no infinity"


def not_finite_values(checkpoint: Checkpoint, name: str) -> int:
    """How many values or codes of a weight are NaN or infinite."""
    spec = checkpoint.specs[name]
    return sum(_not_finite(spec.dtype, part) for part in _pieces(checkpoint, name, spec))


def _pieces(checkpoint: Checkpoint, name: str, spec: TensorSpec) -> Iterator[Tensor]:
    """The rows of a weight that `spec` has, PIECE_BYTES at a time."""
    step = max(1, PIECE_BYTES // max(1, spec.nbytes // spec.shape[0]))
    for start in range(0, spec.shape[0], step):
        yield checkpoint.read_rows(name, start, min(start + step, spec.shape[0]))


def _not_finite(dtype: str, part: Tensor) -> int:
    if part.is_floating_point():
        return int((~part.isfinite()).sum())
    return sum(int((part == code).sum()) for code in NAN_CODES.get(dtype, ()))


def layer_types(config: ModelConfig) -> dict[str, int]:
    """The first layer of each type, by a description of the type; the MTP block is one."""
    types: dict[str, int] = {}
    for layer in range(config.n_layers):
        routing = "hash" if config.is_hash(layer) else "score"
        kind = f"layer of ratio {config.ratio(layer)}, {routing} routing"
        types.setdefault(kind, layer)
    if config.mtp_supported:
        types["MTP block"] = config.n_layers
    return types


class ReadTracker:
    """A weight reader over a checkpoint that collects the names of the tensors read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.names: set[str] = set()

    def nbytes(self, name: str) -> int:
        """As `Checkpoint`."""
        return self.checkpoint.nbytes(name)

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """As `Checkpoint`."""
        self.names.add(name)
        return self.checkpoint.read(name, buffer)

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """As `Checkpoint`."""
        self.names.add(name)
        return self.checkpoint.read_rows(name, start, stop, buffer)

    def gather_rows(self, name: str, ids: Tensor) -> Tensor:
        """As `Checkpoint`."""
        self.names.add(name)
        return self.checkpoint.gather_rows(name, ids)

    def advise(self, names: list[str]) -> None:
        """As `Checkpoint`."""
        self.checkpoint.advise(names)


def one_layer(checkpoint: Checkpoint, layer: int, numerics: Numerics, *, quick: bool) -> str:
    """Run one block on embeddings of arbitrary ids, and check its outputs and what it read.

    The outputs must be the keys of SPEC section 6, with their shapes and finite.
    """
    config = checkpoint.config
    tokens = QUICK_TOKENS if quick else TOKENS
    ids = torch.arange(tokens) * 31 % config.vocab_size
    seen: dict[str, Tensor] = {}
    watched, step = ReadTracker(checkpoint), Step("", tokens, 0)
    segment = Segment(step, ids, {}, seen.__setitem__)
    scope = Scope(watched, config, numerics, (segment,), path=config.block_path(layer) + ".")
    x = checkpoint.gather_rows("embed.weight", ids).unsqueeze(1).repeat(1, config.hc_mult, 1)
    seen["out"] = block(scope, x, layer).unsqueeze(0)
    _judge_outputs(seen, block_keys(config, layer, step))
    experts_read = _judge_reading(watched.names, checkpoint, layer, tokens)
    outputs = f"{tokens} tokens, {len(seen)} outputs finite"
    return f"{outputs}, {experts_read} experts reached, all weights read"


def block_keys(config: ModelConfig, layer: int, step: Step) -> "Keys":
    """The keys of one block without its path in front; of MTP without its input and its head."""
    keys = layer_keys(config, layer, step)
    if not config.is_mtp(layer):
        return keys
    inside = {key: spec for key, spec in keys.items() if not key.startswith(OUTSIDE)}
    return {**inside, "out": bf16(1, step.tokens, config.hc_mult, config.dim)}


def _judge_outputs(seen: dict[str, Tensor], keys: "Keys") -> None:
    missing = [key for key in keys if not is_expert(key) and key not in seen]
    unknown = [key for key in seen if generic(key) not in keys]
    if missing or unknown:
        raise CheckFailed(f"keys missing {missing[:3]}, keys unknown {unknown[:3]}")
    for key, value in seen.items():
        wanted = keys[generic(key)].shape
        if len(wanted) != value.dim() or any(
            n not in (None, found) for n, found in zip(wanted, value.shape, strict=True)
        ):
            raise CheckFailed(f"{key}: shape {list(value.shape)}, expected {list(wanted)}")
        if value.is_floating_point() and not value.isfinite().all():
            count = int((~value.isfinite()).sum())
            raise CheckFailed(f"{key}: {count} of {value.numel()} values are NaN or infinite")


def _judge_reading(read: Iterable[str], checkpoint: Checkpoint, layer: int, tokens: int) -> int:
    """Number of experts read; raises `CheckFailed` if a tensor that the block needs was not.

    Experts without a token may be unread, but not a part of one. A compressor's norm is read only
    if the prompt completes a block.
    """
    read, path = set(read), checkpoint.config.block_path(layer) + "."
    mine = {name for name in checkpoint.specs if name.startswith(path)}
    experts = {name.split(".experts.")[1].split(".")[0] for name in read if ".ffn.experts." in name}
    without_block = tokens < checkpoint.config.ratio(layer)
    for name in sorted(mine - read):
        end = name.removeprefix(path)
        if end.startswith(OUTSIDE):
            continue
        if without_block and end == "attn.compressor.norm.weight":
            continue
        number = end.split(".")[2] if end.startswith("ffn.experts.") else None
        if number is None or number in experts:
            raise CheckFailed(f"{name} was never read")
    return len(experts)
