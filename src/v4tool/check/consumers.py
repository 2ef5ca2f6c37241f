"""Consumers of a single-pass file scan: tensor cache, checksums, background checks of blocks.

Each takes the pieces of payload in file order, as `record.scan` yields them. Left out: the checks
of a block (`recording.check_block`).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from v4tool.check.block_pass import BlockPass
from v4tool.check.file_tensors import LARGEST_CACHED, Array, FileTensors
from v4tool.check.findings import Findings
from v4tool.record.manifest import Entry as ManifestEntry
from v4tool.record.scan import Header, Piece
from v4tool.record.statistics import checksum

NOT_HELD = ("w1.out", "w3.out", "wgate.out", "compressor.wkv.out", "head.out", "logits.out")
"""Suffixes of keys that no identity reads whole; they are not cached during the scan."""
WORKERS = 2
"""Threads that check blocks while the file is read."""
BLOCKS_WAITING = 3
"""Blocks that may be queued or in work; the tensors of each are cached."""


class TensorCollector:
    """Assembles whole FP32 tensors from pieces and puts them into the cache of `FileTensors`.

    wanted: whether a key should be cached.
    """

    def __init__(self, tensors: FileTensors, wanted: Callable[[str], bool]) -> None:
        self.tensors, self.wanted = tensors, wanted
        self._whole: Array = np.empty(0)

    def take(self, piece: Piece) -> None:
        """Add one piece of an FP32 tensor; the last piece puts the tensor into the cache."""
        entry = piece.entry
        kind = self.tensors.kinds.get(entry.key)
        if kind is None or entry.nbytes > 2 * LARGEST_CACHED or not self.wanted(entry.key):
            return
        if piece.offset == 0:
            self._whole = np.empty(entry.nbytes // 4, np.uint16 if kind == "bf16" else np.float32)
        span = slice(piece.offset // 4, (piece.offset + len(piece.data)) // 4)
        if kind == "bf16":
            words = piece.data.view(np.uint32)
            np.right_shift(words, np.uint32(16), out=self._whole[span], casting="unsafe")
        else:
            self._whole[span] = piece.data.view(np.float32)
        if piece.last:
            self.tensors.put(entry.key, self._whole)


class Checksums:
    """Checksums of all tensors, compared with those of the manifest, if there is one."""

    def __init__(self, manifest: ManifestEntry | None) -> None:
        self.manifest = manifest
        self._sums: dict[str, int] = {}

    def take(self, piece: Piece) -> None:
        if self.manifest is not None and len(piece.data) % 4 == 0:
            key = piece.entry.key
            words = piece.data.view(np.uint32)
            self._sums[key] = (self._sums.get(key, 0) + checksum(words)) % (1 << 32)

    def close(self, header: Header, findings: Findings) -> None:
        """Compare with the manifest and report differences.

        Nothing is compared if the number of keys differs: other rules report the keys.
        """
        known = self.manifest.sums() if self.manifest is not None else []
        keys = sorted(header.entries)
        if len(known) != len(keys):
            return
        findings.applied("tensor checksum", keys)
        for key, expected in zip(keys, known, strict=True):
            if self._sums.get(key, 0) != expected:
                found = f"{self._sums.get(key, 0):08x}"
                findings.report(key, "tensor checksum", f"{expected:08x} as in the manifest", found)


class BackgroundJudge:
    """Runs `judge` for each block pass in a thread pool as soon as all of its keys have been read.

    A context manager: leaving it runs the blocks whose keys have not all been read, and waits.
    """

    def __init__(
        self, blocks: list[BlockPass], tensors: FileTensors, judge: Callable[[BlockPass], None]
    ) -> None:
        self.tensors, self._judge = tensors, judge
        self._blocks = {block.prefix: block for block in blocks}
        self._left = dict.fromkeys(self._blocks, 0)
        for key in tensors.kinds:
            if (prefix := self._prefix(key)) is not None:
                self._left[prefix] += 1
        self._waiting: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(WORKERS)

    def _prefix(self, key: str) -> str | None:
        """Key prefix of the block pass that a key belongs to, None if it belongs to none."""
        parts = key.split(".")
        for count in (2, 3, 4):
            prefix = ".".join(parts[:count]) + "."
            if prefix in self._blocks:
                return prefix
        return None

    def wanted(self, key: str) -> bool:
        """Whether some identity reads the key whole."""
        return bool(self._blocks) and not key.endswith(NOT_HELD)

    def tensor_read(self, key: str) -> None:
        """Note that a key has been read; start its block's check if it was the last one."""
        prefix = self._prefix(key)
        if prefix is None or key not in self.tensors.kinds:
            return
        self._left[prefix] -= 1
        if self._left[prefix] == 0:
            self._start(prefix)

    def _start(self, prefix: str) -> None:
        while len(self._waiting) >= BLOCKS_WAITING:
            self._waiting.pop(0).result()
        self._waiting.append(self._pool.submit(self._run, self._blocks[prefix]))

    def _run(self, block: BlockPass) -> None:
        self._judge(block)
        self.tensors.forget(block.prefix, keep=block.key("out"))

    def __enter__(self) -> "BackgroundJudge":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                for prefix in [prefix for prefix, left in self._left.items() if left > 0]:
                    self._start(prefix)
                for future in self._waiting:
                    future.result()
        finally:
            self._pool.shutdown(cancel_futures=True)
