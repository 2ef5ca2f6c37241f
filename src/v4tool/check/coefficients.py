"""Recomputes hyper-connection coefficients, compressor pooling and head norms (`check --deep`).

They follow SPEC section 5 with the checkpoint's unquantised weights. Their inputs are recorded
rounded to FP32, or are streams that are recomputed with error bounds; the errors are propagated to
each result, and a recorded value outside the result's bound is a finding. T tokens of a pass,
M streams, D dim, n coefficients of a hyper-connection, c * d a compressor's width, t blocks.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from v4tool.check.bits import F64, FP32_HALF_ULP, Bits, ordinals, to_bf16, to_f32, to_f64
from v4tool.check.block_pass import BlockPass
from v4tool.check.bounded_values import BoundedValues, bounded_sums
from v4tool.check.streams import Streams, middle_streams, post_terms
from v4tool.check.weight_values import WeightCheck, to_numpy
from v4tool.names import complete_blocks, compressor_groups, has_indexer

if TYPE_CHECKING:
    pass

RULE = "product"
TOKENS = 64
"""Tokens whose streams are in memory in binary64 at a time."""


class Coefficients(WeightCheck):
    """The values of one block in one pass that depend on its unquantised weights."""

    def check(self) -> None:
        """Check the hyper-connections, the compressors' pooling and the norm before a head."""
        self.coefficients()
        if self.block.ratio:
            self.pooling("attn.compressor")
        if has_indexer(self.block.ratio):
            self.pooling("attn.indexer.compressor")
        self.head()

    def coefficients(self) -> None:
        """Check `pre`, `post` and `comb` of both hyper-connections from their input streams."""
        entering = Streams.before(self.block)
        if entering is None:
            return
        for start in range(0, self.block.step.tokens, TOKENS):
            stop = min(start + TOKENS, self.block.step.tokens)
            x = entering.read(start, stop)
            self._mix("hc_attn", x, start, stop, entering.sources)
            middle = middle_streams(self.block, x, start, stop)
            if middle is not None:
                self._mix("hc_ffn", middle, start, stop, entering.sources)

    def _mixes(self, path: str, x: BoundedValues) -> tuple[F64, F64]:
        """The normalised streams times `<path>_fn`, and error bounds: F64 [T, n] each."""
        fn = to_numpy(self.checkpoint.read(f"{path}_fn"))
        flat = x.values.reshape(len(x.values), -1)
        mean = (flat * flat).mean(-1, keepdims=True)
        scale = 1 / np.sqrt(mean + self.config.norm_eps)
        sums = flat @ fn.T
        error = 1e-15 * (np.abs(flat) @ np.abs(fn).T)
        if x.error.indices.size:
            x_error = x.dense_error().reshape(len(flat), -1)
            relative = ((2 * np.abs(flat) + x_error) * x_error).mean(-1, keepdims=True) / mean
            error += x_error @ np.abs(fn).T + np.abs(sums) * relative
        return sums * scale, error * scale

    def _mix(
        self, name: str, x: BoundedValues, start: int, stop: int, sources: Sequence[str]
    ) -> None:
        keys = [self.block.key(f"{name}.{part}") for part in ("pre", "post", "comb")]
        if not self.tensors.has(*keys):
            return
        m, path = self.config.hc_mult, f"{self.block.weights}{name}"
        mixes, error = self._mixes(path, x)
        scale, base = (
            to_numpy(self.checkpoint.read(f"{path}_{part}")) for part in ("scale", "base")
        )
        scales = np.repeat(scale, [m, m, m * m])
        logits, error = mixes * scales + base, error * np.abs(scales)
        gates = 1 / (1 + np.exp(-logits[:, : 2 * m]))
        expected = [gates[:, :m] + self.config.hc_eps, 2 * gates[:, m:]]
        expected.append(self._sinkhorn(logits[:, 2 * m :].reshape(-1, m, m)))
        errors = [error[:, :m] / 4, error[:, m : 2 * m] / 2]
        # each exponent is off by at most `worst`, each division at most doubles the error
        worst = error[:, 2 * m :].max(-1)[:, None, None]
        rounds = 2 * self.config.hc_sinkhorn_iters
        errors.append(expected[2] * np.expm1(np.minimum(2 * rounds * worst, 50)))
        for key, value, slack in zip(keys, expected, errors, strict=True):
            self._close(
                key, self.tensors.floats(key, start, stop), value, slack, [*sources, f"{path}_fn"]
            )

    def _sinkhorn(self, logits: F64) -> F64:
        eps = self.config.hc_eps
        comb = np.exp(logits - logits.max(-1, keepdims=True))
        comb = comb / comb.sum(-1, keepdims=True) + eps
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        return np.asarray(comb)

    def _close(
        self,
        key: str,
        found: np.ndarray,
        expected: F64,
        slack: F64,
        sources: Sequence[str],
    ) -> None:
        self.findings.applied(RULE, [key, *sources], found.size)
        ulp = np.spacing(np.abs(found)).astype(np.float64)
        wrong = np.flatnonzero(~(np.abs(found - expected) <= ulp + slack).reshape(-1))
        if wrong.size:
            i = int(wrong[0])
            self.findings.report(
                key, RULE, f"{expected.reshape(-1)[i]:.9g} (from {', '.join(sources)})",
                f"{found.reshape(-1)[i]:.9g}; {wrong.size} of {found.size} values differ",
            )  # fmt: skip

    def head(self) -> None:
        """Check `norm.out` after the last block: RMS norm of the streams weighted by `hc_head`."""
        block = self.block
        if not (block.is_mtp or block.layer == self.config.n_layers - 1):
            return
        prefix = block.prefix if block.is_mtp else block.pass_prefix
        path = block.weights if block.is_mtp else ""
        key = f"{prefix}norm.out"
        streams = self._last_streams()
        if key not in self.tensors or streams is None:
            return
        mixes, error = self._mixes(f"{path}hc_head", streams)
        scale, base = (
            to_numpy(self.checkpoint.read(f"{path}hc_head_{part}")) for part in ("scale", "base")
        )
        pre = 1 / (1 + np.exp(-(mixes * scale + base))) + self.config.hc_eps
        pre_error = error * np.abs(scale) / 4 + 1e-15
        values = (pre[:, None] @ streams.values)[:, 0]
        slack = (pre_error[:, None] @ np.abs(streams.values))[:, 0] + 1e-15 * np.abs(values)
        slack += (pre[:, None] @ streams.dense_error())[:, 0]
        weight = to_numpy(self.checkpoint.read(f"{path}norm.weight"))
        self._normed(
            key, to_bf16(values - slack), to_bf16(values + slack), weight, [f"{path}hc_head_fn"]
        )

    def _last_streams(self) -> BoundedValues | None:
        """The output streams of the block: as recorded, for MTP recomputed."""
        block = self.block
        if not block.is_mtp:
            key = block.key("out")
            return BoundedValues(to_f64(self.tensors.bits(key))) if key in self.tensors else None
        entering = Streams.before(block)
        if entering is None:
            return None
        x = middle_streams(block, entering.read(0, block.step.tokens), 0, block.step.tokens)
        return None if x is None else leaving_streams(block, x)

    def pooling(self, name: str) -> None:
        """Check a compressor's `norm.out` from its recorded wkv and wgate rows of all passes."""
        block, ratio = self.block, self.block.ratio
        key, blocks = block.key(f"{name}.norm.out"), complete_blocks(block.step, ratio)
        rows = self._rows(name)
        if not blocks or key not in self.tensors or rows is None:
            return
        path = f"{block.weights}{name}."
        kv, gate = rows
        ape = to_numpy(self.checkpoint.read(path + "ape"))
        gate_error = FP32_HALF_ULP * np.abs(gate)
        gate = gate + ape[np.arange(len(gate)) % ratio]
        pooled, error = pool(kv, gate, gate_error, block.step.start // ratio, blocks, ratio)
        weight = to_numpy(self.checkpoint.read(path + "norm.weight"))
        low, high = to_bf16(pooled - error), to_bf16(pooled + error)
        sources = [block.key(f"{name}.wkv.out"), block.key(f"{name}.wgate.out"), path + "ape"]
        self._normed(key, low, high, weight, sources)

    def _rows(self, name: str) -> tuple[F64, F64] | None:
        """A compressor's kv and gate rows of all passes up to this: F64 [positions, c * d] each.

        None if some are missing.
        """
        every = (*self.block.earlier, self.block)
        keys = [(p.key(f"{name}.wkv.out"), p.key(f"{name}.wgate.out")) for p in every]
        if not all(self.tensors.has(*pair) for pair in keys):
            return None
        kv, gate = (
            np.concatenate([self.tensors.floats(pair[side]) for pair in keys]).astype(np.float64)
            for side in (0, 1)
        )
        return (kv, gate) if len(kv) == self.block.step.end else None

    def _normed(self, key: str, low: Bits, high: Bits, weight: F64, sources: Sequence[str]) -> None:
        """Check an RMS norm whose input lies between low and high, bits [n, D], mostly equal."""
        found = self.tensors.bits(key).reshape(low.shape)
        a, b = to_f64(low), to_f64(high)
        eps = self.config.norm_eps
        smallest, largest = np.minimum(np.abs(a), np.abs(b)), np.maximum(np.abs(a), np.abs(b))
        scale_high = 1 / np.sqrt((smallest * smallest).mean(-1) + eps) * (1 + 1e-12)
        scale_low = 1 / np.sqrt((largest * largest).mean(-1) + eps) * (1 - 1e-12)
        products = [weight * x * s[:, None] for x in (a, b) for s in (scale_low, scale_high)]
        lower, upper = (
            ordinals(to_bf16(np.min(products, 0))),
            ordinals(to_bf16(np.max(products, 0))),
        )
        seen = ordinals(found)
        self.findings.applied(RULE, [key, *sources], found.size)
        wrong = np.flatnonzero(((seen < lower) | (seen > upper)).reshape(-1))
        if wrong.size:
            i = int(wrong[0])
            expected = to_f32(to_bf16(np.min(products, 0))).reshape(-1)[i]
            where = self.findings.indices(key, i, found.shape)
            self.findings.report(
                key, RULE, f"{expected:.9g} at {where} (from {', '.join(sources)})",
                f"{to_f32(found).reshape(-1)[i]:.9g}; {wrong.size} of {found.size} values differ",
            )  # fmt: skip


def leaving_streams(block: BlockPass, x: BoundedValues) -> BoundedValues | None:
    """The output streams of a block from those after attention; None if a key is missing."""
    if not block.has("hc_ffn.post", "hc_ffn.comb", "ffn.out"):
        return None
    return bounded_sums(*post_terms(block, "hc_ffn", "ffn.out", x, 0, block.step.tokens))


def pool(
    kv: F64, gate: F64, gate_error: F64, first: int, blocks: int, ratio: int
) -> tuple[F64, F64]:
    """Softmax-weighted sums of kv over the rows of each block, and error bounds: F64 [t, d] each.

    kv, gate [positions, c * d] from position 0 on, the gates with `ape` added; gate_error: error
    bounds of the gates; kv is off by its rounding to FP32. first, blocks: the blocks to pool.
    """
    groups = compressor_groups(ratio)
    width = kv.shape[1] // groups
    pooled, error = np.empty((blocks, width)), np.empty((blocks, width))
    for i, block in enumerate(range(first, first + blocks)):
        own = slice(block * ratio, (block + 1) * ratio)
        values, scores, errors = (x[own, -width:] for x in (kv, gate, gate_error))
        if groups == 2 and block:
            before = slice((block - 1) * ratio, block * ratio)
            values, scores, errors = (
                np.concatenate([x[before, :width], y])
                for x, y in ((kv, values), (gate, scores), (gate_error, errors))
            )
        weights = np.exp(scores - scores.max(0))
        weights /= weights.sum(0)
        pooled[i] = (values * weights).sum(0)
        # an error e of the scores changes a softmax weight by at most expm1(2 * e) of itself
        slack = np.expm1(2 * errors.max(0)) + FP32_HALF_ULP + 1e-15
        error[i] = (np.abs(values) * weights).sum(0) * slack
    return pooled, error
