"""Recognises recordings in another form: F16, BF16 or F64 values, no batch dimension, other axes.

Many tensors of such a file deviate in the same way, which `common_forms` returns as one finding in
place of one per key. Left out: other dtypes and shapes, which `specification` reports by key.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from v4tool.names import KeySpec
from v4tool.record.scan import Header
from v4tool.safetensors_header import Entry

LEAST_SHARE = 1 / 4
"""Share of a file's tensors that must deviate alike: 3-dimensional ones are about a half of all."""
READS = "; v4tool diff reads such files"
WITH_MAP = f"{READS} with a map that has `transpose`"


@dataclass(frozen=True)
class CommonForm:
    """A deviation that many tensors share: texts of the finding, and the keys it stands for."""

    expected: str
    found: str
    keys: frozenset[str]


Pair = tuple[KeySpec, Entry]
"""What a key must be, and what the file has."""


def common_forms(pairs: Sequence[Pair]) -> Iterator[CommonForm]:
    """The deviations that tensors of one file share; pairs: its tensors of known keys."""
    floats = [pair for pair in pairs if pair[0].dtype == "F32"]
    for dtype in ("F16", "BF16", "F64"):
        alike = [pair for pair in floats if pair[1].dtype == dtype]
        if _common(alike, floats):
            found = f"{dtype} in {len(alike)} of {len(floats)} tensors of floats{READS}"
            yield CommonForm("F32", found, _keys(alike))
    for expected, deviates, hint in (
        ("a first dimension of 1, the batch", _lacks_batch, READS),
        ("dimensions in the order of SPEC section 6", _is_permuted, WITH_MAP),
    ):
        alike = [pair for pair in pairs if deviates(*pair)]
        if _common(alike, pairs):
            spec, entry = min(alike, key=lambda pair: (len(pair[1].key), pair[1].key))
            example = f"{entry.key} {list(entry.shape)} for {list(spec.shape)}"
            found = f"another shape in {len(alike)} of {len(pairs)} tensors, {example}{hint}"
            yield CommonForm(expected, found, _keys(alike))


def _common(alike: Sequence[Pair], pairs: Sequence[Pair]) -> bool:
    return len(alike) > 1 and len(alike) >= LEAST_SHARE * len(pairs)


def _keys(pairs: Sequence[Pair]) -> frozenset[str]:
    return frozenset(entry.key for _, entry in pairs)


def _lacks_batch(spec: KeySpec, entry: Entry) -> bool:
    return spec.shape[:1] == (1,) and spec.shape[1:] == entry.shape


def _is_permuted(spec: KeySpec, entry: Entry) -> bool:
    known = [n for n in spec.shape if n is not None]
    return spec.shape != entry.shape and sorted(known) == sorted(entry.shape)


def sorted_by_name(header: Header) -> bool:
    """Whether the floats stand in the file in the order of their names; a dump's never do."""
    names = [key for key, entry in header.entries.items() if entry.dtype == "F32"]
    return len(names) > 1 and names == sorted(names)
