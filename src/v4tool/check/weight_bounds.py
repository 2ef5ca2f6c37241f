"""Interval bounds of unknown norm weights and attention sinks, from recorded outputs.

A norm's weight is one BF16 number per dimension, an attention sink one FP32 number per head.
Each token's recorded output gives an interval: the weights for which the output rounds to what was
recorded. If the intervals of all tokens have no weight in common, some token is wrong; a finding
names the tokens whose interval misses the weight that most tokens allow. Passes over the same layer
share its weights, so bounds are kept per weight and intersected across passes at the end. With the
checkpoint, the stored weight must lie in the bounds. Follows SPEC section 5.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from v4tool.check.bits import (
    F32,
    F64,
    LARGEST,
    SMALLEST_NORMAL,
    Bits,
    Ints,
    Mask,
    format_number,
    holds_bf16,
    to_f64,
)
from v4tool.check.findings import Findings

Floats = F32 | F64
ROWS_KEPT = 256
"""Rows of a pass whose bounds are kept to name the wrong ones; of the others only the intersection
is kept, so that memory does not grow with the prompt.
"""
LOWEST = 1e300
"""Minus this is the lower bound of a sink that has none: above the upper bound -inf, which says
that no sink fits.
"""
FP32_SLACK = 2.0**-21
"""Relative slack of a bound: quotients of rounded values in FP32, and rounding to FP32 before BF16.
"""


def norm_bounds(
    out: Bits, x: F32, eps: float, error: tuple[Ints, F64] | None = None
) -> tuple[F32, F32]:
    """Bounds of an RMS norm's weight from out = BF16(weight * x * rsqrt(mean(x^2) + eps)).

    out bits [s, n], x [s, n] of BF16 values -> lower and upper bounds, F32 [s, n] each.
    error: flat indices of elements of x and their absolute error bounds; these elements give no
    bound, and widen those of their row by their effect on the mean.
    """
    mean = np.square(x, dtype=np.float64).mean(-1)
    scale: F32 = np.abs(x)
    scale *= (1 / np.sqrt(mean + eps))[:, None].astype(np.float32)
    slack = np.full(len(x), FP32_SLACK)
    if error is not None:
        where, off = error
        rows, change = where // x.shape[1], (2 * np.abs(x.reshape(-1)[where]) + off) * off
        slack += np.bincount(rows, change, len(x)) / x.shape[1] / (mean + eps)
    magnitude = (out & np.uint16(0x7FFF)).astype(np.int32) << 16
    normal = magnitude >= SMALLEST_NORMAL
    if not normal.all():
        magnitude[~normal] = SMALLEST_NORMAL - 0x8000
    with np.errstate(divide="ignore", invalid="ignore"):
        high: F32 = np.divide((magnitude + 0x8000).view(np.float32), scale)
        low: F32 = np.divide((magnitude - 0x8000).view(np.float32), scale)
    high *= (1 + slack[:, None]).astype(np.float32)
    low *= (1 - slack[:, None]).astype(np.float32)
    if not normal.all():
        low[~normal] = -high[~normal]
    _no_bounds(low, high, scale == 0, possible=~normal)
    negative = (out >> 15) != (x < 0)
    low, high = np.where(negative, -high, low), np.where(negative, -low, high)
    if error is not None:
        low.reshape(-1)[where], high.reshape(-1)[where] = -np.inf, np.inf
    return low, high


def _no_bounds(low: F32, high: F32, where: Mask, possible: Mask) -> None:
    """Set the bounds of inputs that are 0: none if the output may be 0, else impossible ones."""
    if where.any():
        free, never = where & possible, where & ~possible
        low[free], high[free] = -np.inf, np.inf
        low[never], high[never] = np.inf, -np.inf


def sink_bounds(out: Bits, numerator: F64, denominator: F64, highest: F64) -> tuple[F64, F64]:
    """Bounds of the attention sink from out = BF16(numerator / (denominator + exp(sink -
    highest))).

    out bits [s, H, C], numerator [s, H, C], denominator and highest [s, H] -> lower and upper
    bounds, F64 [s, H] each. The quotients are taken in FP32, and the bounds widened accordingly.
    """
    # the numerator times the sign of `out`: negative where the two signs differ
    size = numerator.astype(np.float32)
    size.view(np.uint32)[...] ^= (out & np.uint16(0x8000)).astype(np.uint32) << np.uint32(16)
    noise = 1e-13 * np.abs(size).max(-1, keepdims=True)
    magnitude = (out & np.uint16(0x7FFF)).astype(np.int32) << 16
    if not magnitude.all():
        np.abs(size, out=size, where=magnitude == 0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        high = (magnitude + 0x8000).view(np.float32)
        least = ((size - noise) / high).max(-1).astype(np.float64) * (1 - FP32_SLACK)
        low = np.maximum(magnitude - 0x8000, 0).view(np.float32)
        size += noise
        most = np.divide(size, low, out=size).min(-1).astype(np.float64) * (1 + FP32_SLACK)
        # exp(sink - highest) may be below the resolution of the denominator; any lower sink fits
        near = np.abs(most / denominator - 1) < 2 * FP32_SLACK
        most = np.where(near, denominator * (1 + 2 * FP32_SLACK), most)
        low_sink = np.log(np.maximum(least - denominator, 0)) + highest
        high_sink = np.log(np.maximum(most - denominator, 0)) + highest
    return np.maximum(low_sink, -LOWEST), high_sink


@dataclass
class PassBounds:
    """Bounds of a weight from one pass, F64 [n] each, and the number of rows they come from.

    key: the recorded output; sources: the keys that its inputs come from.
    """

    key: str
    sources: tuple[str, ...]
    low: F64
    high: F64
    rows: int


class WeightBounds:
    """Bounds of unknown weights, added by pass and intersected across passes at the end.

    `add` is safe from several threads, and the findings do not depend on the order of the calls.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._passes: dict[tuple[str, str], list[PassBounds]] = {}
        self._lock = threading.Lock()

    def add(self, rule: str, weight: str, bounds: "RowBounds") -> None:
        """Judge the rows of one pass and keep their bounds; weight: its name in the checkpoint.

        Columns without any possible weight are reported here and no longer bound the weight.
        """
        key, sources = bounds.key, bounds.sources
        self.findings.applied(rule, [key, *sources], bounds.values)
        low, high = bounds.low, bounds.high
        wrong = np.flatnonzero(~bounds.possible(low, high))
        if wrong.size:
            self._report_rows(rule, bounds, wrong)
            low, high = low.copy(), high.copy()
            low[wrong], high[wrong] = -np.inf, np.inf
        known = PassBounds(key, sources, low, high, bounds.rows)
        with self._lock:
            self._passes.setdefault((rule, weight), []).append(known)

    def _report_rows(self, rule: str, bounds: "RowBounds", wrong: Ints) -> None:
        column = int(wrong[0])
        weight, rows = bounds.violating_rows(column)
        expected = (
            f"one weight for all {bounds.rows} tokens, {format_number(weight)} in column {column}"
        )
        where = f"token {rows[0]}" if len(rows) == 1 else f"tokens {', '.join(map(str, rows[:4]))}"
        self.findings.report(
            bounds.key,
            rule,
            f"{expected} (from {', '.join(bounds.sources)})",
            f"no such weight for {where}; {wrong.size} columns differ",
        )

    def check_across_passes(self, discrete: Callable[[str], bool]) -> None:
        """Report the passes whose bounds exclude the weight that the other passes allow.

        discrete: whether the weight of a rule is a BF16 number (else FP32).
        """
        for (rule, weight), passes in sorted(self._passes.items()):
            passes.sort(key=lambda one: one.key)
            if len(passes) > 1:
                self._check_across(rule, weight, passes, discrete(rule))

    def compare_stored(self, known: Callable[[str], F64 | None]) -> None:
        """Report the passes whose bounds exclude the stored weight; known: its values by name."""
        for (rule, weight), passes in self._passes.items():
            values = known(weight)
            if values is None:
                continue
            for one in passes:
                self._compare_pass(f"{rule} from weights", weight, values, one)

    def _compare_pass(self, rule: str, weight: str, values: F64, one: PassBounds) -> None:
        self.findings.applied(rule, [one.key, *one.sources], len(values))
        outside = np.flatnonzero((values < one.low) | (values > one.high))
        if outside.size:
            column = int(outside[0])
            low, high = format_number(one.low[column]), format_number(one.high[column])
            self.findings.report(
                one.key,
                rule,
                f"outputs of {weight} = {format_number(values[column])} in column {column} "
                f"(from {', '.join(one.sources)})",
                f"outputs that need {low} ... {high}; {outside.size} columns differ",
            )

    def _check_across(
        self, rule: str, weight: str, passes: list[PassBounds], discrete: bool
    ) -> None:
        possible = holds_bf16 if discrete else _ordered
        low = np.max([p.low for p in passes], 0)
        high = np.min([p.high for p in passes], 0)
        wrong = np.flatnonzero(~possible(low, high))
        if not wrong.size:
            return
        column = int(wrong[0])
        lows = np.array([p.low[column] for p in passes])
        highs = np.array([p.high[column] for p in passes])
        rows = np.array([p.rows for p in passes])
        value, outside = _most_allowed(lows, highs, rows, discrete)
        for i in outside:
            self.findings.report(
                passes[i].key,
                rule,
                f"the {weight} of the other passes, {format_number(value)} in column {column} "
                f"(from {', '.join(passes[i].sources)})",
                f"outputs that need another value; {wrong.size} columns differ",
            )


class RowBounds:
    """Bounds of a weight from the rows of one pass, added some rows at a time.

    key: the recorded output; sources: the keys that its inputs come from; columns: n, the weight's
    length; discrete: whether the weight is a BF16 number. low, high: the intersection, F64 [n].
    """

    def __init__(self, key: str, sources: tuple[str, ...], columns: int, *, discrete: bool) -> None:
        self.key, self.sources, self.discrete = key, sources, discrete
        self.low, self.high = np.full(columns, -np.inf), np.full(columns, np.inf)
        self.rows = 0
        self._kept: list[tuple[Floats, Floats]] = []

    @property
    def values(self) -> int:
        """How many bounds were added."""
        return self.rows * len(self.low)

    def add(self, low: Floats, high: Floats) -> None:
        """Add the lower and upper bounds of some rows, [rows, n] each."""
        if self.rows < ROWS_KEPT:
            self._kept.append((low, high))
        self.rows += len(low)
        np.maximum(self.low, low.max(0), out=self.low)
        np.minimum(self.high, high.min(0), out=self.high)

    def possible(self, low: F64, high: F64) -> Mask:
        """Whether each interval contains a weight: [n] -> bool [n]."""
        return holds_bf16(low, high) if self.discrete else _ordered(low, high)

    def violating_rows(self, column: int) -> tuple[float, list[int]]:
        """The weight of a column that most of the kept rows allow, and the rows that do not."""
        low = np.concatenate([low[:, column] for low, _ in self._kept]).astype(np.float64)
        high = np.concatenate([high[:, column] for _, high in self._kept]).astype(np.float64)
        return _most_allowed(low, high, np.ones(len(low), np.int64), self.discrete)


def _ordered(low: F64, high: F64) -> Mask:
    return np.asarray(low <= high)


def _most_allowed(low: F64, high: F64, counts: Ints, discrete: bool) -> tuple[float, list[int]]:
    """The value that most intervals contain, weighted by counts, and the intervals without it.

    Tried are the lower bounds, or the smallest BF16 numbers not below them: if some value lies in a
    set of intervals, so does one of these.
    """
    candidates = np.unique(_ceil_bf16(low) if discrete else low)
    candidates = candidates[np.isfinite(candidates)]
    if not candidates.size:
        return float("nan"), list(range(len(low)))
    inside = (low <= candidates[:, None]) & (candidates[:, None] <= high)
    best = int((inside * counts).sum(1).argmax())
    return float(candidates[best]), [int(i) for i in np.flatnonzero(~inside[best])]


def _ceil_bf16(values: F64) -> F64:
    """The smallest BF16 number not below each value."""
    with np.errstate(over="ignore", invalid="ignore"):
        words = np.clip(values, -LARGEST, LARGEST).astype(np.float32)
        above = np.nextafter(words, np.float32(np.inf))
    words = np.where(words.astype(np.float64) < values, above, words)
    raw = words.view(np.uint32)
    up = np.where(raw >> np.uint32(31), raw, raw + np.uint32(0xFFFF)) >> np.uint32(16)
    return np.where(np.isfinite(values), to_f64(up.astype(np.uint16)), values)
