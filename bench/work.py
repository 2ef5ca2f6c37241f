"""Number of operations of a block, from the configuration (multiply and add count as two)."""

from v4tool.config import ModelConfig


def operations(config: ModelConfig, layer: int, tokens: int) -> int:
    """Operations of all products of a block's prefill, without element-wise steps."""
    if layer > config.n_layers:
        return 2 * config.vocab_size * config.dim
    return 2 * (tokens * per_token(config, layer) + attended(config, layer, tokens))


def per_token(c: ModelConfig, layer: int) -> int:
    """Multiplications with weights per token."""
    ratio, width = c.ratio(layer), c.n_heads * c.head_dim
    mixes = 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * c.dim
    queries = c.dim * c.q_lora_rank + c.q_lora_rank * width + c.dim * c.head_dim
    output = width * c.o_lora_rank + c.o_groups * c.o_lora_rank * c.dim
    total = mixes + queries + output + c.n_routed_experts * c.dim
    total += 3 * c.dim * c.moe_inter_dim * (c.n_activated_experts + 1)
    if ratio:
        total += 2 * (2 if ratio == 4 else 1) * c.head_dim * c.dim
    if ratio == 4:
        index_width = c.index_n_heads * c.index_head_dim
        total += c.q_lora_rank * index_width + c.index_n_heads * c.dim
        total += 4 * c.index_head_dim * c.dim
    if c.is_mtp(layer):
        total += (1 + c.hc_mult) * c.dim * c.dim
    return total


def attended(c: ModelConfig, layer: int, tokens: int) -> int:
    """Multiplications of queries with keys and values, over all columns of the table."""
    ratio = c.ratio(layer)
    columns = min(tokens, c.window_size)
    blocks = tokens // ratio if ratio else 0
    columns += min(c.index_topk, blocks) if ratio == 4 else blocks
    total = 2 * tokens * c.n_heads * columns * c.head_dim
    return total + (tokens * c.index_n_heads * blocks * c.index_head_dim if ratio == 4 else 0)
