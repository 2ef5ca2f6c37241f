"""The keys, shapes and dtypes that a recording of DeepSeek-V4 must hold (SPEC section 6).

Shape letters as in `names`.
"""

from v4tool.config_v4 import V4Config, V4Fields
from v4tool.names import (
    Keys,
    Step,
    acc,
    bf16,
    complete_blocks,
    compressor_groups,
    has_indexer,
    hc_keys,
    index,
    kv_rows,
    moe_keys,
    selected_columns,
    steps_of,
    window_columns,
)


def _compressor_keys(
    config: V4Fields, name: str, step: Step, ratio: int, width: int, rot: str
) -> Keys:
    """A compressor's keys; `norm.out`, the rotation `rot` and `out` only where it gives a block."""
    s, t = step.tokens, complete_blocks(step, ratio)
    doubled = width * compressor_groups(ratio)
    keys = {f"{name}.wkv.out": acc(1, s, doubled), f"{name}.wgate.out": acc(1, s, doubled)}
    if t:
        keys[f"{name}.norm.out"] = bf16(1, t, width)
        keys[rot] = bf16(1, t, config.rope_head_dim)
        keys[f"{name}.out"] = bf16(1, t, width)
    return keys


def _indexer_keys(config: V4Fields, step: Step, ratio: int) -> Keys:
    """The indexer's keys, its own compressor's among them."""
    s, heads, dim = step.tokens, config.index_n_heads, config.index_head_dim
    return {
        "attn.indexer.wq_b.out": bf16(1, s, heads * dim),
        "attn.rope.rot.2.out": bf16(1, s, heads, config.rope_head_dim),
        **_compressor_keys(
            config, "attn.indexer.compressor", step, ratio, dim, "attn.rope.rot.3.out"
        ),
        "attn.indexer.weights_proj.out": bf16(1, s, heads),
        "attn.indexer.out": index("I64", 1, s, selected_columns(config, step, ratio)),
    }


def _attention_keys(config: V4Fields, step: Step, ratio: int) -> Keys:
    """Everything that is recorded under `attn.`, in order of execution."""
    s, h, c, r = step.tokens, config.n_heads, config.head_dim, config.rope_head_dim
    keys: Keys = {
        "attn.wq_a.out": bf16(1, s, config.q_lora_rank),
        "attn.q_norm.out": bf16(1, s, config.q_lora_rank),
        "attn.wq_b.out": bf16(1, s, h * c),
        "attn.rope.rot.0.out": bf16(1, s, h, r),
        "attn.wkv.out": bf16(1, s, c),
        "attn.kv_norm.out": bf16(1, s, c),
        "attn.rope.rot.1.out": bf16(1, s, r),
    }
    next_rotation = 2
    if has_indexer(ratio):
        keys |= _indexer_keys(config, step, ratio)
        next_rotation = 4 if complete_blocks(step, ratio) else 3
    if ratio:
        rot = f"attn.rope.rot.{next_rotation}.out"
        keys |= _compressor_keys(config, "attn.compressor", step, ratio, c, rot)
    columns = window_columns(config, step) + selected_columns(config, step, ratio)
    return keys | {
        "attn.sparse_attn.in.q": bf16(1, s, h, c),
        "attn.sparse_attn.in.kv": bf16(1, kv_rows(config, step, ratio), c),
        "attn.sparse_attn.in.topk_idxs": index("I32", 1, s, columns),
        "attn.sparse_attn.out": bf16(1, s, h, c),
        "attn.rope.o_inv.out": bf16(1, s, h, r),
        "attn.wo_b.in": bf16(1, s, config.o_groups * config.o_lora_rank),
        "attn.wo_b.out": bf16(1, s, config.dim),
        "attn.out": bf16(1, s, config.dim),
    }


def _block_keys(config: V4Fields, layer: int, step: Step) -> Keys:
    """Everything that one block records except its own `out`, in order of execution."""
    s, dim = step.tokens, config.dim
    return {
        **hc_keys(config, "hc_attn", step),
        "attn_norm.out": bf16(1, s, dim),
        **_attention_keys(config, step, config.ratio(layer)),
        **hc_keys(config, "hc_ffn", step),
        "ffn_norm.out": bf16(1, s, dim),
        **moe_keys(config, layer, step),
    }


def main_layer_keys(config: V4Fields, layer: int, step: Step) -> Keys:
    """A main layer's keys without its path in front."""
    out = bf16(1, step.tokens, config.hc_mult, config.dim)
    return {**_block_keys(config, layer, step), "out": out}


def layer_keys(config: V4Config, layer: int, step: Step) -> Keys:
    """A block's keys without its path in front; those of MTP with what surrounds it."""
    if config.is_mtp(layer):
        return _mtp_keys(config, step)
    return main_layer_keys(config, layer, step)


def _mtp_keys(config: V4Config, step: Step) -> Keys:
    """The keys of an MTP pass, without the pass prefix (SPEC 6, last row of the table)."""
    s, m, dim = step.tokens, config.hc_mult, config.dim
    logits = acc(1, config.vocab_size)
    return {
        "embed.out": bf16(1, s, dim),
        "enorm.out": bf16(1, s, dim),
        "e_proj.out": bf16(1, s, dim),
        "hnorm.out": bf16(1, s, m, dim),
        "h_proj.out": bf16(1, s, m, dim),
        **_block_keys(config, config.n_layers, step),
        "norm.out": bf16(1, s, dim),
        "head.out": logits,
        "logits.out": logits,
        "out": logits,
    }


def main_keys(config: V4Fields, step: Step) -> Keys:
    """The keys of one pass over the main stack."""
    p, s = step.prefix, step.tokens
    keys = {
        f"{p}input_ids": index("I64", 1, s),
        f"{p}embed.out": bf16(1, s, config.dim),
    }
    for n in range(config.n_layers):
        keys |= {f"{p}layers.{n}.{k}": v for k, v in main_layer_keys(config, n, step).items()}
    return keys | {
        f"{p}norm.out": bf16(1, s, config.dim),
        f"{p}head.out": acc(1, config.vocab_size),
    }


def recording_keys(config: V4Config, length: int, decode: int = 0, *, mtp: bool = True) -> Keys:
    """Every key of a complete recording of `length` tokens and `decode` steps (SPEC 6).

    Routed experts appear once per pass and layer as `experts.<E>.*` with None rows.
    """
    prefill, *decodes = steps_of(length, decode)
    keys = main_keys(config, prefill)
    if mtp:
        passes = Step("mtp.0.prefill.", length, 0), Step("mtp.0.decode.", 1, length)
        for step in passes:
            keys |= {f"{step.prefix}{k}": v for k, v in _mtp_keys(config, step).items()}
    for step in decodes:
        keys |= main_keys(config, step)
    return keys
