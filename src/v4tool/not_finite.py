"""Finds NaN and infinity among the values that a dump computes, and the weights behind them.

Every value of every key is looked at as it is recorded, in FP32 (SPEC section 6), whether its key
is wanted or not; those of a recording first by the sums of the writer's buffers. A minus infinity
that the model writes by design (masks, scores of blocks that are not visible yet) stands in no key.
Left out: values between two keys, NaN codes in weights that no token reaches
(`v4tool check --port`).
"""

import math
import re
from collections.abc import Container

import torch
from torch import Tensor

from v4tool.check.port import not_finite_values
from v4tool.checkpoint.shards import Checkpoint
from v4tool.errors import CheckpointError, NotFiniteError

_LARGEST = torch.finfo(torch.float32).max
_KEY = re.compile(
    r"(?:decode\.\d+\.)?(?P<block>layers\.\d+\.|mtp\.\d+\.)?(?:prefill\.|decode\.)?(?P<path>.+)"
)
_OPERANDS = (
    (r"(hc_\w+)\.(?:pre|post|comb)", (r"\1_fn", r"\1_base", r"\1_scale")),
    (r"(attn)\.sparse_attn\.out", (r"\1.attn_sink",)),
    (r"(attn)\.wo_b\.in", (r"\1.wo_a.weight", r"\1.wo_a.scale")),
    (r"(.+\.compressor)\.norm\.out", (r"\1.ape", r"\1.norm.weight")),
    (r"(ffn\.gate)\.out\.[01]", (r"\1.weight", r"\1.bias", r"\1.tid2eid")),
    (r"norm\.out", ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")),
    (r"(.+)\.out", (r"\1.weight", r"\1.scale")),
)
"""The weights behind a key, both by their paths in a block; the first pattern that matches."""


def all_finite(value: Tensor) -> bool:
    """Whether all elements are finite in FP32; integers are.

    A sum is the fastest look at all of them: it is finite only if they are. Only where it is not
    (or binary64 may exceed FP32's range) the extremes decide.
    """
    if not value.is_floating_point() or not value.numel():
        return True
    if value.dtype != torch.float64 and math.isfinite(value.sum().item()):
        return True
    low, high = value.aminmax()  # NaN if any element is
    if low.item() >= -_LARGEST and high.item() <= _LARGEST:
        return True
    return bool(value.float().isfinite().all())


def describe(value: Tensor) -> str:
    """How many elements are NaN and infinite, and where the first one is."""
    single = value.float()
    wrong = (~single.isfinite()).nonzero()
    nans = int(single.isnan().sum())
    counts = ((nans, "NaN"), (len(wrong) - nans, "infinite"))
    found = " and ".join(f"{count} {what}" for count, what in counts if count)
    return f"{found} of {value.numel()} values, the first at {wrong[0].tolist()}"


def weights_of(key: str, names: Container[str]) -> list[str]:
    """The weights that the operator behind a key multiplies, adds or looks up.

    names: the checkpoint's tensors. Empty for operators without weights (rotations, sums).
    """
    parts = _KEY.fullmatch(key)
    if parts is None:
        return []
    block = parts["block"] or ""
    for pattern, templates in _OPERANDS:
        if found := re.fullmatch(pattern, parts["path"]):
            paths = [found.expand(template) for template in templates]
            # MTP has no embedding and output matrix of its own (SPEC 2)
            every = [block + path if block + path in names else path for path in paths]
            return [name for name in every if name in names]
    return []


class FiniteCheck:
    """Judges the values of one case, in order of execution.

    keep_going: do not raise. keys: those with NaN or infinity; first: what was found in the first
    one, and with which weights it was computed.
    """

    def __init__(self, case: str, checkpoint: Checkpoint, *, keep_going: bool) -> None:
        self.case, self.checkpoint, self.keep_going = case, checkpoint, keep_going
        self.keys: set[str] = set()
        self.first: str | None = None

    def see(self, key: str, value: Tensor) -> None:
        """Look at one value, or again at it. NotFiniteError for NaN and infinity, unless
        `keep_going`.
        """
        if all_finite(value):
            return
        self.keys.add(key)
        if self.first is not None:
            return
        self.first = f"{key}: {describe(value)}, {self._weights(key)}"
        if not self.keep_going:
            raise NotFiniteError(
                f"case {self.case}: {self.first}; nothing is recorded (--keep-going records on)"
            )

    def _weights(self, key: str) -> str:
        names = weights_of(key, self.checkpoint.specs)
        if not names:
            return "computed without weights"
        bad = {name: found for name in names if (found := self._bad(name))}
        if not bad:
            return f"computed with {', '.join(names)} (all finite)"
        return f"computed with {', '.join(name + bad.get(name, '') for name in names)}"

    def _bad(self, name: str) -> str:
        """What a weight holds that is not finite, in parentheses; empty where all of it is."""
        try:
            count = not_finite_values(self.checkpoint, name)
        except CheckpointError as error:
            return f" ({error})"
        total = math.prod(self.checkpoint.specs[name].shape)
        return f" ({count} of {total} are NaN or infinite)" if count else ""
