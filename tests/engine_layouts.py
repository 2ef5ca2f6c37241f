"""One pass of our recordings as other engines lay it out, written by hand for each engine.

Every function takes the keys of one pass without its prefix and gives the engine's names of that
pass. What an engine does not publish is left out.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from v4tool.config import ModelConfig
from v4tool.names import Step

Pass = dict[str, Tensor]
CELLS = 256
"""Cells that llama.cpp's cache of a short prompt has."""


def transformers(config: ModelConfig, given: Pass, step: Step) -> Pass:
    """A module's outputs; the streams are the next layer's argument."""
    found = {
        "model.embed_tokens": given["embed.out"],
        "model.embed_tokens.in0": given["input_ids"],
        "model.norm": given["norm.out"],
        "lm_head": rows_before(given["head.out"], step),
    }
    for n in range(config.n_layers):
        of, at = of_layer(given, n), f"model.layers.{n}"
        if n:
            found[f"{at}.in0"] = given[f"layers.{n - 1}.out"]
        for ours, theirs in (("hc_attn", "attn_hc"), ("hc_ffn", "ffn_hc")):
            found[f"{at}.{theirs}.0"] = of[f"{ours}.post"]
            found[f"{at}.{theirs}.1"] = of[f"{ours}.comb"]
        for ours, theirs in TRANSFORMERS.items():
            if ours in of:
                found[f"{at}.{theirs}"] = of[ours]
        if "attn.compressor.out" in of:
            found[f"{at}.self_attn.compressor.0"] = of["attn.compressor.out"][:, None]
        if "attn.indexer.out" in of and of["attn.indexer.out"].numel():
            found[f"{at}.self_attn.compressor.indexer"] = from_0(of["attn.indexer.out"], step)
    return found


TRANSFORMERS = {
    "attn_norm.out": "input_layernorm",
    "ffn_norm.out": "post_attention_layernorm",
    "attn.wq_a.out": "self_attn.q_a_proj",
    "attn.q_norm.out": "self_attn.q_a_norm",
    "attn.wq_b.out": "self_attn.q_b_proj",
    "attn.wkv.out": "self_attn.kv_proj",
    "attn.kv_norm.out": "self_attn.kv_norm",
    "attn.wo_b.in": "self_attn.o_b_proj.in0",
    "attn.wo_b.out": "self_attn.o_b_proj",
    "attn.out": "self_attn.0",
    "attn.compressor.wkv.out": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate.out": "self_attn.compressor.gate_proj",
    "attn.compressor.norm.out": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b.out": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.compressor.wkv.out": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate.out": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm.out": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.weights_proj.out": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn.gate.out.0": "mlp.gate.1",
    "ffn.gate.out.1": "mlp.gate.2",
    "ffn.shared_experts.w1.out": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w3.out": "mlp.shared_experts.up_proj",
    "ffn.shared_experts.w2.out": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.out": "mlp.shared_experts",
    "ffn.out": "mlp",
}


def vllm(config: ModelConfig, given: Pass, step: Step) -> Pass:
    """Tokens in front, products merged; hyper-connections in modules that are called twice."""
    found = {**vllm_ends(given, step)}
    for n in range(config.n_layers):
        of, at = of_layer(given, n), f"model.layers.{n}"
        found |= {
            f"{at}.mhc_pre.0": of["hc_attn.post"][0, ..., None],
            f"{at}.mhc_pre.1": of["hc_attn.comb"][0],
            f"{at}.mhc_pre.0#1": of["hc_ffn.post"][0, ..., None],
            f"{at}.mhc_pre.1#1": of["hc_ffn.comb"][0],
            f"{at}.mhc_post#1": of["out"][0],
            **vllm_layer(of, at, step),
        }
    return found


def vllm_fused(config: ModelConfig, given: Pass, step: Step) -> Pass:
    """The same with hyper-connections and norms fused over the border of layers."""
    found = {**vllm_ends(given, step)}
    for n in range(config.n_layers):
        of, at = of_layer(given, n), f"model.layers.{n}"
        fused = f"{at}.mhc_fused_post_pre"
        if n == 0:
            found[f"{at}.mhc_pre.0"] = of["hc_attn.post"][0, ..., None]
            found[f"{at}.mhc_pre.1"] = of["hc_attn.comb"][0]
        else:
            found[f"{fused}.0"] = given[f"layers.{n - 1}.out"][0]
            found[f"{fused}.1"] = of["hc_attn.post"][0, ..., None]
            found[f"{fused}.2"] = of["hc_attn.comb"][0]
        second = "#1" if n else ""
        found[f"{fused}.1{second}"] = of["hc_ffn.post"][0, ..., None]
        found[f"{fused}.2{second}"] = of["hc_ffn.comb"][0]
        found |= vllm_layer(of, at, step)
        found[f"{at}.attn.in1"] = found.pop(f"{at}.attn_norm")
        found[f"{at}.ffn.in0"] = found.pop(f"{at}.ffn_norm")
    return found


def vllm_ends(given: Pass, step: Step) -> Pass:
    """What is before and behind the layers."""
    return {
        "model.embed_tokens": given["embed.out"][0],
        "model.embed_tokens.in0": given["input_ids"][0],
        "model.norm": given["norm.out"][0],
        "logits_processor": given["head.out"],
    }


def vllm_layer(of: Pass, at: str, step: Step) -> Pass:
    """One layer apart from its hyper-connections."""
    found = {
        f"{at}.attn_norm": of["attn_norm.out"][0],
        f"{at}.attn.fused_wqa_wkv.0": torch.cat([of["attn.wq_a.out"], of["attn.wkv.out"]], -1)[0],
        f"{at}.attn.wq_b.in0": of["attn.q_norm.out"][0],
        f"{at}.attn.wq_b": of["attn.wq_b.out"][0],
        f"{at}.attn.wo_b.in0": of["attn.wo_b.in"][0],
        f"{at}.attn.wo_b": of["attn.wo_b.out"][0],
        f"{at}.attn": of["attn.out"][0],
        f"{at}.ffn_norm": of["ffn_norm.out"][0],
        f"{at}.ffn": of["ffn.out"][0],
        **shared(of, f"{at}.ffn.shared_experts"),
    }
    for name in ("attn.compressor", "attn.indexer.compressor"):
        if f"{name}.wkv.out" in of:
            found[f"{at}.{name}.in0"] = merged(of, name)
    if "attn.indexer.out" in of:
        found[f"{at}.attn.indexer.wq_b.0"] = of["attn.indexer.wq_b.out"][0]
        found[f"{at}.attn.indexer.weights_proj.0"] = of["attn.indexer.weights_proj.out"][0]
        blocks = from_0(of["attn.indexer.out"], step)[0].flip(-1).int()
        buffer = torch.full((64, 16), -1, dtype=torch.int32)
        buffer[: blocks.shape[0], : blocks.shape[1]] = blocks
        found[f"{at}.attn.indexer.indexer_op"] = buffer
    return found


def sglang(config: ModelConfig, given: Pass, step: Step) -> Pass:
    """Names of that engine's own dump and of captured modules, tokens in front."""
    found = {
        "model.embed_tokens": given["embed.out"][0],
        "model.forward_batch_info.input_ids": given["input_ids"][0],
        "model.norm": given["norm.out"][0],
    }
    for n in range(config.n_layers):
        of, at = of_layer(given, n), f"model.layers.{n}"
        found |= {
            at: of["out"][0],
            f"{at}.input_layernorm": of["attn_norm.out"][0],
            f"{at}.post_attention_layernorm": of["ffn_norm.out"][0],
            f"{at}.self_attn.wqkv_a": torch.cat([of["attn.wq_a.out"], of["attn.wkv.out"]], -1)[0],
            f"{at}.self_attn.q_norm": of["attn.q_norm.out"][0],
            f"{at}.self_attn.kv_norm": of["attn.kv_norm.out"][0],
            f"{at}.self_attn.wq_b.0": of["attn.wq_b.out"][0],
            f"{at}.self_attn.wo_b.in0": of["attn.wo_b.in"][0],
            f"{at}.self_attn.wo_b.0": of["attn.wo_b.out"][0],
            f"{at}.self_attn": of["attn.out"][0],
            f"{at}.mlp.topk.1": of["ffn.gate.out.1"].int(),
            f"{at}.mlp": of["ffn.out"][0],
            **shared(of, f"{at}.mlp.shared_experts"),
        }
        for name in ("compressor", "indexer.compressor"):
            if f"attn.{name}.wkv.out" in of:
                found[f"{at}.self_attn.{name}.wkv_gate"] = merged(of, f"attn.{name}")
        for name in ("wq_b", "weights_proj"):
            if f"attn.indexer.{name}.out" in of:
                found[f"{at}.self_attn.indexer.{name}"] = of[f"attn.indexer.{name}.out"][0]
    return found


def llama_cpp(config: ModelConfig, given: Pass, step: Step) -> Pass:
    """Tensors of the graph; in a prefill with masks of the cache's cells."""
    rows = given["embed.out"].shape[1]
    mask = seen(torch.arange(rows) <= torch.arange(rows)[:, None], CELLS)
    found = {
        "inp_tokens": given["input_ids"].int(),
        "embd": given["embed.out"],
        "result_norm": given["norm.out"],
        "result_output": rows_before(given["head.out"], step),
    }
    if not step.start:
        found["attn_inp_kq_mask"] = mask
    for n in range(config.n_layers):
        of = of_layer(given, n)
        named = {**ggml_attention(config, of, config.ratio(n), mask, step), **ggml_experts(of)}
        found |= {f"{name}-{n}{again}": value for (name, again), value in named.items()}
        for name, key in GGML_UNNAMED.items():
            if key in of:
                found[f"MUL_MAT(blk.{n}.{name}.weight)"] = of[key]
    return found


GGML_UNNAMED = {
    "attn_q_b": "attn.wq_b.out",
    "attn_kv": "attn.wkv.out",
    "indexer.attn_q_b": "attn.indexer.wq_b.out",
    "indexer.proj": "attn.indexer.weights_proj.out",
}
GGML = {
    "attn_norm": "attn_norm.out",
    "qr": "attn.wq_a.out",
    "qr_norm": "attn.q_norm.out",
    "q": "attn.sparse_attn.in.q",
    "kv_norm": "attn.kv_norm.out",
    "attn_out": "attn.wo_b.out",
    "ffn_norm": "ffn_norm.out",
    "ffn_moe_weights_scaled": "ffn.gate.out.0",
    "ffn_moe_topk": "ffn.gate.out.1",
    "ffn_gate": "ffn.shared_experts.w1.out",
    "ffn_up": "ffn.shared_experts.w3.out",
    "ffn_shexp": "ffn.shared_experts.w2.out",
    "ffn_out": "ffn.out",
    "l_last": "out",
}
Named = dict[tuple[str, str], Tensor]
"""Name without the layer, which occurrence (`#1`) -> value."""


def ggml_attention(config: ModelConfig, of: Pass, ratio: int, mask: Tensor, step: Step) -> Named:
    """Hyper-connections and attention of one layer."""
    found: Named = {(name, ""): of[key] for name, key in GGML.items()}
    for number, place in (("", "hc_attn"), ("#1", "hc_ffn")):
        for part in ("pre", "post", "comb"):
            found[f"hc_{part}", number] = of[f"{place}.{part}"]
    out, turned = of["attn.sparse_attn.out"], of["attn.rope.o_inv.out"]
    found["attn_derope", ""] = torch.cat([out[..., : -turned.shape[-1]], turned], -1)
    name = {0: "attn_raw", 4: "attn_csa_lid", 128: "attn_hca"}[ratio]
    found[name, ""] = out
    groups = of["attn.wo_b.in"][0].reshape(-1, config.o_groups, config.o_lora_rank)
    found["attn_wo_a", ""] = groups.transpose(0, 1).contiguous()
    # a prefill's own rows; a decode step's row is that of its position in the ring
    own = of["attn.sparse_attn.in.kv"][:, : step.tokens]
    if step.start:
        own = of["attn.sparse_attn.in.kv"][:, step.start % config.window_size][:, None]
    found["kv", ""] = own
    if ratio:
        prefix = {4: "csa", 128: "hca"}[ratio]
        found |= ggml_compressor(of, "attn.compressor", prefix)
        table = of["attn.sparse_attn.in.topk_idxs"][0, :, own.shape[1] :].long() - own.shape[1]
        blocks = (table[..., None] == torch.arange(CELLS)).any(-2)
        if ratio == 4 and not step.start:
            found["csa_top_k_mask", ""] = seen(blocks, CELLS)
        elif not step.start:
            found["hca_kq_mask", ""] = torch.cat([mask, seen(blocks, CELLS)], -1)
    if ratio == 4:
        found |= ggml_indexer(config, of, step)
    return found


def ggml_compressor(of: Pass, name: str, prefix: str) -> Named:
    """A compressor computes a block even where none is complete."""
    found: Named = {
        (f"{prefix}_state_kv", ""): of[f"{name}.wkv.out"],
        (f"{prefix}_state_score", ""): of[f"{name}.wgate.out"],
    }
    nothing = torch.full((1, 1, 128), 7.0)
    for number, part in (("#3", "norm.out"), ("#4", "out")):
        found[f"{prefix}_state_compress", number] = of.get(f"{name}.{part}", nothing)
    return found


def ggml_indexer(config: ModelConfig, of: Pass, step: Step) -> Named:
    """The indexer; its choice holds closed blocks, whose scores are -inf."""
    found = ggml_compressor(of, "attn.indexer.compressor", "lid")
    # the rotation has a tensor of its own there, and the last key is behind Hadamard's
    found["lid_state_compress_rot", ""] = found.pop(("lid_state_compress", "#4"))
    rotated = of.get("attn.rope.rot.3.out", torch.full((1, 1, config.rope_head_dim), 7.0))
    width = config.index_head_dim - config.rope_head_dim
    found["lid_state_compress", "#4"] = pad(rotated, (width, 0))
    found["lid_q_rope", ""] = pad(of["attn.rope.rot.2.out"], (width, 0))
    blocks = from_0(of["attn.indexer.out"], step)[0].long()
    scores = torch.full((blocks.shape[0], CELLS), -torch.inf)
    choice = torch.full((blocks.shape[0], config.index_topk), CELLS - 1)
    for row, chosen in enumerate(blocks):
        there = chosen[chosen >= 0]
        scores[row, there] = 1.0
        choice[row, : len(there)] = there.flip(0)
    found["lid_score_masked", ""], found["lid_top_k", ""] = scores, choice.int()
    return found


def ggml_experts(of: Pass) -> Named:
    """Rows of all routes, in the order of each token's choice."""
    chosen = of["ffn.gate.out.1"]
    names = {"ffn_moe_gate": "w1.out", "ffn_moe_up": "w3.out", "ffn_moe_weighted": "w2.out"}
    found: Named = {}
    for name, part in names.items():
        width = of[f"ffn.shared_experts.{part}"].shape[-1]
        value = torch.zeros(*chosen.shape, width)
        for expert in chosen.unique().tolist():
            value[chosen == expert] = of[f"ffn.experts.{expert}.{part}"]
        found[name, ""] = value
    return found


def of_layer(given: Pass, n: int) -> Pass:
    """The keys of one layer without its path."""
    head = f"layers.{n}."
    return {key.removeprefix(head): v for key, v in given.items() if key.startswith(head)}


def from_0(table: Tensor, step: Step) -> Tensor:
    """Blocks counted from 0; ours begin behind the rows of the pass, or behind the ring."""
    offset = 128 if step.start else step.tokens
    return torch.where(table < 0, table, table - offset)


def rows_before(logits: Tensor, step: Step) -> Tensor:
    """Logits of all positions, where ours hold the last."""
    return torch.cat([torch.zeros(step.tokens - 1, logits.shape[-1]), logits])[None]


def merged(of: Pass, name: str) -> Tensor:
    """A compressor's content and scores in one tensor."""
    return torch.cat([of[f"{name}.wkv.out"], of[f"{name}.wgate.out"]], -1)[0]


def shared(of: Pass, name: str) -> Pass:
    """The shared expert with w1 and w3 in one product; linears give a tuple of one."""
    both = [of["ffn.shared_experts.w1.out"], of["ffn.shared_experts.w3.out"]]
    return {
        f"{name}.gate_up_proj.0": torch.cat(both, -1),
        f"{name}.down_proj.0": of["ffn.shared_experts.w2.out"],
        name: of["ffn.shared_experts.out"],
    }


def seen(mask: Tensor, width: int) -> Tensor:
    """A mask of so many cells: 0 where a row is seen, -inf elsewhere."""
    whole = pad(mask, (0, width - mask.shape[-1]))
    return torch.where(whole, 0.0, -torch.inf)


Layout = Callable[[ModelConfig, Pass, Step], Pass]
LAYOUTS: dict[str, tuple[str, Layout, Callable[[int], str]]] = {
    "transformers": ("transformers", transformers, lambda p: f"step{p - 1}." if p else ""),
    "vllm": ("vllm", vllm, lambda p: f"step{p - 1}." if p else ""),
    "vllm, fused": ("vllm", vllm_fused, lambda p: f"step{p - 1}." if p else ""),
    "sglang": ("sglang", sglang, lambda p: f"Pass{p:05}."),
    "llama.cpp": ("llama.cpp", llama_cpp, lambda p: f"pass{p}/" if p else ""),
}
"""Map, layout, what stands before the names of pass p."""


def laid_out(
    layout: str, config: ModelConfig, recorded: Pass, steps: list[Step]
) -> Iterator[tuple[str, Tensor]]:
    """All passes of the main stack under the engine's names."""
    _, write, prefix = LAYOUTS[layout]
    for number, step in enumerate(steps):
        inner = {
            key.removeprefix(step.prefix): value
            for key, value in recorded.items()
            if key.startswith(step.prefix)
            and (step.prefix or not key.startswith(("decode.", "mtp.")))
        }
        for name, value in write(config, inner, step).items():
            yield prefix(number) + name, value.contiguous().clone()
