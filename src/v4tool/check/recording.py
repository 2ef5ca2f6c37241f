"""Check of one recording: specification, hashes, values and identities in one read of the file.

`check_recording` reads the file once from start to end; hashes, rules about values and the
tensors for identities all come from that read. Once the keys of a block pass have been read, its
identities are checked in a background thread. Each defect is a `Finding`, and the result says how
many keys and values each rule was applied to. Left out: the checks that take the checkpoint
(`weights`), and how results are shown (`report`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from v4tool.check.attention import check_attention
from v4tool.check.block_pass import BlockPass, DuplicateInputs
from v4tool.check.compressed import check_compressed
from v4tool.check.consumers import BackgroundJudge, Checksums, TensorCollector
from v4tool.check.embeddings import check_embeddings
from v4tool.check.experts import check_experts
from v4tool.check.file_tensors import FileTensors
from v4tool.check.findings import Findings
from v4tool.check.form import sorted_by_name
from v4tool.check.rules import RULES, Rule
from v4tool.check.specification import (
    Expectation,
    check_ids,
    check_keys,
    expectation,
)
from v4tool.check.specification import check_experts as check_expert_keys
from v4tool.check.streams import check_mtp_input, check_streams
from v4tool.check.value_rules import ValueRules, check_values
from v4tool.check.weight_bounds import WeightBounds
from v4tool.config import ModelConfig
from v4tool.errors import Finding
from v4tool.names import Step, steps_of
from v4tool.record.manifest import Entry as ManifestEntry
from v4tool.record.scan import FileScan, Header, read_header

if TYPE_CHECKING:
    from v4tool.checkpoint.shards import Checkpoint

SORTED = " (tensors sorted by name as other writers do: the same values have another hash)"
Progress = Callable[[int], None]
"""Called with the number of bytes read from the file since the last call."""


@dataclass(frozen=True)
class RuleRow:
    """Use of one rule: the keys and the number of values it was applied to, and its findings."""

    rule: Rule
    covered: frozenset[str]
    values: int
    findings: int

    @property
    def keys(self) -> int:
        """How many keys of the file the rule was applied to."""
        return len(self.covered)


@dataclass
class CheckResult:
    """Result of the check of one recording.

    keys: number of keys in the file; covered: number of those that an identity or a weight was
    compared with; seconds: by stage.
    """

    path: Path
    findings: list[Finding]
    rules: list[RuleRow]
    keys: int
    covered: int
    payload_sha256: str
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is no finding except notes."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "file": str(self.path),
            "ok": self.ok,
            "findings": [finding.as_dict() for finding in self.findings],
            "rules": [
                {"rule": r.rule.id, "family": r.rule.family, "keys": r.keys, "values": r.values,
                 "findings": r.findings}
                for r in self.rules
            ],
            "keys": self.keys,
            "covered": self.covered,
            "payload_sha256": self.payload_sha256,
            "bytes_read": self.bytes_read,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }  # fmt: skip


def check_recording(
    path: Path | str,
    *,
    config: ModelConfig,
    ids: Sequence[int] | None = None,
    decode_ids: Sequence[int] | None = None,
    case: str = "",
    manifest: ManifestEntry | None = None,
    checkpoint: "Checkpoint | None" = None,
    identities: bool = True,
    deep: bool = False,
    partial: bool = False,
    progress: Progress | None = None,
) -> CheckResult:
    """Check one recording. Defects are findings; RecordingError if the file cannot be opened.

    ids, decode_ids: the token ids it must be a recording of (default: those that it states);
    case: name for messages; manifest: the recording's entry, for hashes and ids; checkpoint: for
    the rules that take weights, with `deep` every product as well; identities: whether to check
    identities; partial: keys may be missing; progress: called with bytes read.
    """
    config.architecture.require("check")
    check = _Check(Path(path), config, partial=partial, ids=ids, manifest=manifest)
    try:
        check.specification(ids, decode_ids, case)
        check.scan(identities=identities, progress=progress or (lambda _: None))
        if checkpoint is not None:
            check.weights(checkpoint, deep=deep)
    finally:
        check.close()
    return check.result()


class _Check:
    """The state of one check: its stages are methods, called in order."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        *,
        partial: bool,
        ids: Sequence[int] | None,
        manifest: ManifestEntry | None,
    ) -> None:
        self.config, self.manifest = config, manifest
        self.header: Header = read_header(path)
        self.findings = Findings({key: entry.shape for key, entry in self.header.entries.items()})
        for finding in self.header.findings:
            self.findings.report(finding.key, finding.rule, finding.expected, finding.found)
        self.expected: Expectation = expectation(self.header, config, ids=ids, partial=partial)
        self.seconds: dict[str, float] = {}
        self.payload_sha256 = ""
        self.bytes_read = 0
        for rule in RULES.values():
            if rule.family == "container" and "sha256" not in rule.id and "sum" not in rule.id:
                self.findings.applied(rule.id, self.header.entries)
        check_keys(self.header, self.expected, self.findings)
        self.tensors = FileTensors(self.header, self.expected.usable)
        self.weight_bounds = WeightBounds(self.findings)
        self.duplicates = DuplicateInputs(self.tensors, self.findings)
        self.blocks = self._blocks()

    def close(self) -> None:
        self.tensors.close()

    def specification(
        self, ids: Sequence[int] | None, decode_ids: Sequence[int] | None, case: str
    ) -> None:
        """Check what needs only the header and the integer tensors: ids and routed experts."""
        started = time.monotonic()
        if self.manifest is not None:
            ids = self.manifest.input_ids if ids is None else ids
            decode_ids = self.manifest.decode_ids if decode_ids is None else decode_ids
        check_ids(
            self.header, self.expected, self.tensors, self.findings,
            ids=ids, decode_ids=decode_ids, case=case,
        )  # fmt: skip
        check_expert_keys(self.header, self.expected, self.tensors, self.findings)
        self.seconds["specification"] = time.monotonic() - started

    def _blocks(self) -> list[BlockPass]:
        """All block passes, each with the earlier passes over the same block."""
        if not self.expected.length:
            return []
        length, layers = self.expected.length, range(self.config.n_layers)
        rows = [
            (step, layer, f"{step.prefix}layers.{layer}.")
            for step in steps_of(length, len(self.expected.decode_ids))
            for layer in layers
        ]
        if self.expected.mtp:
            for step in (Step("mtp.0.prefill.", length, 0), Step("mtp.0.decode.", 1, length)):
                rows.append((step, self.config.n_layers, step.prefix))
        blocks: list[BlockPass] = []
        for step, layer, prefix in rows:
            earlier = tuple(p for p in blocks if p.layer == layer)
            blocks.append(
                BlockPass(
                    self.config,
                    step,
                    layer,
                    prefix,
                    self.tensors,
                    self.findings,
                    self.weight_bounds,
                    self.duplicates,
                    earlier,
                )
            )
        return blocks

    def scan(self, *, identities: bool, progress: Progress) -> None:
        """Read the file once, and check hashes, values and identities."""
        started = time.monotonic()
        exact = self.header.metadata.get("accumulate", "float64") == "float64"
        self.findings.applied("numerics", self.header.entries)
        if identities and not exact:
            found = self.header.metadata["accumulate"]
            self.findings.report("__metadata__.accumulate", "numerics", "float64", found, note=True)
        blocks = self.blocks if identities and exact else []
        # a BLAS with threads of its own would compete with the reader and the two checking threads
        with (
            threadpool_limits(1, user_api="blas"),
            BackgroundJudge(blocks, self.tensors, check_block) as background,
        ):
            values, checksums = (
                ValueRules(self.findings, self.tensors.kinds),
                Checksums(self.manifest),
            )
            collector = TensorCollector(self.tensors, background.wanted)
            scan = FileScan(self.header)
            for piece in scan.pieces():
                if piece.entry.dtype == "F32" and len(piece.data) % 4 == 0:
                    values.take(piece)
                    collector.take(piece)
                checksums.take(piece)
                if piece.last:
                    background.tensor_read(piece.entry.key)
                progress(len(piece.data))
            values.close()
            self.seconds["reading"] = time.monotonic() - started
        self.bytes_read, self.payload_sha256 = scan.bytes_read, scan.payload_sha256
        self._hashes(checksums)
        if identities and exact:
            with np.errstate(all="ignore"):
                check_embeddings(self.expected, self.blocks, self.tensors, self.findings)
                self.duplicates.check()
                self.weight_bounds.check_across_passes(discrete=lambda rule: rule != "attention")
        self.seconds["file"] = time.monotonic() - started

    def _hashes(self, checksums: "Checksums") -> None:
        stated = {"metadata": self.header.metadata.get("payload_sha256")}
        if self.manifest is not None:
            stated["manifest"] = self.manifest.payload_sha256
        for where, digest in stated.items():
            if digest is not None:
                self.findings.applied("payload sha256", self.header.entries)
                if digest != self.payload_sha256:
                    expected = f"{digest} as in the {where}"
                    found = self.payload_sha256 + (SORTED if sorted_by_name(self.header) else "")
                    self.findings.report("payload", "payload sha256", expected, found)
        if self.manifest is not None:
            self.findings.applied("header sha256", self.header.entries)
            if self.manifest.header_sha256 != self.header.sha256:
                expected = f"{self.manifest.header_sha256} as in the manifest"
                self.findings.report("header", "header sha256", expected, self.header.sha256)
            checksums.close(self.header, self.findings)

    def weights(self, checkpoint: "Checkpoint", *, deep: bool) -> None:
        """Check what takes the checkpoint's weights."""
        from v4tool.check.weights import check_weights

        started = time.monotonic()
        check_weights(
            self.blocks,
            self.expected,
            self.tensors,
            self.findings,
            self.weight_bounds,
            checkpoint,
            deep=deep,
        )
        self.seconds["weights"] = time.monotonic() - started

    def result(self) -> CheckResult:
        tallies = self.findings.tallies
        rows = [
            RuleRow(
                rule,
                frozenset(tally.keys & self.header.entries.keys()),
                tally.values,
                tally.findings,
            )
            for rule in RULES.values()
            if (tally := tallies.get(rule.id)) is not None
        ]
        covered = [row.covered for row in rows if row.rule.family in ("identity", "weights")]
        order = {key: position for position, key in enumerate(self.header.entries)}
        findings = sorted(self.findings.items, key=lambda f: (order.get(f.key, -1), f.rule))
        return CheckResult(
            self.header.path, findings, rows, len(self.header.entries),
            len(frozenset().union(*covered)), self.payload_sha256, self.seconds,
            self.bytes_read,
        )  # fmt: skip


def check_block(block: BlockPass) -> None:
    """Apply all rules about values and all identities to one block in one pass."""
    # values of a damaged file may overflow or be NaN: a rule reports them, NumPy need not warn
    with np.errstate(all="ignore"):
        check_values(block)
        if block.is_mtp:
            check_mtp_input(block)
        check_attention(block)
        check_compressed(block)
        check_experts(block)
        check_streams(block)
