"""Every rule that `check` knows, with what it says and which keys it ties; and the book that is
kept of them.

A rule's id is what a finding names. `needs` says what a rule takes besides the file: nothing;
unknown weights (it holds for some weight that all tokens share, and says so if there is none);
or the checkpoint. Left out: how a rule is checked (the modules beside this one).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from v4tool.check.bits import Bits, at, number, same, widen
from v4tool.errors import Finding

Needs = Literal["nothing", "unknown weights", "checkpoint"]
Family = Literal["container", "specification", "values", "identity", "weights"]


@dataclass(frozen=True)
class Rule:
    """One rule: `covers` are the ends of the keys that it ties (with `<E>` for an expert)."""

    id: str
    family: Family
    says: str
    covers: tuple[str, ...] = ()
    needs: Needs = "nothing"
    exact: bool = True


def _rules(family: Family, *rules: tuple[str, str], needs: Needs = "nothing") -> Iterable[Rule]:
    return [Rule(name, family, says, needs=needs) for name, says in rules]


def _identity(
    name: str, says: str, *covers: str, needs: Needs = "nothing", exact: bool = True
) -> Rule:
    return Rule(
        name, "weights" if needs == "checkpoint" else "identity", says, covers, needs, exact
    )


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
    ("payload sha256", "the payload's SHA-256 is the one in the manifest and in the metadata"),
    ("header sha256", "what stands before the payload has the SHA-256 of the manifest"),
    ("tensor checksum", "every tensor's sum of words is the one in the manifest"),
)
_SPECIFICATION = _rules(
    "specification",
    ("input ids", "metadata, the tensors input_ids, the case and the manifest name the same ids"),
    ("key missing", "every key that configuration, length and routing demand is there"),
    ("key unknown", "there is no other key"),
    ("dtype", "every key has the dtype of SPEC section 6"),
    ("shape", "every key has the shape of SPEC section 6"),
    ("expert group", "a routed expert has all of out, w1.out, w2.out, w3.out"),
    ("expert routed", "the routed experts are exactly those that gate.out.1 names"),
    ("expert rows", "a routed expert has as many rows as tokens are routed to it"),
    ("fingerprint", "the recording comes from the checkpoint at hand"),
    ("numerics", "the recording was accumulated in float64 (else identities are not checked)"),
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
    (
        "hc comb",
        "comb is not negative, its columns sum to 1 and its rows as nearly as Sinkhorn leaves them",
    ),
)
_IDENTITIES = (
    _identity("same id, same embedding", "embed.out has equal rows for equal ids in every pass", "embed.out"),
    _identity(
        "streams", "layers.N.out is hc_post of ffn.out over hc_post of attn.out over the layer before",
        "layers.<n>.out", "attn.out", "ffn.out", "hc_attn.post", "hc_attn.comb", "hc_ffn.post",
        "hc_ffn.comb", exact=False,
    ),
    _identity(
        "attn_norm", "attn_norm.out is the RMS norm of the streams mixed by hc_attn.pre",
        "attn_norm.out", "hc_attn.pre", "embed.out", "e_proj.out", "h_proj.out", needs="unknown weights",
    ),
    _identity(
        "ffn_norm", "ffn_norm.out is the RMS norm of the streams after attention, mixed by hc_ffn.pre",
        "ffn_norm.out", "hc_ffn.pre", "hc_attn.post", "hc_attn.comb", "attn.out", needs="unknown weights",
    ),
    _identity("q_norm", "q_norm.out is the RMS norm of wq_a.out", "attn.q_norm.out", "attn.wq_a.out",
              needs="unknown weights"),
    _identity("kv_norm", "kv_norm.out is the RMS norm of wkv.out", "attn.kv_norm.out", "attn.wkv.out",
              needs="unknown weights"),
    _identity("enorm", "MTP's enorm.out is the RMS norm of its embed.out", "enorm.out", "mtp.embed.out",
              needs="unknown weights"),
    _identity("hnorm", "MTP's hnorm.out is the RMS norm of the last layer's streams", "hnorm.out",
              needs="unknown weights"),
    _identity("head norm", "norm.out is the RMS norm of the streams mixed by some pre in (0, 1 + hc_eps]",
              "norm.out", needs="unknown weights"),
    _identity("q", "sparse_attn.in.q is wq_b.out, normed by heads and rotated", "attn.sparse_attn.in.q",
              "attn.wq_b.out"),
    _identity("rot.0", "rope.rot.0.out is the rotated part of sparse_attn.in.q", "attn.rope.rot.0.out",
              "attn.sparse_attn.in.q"),
    _identity("rot.1", "rope.rot.1.out is the rotation of kv_norm.out", "attn.rope.rot.1.out",
              "attn.kv_norm.out"),
    _identity("kv", "the pass's rows of sparse_attn.in.kv are kv_norm.out in FP8 steps and rope.rot.1.out",
              "attn.sparse_attn.in.kv", "attn.kv_norm.out", "attn.rope.rot.1.out"),
    _identity("kv cache", "the ring rows of a decode step are those of the passes before, zero where none was",
              "attn.sparse_attn.in.kv"),
    _identity("kv blocks", "sparse_attn.in.kv ends in compressor.out, after the blocks of earlier passes",
              "attn.sparse_attn.in.kv", "attn.compressor.out"),
    _identity("window", "the window part of topk_idxs follows from position and length",
              "attn.sparse_attn.in.topk_idxs"),
    _identity("all blocks", "the compressed part of topk_idxs is every complete block (ratio 128)",
              "attn.sparse_attn.in.topk_idxs"),
    _identity("chosen blocks", "the compressed part of topk_idxs is indexer.out (ratio 4)",
              "attn.sparse_attn.in.topk_idxs", "attn.indexer.out"),
    _identity("indexer rotation", "rope.rot.2.out is the rotation of indexer.wq_b.out", "attn.rope.rot.2.out",
              "attn.indexer.wq_b.out"),
    _identity("indexer", "indexer.out is the stable top-k of the scores of queries, blocks and weights",
              "attn.indexer.out", "attn.indexer.wq_b.out", "attn.indexer.weights_proj.out",
              "attn.indexer.compressor.out"),
    _identity("compressor rotation", "the compressor's rotation is that of norm.out at the block's first token",
              "attn.compressor.norm.out", "attn.rope.rot.<last>.out"),
    _identity("compressor", "compressor.out is norm.out in FP8 steps and its rotation", "attn.compressor.out",
              "attn.compressor.norm.out", "attn.rope.rot.<last>.out"),
    _identity("indexer compressor rotation", "rope.rot.3.out is the rotation of indexer.compressor.norm.out",
              "attn.indexer.compressor.norm.out", "attn.rope.rot.3.out"),
    _identity("indexer compressor", "indexer.compressor.out is the rotated norm.out, Hadamard and FP4",
              "attn.indexer.compressor.out", "attn.indexer.compressor.norm.out", "attn.rope.rot.3.out"),
    _identity("attention", "sparse_attn.out is the attention of in.q over the rows of in.kv in topk_idxs",
              "attn.sparse_attn.out", "attn.sparse_attn.in.q", "attn.sparse_attn.in.kv",
              "attn.sparse_attn.in.topk_idxs", needs="unknown weights"),
    _identity("inverse rotation", "rope.o_inv.out is sparse_attn.out turned back", "attn.rope.o_inv.out",
              "attn.sparse_attn.out"),
    _identity("attn.out", "attn.out is wo_b.out", "attn.out", "attn.wo_b.out"),
    _identity("shared out", "shared_experts.out is shared_experts.w2.out", "ffn.shared_experts.out",
              "ffn.shared_experts.w2.out"),
    _identity("expert out", "a routed expert's out is its w2.out", "ffn.experts.<E>.out",
              "ffn.experts.<E>.w2.out"),
    _identity("ffn sum", "ffn.out is the sum of the routed experts and the shared one, rounded once",
              "ffn.out", "ffn.experts.<E>.out", "ffn.shared_experts.out", "ffn.gate.out.1"),
    _identity("logits", "MTP's out and logits.out are its head.out", "mtp.out", "mtp.logits.out",
              "mtp.head.out"),
    _identity(
        "same in, same out", "equal inputs of a projection have equal outputs, in every token and pass",
        "attn.wq_a.out", "attn.wkv.out", "attn.wq_b.out", "attn.wo_b.out", "attn.indexer.wq_b.out",
        "attn.indexer.weights_proj.out", "attn.compressor.wkv.out", "attn.compressor.wgate.out",
        "attn.indexer.compressor.wkv.out", "attn.indexer.compressor.wgate.out", "ffn.gate.out.0",
        "ffn.gate.out.1", "ffn.shared_experts.w1.out", "ffn.shared_experts.w3.out", "e_proj.out",
        "h_proj.out",
    ),
)  # fmt: skip

RULES: dict[str, Rule] = {
    rule.id: rule for rule in (*_CONTAINER, *_SPECIFICATION, *_VALUES, *_IDENTITIES)
}


@dataclass
class Tally:
    """What a rule was applied to: how often, to how many keys and values, and how often it
    failed.
    """

    keys: set[str] = field(default_factory=set)
    values: int = 0
    findings: int = 0


class Book:
    """Findings and tallies of one check."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.findings: list[Finding] = []
        self.tallies: dict[str, Tally] = {}
        self.shapes = shapes or {}

    def applied(self, rule: str, keys: Iterable[str] = (), values: int = 0) -> Tally:
        """Note that a rule was applied to keys and values."""
        assert rule in RULES, rule
        tally = self.tallies.setdefault(rule, Tally())
        tally.keys.update(keys)
        tally.values += values
        return tally

    def report(
        self, key: str, rule: str, expected: object, found: object, *, note: bool = False
    ) -> None:
        """Add a finding."""
        self.applied(rule).findings += not note
        severity: Literal["error", "note"] = "note" if note else "error"
        self.findings.append(Finding(key, rule, str(expected), str(found), severity))

    def compare(self, rule: str, key: str, found: Bits, expected: Bits, of: Sequence[str]) -> None:
        """BF16 values that must be equal; `of`: the keys that the expected ones come from."""
        with Comparison(self, rule, key, of) as comparison:
            comparison.add(0, found, expected)

    def equal(
        self,
        rule: str,
        key: str,
        found: npt.NDArray[np.generic],
        expected: npt.NDArray[np.generic],
        of: Sequence[str],
    ) -> None:
        """Integers or FP32 words that must be equal."""
        self.applied(rule, [key, *of], found.size)
        wrong = np.flatnonzero((found != expected).reshape(-1))
        if wrong.size:
            place = self.place(key, int(wrong[0]), found.shape)
            self.report(
                key,
                rule,
                f"{expected.reshape(-1)[wrong[0]]} at {place}{_from(of)}",
                f"{found.reshape(-1)[wrong[0]]}; {wrong.size} of {found.size} values differ",
            )

    def place(self, key: str, index: int, shape: tuple[int, ...] = ()) -> list[int]:
        """A flat index as indices of the key's recorded shape."""
        recorded = self.shapes.get(key, shape)
        return at(index, recorded if math.prod(recorded) > index else shape)


def _from(of: Sequence[str]) -> str:
    return f" (from {', '.join(of)})" if of else ""


class Comparison:
    """BF16 values of one key compared in pieces; reports once, when it is left."""

    def __init__(self, book: Book, rule: str, key: str, of: Sequence[str]) -> None:
        self.book, self.rule, self.key, self.of = book, rule, key, of
        self.count = self.wrong = 0
        self.first: tuple[int, np.uint16, np.uint16] | None = None

    def add(self, start: int, found: Bits, expected: Bits) -> None:
        """Compare some values; `start`: flat index of the first one in the key."""
        bad = np.flatnonzero(~same(found, expected).reshape(-1))
        self.count += found.size
        self.wrong += bad.size
        if bad.size and self.first is None:
            i = bad[0]
            self.first = (start + int(i), found.reshape(-1)[i], expected.reshape(-1)[i])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        self.book.applied(self.rule, [self.key, *self.of], self.count)
        if self.first is not None:
            index, found, expected = self.first
            place = self.book.place(self.key, index, (self.count,))
            self.book.report(
                self.key,
                self.rule,
                f"{number(value_of(expected))} at {place}{_from(self.of)}",
                f"{number(value_of(found))}; {self.wrong} of {self.count} values differ",
            )


def value_of(bits: np.uint16) -> float:
    """The value of one BF16 bit pattern."""
    return float(widen(np.array([bits], np.uint16))[0])
