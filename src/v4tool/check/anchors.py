"""Compares next tokens and log-probabilities with published figures (`check --anchors`).

The figures are those that other engines have published for the released weights, in the field
`expect` of a case: a next token, and sometimes its log-probability. Those engines use other
kernels, so the tolerance is wide (`Expect.within`, in nats). With any other checkpoint the figures
do not apply, and the result says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from torch import Tensor

from v4tool.check.bits import F64
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig, Numerics
from v4tool.errors import CheckpointError
from v4tool.model import stream
from v4tool.profiles import Case, Expect
from v4tool.record.scan import read_header

SYNTHETIC = "v4tool_synth"
"""Metadata key in the shards of a random checkpoint."""


@dataclass(frozen=True)
class AnchorRow:
    """One case: expected and found id of the next token; log-probabilities and margins in nats.

    logprob: of the expected id; published: the published range; margin: to the runner-up.
    """

    case: str
    expected: int
    found: int
    logprob: float
    published: tuple[float, float] | None
    margin: float | None
    published_margin: float | None
    ok: bool


@dataclass(frozen=True)
class Anchors:
    """One row a case, or the reason why the figures do not apply to this checkpoint."""

    rows: list[AnchorRow]
    does_not_apply: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the figures apply and all rows agree with them."""
        return self.does_not_apply is None and all(row.ok for row in self.rows)


def why_not(checkpoint: Checkpoint) -> str | None:
    """Why the published figures do not apply to this checkpoint; None for the release.

    Judged by configuration and shard metadata; the weights themselves are not hashed.
    """
    release = ModelConfig.from_file(str(files("v4tool") / "data" / "flash_config.json"))
    if checkpoint.config != release:
        differ = [n for n in type(release).model_fields
                  if getattr(release, n) != getattr(checkpoint.config, n, None)]  # fmt: skip
        return f"its configuration is not the release's: {', '.join(differ[:4])} differ"
    shards = sorted(checkpoint.directory.glob("*.safetensors"))
    if any(SYNTHETIC in read_header(shard).metadata for shard in shards[:1]):
        return "its weights are random ones"
    return None


def check_anchors(
    checkpoint: Checkpoint,
    cases: Sequence[Case],
    numerics: Numerics,
    watch: Callable[[str, str], None] = lambda name, module: None,
) -> Anchors:
    """Run all cases that have published figures, if the checkpoint is the release.

    watch: called with the name of the pass and of the module that runs next. Raises CheckpointError
    for a weight that cannot be read.
    """
    reason = why_not(checkpoint)
    if reason is not None:
        return Anchors([], reason)
    return Anchors(run_anchors(checkpoint, cases, numerics, watch))


def run_anchors(
    checkpoint: Checkpoint,
    cases: Sequence[Case],
    numerics: Numerics,
    watch: Callable[[str, str], None] = lambda name, module: None,
) -> list[AnchorRow]:
    """Prefill all cases that have an `expect`, and compare the next token.

    Raises CheckpointError if there is no such case.
    """
    cases = [case for case in cases if case.expect is not None]
    if not cases:
        raise CheckpointError("no case of the profile has published figures (`expect`)")
    logits: list[dict[str, Tensor]] = [{} for _ in cases]

    def keep(case: int) -> Callable[[str, Tensor], None]:
        def tap(key: str, value: Tensor) -> None:
            if key == "head.out":
                logits[case][key] = value.clone()

        return tap

    sequences = [stream.Sequence(list(c.input_ids), keep(i)) for i, c in enumerate(cases)]
    extent = stream.LayerRange(checkpoint.config.n_layers, head=True, mtp=False)
    stream.run(checkpoint, checkpoint.config, numerics, sequences, extent, watch)
    rows = []
    for case, seen in zip(cases, logits, strict=True):
        assert case.expect is not None
        rows.append(judge(case.id, case.expect, seen["head.out"].double().numpy().reshape(-1)))
    return rows


def log_softmax(logits: F64) -> F64:
    """Log-probabilities in nats, in binary64: [V] -> [V]."""
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def judge(case: str, expect: Expect, logits: F64) -> AnchorRow:
    """Compare the logits [V] of one case with its published figures."""
    logprobs = log_softmax(logits)
    found = int(logits.argmax())
    logprob = float(logprobs[expect.id])
    margin = None
    ok = found == expect.id
    if expect.logprob is not None:
        low, high = expect.logprob
        ok = ok and low - expect.within <= logprob <= high + expect.within
    if expect.margin is not None and expect.runner_up is not None:
        margin = float(logprobs[expect.id] - logprobs[expect.runner_up])
        ok = ok and abs(margin - expect.margin) <= expect.within
    return AnchorRow(
        case, expect.id, found, logprob, expect.logprob, margin, expect.margin, ok
    )  # fmt: skip
