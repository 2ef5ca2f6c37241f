"""Extrapolation from measured blocks to the whole model: each layer counts as one of its kind."""

from statistics import median
from typing import Any

from v4tool.config import ModelConfig

Row = dict[str, Any]


def select(rows: list[Row], engine: str, tokens: int) -> dict[int, list[Row]]:
    """Select the measurements of one engine and length, by layer."""
    out: dict[int, list[Row]] = {}
    for row in rows:
        if row["engine"] == engine and row["tokens"] == tokens:
            out.setdefault(row["layer"], []).append(row)
    return out


def middle(rows: list[Row], key: str) -> float:
    """The median of a measured figure over all passes."""
    values = [v for row in rows for v in (row[key] if isinstance(row[key], list) else [row[key]])]
    return float(median(values))


def counts(full: ModelConfig, config: ModelConfig) -> dict[int, int]:
    """Number of blocks of model `full` of each measured block's kind; MTP once, heads twice."""
    out = {
        layer: sum(full.ratio(i) == config.ratio(layer) for i in range(full.n_layers))
        for layer in range(config.n_layers)
    }
    return out | {config.n_layers: 1, config.n_layers + 1: 2}


def whole(
    full: ModelConfig, config: ModelConfig, rows: list[Row], engine: str, tokens: int
) -> Row | None:
    """Seconds, bytes and operations of a whole forward pass; None if a block was not measured.

    What an engine does not compute (the peer has neither MTP's input nor the heads) is left out
    of its time.
    """
    found = select(rows, engine, tokens)
    needed = counts(full, config)
    if any(layer not in found for layer in range(config.n_layers)):
        return None
    parts = {layer: n for layer, n in needed.items() if layer in found}
    return {
        "engine": engine,
        "tokens": tokens,
        "seconds": sum(n * middle(found[i], "seconds") for i, n in parts.items()),
        "bytes": sum(n * middle(found[i], "bytes_used") for i, n in parts.items()),
        "operations": sum(n * middle(found[i], "operations") for i, n in parts.items()),
        "complete": len(parts) == len(needed),
    }
