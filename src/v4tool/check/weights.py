"""What the checkpoint ties: embedding, hash routing, logits, norms and sinks that were only
bounded before.

Each anchor is a fresh look-up or a product in binary64 of recorded values with a stored weight.
Products with quantised weights are in `products`, for `deep` checks. A recording of another
checkpoint is a finding.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import F64, Bits, number, wide
from v4tool.check.block_pass import BlockPass
from v4tool.check.file_tensors import FileTensors
from v4tool.check.findings import Findings
from v4tool.check.specification import Expectation

if TYPE_CHECKING:
    from torch import Tensor

    from v4tool.check.weight_bounds import WeightBounds
    from v4tool.checkpoint.shards import Checkpoint

MATRIX_ROWS = 8192
"""Rows of the output matrix that are in memory at a time."""
ULPS = 1
"""How far apart two FP32 values may be that were rounded from sums in another order (SPEC 8)."""


def check_weights(
    places: Sequence[BlockPass],
    expected: Expectation,
    source: FileTensors,
    book: Findings,
    unknowns: "WeightBounds",
    checkpoint: "Checkpoint",
    *,
    deep: bool,
) -> None:
    """All anchors with the checkpoint; `deep`: every product as well."""
    check_fingerprint(source, book, checkpoint)
    if not places:
        return
    with np.errstate(all="ignore"):
        check_lookups(places, expected, source, book, checkpoint)
        check_hash_routing(places, expected, source, book, checkpoint)
        check_logits(places, source, book, checkpoint)
        unknowns.compare(lambda name: known_weight(checkpoint, name))
        if deep:
            from v4tool.check.products import check_products

            check_products(places, source, book, checkpoint)


def check_fingerprint(source: FileTensors, book: Findings, checkpoint: "Checkpoint") -> None:
    """The recording's checkpoint is the one at hand."""
    stated = source.header.metadata.get("checkpoint_fingerprint")
    if stated is not None:
        book.applied("fingerprint", source.header.entries)
        if stated != checkpoint.fingerprint:
            expected = f"{checkpoint.fingerprint} of {checkpoint.directory}"
            book.report("__metadata__.checkpoint_fingerprint", "fingerprint", expected, stated)


def bits_of(values: "Tensor") -> Bits:
    """A BF16 tensor as bits."""
    import torch

    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def numbers(values: "Tensor") -> F64:
    """A BF16 or FP32 tensor in binary64."""
    return np.asarray(values.double().numpy())


def known_weight(checkpoint: "Checkpoint", name: str) -> F64 | None:
    """A norm's weight or a layer's sinks in binary64, or None where the checkpoint has no such
    tensor.
    """
    return numbers(checkpoint.read(name)).reshape(-1) if name in checkpoint else None


def check_lookups(
    places: Sequence[BlockPass],
    expected: Expectation,
    source: FileTensors,
    book: Findings,
    checkpoint: "Checkpoint",
) -> None:
    """Every `embed.out` is the embedding of its ids."""
    vocabulary = checkpoint.config.vocab_size
    for prefix in dict.fromkeys(place.pass_prefix for place in places):
        key = f"{prefix}embed.out"
        if key not in source:
            continue
        rows = source.bits(key)
        ids = expected.ids_of(prefix, source, len(rows))
        if not ids:
            continue
        if not all(0 <= i < vocabulary for i in ids):
            book.report(key, "embedding", f"ids below {vocabulary}", f"{ids[:6]}")
            continue
        fresh = bits_of(checkpoint.gather_rows("embed.weight", ids))
        book.compare("embedding", key, rows, fresh, ["embed.weight"])


def check_hash_routing(
    places: Sequence[BlockPass],
    expected: Expectation,
    source: FileTensors,
    book: Findings,
    checkpoint: "Checkpoint",
) -> None:
    """The experts of hash layers are the table's rows for the ids."""
    vocabulary = checkpoint.config.vocab_size
    for place in places:
        if not place.config.is_hash(place.layer) or not place.has("ffn.gate.out.1"):
            continue
        key, name = place.key("ffn.gate.out.1"), f"{place.weights}ffn.gate.tid2eid"
        found = source.ints(key)
        ids = expected.ids_of(place.pass_prefix, source, len(found))
        if len(ids) == len(found) and all(0 <= i < vocabulary for i in ids):
            table = checkpoint.gather_rows(name, ids).long().numpy()
            book.equal("hash routing", key, found, table, [name])


def check_logits(
    places: Sequence[BlockPass], source: FileTensors, book: Findings, checkpoint: "Checkpoint"
) -> None:
    """Every `head.out` is the output matrix times the last row of `norm.out`, within 1 ulp of
    FP32.
    """
    prefixes = dict.fromkeys(place.pass_prefix for place in places)
    pairs = [(f"{p}norm.out", f"{p}head.out") for p in prefixes]
    pairs = [(x, y) for x, y in pairs if source.has(x, y)]
    if not pairs:
        return
    last = np.concatenate([wide(source.bits(x, source.count(x) - 1)) for x, _ in pairs])
    found = np.concatenate([source.floats(y).reshape(1, -1) for _, y in pairs])
    vocabulary = checkpoint.config.vocab_size
    sums, sizes = np.empty(found.shape), np.empty(found.shape)
    for start in range(0, vocabulary, MATRIX_ROWS):
        stop = min(start + MATRIX_ROWS, vocabulary)
        matrix = numbers(checkpoint.read_rows("head.weight", start, stop))
        sums[:, start:stop] = last @ matrix.T
        sizes[:, start:stop] = np.abs(last) @ np.abs(matrix).T
    for (x, key), row, expected, size in zip(pairs, found, sums, sizes, strict=True):
        acc_equal(book, "logits from weights", key, row, expected, size, [x, "head.weight"])


def acc_equal(
    book: Findings,
    rule: str,
    key: str,
    found: npt.NDArray[np.float32],
    expected: F64,
    size: F64,
    of: Sequence[str],
) -> None:
    """FP32 values rounded from binary64 sums: within 1 ulp, or within the last bits of the
    terms' sizes.
    """
    book.applied(rule, [key, *of], found.size)
    gap = np.abs(found.astype(np.float64) - expected)
    allowed = np.maximum(ULPS * np.spacing(np.abs(found)).astype(np.float64), 1e-14 * size)
    wrong = np.flatnonzero(~(gap <= allowed).reshape(-1))
    if wrong.size:
        i = int(wrong[0])
        book.report(
            key, rule,
            f"{number(expected.reshape(-1)[i])} at {book.place(key, i, found.shape)} "
            f"(from {', '.join(of)})",
            f"{number(found.reshape(-1)[i])}; {wrong.size} of {found.size} values differ",
        )  # fmt: skip
