"""The one identity of the embedding: equal ids have equal rows, in the prompt, in decode steps
and in MTP.
"""

from collections.abc import Sequence

import numpy as np

from v4tool.check.bits import Bits
from v4tool.check.book import Book
from v4tool.check.place import Place
from v4tool.check.source import Source

RULE = "same id, same embedding"


def check_embeddings(
    ids: Sequence[int], places: Sequence[Place], source: Source, book: Book
) -> None:
    """Every row of every `embed.out` against the first row of its id; ids: the prompt's."""
    first: dict[int, tuple[str, int, Bits]] = {}
    for prefix in dict.fromkeys(place.pass_prefix for place in places):
        key = f"{prefix}embed.out"
        if key not in source:
            continue
        rows = source.bits(key)
        tokens = _ids(prefix, ids, source, len(rows))
        book.applied(RULE, [key], rows.size)
        for row, token in enumerate(tokens):
            other, other_row, expected = first.setdefault(token, (key, row, rows[row]))
            if not np.array_equal(rows[row], expected):
                differ = int((rows[row] != expected).sum())
                wanted = f"row {row} like row {other_row} of {other}, id {token}"
                book.report(key, RULE, wanted, f"{differ} of {expected.size} values differ")


def _ids(prefix: str, ids: Sequence[int], source: Source, count: int) -> list[int]:
    """The ids of a pass: its own tensor, or for MTP the prompt's (its decode step takes the
    last one).
    """
    if not prefix.startswith("mtp."):
        key = f"{prefix}input_ids"
        return source.ints(key).reshape(-1).tolist() if key in source else []
    prompt = source.ints("input_ids").reshape(-1).tolist() if "input_ids" in source else list(ids)
    return prompt[-count:]
