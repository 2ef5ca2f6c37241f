"""Table of all rules that `check` applies: id, family, text, covered keys, what each needs.

A finding names its rule by id. `needs` is what a rule takes besides the file: nothing; unknown
weights (some value of the weight must explain all tokens; the weight itself is not read); or the
checkpoint. Left out: the code that checks each rule, in the other modules of this package.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Needs = Literal["nothing", "unknown weights", "checkpoint"]
Family = Literal["container", "specification", "values", "identity", "weights"]
Only = Literal["", "compressed", "ratio 4", "ratio 128", "hash", "later passes", "main"]


@dataclass(frozen=True)
class Rule:
    """One rule. says: the condition in one sentence, shown to the user.

    covers: suffixes of the keys that it constrains, with `<E>` for the number of an expert (as
    `explain.names_of` gives them); only: the blocks or passes it applies to, "" for all.
    """

    id: str
    family: Family
    says: str
    covers: tuple[str, ...] = ()
    needs: Needs = "nothing"
    only: Only = ""


def _rules(family: Family, *rules: tuple[str, str]) -> Iterable[Rule]:
    return [Rule(name, family, says) for name, says in rules]


def _identity(
    name: str, says: str, *covers: str, needs: Needs = "nothing", only: Only = ""
) -> Rule:
    return Rule(name, "weights" if needs == "checkpoint" else "identity", says, covers, needs, only)


_CONTAINER = _rules(
    "container",
    (
        "header length",
        "the first 8 bytes are the header's length, and the file is at least that long",
    ),
    ("header is JSON", "the header is a JSON object padded with spaces"),
    ("header entry", "every key has a dtype, a shape and a byte range"),
    ("one entry a key", "no key occurs twice in the header"),
    ("dtype known", "every dtype is defined by the safetensors format"),
    ("byte range", "the byte range has the length that shape and dtype give"),
    ("offsets contiguous", "the byte ranges follow each other without gap or overlap"),
    ("payload complete", "the file ends where the last tensor ends"),
    ("metadata present", "the header has `__metadata__`, and all of its values are strings"),
    ("payload sha256", "the payload has the SHA-256 that manifest and metadata state"),
    ("header sha256", "the header has the SHA-256 that the manifest states"),
    ("tensor checksum", "the sum of each tensor's 32-bit words is the checksum in the manifest"),
)
_SPECIFICATION = _rules(
    "specification",
    (
        "input ids",
        "the metadata, the tensors input_ids, the case and the manifest state the same ids",
    ),
    ("key missing", "every key that configuration, prompt length and routing require is present"),
    ("key unknown", "there is no other key"),
    ("form", "floats are F32, the batch is the first dimension, dimensions have SPEC 6's order"),
    ("dtype", "every key has the dtype of SPEC section 6"),
    ("shape", "every key has the shape of SPEC section 6"),
    ("expert group", "a recorded expert has all of out, w1.out, w2.out and w3.out"),
    ("expert routed", "the recorded experts are exactly those in gate.out.1"),
    ("expert rows", "a recorded expert has one row for each token routed to it"),
    ("fingerprint", "the recording was made from the given checkpoint"),
    ("numerics", "the recording was accumulated in float64; identities are not checked otherwise"),
)
_VALUES = _rules(
    "values",
    ("finite", "no NaN and no infinity"),
    ("bf16", "values of keys computed in BF16 are exactly representable in BF16"),
    ("index range", "indices are in range and causal, and -1 fills exactly the unused entries"),
    ("index duplicate", "no index occurs twice in a row of the table"),
    ("expert range", "a token's experts are distinct and in 0 ... n_routed_experts - 1"),
    ("gate sum", "a token's gate weights are not negative and sum to route_scale"),
    ("hc pre", "pre lies in (0, 1 + hc_eps]"),
    ("hc post", "post lies in [0, 2]"),
    (
        "hc comb",
        "comb's columns sum to 1 within rounding, its rows within the Sinkhorn residual",
    ),
)
_IDENTITIES = (
    _identity(
        "same id, same embedding",
        "equal token ids have equal rows of embed.out, in every pass",
        "embed.out",
    ),
    _identity(
        "streams",
        "a layer's out is the previous out after hc_post of attention and of the experts",
        *("layers.<n>.out", "main.embed.out", "attn.out", "ffn.out"),
        *("hc_attn.post", "hc_attn.comb", "hc_ffn.post", "hc_ffn.comb"),
        only="main",
    ),
    _identity(
        "attn_norm",
        "attn_norm.out is the RMS norm of the block's input streams, weighted by hc_attn.pre",
        *("attn_norm.out", "hc_attn.pre", "main.embed.out", "layers.<inner>.out"),
        *("e_proj.out", "h_proj.out"),
        needs="unknown weights",
    ),
    _identity(
        "ffn_norm",
        "ffn_norm.out is the RMS norm of the streams after attention, weighted by hc_ffn.pre",
        *("ffn_norm.out", "hc_ffn.pre", "hc_attn.post", "hc_attn.comb", "attn.out"),
        *("main.embed.out", "layers.<inner>.out", "e_proj.out", "h_proj.out"),
        needs="unknown weights",
    ),
    _identity(
        "q_norm",
        "q_norm.out is the RMS norm of wq_a.out",
        *("attn.q_norm.out", "attn.wq_a.out"),
        needs="unknown weights",
    ),
    _identity(
        "kv_norm",
        "kv_norm.out is the RMS norm of wkv.out",
        *("attn.kv_norm.out", "attn.wkv.out"),
        needs="unknown weights",
    ),
    _identity(
        "enorm",
        "MTP's enorm.out is the RMS norm of its embed.out",
        *("enorm.out", "mtp.embed.out"),
        needs="unknown weights",
    ),
    _identity(
        "hnorm",
        "MTP's hnorm.out is the RMS norm of the last layer's out",
        *("hnorm.out", "layers.<last>.out"),
        needs="unknown weights",
    ),
    _identity(
        "q",
        "in.q is wq_b.out after the RMS norm of each head and the rotary embedding",
        *("attn.sparse_attn.in.q", "attn.wq_b.out"),
    ),
    _identity(
        "rot.0",
        "rope.rot.0.out is the rotary dimensions of in.q",
        *("attn.rope.rot.0.out", "attn.sparse_attn.in.q"),
    ),
    _identity(
        "rot.1",
        "rope.rot.1.out is the rotary embedding of kv_norm.out",
        *("attn.rope.rot.1.out", "attn.kv_norm.out"),
    ),
    _identity(
        "kv",
        "the rows of in.kv of this pass are kv_norm.out quantised to FP8, then rope.rot.1.out",
        *("attn.sparse_attn.in.kv", "attn.kv_norm.out", "attn.rope.rot.1.out"),
    ),
    _identity(
        "kv cache",
        "the window cache of a decode step holds the rows of earlier passes, zero where unused",
        "attn.sparse_attn.in.kv",
        only="later passes",
    ),
    _identity(
        "kv blocks",
        "the compressed rows of in.kv are the compressor.out of all passes so far",
        *("attn.sparse_attn.in.kv", "attn.compressor.out"),
        only="compressed",
    ),
    _identity(
        "window",
        "the window columns of topk_idxs are those that position and length give",
        "attn.sparse_attn.in.topk_idxs",
    ),
    _identity(
        "all blocks",
        "the compressed columns of topk_idxs list every complete block",
        "attn.sparse_attn.in.topk_idxs",
        only="ratio 128",
    ),
    _identity(
        "chosen blocks",
        "the compressed columns of topk_idxs are indexer.out",
        *("attn.sparse_attn.in.topk_idxs", "attn.indexer.out"),
        only="ratio 4",
    ),
    _identity(
        "indexer rotation",
        "rope.rot.2.out is the rotary embedding of indexer.wq_b.out",
        *("attn.rope.rot.2.out", "attn.indexer.wq_b.out"),
        only="ratio 4",
    ),
    _identity(
        "indexer",
        "indexer.out is the stable top-k of block scores from queries, keys and weights",
        *("attn.indexer.out", "attn.indexer.wq_b.out", "attn.indexer.weights_proj.out"),
        "attn.indexer.compressor.out",
    ),
    _identity(
        "compressor rotation",
        "the compressor's rope.rot is the rotary embedding of norm.out at each block's start",
        *("attn.compressor.norm.out", "attn.rope.rot.<last>.out"),
    ),
    _identity(
        "compressor",
        "compressor.out is norm.out quantised to FP8, then its rotary embedding",
        *("attn.compressor.out", "attn.compressor.norm.out", "attn.rope.rot.<last>.out"),
    ),
    _identity(
        "indexer compressor rotation",
        "rope.rot.3.out is the rotary embedding of indexer.compressor.norm.out",
        *("attn.indexer.compressor.norm.out", "attn.rope.rot.3.out"),
    ),
    _identity(
        "indexer compressor",
        "indexer.compressor.out is norm.out rotated, Hadamard-transformed, quantised to FP4",
        *("attn.indexer.compressor.out", "attn.indexer.compressor.norm.out"),
        "attn.rope.rot.3.out",
    ),
    _identity(
        "attention",
        "sparse_attn.out is the attention of in.q over the rows of in.kv listed in topk_idxs",
        *("attn.sparse_attn.out", "attn.sparse_attn.in.q", "attn.sparse_attn.in.kv"),
        "attn.sparse_attn.in.topk_idxs",
        needs="unknown weights",
    ),
    _identity(
        "inverse rotation",
        "rope.o_inv.out is the inverse rotary embedding of sparse_attn.out",
        *("attn.rope.o_inv.out", "attn.sparse_attn.out"),
    ),
    _identity("attn.out", "attn.out equals wo_b.out", "attn.out", "attn.wo_b.out"),
    _identity(
        "shared out",
        "shared_experts.out equals its w2.out",
        *("ffn.shared_experts.out", "ffn.shared_experts.w2.out"),
    ),
    _identity(
        "expert out",
        "a routed expert's out equals its w2.out",
        *("ffn.experts.<E>.out", "ffn.experts.<E>.w2.out"),
    ),
    _identity(
        "ffn sum",
        "ffn.out is the sum of the routed experts and the shared expert, rounded once",
        *("ffn.out", "ffn.experts.<E>.out", "ffn.shared_experts.out", "ffn.gate.out.1"),
    ),
    _identity(
        "logits",
        "MTP's out and logits.out equal its head.out",
        *("mtp.out", "mtp.logits.out", "mtp.head.out"),
    ),
    _identity(
        "same in, same out",
        "equal input rows of a projection have equal output rows, in all tokens and passes",
        *("attn.wq_a.out", "attn.wkv.out", "attn.wq_b.out", "attn.wo_b.out"),
        *("attn.indexer.wq_b.out", "attn.indexer.weights_proj.out"),
        *("attn.compressor.wkv.out", "attn.compressor.wgate.out"),
        *("attn.indexer.compressor.wkv.out", "attn.indexer.compressor.wgate.out"),
        *("score.ffn.gate.out.0", "ffn.gate.out.1", "e_proj.out", "h_proj.out"),
        *("ffn.shared_experts.w1.out", "ffn.shared_experts.w3.out"),
    ),
)
_WEIGHTS = (
    _identity(
        "embedding",
        "embed.out is the rows of embed.weight for the token ids",
        "embed.out",
        needs="checkpoint",
    ),
    _identity(
        "hash routing",
        "the experts of hash layers are the rows of tid2eid for the token ids",
        "ffn.gate.out.1",
        needs="checkpoint",
        only="hash",
    ),
    _identity(
        "logits from weights",
        "head.out is head.weight times the last row of norm.out",
        *("head.out", "norm.out"),
        needs="checkpoint",
    ),
    *(
        replace(
            rule,
            id=f"{rule.id} from weights",
            family="weights",
            says=f"{rule.says}, with the checkpoint's weight",
            needs="checkpoint",
        )
        for rule in _IDENTITIES
        if rule.needs == "unknown weights"
    ),
    _identity(
        "product",
        "every product with a weight, recomputed from its recorded input (--deep only)",
        "*",
        needs="checkpoint",
    ),
)

RULES: dict[str, Rule] = {
    rule.id: rule for rule in (*_CONTAINER, *_SPECIFICATION, *_VALUES, *_IDENTITIES, *_WEIGHTS)
}
"""By id, in the order of the check."""
