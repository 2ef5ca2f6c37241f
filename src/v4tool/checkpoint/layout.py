"""Every tensor of a checkpoint, its dtype, shape and shard, derived from the configuration (SPEC
2).

The architecture of the configuration says which tensors there are (`layout_v4`, `layout_v41`).
Left out: where the bytes lie (`shards.py`). The draft blocks are left out where the
configuration's `mtp_problem` says that they cannot be computed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from v4tool.config import ModelConfig

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
"""Bytes per stored element by safetensors dtype; an I8 element of a weight holds two FP4 codes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor: safetensors dtype name, stored shape, number of its shard (from 1).

    used: whether any pass reads it; what none does (the image part) may be absent.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: int
    used: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)

    @property
    def parameters(self) -> int:
        """Parameters held: FP4 codes counted one by one; scales and the hash table hold none."""
        per_element = {"F8_E8M0": 0, "I64": 0, "I8": 2}.get(self.dtype, 1)
        return per_element * prod(self.shape)


@dataclass(frozen=True)
class Totals:
    """Sums over a layout: tensors (all, and those of MTP), bytes on disk, parameters."""

    tensors: int
    mtp_tensors: int
    total_size: int
    parameters: int


Entry = tuple[str, str, tuple[int, ...]]
"""Name below a path, dtype, shape."""
Place = tuple[str, Iterable[Entry]]
"""A path and the entries below it, all in one shard."""


def layout(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> TensorSpec of every tensor of the checkpoint, in the order of the shards (SPEC 2)."""
    architecture = config.architecture
    shards: Iterator[list[Place]] = architecture.load("layout")(config)
    out: dict[str, TensorSpec] = {}
    for number, places in enumerate(shards, 1):
        for path, entries in places:
            for name, dtype, shape in entries:
                whole = f"{path}.{name}" if path else name
                out[whole] = TensorSpec(dtype, shape, number, architecture.reads(whole))
    return out


def totals(specs: Mapping[str, TensorSpec]) -> Totals:
    """Count tensors, bytes and parameters of a layout or of a part of one."""
    return Totals(
        tensors=len(specs),
        mtp_tensors=sum(name.startswith("mtp.") for name in specs),
        total_size=sum(s.nbytes for s in specs.values()),
        parameters=sum(s.parameters for s in specs.values()),
    )


def shard_name(shard: int, count: int) -> str:
    """File name of shard `shard` (from 1) of `count`."""
    return f"model-{shard:05d}-of-{count:05d}.safetensors"
