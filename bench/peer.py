"""A straightforward port of one block, as a baseline for the benchmarks.

The prefill of SPEC section 5 as one would first write it: everything in FP32, every weight
dequantised as a whole, `F.linear` and `einsum` with torch's own threads, all queries at once. It
does the same work on the same checkpoint; it shares no code with v4tool but the reader. Left out:
decode, the heads, recording.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bf16(x: Tensor) -> Tensor:
    """Round to BF16, kept as FP32."""
    return x.bfloat16().float()


def scales(codes: Tensor) -> Tensor:
    """E8M0 codes to FP32."""
    return torch.ldexp(torch.ones(codes.shape), codes.int() - 127)


def quantise(x: Tensor, block: int, largest: float, floor: float) -> tuple[Tensor, Tensor]:
    """x / scale in blocks of the last dim, and the power-of-two scales, one per block."""
    blocks = x.unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=floor)
    scale = torch.exp2(torch.ceil(torch.log2(amax / largest)))
    return (blocks / scale).clamp(-largest, largest), scale


def fp8(x: Tensor, block: int) -> Tensor:
    """Quantise to E4M3 in blocks and back."""
    q, scale = quantise(x, block, 448.0, 1e-4)
    return (q.to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def fp4(x: Tensor, block: int) -> Tensor:
    """Quantise to E2M1 in blocks and back."""
    q, scale = quantise(x, block, 6.0, 6 * 2.0**-126)
    grid = E2M1[:8]
    nearest = (q.abs().unsqueeze(-1) - grid).abs().argmin(-1)
    return (grid[nearest] * q.sign() * scale).flatten(-2)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm."""
    return bf16(weight.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


class Peer:
    """One block of a model; weights come from a checkpoint by name, whole and dequantised."""

    def __init__(self, weights: Any, config: Any, layer: int, ids: Tensor) -> None:
        self.weights, self.config, self.layer, self.ids = weights, config, layer, ids
        self.path = config.block_path(layer) + "."
        self.ratio = config.ratio(layer)

    def plain(self, name: str) -> Tensor:
        """A weight that is not quantised, FP32."""
        return self.weights.read(self.path + name).float()

    def dequantised(self, name: str, width: int) -> Tensor:
        """A quantised weight for inputs of this width, FP32 [out, in]."""
        codes = self.weights.read(f"{self.path}{name}.weight")
        scale = scales(self.weights.read(f"{self.path}{name}.scale"))
        if codes.shape[1] == width:
            values = codes.view(torch.float8_e4m3fn).float()
            scale = scale.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)
        else:
            values = E2M1[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
            scale = scale.repeat_interleave(32, 1)
        return values * scale[:, :width]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """FP8 activations times a quantised weight."""
        return bf16(F.linear(fp8(x, 128), self.dequantised(name, x.shape[-1])))

    def block(self, x: Tensor) -> Tensor:
        """One block: streams [s, M, D] -> [s, M, D]."""
        x = x.float()
        y, post, comb = self.hc_pre("hc_attn", x)
        y = self.attention(rms(y, self.plain("attn_norm.weight"), self.config.norm_eps))
        x = self.hc_post(y, x, post, comb)
        y, post, comb = self.hc_pre("hc_ffn", x)
        y = self.moe(rms(y, self.plain("ffn_norm.weight"), self.config.norm_eps))
        return self.hc_post(y, x, post, comb)

    def hc_pre(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sub-layer's input, and the coefficients for `hc_post`."""
        c, m = self.config, self.config.hc_mult
        flat = x.flatten(1)
        norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.norm_eps)
        mixes = F.linear(flat, self.plain(f"{name}_fn")) * norm
        base, scale = self.plain(f"{name}_base"), self.plain(f"{name}_scale")
        pre = torch.sigmoid(mixes[:, :m] * scale[0] + base[:m]) + c.hc_eps
        post = 2 * torch.sigmoid(mixes[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = (mixes[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(1, (m, m))
        comb = comb.softmax(-1) + c.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return bf16((pre.unsqueeze(-1) * x).sum(1)), post, comb

    def hc_post(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Add a sub-layer's result to the mixed streams."""
        mixed = torch.einsum("sij,sid->sjd", comb, x)
        return bf16(post.unsqueeze(-1) * y.unsqueeze(1) + mixed)

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Interleaved rotary embedding of the last dims."""
        c = self.config
        dim, half = c.rope_head_dim, c.rope_head_dim // 2
        base = c.compress_rope_theta if self.ratio else c.rope_theta
        freqs = 1.0 / base ** (torch.arange(half) / half)
        if self.ratio:
            low, high = (
                dim * math.log(c.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (c.beta_fast, c.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            smooth = 1 - ((torch.arange(half) - low) / max(high - low, 0.001)).clamp(0, 1)
            freqs = freqs / c.rope_factor * (1 - smooth) + freqs * smooth
        angle = positions.unsqueeze(-1) * freqs * (-1 if inverse else 1)
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * (turn if x.dim() == 2 else turn.unsqueeze(1))
        return torch.cat([x[..., :-dim], bf16(torch.view_as_real(turned).flatten(-2))], -1)

    def attention(self, x: Tensor) -> Tensor:
        """Attention over the window and compressed blocks."""
        c, s = self.config, x.shape[0]
        positions, rope = torch.arange(s), c.rope_head_dim
        qr = rms(self.linear("attn.wq_a", x), self.plain("attn.q_norm.weight"), c.norm_eps)
        q = self.linear("attn.wq_b", qr).unflatten(-1, (c.n_heads, c.head_dim))
        mean = bf16(bf16(q.square()).mean(-1, keepdim=True))
        q = bf16(q * bf16(torch.rsqrt(bf16(mean + c.norm_eps))))
        q = self.rotate(q, positions)
        kv = rms(self.linear("attn.wkv", x), self.plain("attn.kv_norm.weight"), c.norm_eps)
        kv = self.rotate(kv, positions)
        kv = torch.cat([fp8(kv[:, :-rope], 64), kv[:, -rope:]], -1)
        window = (positions - c.window_size + 1).clamp(min=0).unsqueeze(1)
        window = window + torch.arange(min(s, c.window_size))
        table = torch.where(window > positions.unsqueeze(1), -1, window)
        if self.ratio and s >= self.ratio:
            table = torch.cat([table, self.chosen(x, qr)], 1)
            rows = self.compress("attn.compressor", x, c.head_dim)
            rows = torch.cat([fp8(rows[:, :-rope], 64), rows[:, -rope:]], -1)
            kv = torch.cat([kv, rows])
        o = self.rotate(self.core(q, kv, table), positions, inverse=True)
        o = o.flatten(1).unflatten(1, (c.o_groups, -1))
        wo_a = bf16(self.dequantised("attn.wo_a", o.shape[-1])).unflatten(0, (c.o_groups, -1))
        return self.linear("attn.wo_b", bf16(torch.einsum("sgd,grd->sgr", o, wo_a)).flatten(1))

    def core(self, q: Tensor, kv: Tensor, table: Tensor) -> Tensor:
        """Softmax over the rows of the table, with a sink."""
        rows = kv[table.clamp(min=0)]
        scores = torch.einsum("shc,smc->shm", q, rows) * q.shape[-1] ** -0.5
        scores = scores.masked_fill((table < 0).unsqueeze(1), -math.inf)
        highest = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - highest)
        sink = torch.exp(self.plain("attn.attn_sink").unsqueeze(-1) - highest)
        o = torch.einsum("shm,smc->shc", bf16(p), rows)
        return bf16(o / (p.sum(-1, keepdim=True) + sink))

    def compress(self, name: str, x: Tensor, width: int) -> Tensor:
        """Pool complete blocks of tokens: [s, D] -> [s // ratio, width], rotated."""
        r, t = self.ratio, x.shape[0] // self.ratio
        x = x[: t * r]
        kv = F.linear(x, self.plain(f"{name}.wkv.weight")).unflatten(0, (t, r))
        gate = F.linear(x, self.plain(f"{name}.wgate.weight")).unflatten(0, (t, r))
        gate = gate + self.plain(f"{name}.ape")
        if r == 4:
            kv, gate = (self.overlap(v, f, width) for v, f in ((kv, 0.0), (gate, -math.inf)))
        pooled = bf16((kv * gate.softmax(1)).sum(1))
        normed = rms(pooled, self.plain(f"{name}.norm.weight"), self.config.norm_eps)
        return self.rotate(normed, torch.arange(t) * r)

    def overlap(self, v: Tensor, fill: float, width: int) -> Tensor:
        """Rows of the previous block (first columns) and of the own one (last): [t, 2r, width]."""
        before = torch.cat([torch.full_like(v[:1, :, :width], fill), v[:-1, :, :width]])
        return torch.cat([before, v[:, :, width:]], 1)

    def chosen(self, x: Tensor, qr: Tensor) -> Tensor:
        """The table's columns for compressed blocks."""
        c, s, r = self.config, x.shape[0], self.ratio
        allowed = ((torch.arange(s) + 1) // r).unsqueeze(1)
        blocks = torch.arange(s // r)
        if r != 4:
            return torch.where(blocks < allowed, blocks + s, -1)
        q = self.linear("attn.indexer.wq_b", qr).unflatten(-1, (c.index_n_heads, -1))
        q = fp4(self.hadamard(self.rotate(q, torch.arange(s))), 32)
        k = self.compress("attn.indexer.compressor", x, c.index_head_dim)
        k = fp4(self.hadamard(k), 32)
        weights = bf16(F.linear(x, self.plain("attn.indexer.weights_proj.weight")))
        weights = bf16(weights * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5))
        scores = bf16(torch.einsum("shd,td->sht", q, k)).relu()
        scores = bf16((scores * weights.unsqueeze(-1)).sum(1))
        scores = scores.masked_fill(blocks >= allowed, -math.inf)
        best = scores.topk(min(c.index_topk, s // r), dim=1).indices
        return torch.where(best < allowed, best + s, -1)

    def hadamard(self, x: Tensor) -> Tensor:
        """The Hadamard rotation of the last dim."""
        h, n = torch.ones(1, 1), x.shape[-1]
        while h.shape[0] < n:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        return bf16(x @ h * n**-0.5)

    def moe(self, x: Tensor) -> Tensor:
        """Routed experts and the shared one."""
        c = self.config
        affinity = F.softplus(F.linear(x, self.plain("ffn.gate.weight"))).sqrt()
        if c.is_hash(self.layer):
            experts = self.weights.gather_rows(f"{self.path}ffn.gate.tid2eid", self.ids)
        else:
            biased = affinity + self.plain("ffn.gate.bias")
            experts = biased.topk(c.n_activated_experts, dim=1).indices
        weights = affinity.gather(1, experts)
        weights = weights / weights.sum(1, keepdim=True) * c.route_scale
        y = torch.zeros_like(x)
        for e in experts.unique().tolist():
            rows, places = (experts == e).nonzero(as_tuple=True)
            y[rows] += self.expert(f"ffn.experts.{e}", x[rows], weights[rows, places].unsqueeze(1))
        return bf16(y + self.expert("ffn.shared_experts", x, torch.ones(())))

    def expert(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """One expert on its tokens."""
        limit = self.config.swiglu_limit
        a = self.linear(f"{name}.w1", x).clamp(max=limit)
        u = self.linear(f"{name}.w3", x).clamp(-limit, limit)
        return self.linear(f"{name}.w2", bf16(weight * F.silu(a) * u))
