"""Identity of the embedding: equal token ids have equal rows of `embed.out` in all passes.

Needs no weights; `weights` compares the same rows with `embed.weight`.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from v4tool.check.bits import Bits
from v4tool.check.block_pass import BlockPass
from v4tool.check.file_tensors import FileTensors
from v4tool.check.findings import Findings
from v4tool.check.specification import Expectation

RULE = "same id, same embedding"


def recorded_embeddings(
    expected: Expectation, blocks: Sequence[BlockPass], tensors: FileTensors
) -> Iterator[tuple[str, Bits, list[int]]]:
    """Yield every recorded `embed.out`: key, rows (bits [T, dim]), token id of each row.

    The list of ids is empty if the ids of the pass are not known.
    """
    for prefix in dict.fromkeys(block.pass_prefix for block in blocks):
        key = f"{prefix}embed.out"
        if key in tensors:
            rows = tensors.bits(key)
            yield key, rows, expected.ids_of(prefix, tensors, len(rows))


def check_embeddings(
    expected: Expectation, blocks: Sequence[BlockPass], tensors: FileTensors, findings: Findings
) -> None:
    """Compare every row of every `embed.out` with the first row of the same token id."""
    first: dict[int, tuple[str, int, Bits]] = {}
    for key, rows, tokens in recorded_embeddings(expected, blocks, tensors):
        findings.applied(RULE, [key], len(tokens) * rows.shape[1])
        for row, token in enumerate(tokens):
            other, other_row, known = first.setdefault(token, (key, row, rows[row]))
            if not np.array_equal(rows[row], known):
                differ = int((rows[row] != known).sum())
                wanted = f"row {row} like row {other_row} of {other}, id {token}"
                findings.report(key, RULE, wanted, f"{differ} of {known.size} values differ")
