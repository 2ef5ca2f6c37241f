"""Tables of the measurements."""

from collections.abc import Iterable
from statistics import median

from rich.table import Table

from bench.whole import Row, middle


def table(title: str, *columns: str) -> Table:
    """An empty table; numeric columns are right-aligned."""
    out = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i < 2 else "right")
    return out


def name(row: Row) -> str:
    """The name of a measured block."""
    if row["ratio"] is None:
        return "embedding, head"
    return f"ratio {row['ratio']}" + (", MTP" if row["mtp"] else "")


def blocks(groups: Iterable[list[Row]]) -> Table:
    """One line for each block, length and engine; the ratio is to the peer's time for the same
    work.
    """
    out = table(
        "Blocks of the real size (median of the rounds)",
        *("block", "by", "tokens", "experts", "s", "times peer", "GF/s", "GB read", "GB/s"),
        *("read / used", "peak GB"),
    )
    groups = list(groups)
    peers = {
        (g[0]["layer"], g[0]["tokens"]): middle(g, "seconds")
        for g in groups
        if g[0]["engine"] == "peer"
    }
    for group in groups:
        row, seconds = group[0], middle(group, "seconds")
        peer = peers.get((row["layer"], row["tokens"]))
        read = middle(group, "bytes_read")
        out.add_row(
            name(row),
            row["engine"],
            str(row["tokens"]),
            str(row["experts"]),
            f"{seconds:.3f}",
            f"{peer / seconds:.1f}" if peer and row["engine"] != "peer" else "",
            f"{middle(group, 'operations') / seconds / 1e9:.1f}",
            f"{read / 1e9:.2f}",
            f"{read / seconds / 1e9:.2f}",
            f"{read / middle(group, 'bytes_used'):.3f}",
            f"{max(r['peak_rss'] for r in group) / 1e9:.2f}",
        )
    return out


def forwards(rows: list[Row], machine: Row) -> Table:
    """Time of the whole model, and the times of disk and arithmetic alone."""
    out = table(
        "Whole forward, from these blocks",
        *("tokens", "by", "s", "GB", "TFLOP", "disk alone, s", "arithmetic alone, s"),
    )
    for row in rows:
        disk, gemm = machine["disk_GB_per_s"], machine["gemm_binary64_GF_per_s"]
        out.add_row(
            str(row["tokens"]),
            row["engine"] + ("" if row["complete"] else " (main layers)"),
            f"{row['seconds']:.0f}",
            f"{row['bytes'] / 1e9:.1f}",
            f"{row['operations'] / 1e12:.2f}",
            f"{row['bytes'] / disk / 1e9:.0f}" if disk else "",
            f"{row['operations'] / gemm / 1e9:.0f}",
        )
    return out


def growth(rows: list[Row]) -> Table:
    """Time and memory against the number of tokens."""
    out = table("Growth of a ratio-4 block", "tokens", "by", "s", "ms a token", "GF/s", "peak GB")
    for row in rows:
        seconds = middle([row], "seconds")
        out.add_row(
            str(row["tokens"]),
            row["engine"],
            f"{seconds:.3f}",
            f"{1e3 * seconds / row['tokens']:.1f}",
            f"{row['operations'] / seconds / 1e9:.1f}",
            f"{row['peak_rss'] / 1e9:.2f}",
        )
    return out


def scaling(rows: list[Row]) -> Table:
    """Speed-up by threads and by as many independent processes."""
    out = table(
        "Threads, on a ratio-4 block (medians, in turn)",
        *("tokens", "threads", "1 thread, s", "all, s", "times faster", "processes, s", "at most"),
    )
    for row in rows:
        one, several, processes = (median(row[way]) for way in ("one", "several", "processes"))
        out.add_row(
            str(row["tokens"]),
            str(row["threads"]),
            f"{one:.3f}",
            f"{several:.3f}",
            f"{row['ratio']:.2f}",
            f"{processes:.3f}",
            f"{row['at_most']:.2f}",
        )
    return out
