"""Copies of recordings with one modification, for tests of `check`."""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from v4tool.check.recording import CheckResult
from v4tool.config import ModelConfig
from v4tool.record.manifest import Entry, Run
from v4tool.record.statistics import describe


@dataclass
class Copy:
    """A recording taken apart: header and payload, to be changed and written again."""

    header: dict[str, Any]
    payload: bytearray

    @classmethod
    def of(cls, path: Path) -> "Copy":
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        return cls(json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :]))

    def write(self, path: Path) -> Path:
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + self.payload)
        return path

    def span(self, key: str) -> tuple[int, int]:
        start, stop = self.header[key]["data_offsets"]
        return start, stop

    def flip(self, key: str, value: int, bit: int) -> None:
        """Flip one bit of one 4-byte word of a tensor."""
        start, _ = self.span(key)
        place = start + 4 * value + bit // 8
        self.payload[place] ^= 1 << bit % 8

    def take(self, keys: Iterable[str]) -> None:
        """Remove keys and their bytes, closing the gaps."""
        gone = set(keys)
        rest = [k for k in self.header if k != "__metadata__" and k not in gone]
        payload = bytearray()
        for key in sorted(rest, key=lambda k: self.span(k)):
            start, stop = self.span(key)
            self.header[key]["data_offsets"] = [len(payload), len(payload) + stop - start]
            payload += self.payload[start:stop]
        for key in gone:
            del self.header[key]
        self.payload = payload

    def rename(self, old: str, new: str) -> None:
        self.header = {new if k == old else k: v for k, v in self.header.items()}

    def swap(self, a: str, b: str) -> None:
        self.header[a], self.header[b] = self.header[b], self.header[a]


def altered(source: Path, target: Path, change: Callable[[Copy], None]) -> Path:
    """A copy of a recording with something changed."""
    copy = Copy.of(source)
    change(copy)
    return copy.write(target)


def entry_of(path: Path, config: ModelConfig, case: str = "a") -> Entry:
    """The manifest's entry of a golden recording."""
    metadata = Copy.of(path).header["__metadata__"]
    run = Run(
        id=case,
        subject="",
        text=None,
        input_ids=json.loads(metadata["input_ids"]),
        decode_ids=json.loads(metadata["decode_ids"]),
        complete=True,
        profile="golden",
        numerics={"accumulate": "float64"},
        threads=1,
        seed=0,
        checkpoint_fingerprint="",
        seconds=0.0,
        peak_rss_bytes=0,
    )
    return describe(path, config, run)


def rules_that_name(result: CheckResult, key: str) -> set[str]:
    """The rules of all findings that are about a key or say that what they expect comes from it."""
    return {
        finding.rule
        for finding in result.findings
        if key in {word.strip(",:()") for word in f"{finding.key} {finding.expected}".split()}
    }
