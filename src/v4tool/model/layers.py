"""Fixed-order sums, RMS norm, rotary embedding, sigmoid and softplus (SPEC sections 4 and 5).

Every function works on a flat batch of tokens: [T, ...]. Values between two rounding places are
in the accumulation dtype `acc`; `to_bf16` is the only way back to BF16. Sums are pairwise, by
element-wise additions of halves, so that their order does not depend on a vector width or a thread
count.
"""

import math
from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from v4tool.config import ModelConfig
from v4tool.quant.activation import to_bf16
from v4tool.threads import parallel_for

ELEMENTS_AT_ONCE = 1 << 18
"""Elements that an element-wise step converts to `acc` at a time: they stay in the processor's
cache. New memory for a whole batch takes twenty times as long as the arithmetic.
"""
PIECES_MULTIPLE = 4
"""The number of pieces is a multiple of this, so that two or four threads have equal shares."""


def ordered_sum(x: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    """Sum over a dim in a fixed order: [..., n, ...] -> [..., ...], same dtype; n = 0 gives 0."""
    while (n := x.shape[dim]) > 1:
        first, second, *rest = x.split_with_sizes([n // 2, n // 2, 1][: 2 + n % 2], dim)
        x = torch.cat([first + second, *rest], dim) if rest else first + second
    if not n:
        x = x.sum(dim, keepdim=True)
    return x if keepdim else x.squeeze(dim)


def by_tokens(function: Callable[..., Tensor], *xs: Tensor, threads: int = 1) -> Tensor:
    """Apply a per-token function to pieces of about `ELEMENTS_AT_ONCE` elements: [T, ...] each.

    The pieces depend on the shapes alone and are shared out among the threads.
    """
    tokens = xs[0].shape[0]
    count = -(-max(x.numel() for x in xs) // ELEMENTS_AT_ONCE)
    if count <= 1 or tokens <= 1:
        return function(*xs)
    size = -(-tokens // (-(-count // PIECES_MULTIPLE) * PIECES_MULTIPLE))
    pieces = list(zip(*(x.split(size) for x in xs), strict=True))
    out: Tensor | None = None
    making = Lock()

    def task(i: int) -> None:
        nonlocal out
        result = function(*pieces[i])
        with making:
            if out is None:
                out = result.new_empty(tokens, *result.shape[1:])
        out[i * size : (i + 1) * size] = result

    parallel_for(task, len(pieces), threads)
    assert out is not None
    return out


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), element by element.

    torch.sigmoid uses another exponential for the last few elements of a tensor, so that its bits
    depend on a value's position in the batch.
    """
    return torch.exp(-x).add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x above 20, as torch defines it; not torch's, as for `sigmoid`."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def rms(x: Tensor, weight: Tensor, eps: float, acc: torch.dtype, *, threads: int = 1) -> Tensor:
    """RMS norm (SPEC 5): x BF16 [T, ..., n], weight BF16 [n] -> BF16 of the shape of x."""

    def normed(piece: Tensor) -> Tensor:
        wide = piece.to(acc)
        mean = ordered_sum(wide * wide) / wide.shape[-1]
        return to_bf16(scale * wide * torch.rsqrt(mean + eps).unsqueeze(-1))

    scale = weight.to(acc)
    return by_tokens(normed, x, threads=threads)


def unit_rms(x: Tensor, eps: float, acc: torch.dtype, *, threads: int = 1) -> Tensor:
    """RMS norm of each query head without a weight, rounded to BF16 at each step (SPEC 5, step 1).

    x BF16 [T, H, C] -> BF16 [T, H, C]. The release computes it with BF16 tensors, so each step
    rounds. Products of two BF16 values have at most 16 bits, so they are exact in FP32.
    """

    def normed(piece: Tensor) -> Tensor:
        single = piece.float()
        squares = to_bf16(single * single).to(acc)
        mean = to_bf16(ordered_sum(squares) / single.shape[-1]).to(acc)
        variance = to_bf16(mean + eps).to(acc)
        rho = to_bf16(1.0 / torch.sqrt(variance)).float()
        return to_bf16(single * rho.unsqueeze(-1))

    return by_tokens(normed, x, threads=threads)


def rope_frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """Rotary frequencies of a layer with this ratio: FP32 [rope_head_dim / 2] (SPEC 5).

    Layers without compression use rope_theta without YaRN, others compress_rope_theta with YaRN.
    """
    dim = config.rope_head_dim
    base = config.compress_rope_theta if ratio else config.rope_theta
    exponents = [2 * i / dim for i in range(dim // 2)]
    powers = torch.tensor([base**e for e in exponents], dtype=torch.float64).to(torch.float32)
    frequencies = 1.0 / powers
    return _yarn(config, frequencies, base) if ratio else frequencies


def _yarn(config: ModelConfig, frequencies: Tensor, base: float) -> Tensor:
    """YaRN: high frequencies are kept, low ones divided by rope_factor, with a ramp between."""
    dim = config.rope_head_dim

    def dimension(turns: float) -> float:
        return (
            dim * math.log(config.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low = float(max(math.floor(dimension(config.beta_fast)), 0))
    high = float(min(math.ceil(dimension(config.beta_slow)), dim - 1))
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    smooth = 1 - ramp.clamp(0, 1)
    return frequencies / config.rope_factor * (1 - smooth) + frequencies * smooth


def rope_tables(frequencies: Tensor, positions: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency: I64 [n] -> two acc tensors [n, dim / 2].

    The angle is rounded to FP32; cosine and sine of that angle are evaluated in binary64 and
    rounded to FP32.
    """
    angles = (positions.to(torch.float32).unsqueeze(-1) * frequencies).double()
    return torch.cos(angles).float().to(acc), torch.sin(angles).float().to(acc)


def rotate(
    x: Tensor, tables: tuple[Tensor, Tensor], *, inverse: bool = False, threads: int = 1
) -> Tensor:
    """Rotate the last dims of x, pairs (2i, 2i+1) as complex numbers (SPEC 5, Rotary tables).

    x BF16 [n, C] or [n, H, C]; tables as `rope_tables` gives them for the n rows -> BF16 of the
    same shape.
    """
    return by_tokens(lambda p, c, s: _rotated(p, c, s, inverse), x, *tables, threads=threads)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].to(cos.dtype).unflatten(-1, (-1, 2))
    real, imag = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([real * cos - imag * sin, real * sin + imag * cos], dim=-1)
    return torch.cat([x[..., :-width], to_bf16(turned.flatten(-2))], dim=-1)


def rotated_part(x: Tensor, config: ModelConfig) -> Tensor:
    """The rotated dims of x, which are recorded: [..., C] -> [..., rope_head_dim]."""
    return x[..., -config.rope_head_dim :]
