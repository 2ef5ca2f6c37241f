"""The one identity of the embedding: equal ids have equal rows, in the prompt, in decode steps
and in MTP.
"""

from collections.abc import Sequence

import numpy as np

from v4tool.check.bits import Bits
from v4tool.check.block_pass import BlockPass
from v4tool.check.file_tensors import FileTensors
from v4tool.check.findings import Findings
from v4tool.check.specification import Expectation

RULE = "same id, same embedding"


def check_embeddings(
    expected: Expectation, places: Sequence[BlockPass], source: FileTensors, book: Findings
) -> None:
    """Every row of every `embed.out` against the first row of its id."""
    first: dict[int, tuple[str, int, Bits]] = {}
    for prefix in dict.fromkeys(place.pass_prefix for place in places):
        key = f"{prefix}embed.out"
        if key not in source:
            continue
        rows = source.bits(key)
        tokens = expected.ids_of(prefix, source, len(rows))
        book.applied(RULE, [key], len(tokens) * rows.shape[1])
        for row, token in enumerate(tokens):
            other, other_row, known = first.setdefault(token, (key, row, rows[row]))
            if not np.array_equal(rows[row], known):
                differ = int((rows[row] != known).sum())
                wanted = f"row {row} like row {other_row} of {other}, id {token}"
                book.report(key, RULE, wanted, f"{differ} of {known.size} values differ")
