"""Hashes of n-grams of token classes into rows of the Engram tables (SPEC41 section 4, Engram).

Integers alone, so that a hash can be computed without weights. C classes, N the longest n-gram, H
heads of each n-gram size; a table has one column for each size 2 ... N and head, in that order, and
each column has rows of its own, as many as its prime. Left out: which class a token is of
(`profiles.token_classes`) and the tables themselves.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SEED_FACTOR = 10007
"""The multipliers of a layer are drawn from a generator seeded with this times its number."""


def is_prime(n: int) -> bool:
    """By trial division: the numbers are about 16 million in the release."""
    if n < 4:
        return n > 1
    return n % 2 == 1 and all(n % d for d in range(3, int(n**0.5) + 1, 2))


def primes_of(
    layers: Sequence[int], max_ngram: int, heads: int, vocab_size: int
) -> dict[int, list[int]]:
    """Rows of every column of each layer's table: layer -> primes in the order of the columns.

    Each is the smallest prime above the previous one of its n-gram size, the first above
    vocab_size - 1, that no earlier layer, size or head has taken.
    """
    taken: set[int] = set()
    previous = dict.fromkeys(range(2, max_ngram + 1), vocab_size - 1)
    out: dict[int, list[int]] = {}
    for layer in layers:
        out[layer] = []
        for size in previous:
            for _ in range(heads):
                n = next(_free_primes(previous[size], taken))
                taken.add(n)
                previous[size] = n
                out[layer].append(n)
    return out


def _free_primes(above: int, taken: set[int]) -> Iterator[int]:
    n = above
    while True:
        n += 1
        if n not in taken and is_prime(n):
            yield n


def multipliers(layer: int, classes: int, max_ngram: int) -> "npt.NDArray[np.int64]":
    """What the class at each distance back is multiplied with: odd, I64 [N].

    The products with a class stay below 2^63. layer: its number in the model.
    """
    import numpy as np

    most = max(1, (2**63 - 1) // classes // 2)
    drawn = np.random.default_rng(SEED_FACTOR * layer).integers(0, most, max_ngram, np.int64)
    return drawn * 2 + 1


def hash_ids(
    classes: "npt.NDArray[np.int64]",
    tokens: int,
    pad_class: int,
    factors: "npt.NDArray[np.int64]",
    primes: Sequence[int],
) -> "npt.NDArray[np.int64]":
    """Rows of the table for the last `tokens` of a sequence: I64 [tokens, columns].

    classes: I64 [n], of every token so far; before the first stand pad_class. factors I64 [N];
    primes: of the columns.
    """
    import numpy as np

    n, longest = len(classes), len(factors)
    padded = np.concatenate([np.full(longest - 1, pad_class, np.int64), classes])
    heads = len(primes) // (longest - 1)
    offsets = np.concatenate([[0], np.cumsum(primes)[:-1]])
    mixed = np.zeros(tokens, np.int64)
    columns = []
    for back in range(longest):
        start = longest - 1 + n - tokens - back
        mixed = mixed ^ padded[start : start + tokens] * factors[back]
        if back:
            columns += [mixed % p for p in primes[(back - 1) * heads : back * heads]]
    rows: npt.NDArray[np.int64] = np.stack(columns, axis=1) + offsets
    return rows
