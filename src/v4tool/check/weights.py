"""Checks of a recording against the checkpoint: embedding rows, hash routing, logits and norms.

Embedding rows and the experts of hash layers are looked up again, logits are recomputed in
binary64, and the weights of norms and the attention sinks must lie in the bounds derived from the
recording (`weight_bounds`). With `deep`, `products` recomputes every product with a weight. A
recording of another checkpoint is a finding. Follows SPEC section 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from v4tool.check.bits import F64, to_f64
from v4tool.check.block_pass import BlockPass
from v4tool.check.embeddings import recorded_embeddings
from v4tool.check.file_tensors import FileTensors
from v4tool.check.findings import Findings
from v4tool.check.products import check_products
from v4tool.check.specification import Expectation
from v4tool.check.weight_values import compare_sums, to_bits, to_numpy

if TYPE_CHECKING:
    from v4tool.check.weight_bounds import WeightBounds
    from v4tool.checkpoint.shards import Checkpoint

MATRIX_ROWS = 8192
"""Rows of `head.weight` that are in memory at a time."""


def check_weights(
    blocks: Sequence[BlockPass],
    expected: Expectation,
    tensors: FileTensors,
    findings: Findings,
    weight_bounds: "WeightBounds",
    checkpoint: "Checkpoint",
    *,
    deep: bool,
) -> None:
    """Run all checks that take the checkpoint; deep: recompute every product with a weight."""
    check_fingerprint(tensors, findings, checkpoint)
    if not blocks:
        return
    stored = StoredWeights(blocks, expected, tensors, findings, checkpoint)
    with np.errstate(all="ignore"):
        stored.embeddings()
        stored.hash_routing()
        stored.logits()
        weight_bounds.compare_stored(lambda name: known_weight(checkpoint, name))
        if deep:
            check_products(blocks, checkpoint)


def check_fingerprint(tensors: FileTensors, findings: Findings, checkpoint: "Checkpoint") -> None:
    """Check that the recording states the fingerprint of this checkpoint."""
    stated = tensors.header.metadata.get("checkpoint_fingerprint")
    if stated is not None:
        findings.applied("fingerprint", tensors.header.entries)
        if stated != checkpoint.fingerprint:
            expected = f"{checkpoint.fingerprint} of {checkpoint.directory}"
            findings.report("__metadata__.checkpoint_fingerprint", "fingerprint", expected, stated)


def known_weight(checkpoint: "Checkpoint", name: str) -> F64 | None:
    """A norm's weight or a layer's sinks in binary64; None if the checkpoint has no such tensor."""
    return to_numpy(checkpoint.read(name)).reshape(-1) if name in checkpoint else None


@dataclass(frozen=True)
class StoredWeights:
    """Checks of one recording that take a stored weight but no quantised product."""

    blocks: Sequence[BlockPass]
    expected: Expectation
    tensors: FileTensors
    findings: Findings
    checkpoint: "Checkpoint"

    def embeddings(self) -> None:
        """Check that every `embed.out` is the rows of `embed.weight` for its token ids."""
        for key, rows, ids in recorded_embeddings(self.expected, self.blocks, self.tensors):
            if ids and self._in_vocabulary(ids):
                looked_up = to_bits(self.checkpoint.gather_rows("embed.weight", ids))
                self.findings.compare("embedding", key, rows, looked_up, ["embed.weight"])
            elif ids:
                limit = f"ids below {self.checkpoint.config.vocab_size}"
                self.findings.report(key, "embedding", limit, f"{ids[:6]}")

    def _in_vocabulary(self, ids: Sequence[int]) -> bool:
        return all(0 <= i < self.checkpoint.config.vocab_size for i in ids)

    def hash_routing(self) -> None:
        """Check that the experts of hash layers are the rows of `tid2eid` for the token ids."""
        for block in self.blocks:
            if not block.config.is_hash(block.layer) or not block.has("ffn.gate.out.1"):
                continue
            key, name = block.key("ffn.gate.out.1"), f"{block.weights}ffn.gate.tid2eid"
            found = self.tensors.ints(key)
            ids = self.expected.ids_of(block.pass_prefix, self.tensors, len(found))
            if len(ids) == len(found) and self._in_vocabulary(ids):
                table = self.checkpoint.gather_rows(name, ids).long().numpy()
                self.findings.equal("hash routing", key, found, table, [name])

    def logits(self) -> None:
        """Check that every `head.out` is `head.weight` times the last row of `norm.out`."""
        prefixes = dict.fromkeys(block.pass_prefix for block in self.blocks)
        pairs = [(f"{p}norm.out", f"{p}head.out") for p in prefixes]
        pairs = [(x, y) for x, y in pairs if self.tensors.has(x, y)]
        if not pairs:
            return
        last = np.concatenate(
            [to_f64(self.tensors.bits(x, self.tensors.count(x) - 1)) for x, _ in pairs]
        )
        found = np.concatenate([self.tensors.floats(y).reshape(1, -1) for _, y in pairs])
        vocabulary = self.checkpoint.config.vocab_size
        sums, sizes = np.empty(found.shape), np.empty(found.shape)
        for start in range(0, vocabulary, MATRIX_ROWS):
            stop = min(start + MATRIX_ROWS, vocabulary)
            matrix = to_numpy(self.checkpoint.read_rows("head.weight", start, stop))
            sums[:, start:stop] = last @ matrix.T
            sizes[:, start:stop] = np.abs(last) @ np.abs(matrix).T
        for (x, key), row, expected, size in zip(pairs, found, sums, sizes, strict=True):
            compare_sums(
                self.findings, "logits from weights", key, row, expected, size, [x, "head.weight"]
            )
