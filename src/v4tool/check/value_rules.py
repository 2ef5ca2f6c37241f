"""Rules about values of single keys: finite, BF16, index tables, gates, coefficients (SPEC 4-6).

`ValueRules` takes the pieces of a file scan; `check_values` takes the tensors of one block pass.
Left out: identities between keys.
"""

import math

import numpy as np

from v4tool.check.attention import TABLE
from v4tool.check.bits import F64, Ints, Mask, format_number, unravel
from v4tool.check.block_pass import BlockPass
from v4tool.check.findings import Findings
from v4tool.check.formulas import allowed_blocks
from v4tool.names import Kind, has_indexer, table_offset, window_columns
from v4tool.record.scan import Piece

INFINITY = np.int32(0x7F800000)
NEGATIVE_INFINITY = np.uint32(0xFF800000)
FP32_ULP = 2.0**-23
ROWS_AT_ONCE = 256
LARGEST_TABLE = 1 << 20
"""Largest index for which duplicates are found with a table of marks, which takes memory."""


class ValueRules:
    """The rules `finite` and `bf16` for all FP32 keys, from the pieces of a file scan."""

    def __init__(self, findings: Findings, kinds: dict[str, Kind]) -> None:
        self.findings, self.kinds = findings, kinds
        self._wrong: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        self._values = {"finite": 0, "bf16": 0}
        self._keys: dict[str, set[str]] = {"finite": set(), "bf16": set()}

    def take(self, piece: Piece) -> None:
        """Check one piece of an FP32 tensor."""
        entry, words = piece.entry, piece.data.view(np.int32)
        if not words.size:
            return
        self._note("finite", entry.key, words.size)
        if words.max() >= INFINITY or words.view(np.uint32).max() >= NEGATIVE_INFINITY:
            bad = (words & np.int32(0x7FFFFFFF)) >= INFINITY
            self._keep(entry.key, "finite", piece, bad)
        if self.kinds.get(entry.key) == "bf16":
            self._note("bf16", entry.key, words.size)
            if int(np.bitwise_or.reduce(words)) & 0xFFFF:
                self._keep(entry.key, "bf16", piece, (words & np.int32(0xFFFF)) != 0)

    def _note(self, rule: str, key: str, values: int) -> None:
        self._keys[rule].add(key)
        self._values[rule] += values

    def _keep(self, key: str, rule: str, piece: Piece, bad: Mask) -> None:
        where = np.flatnonzero(bad)
        value = piece.data.view(np.float32)[where[0]]
        first = piece.offset // 4 + int(where[0])
        self._wrong.setdefault((key, rule), []).append((first, where.size, format_number(value)))

    def close(self) -> None:
        """Report the findings, one per key and rule, and what was checked."""
        for rule, keys in self._keys.items():
            self.findings.applied(rule, keys, self._values[rule])
        expected = {"finite": "finite values", "bf16": "values with 16 low bits of 0"}
        for (key, rule), found in self._wrong.items():
            first, _, value = found[0]
            where = unravel(first, self.findings.shapes[key])
            count = sum(n for _, n, _ in found)
            self.findings.report(key, rule, expected[rule], f"{value} at {where}; {count} values")


def check_values(block: BlockPass) -> None:
    """Apply all rules about single keys to one block in one pass."""
    check_tables(block)
    check_gate(block)
    for name in ("hc_attn", "hc_ffn"):
        check_coefficients(block, name)


def check_tables(block: BlockPass) -> None:
    """Range, causality, padding with -1 and duplicates of `topk_idxs` and `indexer.out`."""
    config, step = block.config, block.step
    offset = table_offset(config, step)
    if block.has(TABLE):
        table = block.tensors.ints(block.key(TABLE))
        columns = window_columns(config, step)
        newest = np.arange(step.tokens)[:, None] if step.start == 0 else config.window_size - 1
        known = min(config.window_size, step.end)
        lengths = np.minimum(np.arange(step.start + 1, step.end + 1), known)
        _check_part(block, TABLE, table[:, :columns], 0, newest, lengths)
        if block.ratio:
            _check_blocks(block, TABLE, table[:, columns:], offset)
        _check_duplicates(block, TABLE, table)
    if has_indexer(block.ratio) and block.has("attn.indexer.out"):
        chosen = block.tensors.ints(block.key("attn.indexer.out"))
        _check_blocks(block, "attn.indexer.out", chosen, offset)
        _check_duplicates(block, "attn.indexer.out", chosen)


def _check_blocks(block: BlockPass, name: str, part: Ints, offset: int) -> None:
    """Columns of compressed blocks: only blocks complete for the query, as many as fit."""
    allowed = allowed_blocks(block.step, block.ratio)
    newest = offset + allowed[:, None] - 1
    _check_part(block, name, part, offset, newest, np.minimum(allowed, part.shape[1]))


def _check_part(
    block: BlockPass, name: str, part: Ints, first: int, newest: Ints | int, lengths: Ints
) -> None:
    """Each row has `lengths` entries between first and newest; the others are -1."""
    key = block.key(name)
    block.findings.applied("index range", [key], part.size)
    real = part >= 0
    outside = (part < -1) | (real & ((part < first) | (part > newest)))
    row_wrong = outside.any(1) | (real.sum(1) != lengths)
    if row_wrong.any():
        row = int(np.flatnonzero(row_wrong)[0])
        top = newest if isinstance(newest, int) else int(newest[row, 0])
        block.findings.report(
            key,
            "index range",
            f"{lengths[row]} indices in {first} ... {top}, else -1, for token {row}",
            f"{_shown(part[row])}; {int(row_wrong.sum())} tokens",
        )


def _check_duplicates(block: BlockPass, name: str, table: Ints) -> None:
    key = block.key(name)
    block.findings.applied("index duplicate", [key], table.size)
    twice = [row for start in range(0, len(table), ROWS_AT_ONCE)
             for row in start + _with_duplicates(table[start : start + ROWS_AT_ONCE])]  # fmt: skip
    if twice:
        found = f"{_shown(table[twice[0]])} for token {twice[0]}; {len(twice)} tokens"
        block.findings.report(key, "index duplicate", "different indices", found)


def _with_duplicates(table: Ints) -> Ints:
    """Rows of a table in which an index that is not negative occurs twice: int64 [s, m] -> [n]."""
    real = table >= 0
    if not real.any() or table.max() > LARGEST_TABLE:
        ordered = np.sort(table, axis=1)
        return np.flatnonzero(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1))
    marks = np.zeros((len(table), int(table.max()) + 2), bool)
    marks[np.arange(len(table))[:, None], np.where(real, table, -1)] = True
    return np.flatnonzero(marks[:, :-1].sum(1) != real.sum(1))


def _shown(row: Ints) -> str:
    text = ", ".join(map(str, row[:8].tolist()))
    return f"[{text}{', ...' if len(row) > 8 else ''}]"


def check_gate(block: BlockPass) -> None:
    """Experts in range and distinct; gate weights not negative, with the sum route_scale.

    The sum may differ by the rounding of each weight to FP32.
    """
    config, tensors = block.config, block.tensors
    if block.has("ffn.gate.out.1"):
        key = block.key("ffn.gate.out.1")
        experts = np.sort(tensors.ints(key), axis=1)
        block.findings.applied("expert range", [key], experts.size)
        wrong = (experts[:, 0] < 0) | (experts[:, -1] >= config.n_routed_experts)
        wrong |= (experts[:, 1:] == experts[:, :-1]).any(1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            found = f"{_shown(tensors.ints(key)[row])} for token {row}; {int(wrong.sum())} tokens"
            expected = f"different experts below {config.n_routed_experts}"
            block.findings.report(key, "expert range", expected, found)
    if block.has("ffn.gate.out.0"):
        key = block.key("ffn.gate.out.0")
        weights = tensors.floats(key).astype(np.float64)
        block.findings.applied("gate sum", [key], weights.size)
        off = np.abs(weights.sum(1) - config.route_scale)
        wrong = (off > config.route_scale * FP32_ULP) | (weights < 0).any(1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            block.findings.report(
                key,
                "gate sum",
                f"weights from 0 up that sum to {config.route_scale}",
                f"{format_number(weights[row].sum())} for token {row}; {int(wrong.sum())} tokens",
            )


def check_coefficients(block: BlockPass, name: str) -> None:
    """Ranges of `pre` and `post`, and row and column sums of `comb`."""
    tensors, eps = block.tensors, block.config.hc_eps
    for part, low, high in (("pre", 0.0, 1 + eps), ("post", 0.0, 2.0)):
        key = block.key(f"{name}.{part}")
        if key not in tensors:
            continue
        values = tensors.floats(key).astype(np.float64)
        block.findings.applied(f"hc {part}", [key], values.size)
        wrong = (values < low) | (values > high * (1 + FP32_ULP))
        if part == "pre":
            wrong |= values == 0
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            found = f"{format_number(values.reshape(-1)[i])}; {int(wrong.sum())} values"
            open_end = "(" if part == "pre" else "["
            expected = f"{open_end}{low}, {format_number(high)}]"
            block.findings.report(key, f"hc {part}", expected, found)
    key = block.key(f"{name}.comb")
    if key in tensors:
        _check_comb(block, key, tensors.floats(key).astype(np.float64))


def _check_comb(block: BlockPass, key: str, comb: F64) -> None:
    columns = np.abs(comb.sum(1) - 1).max(-1)
    rows = np.abs(comb.sum(2) - 1).max(-1)
    of_rows = row_residual(comb, block.config.hc_sinkhorn_iters, block.config.hc_eps)
    of_columns = column_residual(comb, block.config.hc_eps)
    block.findings.applied("hc comb", [key], comb.size)
    wrong = (columns > of_columns) | (rows > of_rows) | (comb < 0).any((1, 2))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        block.findings.report(
            key,
            "hc comb",
            f"columns that sum to 1 within {of_columns[row]:.1e}, rows within {of_rows[row]:.1e}",
            f"{columns[row]:.1e} and {rows[row]:.1e} for token {row}; {int(wrong.sum())} tokens",
        )


def projective_diameter(comb: F64) -> F64:
    """The projective diameter of each matrix: log of its largest cross-ratio, [s, M, M] -> [s].

    Scaling rows and columns does not change it, so the iteration's result has that of its input.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(comb)
        ratios = logs[:, :, None, :] - logs[:, None, :, :]
        widths = ratios.max(-1) - ratios.min(-1)
        return np.asarray(np.nan_to_num(widths, nan=np.inf).max((1, 2)))


def row_residual(comb: F64, iterations: int, eps: float) -> F64:
    """Bound of |row sum - 1| after the last column step: [s, M, M] -> [s].

    Birkhoff's theorem: a positive matrix contracts Hilbert's metric by k = tanh(diameter / 4), so
    each half step reduces the distance between row sums by the factor k; after the softmax (entries
    eps ... 1 + eps) it is at most log((1 + eps) / eps). Added are the eps in each division, M * eps
    per half step as a geometric sum, and the rounding to FP32.
    """
    m = comb.shape[-1]
    k = np.tanh(projective_diameter(comb) / 4)
    distance = math.log((1 + eps) / eps) * k ** (2 * iterations - 1)
    steps = np.minimum(1 / np.maximum(1 - k, 1e-300), 2.0 * iterations)
    return np.asarray(np.expm1(np.minimum(distance + 2 * m * eps * steps, 50)) + m * FP32_ULP)


def column_residual(comb: F64, eps: float) -> F64:
    """Bound of |column sum - 1|: the eps in the last division, and the rounding to FP32."""
    m = comb.shape[-1]
    return np.full(len(comb), m * eps + m * FP32_ULP)
