"""Engram's hashes: primes, multipliers and rows, against the release's figures (SPEC41 4)."""

import numpy as np
import pytest

from v4tool.ngram_hash import hash_ids, is_prime, multipliers, primes_of

CLASSES = 99092


def test_primes_of_the_release() -> None:
    primes = primes_of([1, 14], 4, 8, 16_000_000)
    assert [len(primes[layer]) for layer in (1, 14)] == [24, 24]
    assert primes[1][:3] == [16000057, 16000079, 16000081]
    assert (primes[1][-1], primes[14][0], primes[14][-1]) == (16000463, 16000477, 16000889)
    assert [sum(primes[layer]) for layer in (1, 14)] == [384006168, 384016682]


def test_no_two_columns_share_a_prime_and_each_size_ascends() -> None:
    primes = primes_of([0, 3], 4, 2, 60)
    every = primes[0] + primes[3]
    assert len(set(every)) == 12
    assert all(map(is_prime, every))
    assert primes[0][:2] == [61, 67]
    assert [sum(primes[0]), sum(primes[3])] == [434, 606]


def test_small_primes() -> None:
    assert [n for n in range(30) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    assert not is_prime(16000057 * 3)
    assert not is_prime(3989**2)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (1, [76632096046245, 4839876093313, 35959672319349, 73987337458391]),
        (14, [67716810739261, 51510806800915, 30921347202721, 82619226485591]),
    ],
)
def test_multipliers_of_the_release(layer: int, expected: list[int]) -> None:
    found = multipliers(layer, CLASSES, 4)
    assert found.tolist() == expected
    assert max(expected) * (CLASSES - 1) < 2**63


def test_rows_of_a_short_sequence() -> None:
    """Two tokens, n-grams of 2 and 3: by hand, the pad's class before the first token."""
    factors = np.array([3, 5, 7])
    rows = hash_ids(np.array([10, 20]), 2, 1, factors, [11, 13])
    first = [30 ^ 5, 30 ^ 5 ^ 7]
    second = [60 ^ 50, 60 ^ 50 ^ 7]
    assert rows.tolist() == [[h[0] % 11, 11 + h[1] % 13] for h in (first, second)]


def test_a_step_looks_back_into_the_prompt() -> None:
    classes = np.arange(1, 9)
    factors, primes = multipliers(2, 9, 4), [61, 67, 71, 73, 79, 83]
    whole = hash_ids(classes, 8, 0, factors, primes)
    assert whole.shape == (8, 6)
    assert hash_ids(classes, 1, 0, factors, primes).tolist() == whole[-1:].tolist()
