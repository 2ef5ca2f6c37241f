"""Checks of a checkpoint's payload: unfinished downloads, NaN scales, invalid routing tables.

Each check refuses values that no trained checkpoint has (SPEC section 2), so that a damaged file is
reported before it is used. Left out: NaN codes in weights (`v4tool check --port`).
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from v4tool.checkpoint.layout import TensorSpec
from v4tool.checkpoint.tensor_index import TensorIndex
from v4tool.errors import CheckpointError
from v4tool.safetensors_header import Entry

PROBE = 4096
"""Bytes that are read first in a search for bytes other than zero."""
_VOCABULARY = ("embed.weight", "head.weight")


def zero_tails(found: TensorIndex, specs: Mapping[str, TensorSpec]) -> list[str]:
    """A line for each shard in which weights of the layout end in zeros: an unfinished download.

    Tensors outside the layout are ignored: they may be zero or empty.
    """
    out = []
    for file, header in found.headers.items():
        start = _zeros_from(found.directory / file, header.length, header.size)
        hit = [
            name
            for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].start)
            if name in specs
            and entry.stop - max(entry.start, start) >= _fewest_zeros(name, specs[name], entry)
        ]
        if hit:
            out.append(
                f"{file}: its last {header.size - start} bytes are zero, from {hit[0]} on "
                f"({len(hit)} weights), as after a download that was not finished"
            )
    return out


def _fewest_zeros(name: str, spec: TensorSpec, entry: Entry) -> float:
    """Trailing zero bytes of a tensor that show an unfinished download; inf if no number does.

    In embeddings some are normal: rows of tokens that are never used may be zero.
    """
    if not entry.nbytes:
        return math.inf
    if spec.dtype in ("F8_E4M3", "I8"):
        return min(PROBE, entry.nbytes)
    return entry.nbytes / 16 if name in _VOCABULARY else math.inf


def _zeros_from(path: Path, start: int, stop: int) -> int:
    """The offset, `start` or above, from which on the file has only zeros."""
    step = PROBE
    with path.open("rb") as f:
        while stop > start:
            begin = max(start, stop - step)
            f.seek(begin)
            kept = len(f.read(stop - begin).rstrip(b"\0"))
            if kept:
                return begin + kept
            stop, step = begin, 1 << 20
    return start


def never_zero(name: str, spec: TensorSpec) -> bool:
    """Whether no trained checkpoint has only zeros here; a single scale may be 2^-127 (code 0)."""
    if spec.dtype in ("F8_E4M3", "I8"):
        return True
    if spec.dtype == "F8_E8M0":
        return spec.nbytes > 1
    return name in _VOCABULARY


def scale_codes(name: str, values: Tensor, *, allow_nan: bool = False) -> Tensor:
    """E8M0 codes (uint8), none of them NaN unless allowed; F32 scales are turned into them."""
    if values.dtype == torch.float32:
        return _codes_of_powers(name, values, allow_nan)
    if not allow_nan and b"\xff" in values.numpy().tobytes():
        count = int((values == 0xFF).sum())
        raise CheckpointError(f"{name}: {count} of {values.numel()} scales are 0xFF (NaN)")
    return values


def check_bias(name: str, values: Tensor) -> None:
    """No bias of the gate is NaN: it only selects experts, so no recorded value would show it."""
    if count := int(values.isnan().sum()):
        raise CheckpointError(f"{name}: {count} of {values.numel()} biases are NaN")


def _codes_of_powers(name: str, values: Tensor, allow_nan: bool) -> Tensor:
    """F32 powers of two from 2^-127 to 2^127 as E8M0 codes; anything else is refused, NaN unless
    allowed.
    """
    bits = values.view(torch.int32)
    smallest = bits == 1 << 22  # 2^-127 is subnormal in F32
    codes = torch.where(smallest, 0, bits >> 23)
    wrong = ((bits & 0x7FFFFF) != 0) & ~smallest | (codes < 0) | (codes > 254) | (bits == 0)
    if allow_nan:
        codes = torch.where(values.isnan(), 0xFF, codes)
        wrong &= ~values.isnan()
    if wrong.any():
        found = values[wrong][0].item()
        raise CheckpointError(
            f"{name}: expected powers of two from 2^-127 to 2^127, found {found!r}"
        )
    return codes.to(torch.uint8)


def check_experts(name: str, table: Tensor, experts: int) -> None:
    """Each row of `tid2eid` [rows, k] must name k different experts."""
    ordered = table.sort(dim=-1).values
    wrong = ((table < 0) | (table >= experts)).any(-1)
    wrong |= (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    if wrong.any():
        row = table[wrong][0].tolist()
        raise CheckpointError(
            f"{name}: expected different experts 0 ... {experts - 1} in a row, found {row} "
            f"({int(wrong.sum())} of {len(table)} rows)"
        )
