"""Hashes, checksums and coverage of a finished recording, from one scan, as its manifest entry.

Left out: the manifest itself (`manifest`), and whether the values are right (`check`).
"""

import base64
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from v4tool.config import ModelConfig
from v4tool.errors import RecordingError
from v4tool.names import has_indexer, is_expert, pass_of
from v4tool.record.manifest import Blocks, Coverage, Entry, Run, update_entry
from v4tool.record.scan import FileScan, Header, Piece, read_header
from v4tool.version import __version__


def record_dump(
    directory: Path | str, recording: Path | str, config: ModelConfig, run: Run
) -> Entry:
    """Add a finished recording to the manifest of `directory`; returns its entry.

    The recording is read once, for hashes and coverage; an earlier verification is dropped.
    RecordingError if it is not a complete safetensors file, OutputError if the manifest cannot be
    written.
    """
    entry = describe(recording, config, run)
    update_entry(directory, run.id, entry)
    return entry


def describe(recording: Path | str, config: ModelConfig, run: Run) -> Entry:
    """The entry of a finished recording; nothing is written."""
    length = len(run.input_ids)
    statistics = RecordingStatistics(recording, config, length)
    header = statistics.header
    has_mtp = any(key.startswith("mtp.0.decode.") for key in header.entries)
    return Entry(
        **run.model_dump(),
        length=length,
        file=Path(recording).name,
        tensors=len(header.entries),
        payload_bytes=header.size - header.payload,
        payload_sha256=statistics.payload_sha256,
        header_sha256=header.sha256,
        file_sha256=statistics.file_sha256,
        mtp_decode_start_pos=length if has_mtp else None,
        coverage=statistics.coverage,
        versions=versions(),
        checksums=statistics.checksums,
    )


def versions() -> dict[str, str]:
    """Versions of v4tool, Python, torch, NumPy and safetensors."""
    found = {"v4tool": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def checksum(words: Any) -> int:
    """The sum modulo 2^32 of words, uint32 [n]; every single flipped bit changes it."""
    return int(np.add.reduce(words, dtype=np.uint32)) if len(words) else 0


class RecordingStatistics:
    """Hashes, checksums and coverage of a recording, from one scan of the file."""

    def __init__(self, recording: Path | str, config: ModelConfig, length: int) -> None:
        self.header = read_header(recording)
        if self.header.findings:
            raise RecordingError(f"{recording}: {self.header.findings[0].line()}")
        self._limit = np.float32(config.swiglu_limit)
        self._sums = dict.fromkeys(self.header.entries, 0)
        self._hits = dict.fromkeys(
            (f"{kind}.{name}" for kind in ("routed", "shared") for name in ("w1", "w3")), 0
        )
        scan = FileScan(self.header, hash_file=True)
        for piece in scan.pieces():
            self._take(piece)
        self.payload_sha256, self.file_sha256 = scan.payload_sha256, scan.file_sha256
        sums = np.array([self._sums[key] for key in sorted(self._sums)], "<u4")
        self.checksums = base64.b64encode(sums.tobytes()).decode()
        self.coverage = Coverage(
            **path_coverage(config, length),
            clamp_hits=self._hits,
            experts_reached=experts_reached(self.header),
        )

    def _take(self, piece: Piece) -> None:
        key = piece.entry.key
        self._sums[key] = (self._sums[key] + checksum(piece.data.view(np.uint32))) % (1 << 32)
        if ".ffn." in key and key.endswith(("w1.out", "w3.out")):
            kind, name = "routed" if is_expert(key) else "shared", key.split(".")[-2]
            values = piece.data.view(np.float32)
            beyond = values > self._limit if name == "w1" else np.abs(values) > self._limit
            self._hits[f"{kind}.{name}"] += int(beyond.sum())


def path_coverage(config: ModelConfig, length: int) -> dict[str, Any]:
    """The fields of `Coverage` that depend on the prompt's length alone."""
    ratios = sorted({r for r in config.compress_ratios if r})
    return {
        "blocks": {str(r): Blocks(complete=length // r, trailing=length % r) for r in ratios},
        "window_exceeded": length > config.window_size,
        "topk_truncated": any(length // r > config.index_topk for r in ratios if has_indexer(r)),
    }


def experts_reached(header: Header) -> dict[str, int]:
    """Routed experts by pass and layer: `layers.3`, `decode.0.layers.3`, `mtp.0.prefill`."""
    reached: dict[str, int] = {}
    for key in header.entries:
        if is_expert(key) and key.endswith(".w1.out"):
            block = key.split(".ffn.")[0]
            reached[block] = reached.get(block, 0) + 1
    return dict(sorted(reached.items(), key=lambda item: _pass_and_layer(item[0])))


def _pass_and_layer(block: str) -> tuple[str, int]:
    """The sorting key of a block's path: its pass, and its layer's number (0 for MTP)."""
    rest = block.removeprefix(pass_of(block + "."))
    return pass_of(block + "."), int(rest.split(".")[1]) if rest.startswith("layers.") else 0
