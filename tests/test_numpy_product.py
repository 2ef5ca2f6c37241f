"""The NumPy backend: proof of exactness before a BLAS call, and how often it is made."""

from collections.abc import Callable

import pytest

from tests.quant_operands import READABLE, fp4, fp8, generator, numerics, spread
from tests.quant_tables import same_bits
from v4tool.quant import _numpy_product as numpy_product
from v4tool.quant.linear import linear_hi, q_linear


def _paths(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count how often each way of summing is taken, without changing what it does."""
    taken = {"_in_one": 0, "_by_group": 0, "_all_one_by_one": 0}

    def counting(name: str) -> Callable[..., object]:
        original = getattr(numpy_product, name)

        def counted(*args: object) -> object:
            taken[name] += len(args[0].values) if name == "_by_group" else 1  # type: ignore[attr-defined]
            return original(*args)

        return counted

    for name in taken:
        monkeypatch.setattr(numpy_product, name, counting(name))
    return taken


def test_ordinary_operands_use_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _paths(monkeypatch)
    g, n = generator(12), numerics("numpy")
    x = spread(g, 30, 512).bfloat16()
    q_linear(x, fp4(g, 64, 512, (118, 124)), n)
    q_linear(x, fp8(g, 64, 512, (110, 113)), n)
    assert taken == {"_in_one": 2, "_by_group": 0, "_all_one_by_one": 0}
    linear_hi(spread(g, 30, 4096).bfloat16(), spread(g, 64, 4096).bfloat16(), n)
    assert taken["_by_group"] >= 25
    assert taken["_all_one_by_one"] == 0


def test_only_inexact_rows_are_summed_term_by_term(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _paths(monkeypatch)
    g = generator(13)
    x = spread(g, 30, 512).bfloat16()
    x[7, :128] *= 2.0**60
    w = fp8(g, 64, 512, (110, 113))
    found = q_linear(x, w, numerics("numpy"))
    assert taken["_by_group"] == 1
    assert same_bits(found, q_linear(x, w, READABLE))
