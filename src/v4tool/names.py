"""The grammar of keys, and the keys, shapes and dtypes that a recording must hold (SPEC section 6).

A key is a pass prefix (nothing for the prefill, `decode.<i>.`, `mtp.0.prefill.`, `mtp.0.decode.`),
a module path (`layers.3.attn.wq_a`) and what is recorded of it (`.out`, or `.pre`, `.in` where SPEC
says so). Everything here follows from the model's configuration and the number of tokens; nothing
is run and no tensor is touched. Which routed experts appear depends on the data, so they are
described once, as `experts.<E>.*`. Left out: which keys an architecture has (`names_v4`).

Shape letters: S tokens of the pass, P its start position, D dim, H heads, C head_dim, R rotated
dims, M streams, K experts per token, I the experts' inner width, V vocabulary.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol

from v4tool.config import ModelConfig

Kind = Literal["bf16", "acc", "int"]
Shape = tuple[int | None, ...]

ITEMSIZE = {"F32": 4, "I32": 4, "I64": 8}
EXPERT = re.compile(r"(?<=ffn\.)experts\.(\d{1,9}|<E>)\.")
PASS = re.compile(r"decode\.\d{1,9}\.|mtp\.\d+\.(prefill|decode)\.")
DRAFT = re.compile(r"(decode\.\d{1,9}\.)?mtp\.")
BLOCK = re.compile(r"(?:decode\.\d{1,9}\.)?(layers|mtp)\.(\d{1,9})\.")
INDEXED_RATIO = 4
EXPERT_OUTPUTS = ("w1.out", "w3.out", "w2.out", "out")


@dataclass(frozen=True)
class KeySpec:
    """What one key must be.

    dtype: safetensors name (F32, I32, I64). shape: None stands for the number of tokens that an
    expert received. kind: "bf16" values are exactly representable in BF16, "acc" values were kept
    in the accumulation dtype and rounded to FP32 for the recording, "int" are indices.
    """

    dtype: str
    shape: Shape
    kind: Kind

    @property
    def nbytes(self) -> int:
        """Payload bytes; rows that depend on the data count as none."""
        return ITEMSIZE[self.dtype] * math.prod(n or 0 for n in self.shape)


Keys = dict[str, KeySpec]


def bf16(*shape: int | None) -> KeySpec:
    """An FP32 tensor whose values are BF16 values."""
    return KeySpec("F32", shape, "bf16")


def acc(*shape: int | None) -> KeySpec:
    """An FP32 tensor of values that the model keeps in the accumulation dtype."""
    return KeySpec("F32", shape, "acc")


def index(dtype: str, *shape: int | None) -> KeySpec:
    """An integer tensor."""
    return KeySpec(dtype, shape, "int")


@dataclass(frozen=True)
class Step:
    """One pass over the layers: `tokens` tokens that start at position `start` (0: the prefill)."""

    prefix: str
    tokens: int
    start: int

    @property
    def end(self) -> int:
        """Number of positions known after the pass."""
        return self.start + self.tokens


def has_indexer(ratio: int) -> bool:
    """Whether an indexer chooses the compressed blocks: only blocks of 4 tokens (SPEC 1)."""
    return ratio == INDEXED_RATIO


def compressor_groups(ratio: int) -> int:
    """SPEC's c: 2 where neighbouring blocks overlap (blocks of 4 tokens), else 1."""
    return 2 if ratio == INDEXED_RATIO else 1


def steps_of(length: int, decode: int) -> list[Step]:
    """The passes of the main stack: the prefill of `length` tokens, then `decode` single tokens."""
    prefill = Step("", length, 0)
    return [prefill, *(Step(f"decode.{i}.", 1, length + i) for i in range(decode))]


def complete_blocks(step: Step, ratio: int) -> int:
    """Compressed blocks that the pass itself completes (SPEC 5, Compressor)."""
    return step.end // ratio - step.start // ratio


def compressed_columns(step: Step, ratio: int) -> int:
    """Compressed blocks that exist after the pass: the candidates of its queries (SPEC 5, step
    3).
    """
    return step.end // ratio


def window_columns(config: ModelConfig, step: Step) -> int:
    """Columns of the window part of the index table (SPEC 5, step 3)."""
    return min(step.tokens, config.window_size) if step.start == 0 else config.window_size


def selected_columns(config: ModelConfig, step: Step, ratio: int) -> int:
    """Columns of the compressed part of the index table: at most top-k for ratio 4, all for
    others.
    """
    if ratio == 0:
        return 0
    blocks = compressed_columns(step, ratio)
    return min(config.index_topk, blocks) if has_indexer(ratio) else blocks


def kv_rows(config: ModelConfig, step: Step, ratio: int) -> int:
    """Rows of `sparse_attn.in.kv` (SPEC 5, step 5)."""
    blocks = compressed_columns(step, ratio) if ratio else 0
    return table_offset(config, step) + blocks


def table_offset(config: ModelConfig, step: Step) -> int:
    """Index of compressed block 0 in a query's table: after the pass's own rows, or after the
    ring.
    """
    return step.tokens if step.start == 0 else config.window_size


def hc_keys(config: ModelConfig, name: str, step: Step) -> Keys:
    """`pre`, `post` and `comb` of one hyper-connection."""
    s, m = step.tokens, config.hc_mult
    return {
        f"{name}.pre": acc(1, s, m),
        f"{name}.post": acc(1, s, m),
        f"{name}.comb": acc(1, s, m, m),
    }


def expert_keys(config: ModelConfig, name: str, rows: int | None) -> Keys:
    """The four keys of an expert that received `rows` tokens (None: depends on the data)."""
    inner, dim = config.moe_inter_dim, config.dim
    widths = dict(zip(EXPERT_OUTPUTS, (inner, inner, dim, dim), strict=True))
    return {f"{name}.{output}": bf16(rows, width) for output, width in widths.items()}


def moe_keys(config: ModelConfig, layer: int, step: Step) -> Keys:
    """Everything that is recorded under `ffn.`; routed experts as `experts.<E>`."""
    s, (_, k) = step.tokens, config.experts_of(layer)
    return {
        "ffn.gate.out.0": acc(s, k),
        "ffn.gate.out.1": index("I32" if config.is_hash(layer) else "I64", s, k),
        **expert_keys(config, "ffn.experts.<E>", None),
        **expert_keys(config, "ffn.shared_experts", s),
        "ffn.out": bf16(1, s, config.dim),
    }


class KeyLists(Protocol):
    """What lists an architecture's keys, its blocks' and those of a whole recording."""

    def layer_keys(self, config: ModelConfig, layer: int, step: Step) -> Keys: ...

    def recording_keys(
        self, config: ModelConfig, length: int, decode: int, *, mtp: bool
    ) -> Keys: ...


def _lists(config: ModelConfig) -> KeyLists:
    found: KeyLists = config.architecture.load("keys")
    return found


def layer_keys(config: ModelConfig, layer: int, step: Step) -> Keys:
    """A block's keys without its path in front; drafts have the numbers from n_layers on."""
    return _lists(config).layer_keys(config, layer, step)


def recording_keys(config: ModelConfig, length: int, decode: int = 0, *, mtp: bool = True) -> Keys:
    """Every key of a complete recording of `length` tokens and `decode` steps (SPEC 6).

    Routed experts appear once per pass and layer as `experts.<E>.*` with None rows.
    """
    return _lists(config).recording_keys(config, length, decode, mtp=mtp)


def is_expert(key: str) -> bool:
    """Whether the key belongs to a routed expert."""
    return EXPERT.search(key) is not None


def generic(key: str) -> str:
    """The key with its routed expert's number replaced: `….experts.7.out` ->
    `….experts.<E>.out`.
    """
    return EXPERT.sub("experts.<E>.", key)


def pass_of(key: str) -> str:
    """The key's pass prefix: "" (the prefill), `decode.<i>.`, `mtp.0.prefill.` or
    `mtp.0.decode.`.
    """
    match = PASS.match(key)
    return match[0] if match else ""


def base_keys(keys: Keys) -> Keys:
    """The keys without the routed experts' (SPEC 6 calls them base keys)."""
    return {k: v for k, v in keys.items() if not is_expert(k)}


def with_rows(spec: KeySpec, rows: int) -> KeySpec:
    """An expert's spec with the number of its tokens filled in."""
    return KeySpec(spec.dtype, tuple(rows if n is None else n for n in spec.shape), spec.kind)


def is_draft(key: str) -> bool:
    """Whether the key belongs to the draft head, MTP or DSpark."""
    return DRAFT.match(key) is not None


def block_of(config: ModelConfig, key: str) -> int | None:
    """The block that a key belongs to, or None; drafts have the numbers from n_layers on."""
    match = BLOCK.match(key)
    if match is None:
        return None
    return int(match[2]) + (config.n_layers if match[1] == "mtp" else 0)


def experts_at(config: ModelConfig, key: str) -> tuple[int, int]:
    """Routed experts of an expert key's block, and how many of them a token takes."""
    block = block_of(config, key)
    assert block is not None
    return config.experts_of(block)


def routed_rows(config: ModelConfig, key: str, length: int) -> int:
    """Rows that all experts of the key's block and pass share out: tokens times experts per
    token.
    """
    if pass_of(key) in ("", "mtp.0.prefill."):
        tokens = length
    else:
        tokens = config.draft_tokens if is_draft(key) else 1
    return tokens * experts_at(config, key)[1]


def payload_bytes(config: ModelConfig, keys: Keys, length: int) -> int:
    """Payload of these keys for a prompt of `length`: the same however the tokens spread over
    experts.
    """
    specs = (
        with_rows(spec, routed_rows(config, key, length)) if "<E>" in key else spec
        for key, spec in keys.items()
    )
    return sum(spec.nbytes for spec in specs)


def most_tensors(config: ModelConfig, keys: Keys, length: int) -> int:
    """Upper bound of the number of tensors of these keys, whatever the routing."""
    experts = (
        min(experts_at(config, key)[0], routed_rows(config, key, length))
        for key in keys
        if "<E>" in key
    )
    return len(base_keys(keys)) + sum(experts)


def layer_of(key: str) -> int | None:
    """The main layer that a key belongs to, or None (embedding, head, MTP)."""
    match = re.match(r"(?:decode\.\d{1,9}\.)?layers\.(\d{1,9})\.", key)
    return int(match[1]) if match else None


def matches(key: str, globs: Iterable[str], experts: int = 0) -> bool:
    """Whether a key matches one of the shell patterns; a generic `<E>` may be any of `experts`
    numbers.
    """
    names = [key]
    if "<E>" in key:
        names += [key.replace("<E>", str(e)) for e in range(experts)]
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


def parse_layers(text: str) -> Iterator[int]:
    """The numbers of a list such as `0,2-5`; ValueError where it is none."""
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        yield from range(int(first), int(last if dash else first) + 1)
