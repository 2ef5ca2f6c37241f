"""Faults of the compressor and the indexer."""

import math

import torch

from tests.faults.harness import Fault, Patch
from v4tool.model import compress
from v4tool.model.layers import ordered_sum
from v4tool.model.scope import Scope
from v4tool.quant import activation
from v4tool.quant.activation import to_bf16

POOL = "compressor_pool[attn.indexer.compressor]"
NORM = "layers.1.attn.indexer.compressor.norm.out"
KEYS = {"operator": "index_compressor_out", "key": "layers.1.attn.indexer.compressor.out"}
CHOICE = {
    "operator": "index_choice",
    "key": "layers.1.attn.indexer.out",
    "prompt": "len129",
    "suspects": ("index_score",),
}


def pooled(name: str, inject, key: str = NORM, **more) -> Fault:
    """A fault that the pooled rows of the indexer's compressor show first."""
    return Fault(name, inject, POOL, key, **{"prompt": "len6", **more})


def ape_missing(patch: Patch) -> None:
    right = Scope.weight

    def wrong(self, name):
        value = right(self, name)
        return torch.zeros_like(value) if name == "ape" else value

    patch.setattr(Scope, "weight", wrong)


def ape_missing_on_tail(patch: Patch) -> None:
    right_weight, right_forget, last = Scope.weight, compress.keep_rows, {}

    def weight(self, name):
        value = right_weight(self, name)
        if name == "ape":
            last["ape"] = value.double()
        return value

    def wrong(state, kv, gate, step, ratio):
        right_forget(state, kv, gate, step, ratio)
        tail = step.end % ratio
        if step.start == 0 and tail:
            state.gate[-tail:] -= last["ape"][:tail]

    patch.setattr(Scope, "weight", weight)
    patch.setattr(compress, "keep_rows", wrong)


def rows(change):
    """Replace `block_rows`: change gets (right, x, first, blocks, ratio, before)."""

    def inject(patch: Patch) -> None:
        right = compress.block_rows
        patch.setattr(compress, "block_rows", lambda *a, before: change(right, *a, before))

    return inject


def own_rows_only(right, x, first, blocks, ratio, before):
    out = right(x, first, blocks, ratio, before=before)
    if out.shape[1] == 2 * ratio:
        out[:, :ratio] = before
    return out


def halves_swapped(right, x, first, blocks, ratio, before):
    if x.shape[-1] % 2 == 0 and ratio == 4:
        x = x.roll(x.shape[-1] // 2, -1)
    return right(x, first, blocks, ratio, before=before)


def next_block(right, x, first, blocks, ratio, before):
    out = right(x, first, blocks, ratio, before=before)
    if out.shape[1] == 2 * ratio:
        empty = torch.full_like(out[:1, :ratio], before)
        d = out.shape[-1]
        own_first = x[-blocks * ratio :][: blocks * ratio].unflatten(0, (blocks, ratio))[..., :d]
        out[:, :ratio] = torch.cat([own_first[1:], empty])
    return out


def pool(change):
    """Replace the pooling: change gets (right, kv, gate)."""

    def inject(patch: Patch) -> None:
        right = compress.pool
        patch.setattr(compress, "pool", lambda kv, gate: change(right, kv, gate))

    return inject


def mean(right, kv, gate):
    there = (gate > -math.inf).double()
    return (kv * there).sum(1) / there.sum(1)


def over_features(right, kv, gate):
    return (kv * torch.softmax(gate, dim=-1)).sum(1)


def in_bf16(right, kv, gate):
    return right(to_bf16(kv).double(), to_bf16(gate).double())


def norm_missing(patch: Patch) -> None:
    right = Scope.norm

    def wrong(self, name, x):
        compressing = self.path.endswith("compressor.") and name == "norm"
        return x if compressing else right(self, name, x)

    patch.setattr(Scope, "norm", wrong)


def decode_overlap_lost(patch: Patch) -> None:
    right = compress.completed_blocks

    def wrong(state, step, kv, gate, ratio):
        end = step.start // 4 * 4 - state.first
        if step.start and ratio == 4 and state.kv is not None and end > 0:
            state.kv[:end], state.gate[:end] = 0, -math.inf
        return right(state, step, kv, gate, ratio)

    patch.setattr(compress, "completed_blocks", wrong)


def state_not_shifted(patch: Patch) -> None:
    right = compress.keep_rows

    def wrong(state, kv, gate, step, ratio):
        right(state, kv, gate, step, ratio)
        if step.start and ratio == 4 and step.end % 4 == 0:
            state.kv[:4], state.gate[:4] = 0, -math.inf

    patch.setattr(compress, "keep_rows", wrong)


def state_of_the_last_prompt(patch: Patch) -> None:
    """The rows that stand before block 0 in a decode step are those of an earlier prompt."""

    def change(right, x, first, blocks, ratio, before):
        if first or ratio != 4 or len(x) != 4:
            return right(x, first, blocks, ratio, before=before)
        out = right(x, first, blocks, ratio, before=before)
        out[:, :4] = x[..., : out.shape[-1]].flip(0)
        return out

    rows(change)(patch)


def hadamard_of_keys_only(patch: Patch) -> None:
    right = compress.hadamard_fp4

    def wrong(x, acc, **kw):
        return right(x, acc, **kw) if x.dim() == 2 else compress.fp4_act_quant(x, 32)

    patch.setattr(compress, "hadamard_fp4", wrong)


def unscaled(patch: Patch) -> None:
    right = compress.hadamard
    patch.setattr(
        compress,
        "hadamard",
        lambda x, acc: to_bf16(right(x, acc).double() * x.shape[-1] ** 0.5),
    )


def ties_away(patch: Patch) -> None:
    values = activation._ALL_BF16.float().clamp(-6, 6)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    middle = (grid[1:] + grid[:-1]) / 2
    nearest = grid[torch.bucketize(values.abs().nan_to_num(0.0), middle, right=True)]
    wrong = torch.copysign(nearest, values).bfloat16().view(torch.int16).numpy()
    patch.setattr(activation, "_FP4_VALUE", wrong)


def scores(change):
    """Replace the index scores: change gets (dots BF16 [s, H, t], weights BF16 [s, H]) -> acc."""

    def wrong(q, k, weights, acc):
        dots = to_bf16(q.to(acc) @ k.to(acc).T)
        return to_bf16(ordered_sum(change(dots, weights.to(acc).unsqueeze(-1)).transpose(1, 2)))

    return lambda patch: patch.setattr(compress, "index_scores", wrong)


def q_not_rotated(patch: Patch) -> None:
    right = compress.Rotary.rotate_batch

    def wrong(self, x):
        if x.dim() == 3 and x.shape[1] == self.scope.config.index_n_heads:
            for segment, part in self.scope.parts(x):
                self.tap(segment, part)
            return x
        return right(self, x)

    patch.setattr(compress.Rotary, "rotate_batch", wrong)


FAULTS = [
    pooled("ape_missing", ape_missing),
    pooled(
        "ape_missing_on_tail",
        ape_missing_on_tail,
        "decode.1.layers.1.attn.indexer.compressor.norm.out",
        decode=2,
    ),
    pooled("overlap_missing", rows(own_rows_only), prompt="len33"),
    pooled("overlap_halves_swapped", rows(halves_swapped)),
    pooled("overlap_next_block", rows(next_block), prompt="len33"),
    pooled(
        "first_block_score_zero",
        rows(lambda f, x, first, n, r, before: f(x, first, n, r, before=0.0)),
    ),
    pooled("pool_mean", pool(mean)),
    pooled("pool_softmax_over_features", pool(over_features), status="nan"),
    pooled("pool_bf16", pool(in_bf16)),
    pooled("compressor_norm_missing", norm_missing),
    pooled(
        "decode_overlap_lost",
        decode_overlap_lost,
        "decode.1.layers.1.attn.indexer.compressor.norm.out",
        decode=2,
    ),
    pooled(
        "state_not_shifted",
        state_not_shifted,
        "decode.4.layers.1.attn.indexer.compressor.norm.out",
        prompt="len3",
        decode=(5, 17, 60, 2, 119),
    ),
    pooled(
        "state_not_reset",
        state_of_the_last_prompt,
        "decode.0.layers.1.attn.indexer.compressor.norm.out",
        prompt="len3",
        decode=1,
    ),
    Fault(
        "hadamard_missing",
        lambda p: p.setattr(compress, "hadamard", lambda x, acc: x),
        prompt="len6",
        **KEYS,
    ),
    Fault("hadamard_keys_only", hadamard_of_keys_only, **CHOICE),
    Fault("hadamard_unscaled", unscaled, prompt="len6", **KEYS),
    Fault(
        "fp4_missing",
        lambda p: p.setattr(compress, "fp4_act_quant", lambda x, group: x),
        prompt="len6",
        **KEYS,
    ),
    Fault("fp4_ties_away", ties_away, prompt="len33", **KEYS),
    Fault(
        "relu_missing",
        scores(lambda dots, w: to_bf16(dots.double() * w).double()),
        **CHOICE,
    ),
    Fault("weights_proj_missing", scores(lambda dots, w: dots.relu().double()), **CHOICE),
    Fault("indexer_q_not_rotated", q_not_rotated, "rope[2]", "layers.1.attn.rope.rot.2.out"),
]
