"""`V41Config`: the configuration of DeepSeek-V4.1, and what its fields mean for a layer (SPEC41 1).

Two forms are read: the release's, which holds the model in `text_config`, and the flat one of its
inference code with short names. Left out: the image part, which is ignored.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from v4tool.architecture import V41, Architecture
from v4tool.config import ModelConfig
from v4tool.config_dspark import (
    DSPARK_NAMES,
    DSparkFields,
    MarkovNames,
    check_draft_ratios,
    check_targets,
)
from v4tool.config_fields import (
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
from v4tool.ngram_hash import primes_of

BLOCK = 32
"""Rows and columns under one scale of an FP8 weight, and elements of an activation (SPEC41 3)."""
E4M3_GROUP = 16
"""Elements of a compressed row under one E4M3 scale (SPEC41 3)."""
MAX_COLUMNS = 1024
"""Columns of an Engram table (the release has 24); each has a prime to be searched for."""

_ENGRAM = (
    "engram_layer_ids",
    "engram_num_embeddings",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
)
_SAME_NAME = (
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    *_ENGRAM,
)
_NAMES = (
    {k: v for k, v in RELEASE_NAMES.items() if k not in ("n_hash_layers", "max_seq_len")}
    | {name: name for name in _SAME_NAME}
    | DSPARK_NAMES
    | {
        "dspark_n_routed_experts": "dspark_n_routed_experts",
        "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    }
)
"""Short name -> name in `text_config`, but for `quantization_config`, which stands at the top."""


def _check_blocks(c: "V41Config") -> list[str]:
    rows = {
        "head_dim": c.head_dim,
        "index_head_dim": c.index_head_dim,
        "engram_head_dim": c.engram_head_dim,
    }
    return check_multiples(c, BLOCK, rows)


def _check_kv_sources(c: "V41Config") -> list[str]:
    """Every layer with a ratio reads rows that a layer of the same ratio has made."""
    if found := _not_layers(c, "kv_source_layer_ids", c.kv_source_layer_ids):
        return found
    out = []
    for layer in range(min(c.n_layers, len(c.compress_ratios))):
        ratio, source = c.ratio(layer), c.kv_source(layer)
        if layer in c.kv_source_layer_ids and not ratio:
            expected = "layers with a compress_ratios entry above 0"
            out.append(wrong(c, "kv_source_layer_ids", expected, layer))
        elif ratio and source is None:
            expected = f"a source at or before layer {layer} (its compress_ratios entry is {ratio})"
            out.append(wrong(c, "kv_source_layer_ids", expected, list(c.kv_source_layer_ids)))
            break
        elif ratio and source is not None and c.ratio(source) != ratio:
            expected = f"{c.ratio(source)} in layer {layer}, as its source layer {source} has"
            out.append(wrong(c, "compress_ratios", expected, ratio))
            break
    return out


def _check_index_sources(c: "V41Config") -> list[str]:
    """Every layer with a ratio reads a table of the rows that it reads."""
    if found := _not_layers(c, "index_source_layer_ids", c.index_source_layer_ids):
        return found
    without = [n for n in c.index_source_layer_ids if c.compress_ratios[n : n + 1] == (0,)]
    if without:
        expected = "layers with a compress_ratios entry above 0"
        return [wrong(c, "index_source_layer_ids", expected, without)]
    lost = [n for n in c.kv_source_layer_ids if n not in c.index_source_layer_ids]
    if lost:
        expected = "every layer of kv_source_layer_ids among them"
        return [wrong(c, "index_source_layer_ids", expected, list(c.index_source_layer_ids))]
    return []


def _check_candidates(c: "V41Config") -> list[str]:
    source = c.candidate_source_layer_id
    if source == -1:
        return []
    if source not in c.index_source_layer_ids:
        expected = f"-1 or one of index_source_layer_ids {list(c.index_source_layer_ids)}"
        return [wrong(c, "candidate_source_layer_id", expected, source)]
    later = [n for n in c.index_source_layer_ids if n > source]
    if any(c.kv_source(n) != c.kv_source(source) for n in later):
        expected = "a layer whose rows all later index sources read"
        return [wrong(c, "candidate_source_layer_id", expected, source)]
    return []


def _check_sources(c: "V41Config") -> list[str]:
    """What shares rows and tables; the first rule that is broken, for others follow from it."""
    return _check_kv_sources(c) or _check_index_sources(c) or _check_candidates(c)


def _not_layers(c: "V41Config", field: str, ids: tuple[int, ...]) -> list[str]:
    if list(ids) == sorted(set(ids)) and all(n < c.n_layers for n in ids):
        return []
    expected = f"ascending numbers of main layers (0 to {c.n_layers - 1})"
    return [wrong(c, field, expected, list(ids))]


def _check_engram(c: "V41Config") -> list[str]:
    """The tables hold exactly the rows that the hashes address."""
    ids, rows = c.engram_layer_ids, c.engram_num_embeddings
    if out := _not_layers(c, "engram_layer_ids", ids):
        return out
    if c.engram_max_ngram_size < 2:
        return [wrong(c, "engram_max_ngram_size", "at least 2", c.engram_max_ngram_size)]
    if c.engram_columns * max(1, len(ids)) > MAX_COLUMNS:
        expected = f"at most {MAX_COLUMNS} columns in all layers (n-gram sizes times heads)"
        return [wrong(c, "engram_n_heads", expected, c.engram_n_heads)]
    if c.engram_pad_token_id >= c.vocab_size:
        expected = f"a token id below vocab_size {c.vocab_size}"
        return [wrong(c, "engram_pad_token_id", expected, c.engram_pad_token_id)]
    expected_rows = [sum(c.engram_primes(layer)) for layer in ids]
    if list(rows) != expected_rows:
        expected = f"{expected_rows}, the sums of the primes of layers {list(ids)}"
        return [wrong(c, "engram_num_embeddings", expected, list(rows))]
    return []


def _check_draft_experts(c: "V41Config") -> list[str]:
    if c.n_mtp_layers and c.dspark_n_activated_experts > c.dspark_n_routed_experts:
        expected = f"at most dspark_n_routed_experts {c.dspark_n_routed_experts}"
        return [wrong(c, "dspark_n_activated_experts", expected, c.dspark_n_activated_experts)]
    return []


class V41Config(DSparkFields, ModelConfig):
    """DeepSeek-V4.1's fields under short names; draft blocks have the numbers from n_layers on."""

    architecture: ClassVar[Architecture] = V41
    release_names: ClassVar[Mapping[str, str]] = _NAMES
    other_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{short: (short,) for short in _NAMES},
        "rope_type": ("rope_scaling.rope_type", "rope_type"),
        "engram_pad_token_id": ("engram_pad_id",),
        "expert_dtype": ("quantization_config.expert_dtype", "expert_dtype"),
        "scale_fmt": ("scale_fmt",),
    }
    release_extras: ClassVar[Mapping[str, Any]] = {"model_type": "deepseek_v41"}
    only_values: ClassVar[Mapping[str, Any]] = {
        "n_shared_experts": 1,
        "rope_type": "yarn",
        "expert_dtype": "fp4",
        "fp8_fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "fp8_block": (BLOCK, BLOCK),
    }
    markov: ClassVar[MarkovNames] = MarkovNames(
        "markov_head.embed", "markov_head.head", bias="markov_head.out"
    )
    checks: ClassVar[tuple[Check, ...]] = (
        check_heads,
        check_index_heads,
        _check_blocks,
        check_routing,
        check_draft_ratios,
        _check_sources,
        _check_engram,
        check_targets,
        _check_draft_experts,
    )

    kv_source_layer_ids: tuple[SizeOrNone, ...]
    index_source_layer_ids: tuple[SizeOrNone, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: Size
    candidate_block_size: Size
    engram_layer_ids: tuple[SizeOrNone, ...]
    engram_num_embeddings: tuple[Size, ...]
    engram_max_ngram_size: Size
    engram_vocab_size: Size
    engram_n_heads: Size
    engram_head_dim: Size
    engram_pad_token_id: SizeOrNone
    engram_compressed_vocab_size: Size
    dspark_n_routed_experts: Size
    dspark_n_activated_experts: Size

    @classmethod
    def unnested(cls, d: dict[str, Any]) -> dict[str, Any]:
        """`text_config` with the top level's `quantization_config`; a flat form as it is."""
        text = d.get("text_config")
        if not isinstance(text, dict):
            return d
        return {"quantization_config": d.get("quantization_config"), **text}

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed rows this one reads: the last source at or before it."""
        return _last(self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int | None:
        """The layer whose table of compressed rows this one reads."""
        return _last(self.index_source_layer_ids, layer)

    @property
    def engram_columns(self) -> int:
        """Rows of a table that a token adds up: n-gram sizes from 2 on, times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def engram_primes(self, layer: int) -> list[int]:
        """Rows of each column of an Engram layer's table (see `ngram_hash`)."""
        return primes_of(
            self.engram_layer_ids,
            self.engram_max_ngram_size,
            self.engram_n_heads,
            self.engram_vocab_size,
        )[layer]

    def engram_rows(self, layer: int) -> int:
        """Rows of an Engram layer's table."""
        return self.engram_num_embeddings[self.engram_layer_ids.index(layer)]

    def experts_of(self, layer: int) -> tuple[int, int]:
        """Routed experts of a block, and how many of them a token takes."""
        if self.is_mtp(layer):
            return self.dspark_n_routed_experts, self.dspark_n_activated_experts
        return super().experts_of(layer)


def _last(ids: tuple[int, ...], layer: int) -> int | None:
    return max((n for n in ids if n <= layer), default=None)
