"""`check` finds each kind of damage to a recording and reports its key and rule.

The copies are of the small golden recordings. What is found without a manifest is tested
without one.
"""

import json
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import GOLDEN_MINI
from tests.recordings import Copy, altered, entry_of, rules_that_name
from v4tool.check.recording import CheckResult, check_recording
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.names import generic, recording_keys

CONFIG = ModelConfig.from_file(GOLDEN_MINI / "ckpt")
LEN3, LEN6, LEN33 = (GOLDEN_MINI / f"{name}.safetensors" for name in ("len3", "len6", "len33"))
KEYS = recording_keys(CONFIG, 33, 3)
ENTRY = entry_of(LEN33, CONFIG)


def check(path: Path, **options: object) -> CheckResult:
    return check_recording(path, config=CONFIG, **options)  # type: ignore[arg-type]


def damaged(tmp_path: Path, change: Callable[[Copy], object], source: Path = LEN33) -> Path:
    return altered(source, tmp_path / source.name, lambda copy: (change(copy), None)[1])


def one_of_each_kind() -> list[str]:
    """One key of every kind: the same end in another layer or pass is the same kind."""
    kinds: dict[str, str] = {}
    for key in Copy.of(LEN33).header:
        if key != "__metadata__":
            kind = re.sub(r"^(decode\.\d+\.|mtp\.0\.\w+\.)?(layers\.\d+\.)?", "", generic(key))
            kinds.setdefault(kind, key)
    return list(kinds.values())


@pytest.mark.parametrize("key", one_of_each_kind())
def test_a_flipped_bit_has_the_key_s_name(tmp_path: Path, key: str) -> None:
    """In each kind of key, any bit: the manifest's checksum names the tensor."""
    rng = random.Random(key)
    bit = rng.randrange(32)

    def flip(copy: Copy) -> None:
        start, stop = copy.span(key)
        copy.flip(key, rng.randrange((stop - start) // 4), bit)

    result = check(damaged(tmp_path, flip), manifest=ENTRY, identities=False)
    assert "tensor checksum" in rules_that_name(result, key)
    assert "payload sha256" in rules_that_name(result, "payload")


@pytest.mark.parametrize(
    ("key", "bit", "rule", "reason"),
    [
        ("layers.1.attn.wo_b.in", 0, "bf16", "the lowest bit of FP32 is 0 in a BF16 value"),
        ("layers.2.ffn.experts.0.w1.out", 15, "bf16", "and so is bit 15"),
        ("layers.0.hc_attn.pre", 30, "hc pre", "a doubled exponent"),
        ("layers.0.hc_ffn.post", 31, "hc post", "the sign"),
        ("layers.3.hc_attn.comb", 22, "hc comb", "the highest bit of the mantissa"),
        ("layers.2.ffn.gate.out.0", 20, "gate sum", "a bit of the mantissa"),
        ("layers.2.ffn.gate.out.1", 0, "expert rows", "another expert"),
        ("layers.1.attn.sparse_attn.in.topk_idxs", 3, "window", "another row"),
        ("layers.1.attn.indexer.out", 2, "indexer", "another block"),
        ("input_ids", 1, "input ids", "another id"),
        ("decode.1.input_ids", 0, "input ids", "another id"),
        ("mtp.0.decode.logits.out", 5, "logits", "one of three equal keys"),
    ],
)  # fmt: skip
def test_a_flipped_bit_is_found_without_manifest(
    tmp_path: Path, key: str, bit: int, rule: str, reason: str
) -> None:
    place = 0 if key == "decode.1.input_ids" else 4
    result = check(damaged(tmp_path, lambda copy: copy.flip(key, place, bit)))
    assert rule in rules_that_name(result, key), reason


def write_word(copy: Copy, key: str, place: int, word: int) -> None:
    start, _ = copy.span(key)
    copy.payload[start + 4 * place : start + 4 * place + 4] = struct.pack("<I", word)


@pytest.mark.parametrize("word", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001])
@pytest.mark.parametrize("key", ["layers.3.attn.wo_b.in", "head.out", "layers.0.hc_attn.comb"])
def test_infinities_and_nans(tmp_path: Path, key: str, word: int) -> None:
    result = check(damaged(tmp_path, lambda copy: write_word(copy, key, 11, word)))
    assert "finite" in rules_that_name(result, key)


REMOVED = [
    ("layers.2.attn.wq_a.out", "key missing"),
    ("layers.4.out", "key missing"),
    ("head.out", "key missing"),
    ("decode.2.layers.3.attn.indexer.compressor.out", "key missing"),
    ("mtp.0.decode.attn.sparse_attn.in.kv", "key missing"),
    ("layers.0.ffn.experts.3.w2.out", "expert group"),
    ("mtp.0.prefill.ffn.experts.1.out", "expert group"),
]


@pytest.mark.parametrize(("key", "rule"), REMOVED)
def test_a_removed_key(tmp_path: Path, key: str, rule: str) -> None:
    result = check(damaged(tmp_path, lambda copy: copy.take([key])))
    assert rule in rules_that_name(result, key)


@pytest.mark.parametrize(
    "key", ["layers.2.attn.wq_a.out", "layers.1.ffn.experts.2.w3.out", "mtp.0.prefill.hnorm.out"]
)
def test_a_renamed_key(tmp_path: Path, key: str) -> None:
    result = check(damaged(tmp_path, lambda copy: copy.rename(key, key + "put")))
    assert rules_that_name(result, key + "put") == {"key unknown"}
    assert rules_that_name(result, key) & {"key missing", "expert group"}


def test_a_whole_expert_removed(tmp_path: Path) -> None:
    keys = [f"layers.2.ffn.experts.0.{name}.out" for name in ("w1", "w2", "w3")]
    result = check(damaged(tmp_path, lambda copy: copy.take([*keys, "layers.2.ffn.experts.0.out"])))
    assert rules_that_name(result, "layers.2.ffn.experts.0") == {"expert routed"}


def test_an_expert_under_another_number(tmp_path: Path) -> None:
    def rename(copy: Copy) -> None:
        for name in ("w1.out", "w2.out", "w3.out", "out"):
            copy.rename(f"layers.4.ffn.experts.1.{name}", f"layers.4.ffn.experts.5.{name}")

    source = Copy.of(LEN33).header
    assert "layers.4.ffn.experts.5.out" not in source, "the golden routing leaves expert 5 out"
    result = check(damaged(tmp_path, rename))
    assert rules_that_name(result, "layers.4.ffn.experts.5") == {"expert routed"}
    assert rules_that_name(result, "layers.4.ffn.experts.1") == {"expert routed"}


@pytest.mark.parametrize(
    ("a", "b", "rule"),
    [
        ("layers.1.attn.out", "layers.1.ffn.out", "attn.out"),
        ("layers.1.attn_norm.out", "layers.1.ffn_norm.out", "attn_norm"),
        ("layers.1.attn.q_norm.out", "layers.1.attn.wq_a.out", "q_norm"),
        ("layers.1.out", "layers.2.out", "streams"),
        ("layers.1.hc_attn.pre", "layers.1.hc_attn.post", "attn_norm"),
        ("layers.0.attn.rope.rot.1.out", "layers.2.attn.rope.rot.1.out", "rot.1"),
        ("layers.2.ffn.experts.0.w2.out", "layers.2.ffn.shared_experts.out", "expert rows"),
        ("decode.0.layers.1.ffn.out", "decode.1.layers.1.ffn.out", "ffn sum"),
        ("mtp.0.prefill.enorm.out", "mtp.0.prefill.e_proj.out", "enorm"),
    ],
)  # fmt: skip
def test_two_keys_swapped(tmp_path: Path, a: str, b: str, rule: str) -> None:
    result = check(damaged(tmp_path, lambda copy: copy.swap(a, b)))
    assert rule in rules_that_name(result, a) | rules_that_name(result, b)


def test_swapped_keys_that_only_weights_cover_are_found_by_checksums(tmp_path: Path) -> None:
    a, b = "layers.1.attn.wo_b.in", "layers.3.attn.wo_b.in"
    path = damaged(tmp_path, lambda copy: copy.swap(a, b))
    assert check(path).ok
    result = check(path, manifest=ENTRY)
    for key in (a, b):
        assert "tensor checksum" in rules_that_name(result, key)


@pytest.mark.parametrize(
    ("key", "dtype", "rule"),
    [
        ("layers.1.attn.out", "I32", "dtype"),
        ("layers.1.attn.sparse_attn.in.topk_idxs", "F32", "dtype"),
        ("layers.0.ffn.gate.out.1", "U32", "dtype"),
        ("layers.1.ffn.out", "F31", "dtype known"),
        ("layers.1.ffn.out", "BF16", "byte range"),
        ("input_ids", "F64", "dtype"),
    ],
)
def test_a_changed_dtype(tmp_path: Path, key: str, dtype: str, rule: str) -> None:
    result = check(damaged(tmp_path, lambda copy: copy.header[key].update(dtype=dtype)))
    assert rule in rules_that_name(result, key)


def test_a_finding_is_one_line_whatever_the_file_says(tmp_path: Path) -> None:
    key = "layers.1.ffn.out"
    path = damaged(tmp_path, lambda copy: copy.header[key].update(dtype="F3\n\x1b[2J"))
    (finding,) = (f for f in check(path).findings if f.key == key and f.rule == "dtype known")
    assert finding.line().endswith(r"found F3\n\x1b[2J")


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("layers.1.attn.wkv.out", [1, 128, 33]),
        ("layers.1.attn.wkv.out", [33, 128]),
        ("layers.1.attn.wkv.out", [1, 33, 128, 1]),
        ("layers.1.ffn.experts.0.out", [1, 1]),
    ],
)
def test_a_changed_shape(tmp_path: Path, key: str, shape: list[int]) -> None:
    result = check(damaged(tmp_path, lambda copy: copy.header[key].update(shape=shape)))
    assert rules_that_name(result, key) & {"shape", "byte range"}


def test_experts_swapped_with_other_row_counts(tmp_path: Path) -> None:
    """Two experts' groups swapped: the rows betray it, or else the sum."""

    def swap(copy: Copy) -> None:
        for name in ("w1.out", "w2.out", "w3.out", "out"):
            copy.swap(f"layers.0.ffn.experts.0.{name}", f"layers.0.ffn.experts.1.{name}")

    rows = [Copy.of(LEN33).header[f"layers.0.ffn.experts.{e}.out"]["shape"][0] for e in (0, 1)]
    rule = "expert rows" if rows[0] != rows[1] else "ffn sum"
    result = check(damaged(tmp_path, swap))
    assert rule in rules_that_name(result, "layers.0.ffn.experts.0.out")


SIZE = LEN6.stat().st_size
CUTS = sorted({0, 1, 7, 8, 9, SIZE - 1, SIZE - 4} | {SIZE * i // 47 for i in range(1, 47)})


@pytest.mark.parametrize("size", CUTS)
def test_truncated(tmp_path: Path, size: int) -> None:
    assert len(CUTS) >= 50
    path = tmp_path / "cut.safetensors"
    path.write_bytes(LEN6.read_bytes()[:size])
    result = check(path, identities=False)
    header = 8 + int.from_bytes(LEN6.read_bytes()[:8], "little")
    finding = next(f for f in result.findings if f.rule in ("header length", "payload complete"))
    if size < header:
        assert (finding.key, finding.rule) == ("header", "header length")
    else:
        copy = Copy.of(LEN6)
        ends = [(copy.span(k)[1], k) for k in copy.header if k != "__metadata__"]
        first_cut = min((copy.span(k)[0], k) for end, k in ends if end > size - header)[1]
        assert (finding.key, finding.rule) == (first_cut, "payload complete")


@pytest.mark.parametrize("lie", [0, 1, -1, 100, -100, 2**40, 2**63])
def test_header_length_beyond_the_file(tmp_path: Path, lie: int) -> None:
    raw = LEN6.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    told = lie if lie in (0, 2**40, 2**63) else length + lie
    path = tmp_path / "lie.safetensors"
    path.write_bytes(told.to_bytes(8, "little") + raw[8:])
    rules = {f.rule for f in check(path, identities=False).findings}
    # one byte more or less can leave valid JSON, since the header is padded with spaces
    assert rules & {"header length", "header is JSON", "payload complete"}


def gap(copy: Copy) -> None:
    """Move the second tensor in the file away from the first."""
    keys = sorted((k for k in copy.header if k != "__metadata__"), key=copy.span)
    copy.header[keys[1]]["data_offsets"] = [n + 8 for n in copy.span(keys[1])]


def entry(key: str, **fields: object) -> Callable[[Copy], object]:
    return lambda copy: copy.header[key].update(fields)


CONTAINERS: list[tuple[str, Callable[[Copy], object], str]] = [
    ("trailing bytes", lambda c: c.payload.extend(b"12345678"), "payload complete"),
    ("a gap and an overlap", gap, "offsets contiguous"),
    ("no metadata", lambda c: c.header.pop("__metadata__"), "metadata present"),
    ("metadata that is no text", entry("__metadata__", a=1), "metadata present"),
    ("negative offsets", entry("head.out", data_offsets=[-4, 0]), "header entry"),
    ("no shape", lambda c: c.header["head.out"].pop("shape"), "header entry"),
    ("an entry that is no object", lambda c: c.header.update({"head.out": 3}), "header entry"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "change", "rule"), CONTAINERS, ids=[c[0] for c in CONTAINERS])
def test_a_damaged_container(
    tmp_path: Path, what: str, change: Callable[[Copy], object], rule: str
) -> None:
    result = check(damaged(tmp_path, change, LEN6), identities=False)
    assert rule in {f.rule for f in result.findings}


@pytest.mark.parametrize(
    "text", [b"", b"[1, 2]", b"{", b"\xff\xfe", b'{"a": 1, "a": 2}', b"null", b"{}"]
)
def test_a_header_that_is_none(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    result = check(path)
    assert result.findings, "never a traceback, never nothing"


def test_a_key_that_comes_twice(tmp_path: Path) -> None:
    raw = LEN6.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].decode().rstrip()
    entry = json.dumps(json.loads(text)["head.out"])
    text = text[:-1] + f', "head.out": {entry}}}'
    path = tmp_path / "twice.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + raw[8 + length :])
    assert "one entry a key" in rules_that_name(check(path, identities=False), "head.out")


def test_changed_ids(tmp_path: Path) -> None:
    ids = ENTRY.input_ids
    changed = [*ids[:5], (ids[5] + 1) % CONFIG.vocab_size, *ids[6:]]

    def in_metadata(copy: Copy) -> None:
        copy.header["__metadata__"]["input_ids"] = json.dumps(changed)

    def everywhere(copy: Copy) -> None:
        in_metadata(copy)
        start, _ = copy.span("input_ids")
        copy.payload[start + 40 : start + 48] = struct.pack("<q", changed[5])

    result = check(damaged(tmp_path, in_metadata))
    assert rules_that_name(result, "input_ids") == {"input ids"}
    result = check(damaged(tmp_path, everywhere), ids=ids, case="walk")
    assert rules_that_name(result, "__metadata__.input_ids") == {"input ids"}
    assert "those of walk" in result.findings[0].expected
    # nothing else knows the ids of a prompt without repeated tokens; the table of hash layers does
    assert len(set(ids)) == len(ids) or result.findings


@pytest.mark.parametrize(
    "key", ["layers.3.attn.indexer.out", "layers.3.attn.sparse_attn.in.topk_idxs"]
)
def test_a_permuted_index_table(tmp_path: Path, key: str) -> None:
    def swap_last_rows_first_two(copy: Copy) -> None:
        start, stop = copy.span(key)
        rows, item = copy.header[key]["shape"][1], 8 if key.endswith("indexer.out") else 4
        row = stop - (stop - start) // rows
        a, b = copy.payload[row : row + item], copy.payload[row + item : row + 2 * item]
        assert a != b
        copy.payload[row : row + 2 * item] = b + a

    result = check(damaged(tmp_path, swap_last_rows_first_two))
    assert rules_that_name(result, key) & {"indexer", "chosen blocks", "window"}


def test_an_index_that_is_not_causal(tmp_path: Path) -> None:
    """Token 0 that sees token 1."""
    key = "layers.0.attn.sparse_attn.in.topk_idxs"
    result = check(damaged(tmp_path, lambda copy: write_word(copy, key, 1, 1)))
    assert {"index range", "window"} <= rules_that_name(result, key)


def test_an_index_that_comes_twice(tmp_path: Path) -> None:
    key = "layers.1.attn.sparse_attn.in.topk_idxs"
    columns = Copy.of(LEN33).header[key]["shape"][-1]
    result = check(damaged(tmp_path, lambda copy: write_word(copy, key, columns + 1, 0)))
    assert {"index duplicate", "window"} <= rules_that_name(result, key)


def test_a_file_of_another_case(tmp_path: Path) -> None:
    path = tmp_path / LEN33.name
    path.write_bytes(LEN6.read_bytes())
    result = check(path, manifest=ENTRY, case="len33")
    assert "input ids" in rules_that_name(result, "__metadata__.input_ids")
    assert {"payload sha256", "header sha256"} <= {f.rule for f in result.findings}
    # judged as what it is, the file is well formed
    assert {f.rule for f in result.findings} == {"input ids", "payload sha256", "header sha256"}


def test_a_recording_of_another_model(tmp_path: Path) -> None:
    other = CONFIG.model_copy(update={"n_heads": 8})
    result = check_recording(LEN3, config=other, identities=True)
    assert "shape" in rules_that_name(result, "layers.0.attn.wq_b.out")


def test_accumulation_in_float32_is_noted_and_not_judged(tmp_path: Path) -> None:
    def claim(copy: Copy) -> None:
        copy.header["__metadata__"]["accumulate"] = "float32"

    result = check(damaged(tmp_path, claim, LEN3))
    assert [(f.rule, f.severity) for f in result.findings] == [("numerics", "note")]
    assert result.ok
    assert result.covered == 0


def test_a_checkpoint_that_is_not_the_recording_s(tmp_path: Path) -> None:
    def claim(copy: Copy) -> None:
        copy.header["__metadata__"]["checkpoint_fingerprint"] = "0" * 64

    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        result = check(damaged(tmp_path, claim, LEN3), checkpoint=checkpoint)
    assert {f.rule for f in result.findings} == {"fingerprint"}


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("embed.out", "embedding"),
        ("decode.0.embed.out", "embedding"),
        ("mtp.0.decode.head.out", "logits from weights"),
        ("norm.out", "logits from weights"),
        ("layers.1.ffn.gate.out.1", "hash routing"),
    ],
)
def test_a_flipped_bit_with_the_checkpoint(tmp_path: Path, key: str, rule: str) -> None:
    bit = 16 if KEYS[key].dtype == "F32" and KEYS[key].kind == "bf16" else 4
    last = Copy.of(LEN33).span(key)
    place = (last[1] - last[0]) // 4 - 2

    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        result = check(
            damaged(tmp_path, lambda copy: copy.flip(key, place, bit)), checkpoint=checkpoint
        )
    assert rule in rules_that_name(result, key)


def test_a_wrong_norm_that_all_tokens_share_needs_the_weight(tmp_path: Path) -> None:
    """Column 5 doubled in every pass: some weight fits, but not the checkpoint's."""
    keys = [
        f"{prefix}layers.2.attn_norm.out" for prefix in ("", *(f"decode.{i}." for i in range(3)))
    ]

    def double(copy: Copy) -> None:
        for key in keys:
            start, stop = copy.span(key)
            for place in range(start + 4 * 5, stop, 4 * CONFIG.dim):
                (value,) = struct.unpack_from("<f", copy.payload, place)
                struct.pack_into("<f", copy.payload, place, 2 * value)

    path = damaged(tmp_path, double)
    assert check(path).ok
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        result = check(path, checkpoint=checkpoint)
    for key in keys:
        assert rules_that_name(result, key) == {"attn_norm from weights"}


@pytest.mark.parametrize(
    "kept",
    [
        r".*\.attn\.out|.*gate.*",
        r".*embed\.out",
        r"decode\.1\..*",
        r"layers\.1\.ffn\.experts\.2\.w1\.out",
        r"mtp\.0\.decode\..*",
        r"layers\.[13]\..*",
    ],
)
def test_part_of_a_recording_is_judged_by_what_is_there(tmp_path: Path, kept: str) -> None:
    """Keys that an identity needs may be missing: nothing is wrong then, and nothing breaks."""

    def keep(copy: Copy) -> None:
        copy.take([k for k in copy.header if k != "__metadata__" and not re.fullmatch(kept, k)])
        copy.header["__metadata__"]["only"] = json.dumps([kept])

    path = damaged(tmp_path, keep)
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        result = check(path, checkpoint=checkpoint, deep=True)
    assert result.findings == []
    assert result.keys > 0
