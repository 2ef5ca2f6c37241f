"""Weights for benchmarks: a small checkpoint in place of one of the real size.

Only a few routed experts a layer are on disk; expert e of the model is read from expert e mod N.
The router is made here, so that a given number of tokens reaches as many experts as they do in
the published recordings, and the bytes, the rows per expert and the number of products are those
of the real model.
"""

import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig

PUBLISHED = {6: 1045 / 44, 32: 2663 / 44, 129: 5049 / 44}
"""Tokens -> routed experts that they reach in a layer, on average over the 44 prefills (SPEC
section 6).
"""


def experts_reached(tokens: int, config: ModelConfig) -> int:
    """Expected number of experts that have tokens: a power law fitted to published figures."""
    points = sorted(PUBLISHED.items())
    low, high = (points[0], points[1]) if tokens < points[1][0] else (points[1], points[2])
    slope = math.log(high[1] / low[1]) / math.log(high[0] / low[0])
    reached = low[1] * (tokens / low[0]) ** slope
    most = min(config.n_routed_experts, tokens * config.n_activated_experts)
    return round(min(max(reached, config.n_activated_experts), most))


def candidates(tokens: int, reached: int, config: ModelConfig) -> int:
    """Size of the pool of experts for which `reached` of them are expected to be chosen."""
    k = config.n_activated_experts
    for pool in range(reached, config.n_routed_experts):
        if pool * (1 - (1 - k / pool) ** tokens) >= reached - 0.5:
            return pool
    return config.n_routed_experts


class StandIn:
    """Weights of model `config` from a checkpoint with fewer experts; counts bytes read, used."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, tokens: int) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.present = checkpoint.config.n_routed_experts
        self.pool = candidates(tokens, experts_reached(tokens, config), config)
        self.used: dict[str, int] = {}
        self._router: dict[str, Tensor | None] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files."""
        return self.checkpoint.bytes_read

    @property
    def bytes_used(self) -> int:
        """Bytes of the tensors read since `used` was cleared, each counted once."""
        return sum(self.used.values())

    def _there(self, name: str) -> str:
        return re.sub(r"(\.experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) % self.present}", name)

    def _made(self, name: str) -> Tensor | None:
        """Router weights: large for the pool, so that no other expert is chosen."""
        if ".ffn.gate." not in name:
            return None
        if name not in self._router:
            self._router[name] = self._make(name)
        return self._router[name]

    def _make(self, name: str) -> Tensor | None:
        experts, generator = self.config.n_routed_experts, torch.Generator().manual_seed(7)
        if name.endswith("ffn.gate.weight"):
            drawn = torch.randn(experts, self.config.dim, generator=generator)
            return (drawn / self.config.dim**0.5).bfloat16()
        if name.endswith("ffn.gate.bias"):
            order = torch.randperm(experts, generator=generator)
            return torch.where(order < self.pool, 0.0, -1e3)
        return None

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the model's own checkpoint."""
        made = self._made(name)
        if made is None:
            return self.checkpoint.nbytes(self._there(name))
        return made.numel() * made.element_size()

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """A whole tensor."""
        made = self._made(name)
        if made is not None:
            return made
        self.used[name] = self.nbytes(name)
        return self.checkpoint.read(self._there(name), buffer)

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        """Some rows of a tensor."""
        self.used[name] = self.nbytes(name)
        return self.checkpoint.read_rows(self._there(name), start, stop, buffer)

    def gather_rows(self, name: str, rows: Tensor | Sequence[int]) -> Tensor:
        """Rows by number; those of the hash table are drawn from the pool."""
        if name.endswith(".tid2eid"):
            ids = torch.as_tensor(rows)
            noise = torch.rand(len(ids), self.pool, generator=torch.Generator().manual_seed(9))
            return noise.topk(self.config.n_activated_experts, dim=1).indices
        return self.checkpoint.gather_rows(name, rows)

    def advise(self, names: Iterable[str]) -> None:
        """Start read-ahead of these weights."""
        self.checkpoint.advise(map(self._there, names))
