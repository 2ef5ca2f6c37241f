"""Table of all rules that `check` applies: id, family, text, covered keys, what each needs.

A rule's id is what a finding names. `needs` says what a rule takes besides the file: nothing;
unknown weights (it holds for some weight that all tokens share, and says so if there is none);
or the checkpoint. Left out: how a rule is checked (the modules beside this one).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Needs = Literal["nothing", "unknown weights", "checkpoint"]
Family = Literal["container", "specification", "values", "identity", "weights"]
Only = Literal["", "compressed", "ratio 4", "ratio 128", "hash", "later passes", "main"]


@dataclass(frozen=True)
class Rule:
    """One rule: `covers` are the ends of the keys that it ties (with `<E>` for an expert).

    only: which blocks or passes it is about, where not all.
    """

    id: str
    family: Family
    says: str
    covers: tuple[str, ...] = ()
    needs: Needs = "nothing"
    only: Only = ""


def _rules(family: Family, *rules: tuple[str, str]) -> Iterable[Rule]:
    return [Rule(name, family, says) for name, says in rules]


def _tie(name: str, says: str, *covers: str, needs: Needs = "nothing", only: Only = "") -> Rule:
    return Rule(name, "weights" if needs == "checkpoint" else "identity", says, covers, needs, only)


_CONTAINER = _rules(
    "container",
    ("header length", "the first 8 bytes give the length of a header that fits into the file"),
    ("header is JSON", "the header is a JSON object padded with spaces"),
    ("header entry", "every key has a dtype, a shape and a byte range"),
    ("one entry a key", "no key comes twice"),
    ("dtype known", "every dtype is one of the format's"),
    ("byte range", "shape times dtype is the length of the byte range"),
    ("offsets contiguous", "tensors follow each other without gap or overlap"),
    ("payload complete", "the file ends where the last tensor ends"),
    ("metadata present", "the header has metadata, all of it strings"),
    ("payload sha256", "the payload has the SHA-256 of the manifest and of the metadata"),
    ("header sha256", "what stands before the payload has the SHA-256 of the manifest"),
    ("tensor checksum", "every tensor has the sum of words of the manifest"),
)
_SPECIFICATION = _rules(
    "specification",
    ("input ids", "metadata, the tensors input_ids, case and manifest name the same ids"),
    ("key missing", "every key that configuration, length and routing demand is there"),
    ("key unknown", "there is no other key"),
    ("dtype", "every key has the dtype of SPEC section 6"),
    ("shape", "every key has the shape of SPEC section 6"),
    ("expert group", "a routed expert has all of out, w1.out, w2.out, w3.out"),
    ("expert routed", "the routed experts are exactly those that gate.out.1 names"),
    ("expert rows", "a routed expert has as many rows as tokens are routed to it"),
    ("fingerprint", "the recording comes from the checkpoint at hand"),
    ("numerics", "accumulated in float64 (identities are not checked otherwise)"),
)
_VALUES = _rules(
    "values",
    ("finite", "no NaN and no infinity"),
    ("bf16", "BF16-valued keys are exactly representable in BF16"),
    ("index range", "indices lie within their table, -1 only where it is allowed"),
    ("index duplicate", "no index comes twice in a row"),
    ("expert range", "experts lie in 0 ... n_routed_experts - 1, none twice in a row"),
    ("gate sum", "a token's gate weights are positive and sum to route_scale"),
    ("hc pre", "pre lies in (0, 1 + hc_eps]"),
    ("hc post", "post lies in [0, 2]"),
    ("hc comb", "columns of comb sum to 1, rows as nearly as Sinkhorn's iteration leaves them"),
)
_IDENTITIES = (
    _tie("same id, same embedding", "equal ids have equal rows in every pass", "embed.out"),
    _tie(
        "streams",
        "a layer's out is two hc_post over the out of the layer before",
        *("layers.<n>.out", "main.embed.out", "attn.out", "ffn.out"),
        *("hc_attn.post", "hc_attn.comb", "hc_ffn.post", "hc_ffn.comb"),
        only="main",
    ),
    _tie(
        "attn_norm",
        "attn_norm.out is the RMS norm of the streams mixed by hc_attn.pre",
        *("attn_norm.out", "hc_attn.pre", "main.embed.out", "layers.<inner>.out"),
        *("e_proj.out", "h_proj.out"),
        needs="unknown weights",
    ),
    _tie(
        "ffn_norm",
        "ffn_norm.out is the RMS norm of the streams after attention, mixed by hc_ffn.pre",
        *("ffn_norm.out", "hc_ffn.pre", "hc_attn.post", "hc_attn.comb", "attn.out"),
        *("main.embed.out", "layers.<inner>.out", "e_proj.out", "h_proj.out"),
        needs="unknown weights",
    ),
    _tie(
        "q_norm",
        "q_norm.out is the RMS norm of wq_a.out",
        *("attn.q_norm.out", "attn.wq_a.out"),
        needs="unknown weights",
    ),
    _tie(
        "kv_norm",
        "kv_norm.out is the RMS norm of wkv.out",
        *("attn.kv_norm.out", "attn.wkv.out"),
        needs="unknown weights",
    ),
    _tie(
        "enorm",
        "MTP's enorm.out is the RMS norm of its embed.out",
        *("enorm.out", "mtp.embed.out"),
        needs="unknown weights",
    ),
    _tie(
        "hnorm",
        "MTP's hnorm.out is the RMS norm of the last layer's streams",
        *("hnorm.out", "layers.<last>.out"),
        needs="unknown weights",
    ),
    _tie(
        "q",
        "in.q is wq_b.out, normed by heads and rotated",
        *("attn.sparse_attn.in.q", "attn.wq_b.out"),
    ),
    _tie(
        "rot.0",
        "rope.rot.0.out is the rotated part of in.q",
        *("attn.rope.rot.0.out", "attn.sparse_attn.in.q"),
    ),
    _tie(
        "rot.1",
        "rope.rot.1.out is the rotation of kv_norm.out",
        *("attn.rope.rot.1.out", "attn.kv_norm.out"),
    ),
    _tie(
        "kv",
        "a pass's own rows of in.kv are kv_norm.out in FP8 steps and rope.rot.1.out",
        *("attn.sparse_attn.in.kv", "attn.kv_norm.out", "attn.rope.rot.1.out"),
    ),
    _tie(
        "kv cache",
        "the ring of a decode step holds the rows of earlier passes, zero where there was none",
        "attn.sparse_attn.in.kv",
        only="later passes",
    ),
    _tie(
        "kv blocks",
        "in.kv ends in compressor.out, after the blocks of earlier passes",
        *("attn.sparse_attn.in.kv", "attn.compressor.out"),
        only="compressed",
    ),
    _tie(
        "window",
        "the window part of topk_idxs follows from position and length",
        "attn.sparse_attn.in.topk_idxs",
    ),
    _tie(
        "all blocks",
        "the compressed part of topk_idxs is every complete block",
        "attn.sparse_attn.in.topk_idxs",
        only="ratio 128",
    ),
    _tie(
        "chosen blocks",
        "the compressed part of topk_idxs is indexer.out",
        *("attn.sparse_attn.in.topk_idxs", "attn.indexer.out"),
        only="ratio 4",
    ),
    _tie(
        "indexer rotation",
        "rope.rot.2.out is the rotation of indexer.wq_b.out",
        *("attn.rope.rot.2.out", "attn.indexer.wq_b.out"),
        only="ratio 4",
    ),
    _tie(
        "indexer",
        "indexer.out is the stable top-k of the scores of queries, blocks and weights",
        *("attn.indexer.out", "attn.indexer.wq_b.out", "attn.indexer.weights_proj.out"),
        "attn.indexer.compressor.out",
    ),
    _tie(
        "compressor rotation",
        "the compressor's rotation is that of norm.out at the block's first token",
        *("attn.compressor.norm.out", "attn.rope.rot.<last>.out"),
    ),
    _tie(
        "compressor",
        "compressor.out is norm.out in FP8 steps and its rotation",
        *("attn.compressor.out", "attn.compressor.norm.out", "attn.rope.rot.<last>.out"),
    ),
    _tie(
        "indexer compressor rotation",
        "rope.rot.3.out is the rotation of indexer.compressor.norm.out",
        *("attn.indexer.compressor.norm.out", "attn.rope.rot.3.out"),
    ),
    _tie(
        "indexer compressor",
        "indexer.compressor.out is the rotated norm.out after Hadamard and FP4 steps",
        *("attn.indexer.compressor.out", "attn.indexer.compressor.norm.out"),
        "attn.rope.rot.3.out",
    ),
    _tie(
        "attention",
        "sparse_attn.out is the attention of in.q over the rows of in.kv in topk_idxs",
        *("attn.sparse_attn.out", "attn.sparse_attn.in.q", "attn.sparse_attn.in.kv"),
        "attn.sparse_attn.in.topk_idxs",
        needs="unknown weights",
    ),
    _tie(
        "inverse rotation",
        "rope.o_inv.out is sparse_attn.out turned back",
        *("attn.rope.o_inv.out", "attn.sparse_attn.out"),
    ),
    _tie("attn.out", "attn.out is wo_b.out", "attn.out", "attn.wo_b.out"),
    _tie(
        "shared out",
        "shared_experts.out is its w2.out",
        *("ffn.shared_experts.out", "ffn.shared_experts.w2.out"),
    ),
    _tie(
        "expert out",
        "a routed expert's out is its w2.out",
        *("ffn.experts.<E>.out", "ffn.experts.<E>.w2.out"),
    ),
    _tie(
        "ffn sum",
        "ffn.out is the sum of the routed experts and the shared one, rounded once",
        *("ffn.out", "ffn.experts.<E>.out", "ffn.shared_experts.out", "ffn.gate.out.1"),
    ),
    _tie(
        "logits",
        "MTP's out and logits.out are its head.out",
        *("mtp.out", "mtp.logits.out", "mtp.head.out"),
    ),
    _tie(
        "same in, same out",
        "equal inputs of a projection have equal outputs, in every token and pass",
        *("attn.wq_a.out", "attn.wkv.out", "attn.wq_b.out", "attn.wo_b.out"),
        *("attn.indexer.wq_b.out", "attn.indexer.weights_proj.out"),
        *("attn.compressor.wkv.out", "attn.compressor.wgate.out"),
        *("attn.indexer.compressor.wkv.out", "attn.indexer.compressor.wgate.out"),
        *("score.ffn.gate.out.0", "ffn.gate.out.1", "e_proj.out", "h_proj.out"),
        *("ffn.shared_experts.w1.out", "ffn.shared_experts.w3.out"),
    ),
)
_WEIGHTS = (
    _tie("embedding", "embed.out is a fresh look-up of the ids", "embed.out", needs="checkpoint"),
    _tie(
        "hash routing",
        "the experts of hash layers are tid2eid of the ids",
        "ffn.gate.out.1",
        needs="checkpoint",
        only="hash",
    ),
    _tie(
        "logits from weights",
        "head.out is the output matrix times the last row of norm.out",
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
    _tie("product", "every product with a weight (deep checks only)", "*", needs="checkpoint"),
)

RULES: dict[str, Rule] = {
    rule.id: rule for rule in (*_CONTAINER, *_SPECIFICATION, *_VALUES, *_IDENTITIES, *_WEIGHTS)
}
"""By id, in the order of the check."""
