"""Threads and piece sizes change no bits; order of results; prefetching does not block."""

import json
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from tests.conftest import GOLDEN_MINI
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import Numerics
from v4tool.model import layers
from v4tool.model.attention import sparse_attn
from v4tool.model.layers import by_tokens, sigmoid, softplus
from v4tool.model.prefetch import PrefetchingWeights
from v4tool.model.stream import Sequence, run
from v4tool.threads import RESULTS_AHEAD, ordered_map

pytestmark = pytest.mark.usefixtures("shared_out")


def recorded(threads: int) -> list[tuple[str, Tensor]]:
    """Everything that two prompts and their decode steps show, in order."""
    seen: list[tuple[str, Tensor]] = []
    with safe_open(str(GOLDEN_MINI / "len33.safetensors"), framework="pt") as file:
        ids = json.loads(file.metadata()["input_ids"])

    def tap(prompt: str) -> Callable[[str, Tensor], None]:
        return lambda name, value: seen.append((f"{prompt} {name}", value.clone()))

    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        sequences = [Sequence(ids, tap("long"), decode=1), Sequence(ids[:5], tap("short"))]
        run(checkpoint, checkpoint.config, Numerics(threads=threads), sequences)
    return seen


def test_threads_change_neither_bits_nor_order() -> None:
    """1, 2 and 4 threads show the same keys one after the other, with the same bits."""
    expected = recorded(1)
    for threads in (2, 4):
        found = recorded(threads)
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (name, value), (_, other) in zip(expected, found, strict=True):
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name


def test_pieces_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Element-wise steps by one token, by three and all at once."""
    x = torch.randn(7, 4, 96, dtype=torch.float64)
    whole = by_tokens(lambda piece: sigmoid(piece) * 2, x)
    for tokens in (1, 3):
        monkeypatch.setattr(layers, "ELEMENTS_AT_ONCE", tokens * 4 * 96)
        for threads in (1, 3):
            pieces = by_tokens(lambda piece: sigmoid(piece) * 2, x, threads=threads)
            assert torch.equal(pieces, whole)


@pytest.mark.parametrize("function", [sigmoid, softplus], ids=["sigmoid", "softplus"])
def test_position_in_a_tensor_changes_no_bits(function: Callable[[Tensor], Tensor]) -> None:
    """torch's own takes other exponentials for the last elements of a tensor."""
    x = 4 * torch.randn(4099, dtype=torch.float64)
    whole = function(x)
    for size in (1, 3, 5, 9, 31):
        assert torch.equal(torch.cat([function(part) for part in x.split(size)]), whole)


def test_sigmoid_and_softplus_are_torchs_to_an_ulp() -> None:
    """Within 2 units of the last place of binary64, far from it too."""
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.tensor([-700.0, 19.999, 20.0, 20.001])])
    x = x.double()
    for ours, theirs in ((sigmoid(x), torch.sigmoid(x)), (softplus(x), F.softplus(x))):
        torch.testing.assert_close(ours, theirs, rtol=2 * 2.0**-52, atol=0)


def test_attention_does_not_depend_on_other_queries() -> None:
    """Nine queries at once and each alone: the order of every sum is the query's own."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(9, 4, 64, generator=generator).bfloat16()
    kv = torch.randn(150, 64, generator=generator).bfloat16()
    table = torch.randint(-1, 150, (9, 140), generator=generator).to(torch.int32)
    sink = torch.randn(4, generator=generator).double()
    whole = sparse_attn(q, kv, table, sink, Numerics(threads=2))
    for i in range(9):
        one = sparse_attn(q[i : i + 1], kv, table[i : i + 1], sink, Numerics())
        assert torch.equal(one, whole[i : i + 1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_in_order(threads: int) -> None:
    """Results come in the order of the items, with a bounded number of them ahead."""
    begun: list[int] = []
    lock = threading.Lock()

    def square(i: int) -> int:
        with lock:
            begun.append(i)
        return i * i

    for n, result in enumerate(ordered_map(square, range(20), threads)):
        assert result == n * n
        assert len(begun) <= n + 2 + RESULTS_AHEAD * threads
    assert sorted(begun) == list(range(20))


@pytest.mark.parametrize("threads", [1, 2])
def test_in_order_raises_at_its_turn(threads: int) -> None:
    """What came before the error is seen, the error is the function's own."""
    results = ordered_map(lambda i: 6 // (3 - i), range(6), threads)
    assert [next(results) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_abandoned_results_are_cancelled() -> None:
    """A consumer that stops early leaves nothing waiting to be computed."""
    begun: list[int] = []
    gate = threading.Event()

    def slow(i: int) -> int:
        begun.append(i)
        if i:
            gate.wait(5)
        return i

    results = ordered_map(slow, range(50), 2)
    assert next(results) == 0
    results.close()
    gate.set()
    assert len(begun) <= 2 + RESULTS_AHEAD * 2


class Reader:
    """A dictionary as weights; `advise` waits for the gate and remembers what it was told."""

    def __init__(self) -> None:
        self.gate, self.last = threading.Event(), threading.Event()
        self.told: list[str] = []

    def nbytes(self, name: str) -> int:
        return 4

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        return torch.tensor([len(name)])

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        return self.read(name)[start:stop]

    def gather_rows(self, name: str, ids: Tensor) -> Tensor:
        return self.read(name)[ids]

    def advise(self, names: list[str]) -> None:
        self.gate.wait(5)
        self.told += names
        if "d" in names:
            self.last.set()


def test_prefetch_does_not_wait_and_leaves_out_what_was_read() -> None:
    """The first announcement blocks the disk's thread alone; b is read meanwhile, c is not."""
    reader = Reader()
    with PrefetchingWeights(reader) as weights:
        weights.advise(["a"])
        weights.advise(["b", "c"])
        assert weights.read("b").item() == 1
        reader.gate.set()
        weights.advise(["d"])
        assert reader.last.wait(5)
    assert reader.told == ["a", "c", "d"]
