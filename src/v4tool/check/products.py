"""Recomputes every product with a weight from its recorded input (`check --deep`).

The products are those of `quant.linear`; the operators around them follow SPEC section 5. With
them each key of a recording is covered by some rule. Expert gate weights are recorded rounded to
FP32, so an element of w2's input may round to either of two BF16 neighbours; a row that differs is
recomputed with all combinations of these before it is reported.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from v4tool.check.bits import F64, FP32_HALF_ULP, Bits, equal_values, to_bf16, to_f64
from v4tool.check.block_pass import BlockPass
from v4tool.check.coefficients import Coefficients
from v4tool.check.weight_values import WeightCheck, compare_sums, to_bits, to_numpy, to_tensor
from v4tool.config import Numerics
from v4tool.names import has_indexer

if TYPE_CHECKING:
    from v4tool.checkpoint.shards import Checkpoint
    from v4tool.quant.linear import QuantizedWeight

RULE = "product"
MOST_AMBIGUOUS = 6
"""Largest number n of elements of a row with two possible values; all 2^n combinations are tried,
and a row with more is not judged."""


def check_products(blocks: Sequence[BlockPass], checkpoint: "Checkpoint") -> None:
    """Check all products of all passes.

    Layer by layer, so that the page cache still has a layer's weights for its next pass.
    """
    layers: dict[int, list[BlockPass]] = {}
    for block in blocks:
        layers.setdefault(block.layer, []).append(block)
    for same_layer in layers.values():
        for block in same_layer:
            Products(block, checkpoint).check()
            Coefficients(block, checkpoint).check()


class Products(WeightCheck):
    """The products with the weights of one block in one pass."""

    numerics = Numerics()

    def check(self) -> None:
        """Check all products with a weight of this block."""
        self.linear("attn.wq_a", "attn_norm.out")
        self.linear("attn.wkv", "attn_norm.out")
        self.linear("attn.wq_b", "attn.q_norm.out")
        self.linear("attn.wo_b", "attn.wo_b.in")
        self.grouped()
        self.compressors()
        self.gate()
        self.experts()
        if self.block.is_mtp:
            self.linear("e_proj", "enorm.out")
            self.linear("h_proj", "hnorm.out")

    # ---- quantised products -------------------------------------------------------------------

    def weight(self, name: str, width: int) -> "QuantizedWeight":
        """A quantised weight of this block; width: K, its number of columns when decoded."""
        from v4tool.quant.linear import QuantizedWeight

        path = self.block.weights + name
        codes = self.checkpoint.read(f"{path}.weight")
        scale = self.checkpoint.read(f"{path}.scale")
        return QuantizedWeight(codes, scale, "fp8" if codes.shape[1] == width else "fp4")

    def product(self, name: str, x: Bits) -> Bits:
        """x, bits [n, K], times a quantised weight as in `q_linear`: bits [n, N]."""
        from v4tool.quant.linear import q_linear

        return to_bits(q_linear(to_tensor(x), self.weight(name, x.shape[-1]), self.numerics))

    def linear(self, name: str, x: str) -> None:
        """Check that `<name>.out` is the quantised product of key x with the weight `name`."""
        key, source = self.block.key(f"{name}.out"), self.block.key(x)
        if self.tensors.has(key, source):
            rows = self.tensors.bits(source)
            rows = rows.reshape(-1, rows.shape[-1])
            found = self.tensors.bits(key).reshape(len(rows), -1)
            expected = self.product(name, rows)
            self.findings.compare(
                RULE, key, found, expected, [source, f"{self.block.weights}{name}.weight"]
            )

    def grouped(self) -> None:
        """Check that `wo_b.in` is the grouped product of the inversely rotated heads with wo_a."""
        from v4tool.quant.linear import grouped_linear

        out, inverse = self.block.key("attn.sparse_attn.out"), self.block.key("attn.rope.o_inv.out")
        key = self.block.key("attn.wo_b.in")
        if not self.tensors.has(out, inverse, key):
            return
        o = self.tensors.bits(out).copy()
        o[..., -self.config.rope_head_dim :] = self.tensors.bits(inverse)
        o = o.reshape(len(o), self.config.o_groups, -1)
        weight = self.weight("attn.wo_a", o.shape[-1])
        expected = to_bits(grouped_linear(to_tensor(o), weight, self.numerics))
        found = self.tensors.bits(key)
        sources = [out, inverse, f"{self.block.weights}attn.wo_a.weight"]
        self.findings.compare(RULE, key, found, expected.reshape(found.shape), sources)

    # ---- products that stay in acc ------------------------------------------------------------

    def plain(self, name: str, x: Bits) -> F64:
        """x, bits [n, K], times an unquantised weight of this block: F64 [n, N]."""
        from v4tool.quant.linear import linear_hi

        weight = self.checkpoint.read(self.block.weights + name)
        return np.asarray(linear_hi(to_tensor(x), weight, self.numerics).numpy())

    def compressors(self) -> None:
        """Check the compressors' projections, and the indexer's queries and weights."""
        if not self.block.ratio or not self.block.has("attn_norm.out"):
            return
        x = self.tensors.bits(self.block.key("attn_norm.out"))
        names = ["attn.compressor"]
        if has_indexer(self.block.ratio):
            names.append("attn.indexer.compressor")
            self.linear("attn.indexer.wq_b", "attn.q_norm.out")
            self._weights_proj(x)
        for name in names:
            for part in ("wkv", "wgate"):
                self._acc(f"{name}.{part}", x)

    def _weights_proj(self, x: Bits) -> None:
        key = self.block.key("attn.indexer.weights_proj.out")
        if key in self.tensors:
            expected = to_bf16(self.plain("attn.indexer.weights_proj.weight", x))
            sources = [
                self.block.key("attn_norm.out"),
                f"{self.block.weights}attn.indexer.weights_proj",
            ]
            self.findings.compare(RULE, key, self.tensors.bits(key), expected, sources)

    def _acc(self, name: str, x: Bits) -> None:
        key = self.block.key(f"{name}.out")
        if key in self.tensors:
            expected = self.plain(f"{name}.weight", x)
            sources = [self.block.key("attn_norm.out"), f"{self.block.weights}{name}.weight"]
            found = self.tensors.floats(key)
            compare_sums(self.findings, RULE, key, found, expected, np.abs(expected), sources)

    # ---- gate and experts ---------------------------------------------------------------------

    def gate(self) -> None:
        """Check the gate weights and, except in hash layers, the chosen experts."""
        block = self.block
        key, choice = block.key("ffn.gate.out.0"), block.key("ffn.gate.out.1")
        x = block.key("ffn_norm.out")
        if not self.tensors.has(key, choice, x):
            return
        logits = self.plain("ffn.gate.weight", self.tensors.bits(x))
        scores = np.sqrt(np.where(logits > 20, logits, np.log1p(np.exp(np.minimum(logits, 20)))))
        routes = self.tensors.ints(choice)
        sources = [x, f"{block.weights}ffn.gate.weight"]
        if not self.config.is_hash(block.layer):
            biased = scores + to_numpy(self.checkpoint.read(f"{block.weights}ffn.gate.bias"))
            ranked = np.argsort(-biased, axis=1, kind="stable")[:, : routes.shape[1]]
            self.findings.equal(RULE, choice, routes, ranked, sources)
        if routes.min() >= 0 and routes.max() < scores.shape[1]:
            chosen = np.take_along_axis(scores, routes, 1)
            expected = chosen / chosen.sum(1, keepdims=True) * self.config.route_scale
            found = self.tensors.floats(key)
            compare_sums(self.findings, RULE, key, found, expected, np.abs(expected), sources)

    def experts(self) -> None:
        """Check w1, w3 and w2 of the shared expert and of every recorded one."""
        block = self.block
        x, routing = block.key("ffn_norm.out"), block.key("ffn.gate.out.1")
        if x not in self.tensors:
            return
        rows = self.tensors.bits(x)
        self._expert("ffn.shared_experts", rows, None)
        if not self.tensors.has(routing, block.key("ffn.gate.out.0")):
            return
        routes = self.tensors.ints(routing)
        weights = self.tensors.floats(block.key("ffn.gate.out.0")).astype(np.float64)
        for expert in self.tensors.experts.get(block.key("ffn."), []):
            tokens, slots = np.nonzero(routes == expert)
            name = f"ffn.experts.{expert}"
            if block.has(f"{name}.out") and self.tensors.count(block.key(f"{name}.out")) == len(
                tokens
            ):
                self._expert(name, rows[tokens], weights[tokens, slots])

    def _expert(self, name: str, x: Bits, weight: F64 | None) -> None:
        block, source = self.block, self.block.key("ffn_norm.out")
        for part in ("w1", "w3"):
            key = block.key(f"{name}.{part}.out")
            if key in self.tensors:
                expected = self.product(f"{name}.{part}", x)
                self.findings.compare(RULE, key, self.tensors.bits(key), expected, [source])
        w1, w3, w2 = (block.key(f"{name}.{part}.out") for part in ("w1", "w3", "w2"))
        if not self.tensors.has(w1, w3, w2):
            return
        limit = self.config.swiglu_limit
        a = np.minimum(to_f64(self.tensors.bits(w1)), limit)
        u = np.clip(to_f64(self.tensors.bits(w3)), -limit, limit)
        h = a / (1 + np.exp(-a)) * u
        error = np.abs(h) * 1e-15
        if weight is not None:
            h = weight[:, None] * h
            error = np.abs(h) * (FP32_HALF_ULP + 1e-15)
        self._product_of_interval(
            f"{name}.w2", w2, to_bf16(h - error), to_bf16(h + error), [w1, w3]
        )

    def _product_of_interval(
        self, name: str, key: str, low: Bits, high: Bits, sources: Sequence[str]
    ) -> None:
        """Check a quantised product whose input lies between low and high, bits [n, K]."""
        found, expected = self.tensors.bits(key), self.product(name, low)
        differ = ~equal_values(found, expected).all(1)
        for row in np.flatnonzero(differ & (low != high).any(1)):
            ambiguous = np.flatnonzero(low[row] != high[row])
            if len(ambiguous) > MOST_AMBIGUOUS:
                expected[row] = found[row]
                continue
            inputs = np.repeat(low[row][None], 2 ** len(ambiguous), 0)
            for i, pick in enumerate(itertools.product((False, True), repeat=len(ambiguous))):
                taken = ambiguous[list(pick)]
                inputs[i, taken] = high[row, taken]
            results = self.product(name, inputs)
            if equal_values(results, found[row]).all(1).any():
                expected[row] = found[row]
        self.findings.compare(RULE, key, found, expected, sources)
