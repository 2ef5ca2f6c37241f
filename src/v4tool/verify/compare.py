"""Comparison of a computed tensor with the recorded one: status and statistics (SPEC 4 and 8).

The BF16 values and integers of an exact recording (accumulated in binary64) are the same bits on
every machine, so other bits are wrong even within the tolerance. A value kept in the accumulation
dtype (acc) is recorded rounded to FP32: correct sums in different orders may round to neighbouring
FP32 values, so one unit in the last place passes, and an absolute difference up to `CANCELLATION`
for sums with cancellation. Recordings that are not exact (accumulated in FP32, or verified with a
user's description) are compared with atol and rtol; those accumulated in FP32 also pass with
differences that a changed rounding explains.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from v4tool.verify.results import Comparison, Status, Worst

CANCELLATION = 2.0**-40
"""Relative to the key's largest value: the effect of the order of 2^13 terms in binary64."""
FLIPS = 1e-3
"""Largest share of BF16 neighbours that FP32-rounded inputs may cause; 3e-5 is expected."""
FLIPS_AT_LEAST = 2
"""Number of BF16 neighbours that pass in tensors so small that `FLIPS` of them are fewer."""
FLOAT32_SLACK = 2.0**-8
"""Relative to the largest value of a vector: one unit in the last place of BF16."""

SameChoice = Callable[[Tensor, Tensor], bool]
"""Called with (computed, recorded) of an integer key: whether both are correct choices (ties)."""


@dataclass(frozen=True)
class Rule:
    """How values are compared.

    atol, rtol: |computed - recorded| <= atol + rtol·|recorded|. exact: BF16 values must have equal
    bits, acc values be within 1 ulp of FP32. float32: if not exact, differences that accumulation
    in FP32 explains pass as well. Integers must be equal under every rule.
    """

    atol: float = 1e-4
    rtol: float = 1e-4
    exact: bool = True
    float32: bool = False

    def text(self, kind: str) -> str:
        """The rule in words, for one kind of value."""
        if kind == "int":
            return "integers must be equal"
        tolerance = f"atol {self.atol:g}, rtol {self.rtol:g}"
        if not self.exact:
            return tolerance + (" or what FP32 sums explain" if self.float32 else "")
        bits = "BF16 bits must be equal" if kind == "bf16" else "1 ulp of FP32"
        return f"{bits}; {tolerance} tells differs from outside"


def compare(
    key: str,
    computed: Tensor,
    recorded: Tensor,
    rule: Rule,
    *,
    loose: bool = False,
    same_choice: SameChoice | None = None,
) -> Comparison:
    """Compare one key's tensors.

    computed: the node's output: BF16, integer, or acc (FP32 or binary64). recorded: as read from
    the file: FP32 or integer, the same shape. loose: an input of this node is known only rounded to
    FP32. same_choice: see `SameChoice`. Another shape or dtype, NaN and infinity give a status,
    never an exception.
    """
    kind = kind_of(computed)
    shape, count = tuple(recorded.shape), recorded.numel()
    problem = _shape_or_dtype(computed, recorded)
    if problem is not None:
        return Comparison(key, problem[0], kind, shape, count, note=problem[1])
    if kind == "int":
        return _integers(key, computed, recorded, same_choice)
    value = computed.to(torch.float32)
    if same_bits(value, recorded) and bool(torch.isfinite(recorded).all()):
        return Comparison(key, "equal", kind, shape, count, count)
    return _floats(key, kind, computed, recorded, rule, loose)


def kind_of(computed: Tensor) -> str:
    """The kind of value, from the dtype of the node's output: bf16, acc or int."""
    if not computed.is_floating_point():
        return "int"
    return "bf16" if computed.dtype == torch.bfloat16 else "acc"


def _shape_or_dtype(computed: Tensor, recorded: Tensor) -> tuple[Status, str] | None:
    """Status and note if the shapes or dtypes do not fit."""
    if computed.shape != recorded.shape:
        return "shape", f"expected {list(computed.shape)}, found {list(recorded.shape)}"
    expected = torch.float32 if computed.is_floating_point() else computed.dtype
    if recorded.dtype != expected:
        return "dtype", f"expected {_name(expected)}, found {_name(recorded.dtype)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two FP32 tensors of one shape hold the same bits."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def bf16_valued(x: Tensor) -> bool:
    """Whether every element of an FP32 tensor is a BF16 value."""
    return same_bits(x.to(torch.bfloat16).to(torch.float32), x)


def _integers(
    key: str, computed: Tensor, recorded: Tensor, same_choice: SameChoice | None
) -> Comparison:
    shape, count = tuple(recorded.shape), recorded.numel()
    wrong = computed != recorded
    if not bool(wrong.any()):
        return Comparison(key, "equal", "int", shape, count, count)
    equal = count - int(wrong.sum())
    if torch.equal(computed.sort(dim=-1).values, recorded.sort(dim=-1).values):
        note = f"another order in {_rows_differing(wrong)} rows"
        return Comparison(key, "order", "int", shape, count, equal, note=note)
    if same_choice is not None and same_choice(computed, recorded):
        note = f"another pick among equal scores in {_rows_differing(wrong)} rows"
        return Comparison(key, "order", "int", shape, count, equal, note=note)
    difference = (computed.to(torch.float64) - recorded.to(torch.float64)).abs()
    axis, name = token_axis(key, shape)
    return Comparison(
        key=key,
        status="outside",
        kind="int",
        shape=shape,
        count=count,
        bits_equal=equal,
        max_abs=float(difference.max()),
        share_outside=1 - equal / count,
        worst=_worst(key, difference, computed, recorded),
        axis=name,
        per_token=_per_token(wrong.to(torch.float64), axis),
    )


def _rows_differing(wrong: Tensor) -> int:
    return int(wrong.flatten(0, -2).any(-1).sum()) if wrong.dim() > 1 else 1


def _floats(
    key: str, kind: str, computed: Tensor, recorded: Tensor, rule: Rule, loose: bool
) -> Comparison:
    value = computed.to(torch.float32)
    c, e = value.to(torch.float64), recorded.to(torch.float64)
    finite = torch.isfinite(c) & torch.isfinite(e)
    distance = torch.where(finite, (c - e).abs(), math.inf)
    distance = torch.where((c == e) & finite, 0.0, distance)
    steps = ulps(value, recorded, kind)
    wrong = _wrong(kind, distance, steps, e, rule)
    status = _status(kind, distance, steps, wrong, e, rule, loose)
    axis, name = token_axis(key, tuple(recorded.shape))
    scale = torch.where(torch.isfinite(e), e.abs(), 0.0)
    top = scale.amax().clamp(min=1e-300)
    bits = value.contiguous().view(torch.int32) == recorded.contiguous().view(torch.int32)
    failing = status in ("differs", "outside", "nan")
    return Comparison(
        key=key,
        status=status,
        kind=kind,
        shape=tuple(recorded.shape),
        count=recorded.numel(),
        bits_equal=int(bits.sum()),
        max_abs=float(distance.max()),
        max_rel=float((distance / scale.clamp(min=1e-300)).max()),
        ulps=int(steps.max()),
        relative_l2=_relative_l2(c, e),
        cosine=_cosine(c, e),
        share_outside=float(wrong.to(torch.float64).mean()),
        least_tolerance=float((distance / (1 + scale)).max()),
        worst=_worst(key, distance, computed, recorded),
        axis=name,
        per_token=_per_token(torch.where(wrong, distance / top, 0.0), axis) if failing else (),
        note=_note(kind, c, recorded, status, name, axis),
    )


def _outside(distance: Tensor, e: Tensor, rule: Rule) -> Tensor:
    bound = rule.atol + rule.rtol * torch.where(torch.isfinite(e), e.abs(), 0.0)
    return ~(distance <= bound)


def _wrong(kind: str, distance: Tensor, steps: Tensor, e: Tensor, rule: Rule) -> Tensor:
    """Mask of the elements that break the rule."""
    if not rule.exact:
        outside = _outside(distance, e, rule)
        return outside & ~_within_float32(kind, distance, steps, e) if rule.float32 else outside
    if kind == "bf16":
        return distance > 0
    top = torch.where(torch.isfinite(e), e.abs(), 0.0).amax()
    return (distance > CANCELLATION * top) & (steps > 1)


def _within_float32(kind: str, distance: Tensor, steps: Tensor, e: Tensor) -> Tensor:
    """Mask of differences that FP32 accumulation explains.

    These are BF16 neighbours, and differences small relative to the vector's largest value.
    One changed rounding of an attention probability or a residual stream changes a sum with
    cancellation by many of its units in the last place, but by at most this share of its terms.
    """
    largest = torch.where(torch.isfinite(e), e.abs(), 0.0).amax(-1, keepdim=True)
    neighbour = (steps <= 1) if kind == "bf16" else torch.zeros_like(steps, dtype=torch.bool)
    return neighbour | (distance <= FLOAT32_SLACK * largest)


def _status(
    kind: str,
    distance: Tensor,
    steps: Tensor,
    wrong: Tensor,
    e: Tensor,
    rule: Rule,
    loose: bool,
) -> Status:
    if not bool(torch.isfinite(e).all()):
        return "nan"
    if not bool((distance > 0).any()):
        return "zero"
    if not bool(wrong.any()):
        return "close" if not rule.exact else "ulp"
    flips = max(FLIPS_AT_LEAST, FLIPS * wrong.numel())
    neighbours = kind == "bf16" and int(steps.max()) <= 1
    if loose and rule.exact and neighbours and int(wrong.sum()) <= flips:
        return "rounding"
    return "outside" if bool((_outside(distance, e, rule) & wrong).any()) else "differs"


def ulps(computed: Tensor, recorded: Tensor, kind: str) -> Tensor:
    """Distance in units in the last place of BF16 (kind bf16) or FP32; 2^31 where not finite.

    computed, recorded: FP32, one shape. int64 of that shape.
    """
    if kind == "bf16":
        a, b = (_ranks(x.to(torch.bfloat16).view(torch.int16)) for x in (computed, recorded))
        steps = (a - b).abs()
        # a recorded value that is no BF16 value rounds to the computed one, but differs from it
        between = (steps == 0) & (computed != recorded)
        steps = torch.where(between, 1, steps)
    else:
        a, b = (_ranks(x.contiguous().view(torch.int32)) for x in (computed, recorded))
        steps = (a - b).abs()
    finite = torch.isfinite(computed) & torch.isfinite(recorded)
    return torch.where(finite, steps, 2**31)


def _ranks(bits: Tensor) -> Tensor:
    """Bits of floats (sign and magnitude) as integers in the order of the floats' values."""
    wide = bits.to(torch.int64)
    smallest = torch.iinfo(bits.dtype).min
    return torch.where(wide < 0, smallest - wide, wide)


def _relative_l2(c: Tensor, e: Tensor) -> float:
    """Norm of the difference relative to the norm of the computed one."""
    difference, length = float((e - c).norm()), float(c.norm())
    if not math.isfinite(difference) or not length:
        return 0.0 if difference == 0 else math.inf
    return difference / length


def _cosine(c: Tensor, e: Tensor) -> float:
    c, e = c.flatten(), e.flatten()
    lengths = float(c.norm()) * float(e.norm())
    return float(c @ e) / lengths if lengths else float(not c.any() and not e.any())


def _note(kind: str, c: Tensor, recorded: Tensor, status: Status, name: str, axis: int) -> str:
    if status == "nan":
        lost = ~torch.isfinite(recorded)
        begin = _first(lost, axis)
        return f"{int(lost.sum())} of {lost.numel()} not finite, from {name} {begin} on"
    if not bool(torch.isfinite(c).all()):
        return "the description itself gives no finite values here"
    if status != "zero" and kind == "bf16" and not bf16_valued(recorded):
        return "the recorded values are no BF16 values"
    return ""


def _first(mask: Tensor, axis: int) -> int:
    return int(_by_token(mask.to(torch.float64), axis).nonzero()[0, 0])


def _by_token(x: Tensor, axis: int) -> Tensor:
    return x.movedim(axis, 0).flatten(1).amax(-1) if x.dim() > 1 else x


def _per_token(error: Tensor, axis: int) -> tuple[float, ...]:
    return tuple(float(f"{v:.3g}") for v in _by_token(error, axis).tolist())


def _worst(key: str, distance: Tensor, computed: Tensor, recorded: Tensor) -> Worst:
    flat = int(distance.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape))
    where = dict(zip(axis_names(key, tuple(distance.shape)), index, strict=True))
    where.pop("batch", None)
    return Worst(index, where, float(recorded[index]), float(computed[index]))


def axis_names(key: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The name of each dimension of a key: batch, token, channel, ... (SPEC 6, Shapes)."""
    first = "block" if "compressor." in key and not key.endswith(("wkv.out", "wgate.out")) else ""
    first = first or ("row" if key.endswith("sparse_attn.in.kv") else "token")
    if len(shape) == 2:
        return ("batch" if shape[0] == 1 and "logits" in key else "token", "channel")
    if len(shape) == 3:
        table = key.endswith(("topk_idxs", "indexer.out"))
        return ("batch", first, "entry" if table else "channel")
    if len(shape) == 4:
        if key.endswith(".comb"):
            return ("batch", first, "from stream", "to stream")
        return ("batch", first, "head" if ".attn." in key else "stream", "channel")
    return tuple(f"dim {i}" for i in range(len(shape)))


def token_axis(key: str, shape: tuple[int, ...]) -> tuple[int, str]:
    """The dimension of tokens (or rows, or compressed blocks), and its name."""
    axis = 1 if len(shape) > 2 else 0
    return axis, axis_names(key, shape)[axis] if shape else ""
