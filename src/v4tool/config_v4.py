"""The configurations of DeepSeek-V4, by draft head, and what their fields allow (SPEC section 1).

`V4Config` has MTP, `V4DSparkConfig` the draft blocks of the releases since 2026-07-31 (SPEC41 7).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from v4tool.architecture import V4, V4_DSPARK, Architecture
from v4tool.config import ModelConfig
from v4tool.config_dspark import (
    DSPARK_NAMES,
    DSparkFields,
    MarkovNames,
    check_draft_ratios,
    check_targets,
    kept_targets,
)
from v4tool.config_fields import (
    ACT_BLOCK,
    FP4_GROUP,
    KV_BLOCK,
    RATIOS,
    RELEASE_NAMES,
    Check,
    Size,
    SizeOrNone,
    check_heads,
    check_index_heads,
    check_multiples,
    check_routing,
    wrong,
)


def _check_kv_blocks(c: "V4Fields") -> list[str]:
    plain = c.head_dim - c.rope_head_dim
    if plain > 0 and plain % KV_BLOCK:
        expected = (
            f"qk_rope_head_dim {c.rope_head_dim} plus a multiple of {KV_BLOCK} "
            "(keys and values are quantised in such blocks)"
        )
        return [wrong(c, "head_dim", expected, c.head_dim)]
    return []


def _check_indexer(c: "V4Fields") -> list[str]:
    n = c.index_head_dim
    if n & (n - 1) or n < FP4_GROUP:
        expected = f"a power of two from {FP4_GROUP} on (Hadamard, FP4 groups)"
        return [wrong(c, "index_head_dim", expected, n)]
    return check_index_heads(c)


def _check_blocks(c: "V4Fields") -> list[str]:
    return check_multiples(c, ACT_BLOCK, {})


def _check_hash(c: "V4Fields") -> list[str]:
    if c.n_hash_layers > c.n_layers:
        expected = f"at most num_hidden_layers {c.n_layers}"
        return [wrong(c, "n_hash_layers", expected, c.n_hash_layers)]
    return []


def _check_ratio_count(c: "V4Fields") -> list[str]:
    needed, found = c.n_layers + c.n_mtp_layers, len(c.compress_ratios)
    if found < needed:
        what = f"{needed} entries ({c.n_layers} layers, then {c.n_mtp_layers} for MTP)"
        return [wrong(c, "compress_ratios", what, found)]
    return []


def _check_ratio_kinds(c: "V4Fields") -> list[str]:
    odd = sorted({r for r in c.compress_ratios if r not in RATIOS})
    if odd:
        return [wrong(c, "compress_ratios", "only 0, 4 and 128 (no other is defined)", odd)]
    return []


class V4Fields(ModelConfig):
    """What DeepSeek-V4's configurations share, whatever their draft head."""

    checks: ClassVar[tuple[Check, ...]] = (
        check_heads,
        _check_kv_blocks,
        _check_indexer,
        _check_blocks,
        check_routing,
        _check_hash,
        _check_ratio_kinds,
    )
    release_extras: ClassVar[dict[str, Any]] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }

    n_hash_layers: SizeOrNone
    max_seq_len: Size

    def is_hash(self, layer: int) -> bool:
        """Whether the block routes by token id (`ffn.gate.tid2eid`) rather than by score."""
        return layer < self.n_hash_layers

    def kept(self, layers: Sequence[int]) -> dict[str, Any]:
        """See `ModelConfig.kept`."""
        return super().kept(layers) | {"num_hash_layers": sum(map(self.is_hash, layers))}


class V4Config(V4Fields):
    """DeepSeek-V4 with MTP: layer `n_layers` is the MTP block."""

    architecture: ClassVar[Architecture] = V4
    checks: ClassVar[tuple[Check, ...]] = (*V4Fields.checks, _check_ratio_count)

    @property
    def mtp_problem(self) -> str | None:
        """Why the MTP block of this configuration cannot be computed, or None when it can."""
        if self.n_mtp_layers == 0:
            return super().mtp_problem
        extra = len(self.compress_ratios) - self.n_layers
        if self.n_mtp_layers > 1 or extra > self.n_mtp_layers:
            return (
                f"compress_ratios has {len(self.compress_ratios)} entries for {self.n_layers} "
                f"layers and num_nextn_predict_layers is {self.n_mtp_layers}: these mtp blocks are "
                "of another design, one MTP layer is defined (a DSpark head has dspark_* fields)"
            )
        if self.ratio(self.n_layers) != 0:
            return (
                f"the MTP layer's compress_ratios entry is {self.ratio(self.n_layers)}, not 0"
                ": MTP is only defined with a plain window"
            )
        return None


class V4DSparkConfig(DSparkFields, V4Fields):
    """DeepSeek-V4 with a DSpark head: its draft blocks have the numbers from n_layers on."""

    architecture: ClassVar[Architecture] = V4_DSPARK
    release_names: ClassVar[Mapping[str, str]] = RELEASE_NAMES | DSPARK_NAMES
    checks: ClassVar[tuple[Check, ...]] = (*V4Fields.checks, check_draft_ratios, check_targets)
    markov: ClassVar[MarkovNames] = MarkovNames(
        "markov_head.markov_w1", "markov_head.markov_w2", bias="markov_head.markov_w2.out"
    )

    def kept(self, layers: Sequence[int]) -> dict[str, Any]:
        """See `ModelConfig.kept`."""
        return super().kept(layers) | {"dspark_target_layer_ids": kept_targets(self, layers)}
