"""The keys of DSpark draft blocks: seeding in the prefill, a draft in each decode step (SPEC41 5).

Drafts are recorded inside their pass: `mtp.…` in the prefill, `decode.<i>.mtp.…` in a step. Shape
letters as in `names`; B tokens of a draft, T target layers, R rank of the Markov head.
"""

from v4tool.config import ModelConfig
from v4tool.config_dspark import DSparkFields
from v4tool.names import Keys, Step, acc, bf16, hc_keys, index, moe_keys


def _fields(config: ModelConfig) -> DSparkFields:
    assert isinstance(config, DSparkFields)
    return config


def draft_blocks(config: ModelConfig) -> range:
    """The numbers of the draft blocks, which follow the main layers'."""
    return range(config.n_layers, config.n_layers + config.n_mtp_layers)


def draft_step(config: ModelConfig, step: Step) -> Step:
    """The draft of a decode step: B tokens at the positions after the step's own."""
    return Step(step.prefix, config.draft_tokens, step.end)


def draft_block_keys(config: ModelConfig, layer: int, step: Step) -> Keys:
    """A draft block's keys in one pass of the main stack, without its path in front."""
    if step.start == 0:
        return _main_row_keys(config, step)
    draft = draft_step(config, step)
    s, dim = draft.tokens, config.dim
    return {
        **hc_keys(config, "hc_attn", draft),
        "attn_norm.out": bf16(1, s, dim),
        **_main_row_keys(config, step),
        **_attention_keys(config, draft),
        **hc_keys(config, "hc_ffn", draft),
        "ffn_norm.out": bf16(1, s, dim),
        **moe_keys(config, layer, draft),
        "out": bf16(1, s, config.hc_mult, dim),
    }


def _main_row_keys(config: ModelConfig, step: Step) -> Keys:
    """The window rows that a draft block makes of the main stack's positions."""
    s = step.tokens
    return {
        "attn.wkv.main.out": bf16(1, s, config.head_dim),
        "attn.kv_norm.main.out": bf16(1, s, config.head_dim),
        "attn.rope.rot.0.out": bf16(1, s, config.rope_head_dim),
    }


def _attention_keys(config: ModelConfig, draft: Step) -> Keys:
    s, h, c, r = draft.tokens, config.n_heads, config.head_dim, config.rope_head_dim
    columns = min(config.window_size, draft.start) + s
    return {
        "attn.wq_a.out": bf16(1, s, config.q_lora_rank),
        "attn.q_norm.out": bf16(1, s, config.q_lora_rank),
        "attn.wq_b.out": bf16(1, s, h * c),
        "attn.rope.rot.1.out": bf16(1, s, h, r),
        "attn.wkv.out": bf16(1, s, c),
        "attn.kv_norm.out": bf16(1, s, c),
        "attn.rope.rot.2.out": bf16(1, s, r),
        "attn.sparse_attn.in.q": bf16(1, s, h, c),
        "attn.sparse_attn.in.kv": bf16(1, config.window_size + s, c),
        "attn.sparse_attn.in.topk_idxs": index("I32", 1, s, columns),
        "attn.sparse_attn.out": bf16(1, s, h, c),
        "attn.rope.o_inv.out": bf16(1, s, h, r),
        "attn.wo_b.in": bf16(1, s, config.o_groups * config.o_lora_rank),
        "attn.wo_b.out": bf16(1, s, config.dim),
        "attn.out": bf16(1, s, config.dim),
    }


def draft_keys(config: ModelConfig, step: Step) -> Keys:
    """Everything that the draft head records in one pass of the main stack, pass prefix and all."""
    targets, first = (
        len(_fields(config).dspark_target_layer_ids),
        config.block_path(config.n_layers),
    )
    s, dim = step.tokens, config.dim
    keys = {
        "mtp.main_hidden": bf16(1, s, targets * dim),
        f"{first}.main_proj.out": bf16(1, s, dim),
        f"{first}.main_norm.out": bf16(1, s, dim),
    }
    if step.start:
        keys["mtp.input_ids"] = index("I64", 1, config.draft_tokens)
        keys["mtp.embed.out"] = bf16(1, config.draft_tokens, dim)
    for layer in draft_blocks(config):
        own = draft_block_keys(config, layer, step)
        keys |= {f"{config.block_path(layer)}.{key}": spec for key, spec in own.items()}
    if step.start:
        keys |= _head_keys(config)
    return {f"{step.prefix}{key}": spec for key, spec in keys.items()}


def _head_keys(config: ModelConfig) -> Keys:
    fields, last = _fields(config), config.block_path(draft_blocks(config)[-1])
    s, dim, rank = config.draft_tokens, config.dim, fields.dspark_markov_rank
    return {
        f"{last}.hidden": bf16(1, s, dim),
        f"{last}.norm.out": bf16(1, s, dim),
        f"{last}.head.out": acc(1, s, config.vocab_size),
        f"{last}.{fields.markov.embed}.out": bf16(1, s, rank),
        f"{last}.{fields.markov.bias}": acc(1, s, config.vocab_size),
        "mtp.logits.out": acc(1, s, config.vocab_size),
        "mtp.output_ids": index("I64", 1, s + 1),
        f"{last}.confidence_head.out": acc(1, s),
    }
