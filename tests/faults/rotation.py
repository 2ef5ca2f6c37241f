"""Faults of the rotary embedding."""

import math

import torch

from tests.faults.harness import Fault, Patch
from v4tool.model import attention, compress, layers

ROT = "layers.0.attn.rope.rot.0.out"
COMPRESSED_ROT = "layers.1.attn.rope.rot.0.out"
QUERY = "rope[0]"
MSCALE = 0.1 * math.log(16) + 1


def half_split(patch: Patch) -> None:
    def wrong(x, cos, sin, inverse):
        if x.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        sin = -sin if inverse else sin
        half = cos.shape[-1]
        a, b = x[..., -2 * half : -half].double(), x[..., -half:].double()
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return torch.cat([x[..., : -2 * half], turned.float().bfloat16()], dim=-1)

    patch.setattr(layers, "_rotated", wrong)


def first_dims(patch: Patch) -> None:
    right = layers._rotated

    def wrong(x, cos, sin, inverse):
        width = 2 * cos.shape[-1]
        turned = right(x[..., :width], cos, sin, inverse)
        return torch.cat([turned, x[..., width:]], dim=-1)

    patch.setattr(layers, "_rotated", wrong)


def frequencies(change):
    """Replace the frequencies of a layer: change gets (right, config, ratio)."""

    def inject(patch: Patch) -> None:
        right = layers.rope_frequencies
        patch.setattr(compress, "rope_frequencies", lambda c, ratio: change(right, c, ratio))

    return inject


def yarn_on_plain(right, config, ratio):
    if ratio:
        return right(config, ratio)
    return layers._yarn(config, right(config, 0), config.rope_theta)


def base_mixed(patch: Patch) -> None:
    class Mixed(compress.Rotary):
        def __init__(self, scope, ratio):
            super().__init__(scope, ratio)
            plain = layers.rope_frequencies(scope.config, 0)
            self.tables = layers.rope_tables(plain, scope.positions, scope.acc)

    patch.setattr(attention, "Rotary", Mixed)


def tables(change):
    """Replace cosines and sines: change gets (cos, sin)."""

    def inject(patch: Patch) -> None:
        right = layers.rope_tables
        patch.setattr(compress, "rope_tables", lambda f, p, acc: change(*right(f, p, acc)))

    return inject


def angle_in_binary64(patch: Patch) -> None:
    def wrong(f, positions, acc):
        angle = positions.double().unsqueeze(-1) * f.double()
        return torch.cos(angle).to(acc), torch.sin(angle).to(acc)

    patch.setattr(compress, "rope_tables", wrong)


def not_rotated_back(patch: Patch) -> None:
    patch.setattr(attention, "rotate", lambda x, tables, **kw: x)


def rotated_forward(patch: Patch) -> None:
    right = layers.rotate
    patch.setattr(
        attention, "rotate", lambda x, t, *, inverse=False, threads=1: right(x, t, threads=threads)
    )


def block_positions(change):
    """Replace the positions of compressed rows: change gets (step, ratio, right positions)."""

    def inject(patch: Patch) -> None:
        right = compress.block_positions
        patch.setattr(
            compress, "block_positions", lambda s, ratio: change(s, ratio, right(s, ratio))
        )

    return inject


INVERSE = "layers.0.attn.rope.o_inv.out"
KEYS_ROT = "layers.1.attn.rope.rot.3.out"

FAULTS = [
    Fault("half_split", half_split, QUERY, ROT),
    Fault("first_dims", first_dims, QUERY, ROT, suspects=("head_rms",)),
    Fault("compress_base_everywhere", frequencies(lambda f, c, r: f(c, 4)), QUERY, ROT),
    Fault("main_base_on_compressed", frequencies(lambda f, c, r: f(c, 0)), QUERY, COMPRESSED_ROT),
    Fault("base_mixed", base_mixed, QUERY, COMPRESSED_ROT),
    Fault("yarn_on_plain", frequencies(yarn_on_plain), QUERY, ROT),
    Fault(
        "yarn_ignored",
        lambda p: p.setattr(layers, "_yarn", lambda config, f, base: f),
        QUERY,
        COMPRESSED_ROT,
    ),
    Fault("mscale_on_rotation", tables(lambda c, s: (c * MSCALE, s * MSCALE)), QUERY, ROT),
    Fault("inverse_missing", not_rotated_back, "rope_back", INVERSE),
    Fault("inverse_forward", rotated_forward, "rope_back", INVERSE),
    Fault(
        "compressed_position_i",
        block_positions(lambda s, r, p: p // r),
        "rope[3]",
        KEYS_ROT,
        prompt="len33",
    ),
    Fault(
        "compressed_position_last",
        block_positions(lambda s, r, p: p + r - 1),
        "rope[3]",
        KEYS_ROT,
        prompt="len6",
    ),
    Fault(
        "compressed_not_rotated",
        lambda p: p.setattr(compress.Rotary, "rotate_at", lambda self, positions, x: x),
        "rope[3]",
        KEYS_ROT,
        prompt="len33",
    ),
    Fault(
        "decode_compressed_position",
        block_positions(lambda s, r, p: torch.tensor([s.start]) if s.start else p),
        "rope[3]",
        "decode.0.layers.1.attn.rope.rot.3.out",
        prompt="len3",
        decode=1,
    ),
    Fault("angle_in_binary64", angle_in_binary64, QUERY, ROT, prompt="len129"),
    Fault("rotated_backwards", tables(lambda c, s: (c, -s)), QUERY, ROT),
]
