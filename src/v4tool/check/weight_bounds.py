"""Interval bounds of unknown norm weights and attention sinks, from recorded outputs.

A norm's weight is one BF16 number per dimension, an attention sink one number per head. Every
token's recorded output bounds it: it lies in the interval whose values round to that output. If
no number lies in all intervals, some token's output or input is wrong, and the tokens that the
others outvote are named. Passes of the same layer share the weight, so bounds are kept per
weight and judged across passes at the end.
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
"""Rows of a pass that are kept to find the one that is wrong; further rows only narrow the
bounds.
"""
LOWEST = 1e300
"""Stands for a sink that is bounded by nothing from below; -inf as an upper bound says that
none fits.
"""
FP32_SLACK = 2.0**-21
"""Relative width for a quotient in FP32 of rounded values, and for rounding to FP32 before BF16."""


def norm_bounds(
    out: Bits, x: F32, eps: float, unsure: tuple[Ints, F64] | None = None
) -> tuple[F32, F32]:
    """Bounds of an RMS norm's weight from out = BF16(weight * x * rsqrt(mean(x^2) + eps)).

    out bits [s, n], x [s, n] of BF16 values -> two F32 [s, n]. unsure: flat indices of elements
    of x and how far they may be off; they bound nothing and widen the others of their row by
    what they may do to the mean.
    """
    mean = np.square(x, dtype=np.float64).mean(-1)
    scale: F32 = np.abs(x)
    scale *= (1 / np.sqrt(mean + eps))[:, None].astype(np.float32)
    slack = np.full(len(x), FP32_SLACK)
    if unsure is not None:
        where, spread = unsure
        rows, change = where // x.shape[1], (2 * np.abs(x.reshape(-1)[where]) + spread) * spread
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
    if unsure is not None:
        low.reshape(-1)[where], high.reshape(-1)[where] = -np.inf, np.inf
    return low, high


def _no_bounds(low: F32, high: F32, where: Mask, possible: Mask) -> None:
    """An input of 0 bounds nothing if its output is one too, and has no weight otherwise."""
    if where.any():
        free, never = where & possible, where & ~possible
        low[free], high[free] = -np.inf, np.inf
        low[never], high[never] = np.inf, -np.inf


def sink_bounds(out: Bits, numerator: F64, denominator: F64, highest: F64) -> tuple[F64, F64]:
    """Bounds of the attention sink from out = BF16(numerator / (denominator + exp(sink -
    highest))).

    out bits [s, H, C], numerator [s, H, C], denominator and highest [s, H] -> two F64 [s, H].
    The quotients are taken in FP32, and the bounds widened by what that may cost.
    """
    # the numerator with the sign of `out` taken off: negative where the two signs differ
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
        # a sink may be so low that it hardly shows beside the denominator
        near = np.abs(most / denominator - 1) < 2 * FP32_SLACK
        most = np.where(near, denominator * (1 + 2 * FP32_SLACK), most)
        low_sink = np.log(np.maximum(least - denominator, 0)) + highest
        high_sink = np.log(np.maximum(most - denominator, 0)) + highest
    return np.maximum(low_sink, -LOWEST), high_sink


@dataclass
class PassBounds:
    """What one pass says: bounds [n], the key they come from, its inputs, how many rows it has."""

    key: str
    of: tuple[str, ...]
    low: F64
    high: F64
    rows: int


class WeightBounds:
    """Bounds of unknown weights, collected pass by pass. `settle` judges them across passes.

    Blocks may be judged in several threads and in any order: what is found does not depend on it.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._passes: dict[tuple[str, str], list[PassBounds]] = {}
        self._lock = threading.Lock()

    def add(self, rule: str, weight: str, votes: "RowBounds") -> None:
        """Judge one pass's rows and keep what they say of the weight."""
        key, of = votes.key, votes.of
        self.findings.applied(rule, [key, *of], votes.values)
        low, high = votes.low, votes.high
        wrong = np.flatnonzero(~votes.possible(low, high))
        if wrong.size:
            self._report_rows(rule, votes, wrong)
            low, high = low.copy(), high.copy()
            low[wrong], high[wrong] = -np.inf, np.inf
        known = PassBounds(key, of, low, high, votes.rows)
        with self._lock:
            self._passes.setdefault((rule, weight), []).append(known)

    def _report_rows(self, rule: str, votes: "RowBounds", wrong: Ints) -> None:
        column = int(wrong[0])
        weight, rows = votes.violating_rows(column)
        expected = (
            f"one weight for all {votes.rows} tokens, {format_number(weight)} in column {column}"
        )
        where = f"token {rows[0]}" if len(rows) == 1 else f"tokens {', '.join(map(str, rows[:4]))}"
        self.findings.report(
            votes.key,
            rule,
            f"{expected} (from {', '.join(votes.of)})",
            f"{where} cannot have it; {wrong.size} columns disagree",
        )

    def check_across_passes(self, discrete: Callable[[str], bool]) -> None:
        """Judge every weight across its passes; discrete: whether a rule's weight is a BF16
        number.
        """
        for (rule, weight), passes in sorted(self._passes.items()):
            passes.sort(key=lambda one: one.key)
            if len(passes) > 1:
                self._check_across(rule, weight, passes, discrete(rule))

    def compare(self, known: Callable[[str], F64 | None]) -> None:
        """Judge every pass by the weight itself; known: its values in binary64, if there is one."""
        for (rule, weight), passes in self._passes.items():
            values = known(weight)
            if values is None:
                continue
            for one in passes:
                self._compare(f"{rule} from weights", weight, values, one)

    def _compare(self, rule: str, weight: str, values: F64, one: PassBounds) -> None:
        self.findings.applied(rule, [one.key, *one.of], len(values))
        outside = np.flatnonzero((values < one.low) | (values > one.high))
        if outside.size:
            column = int(outside[0])
            low, high = format_number(one.low[column]), format_number(one.high[column])
            self.findings.report(
                one.key,
                rule,
                f"what {weight} = {format_number(values[column])} gives in column {column} "
                f"(from {', '.join(one.of)})",
                f"what needs {low} ... {high}; {outside.size} columns disagree",
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
        votes = np.array([p.rows for p in passes])
        value, outside = _most_allowed(lows, highs, votes, discrete)
        for i in outside:
            self.findings.report(
                passes[i].key,
                rule,
                f"the {weight} of the other passes, {format_number(value)} in column {column} "
                f"(from {', '.join(passes[i].of)})",
                f"a value that needs another; {wrong.size} columns disagree",
            )


class RowBounds:
    """The bounds that the rows of one pass give, [rows, n] in all, added some rows at a time."""

    def __init__(self, key: str, of: tuple[str, ...], columns: int, *, discrete: bool) -> None:
        self.key, self.of, self.discrete = key, of, discrete
        self.low, self.high = np.full(columns, -np.inf), np.full(columns, np.inf)
        self.rows = 0
        self._kept: list[tuple[Floats, Floats]] = []

    @property
    def values(self) -> int:
        """How many recorded values gave a bound."""
        return self.rows * len(self.low)

    def add(self, low: Floats, high: Floats) -> None:
        """Take the bounds of some more rows, [rows, n] each."""
        if self.rows < ROWS_KEPT:
            self._kept.append((low, high))
        self.rows += len(low)
        np.maximum(self.low, low.max(0), out=self.low)
        np.minimum(self.high, high.min(0), out=self.high)

    def possible(self, low: F64, high: F64) -> Mask:
        """Where some weight lies within the bounds."""
        return holds_bf16(low, high) if self.discrete else _ordered(low, high)

    def violating_rows(self, column: int) -> tuple[float, list[int]]:
        """The weight that most rows allow, and the rows that do not."""
        low = np.concatenate([low[:, column] for low, _ in self._kept]).astype(np.float64)
        high = np.concatenate([high[:, column] for _, high in self._kept]).astype(np.float64)
        return _most_allowed(low, high, np.ones(len(low), np.int64), self.discrete)


def _ordered(low: F64, high: F64) -> Mask:
    return np.asarray(low <= high)


def _most_allowed(low: F64, high: F64, votes: Ints, discrete: bool) -> tuple[float, list[int]]:
    """The candidate that most votes allow, and which bounds it lies outside of.

    Candidates are the lower bounds, or the BF16 numbers next above them.
    """
    candidates = np.unique(_ceil_bf16(low) if discrete else low)
    candidates = candidates[np.isfinite(candidates)]
    if not candidates.size:
        return float("nan"), list(range(len(low)))
    inside = (low <= candidates[:, None]) & (candidates[:, None] <= high)
    best = int((inside * votes).sum(1).argmax())
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
