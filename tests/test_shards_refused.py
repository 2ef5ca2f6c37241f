"""Invalid checkpoint directories, as users have had them: each is refused in one line."""

import bz2
import gzip
import json
import lzma
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import GOLDEN_MINI
from tests.shard_files import (
    INDEX,
    Stored,
    copy,
    edit,
    edit_config,
    edit_header,
    edit_index,
    load,
    rename,
    replace,
    save,
    write,
)
from v4tool.checkpoint.header import read_header
from v4tool.checkpoint.shards import Checkpoint
from v4tool.errors import CheckpointError, ConfigError

MINI = GOLDEN_MINI / "ckpt"
SHARD = "model-00003-of-00008.safetensors"
SIZE = (MINI / SHARD).stat().st_size
EMBED = "model-00001-of-00008.safetensors"
TABLE = "layers.0.ffn.gate.tid2eid"
MTP_NORMS = ("mtp.0.enorm.weight", "mtp.0.hnorm.weight")
W1 = "layers.0.ffn.experts.0.w1"
WKV = "layers.1.attn.wkv"

Damage = Callable[[Path], object]


def cut(size: int) -> Damage:
    return lambda d: (d / SHARD).write_bytes((MINI / SHARD).read_bytes()[:size])


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Falsify SHARD's header."""
    return lambda d: edit_header(d / SHARD, lambda h: (change(h), None)[1])


def entry(**fields: object) -> Damage:
    """Falsify the header's entry of WKV.weight: F8_E4M3 [128, 128]."""
    return header(lambda h: h[f"{WKV}.weight"].update(fields))


def shift(by: int) -> Damage:
    """Move the byte range of WKV.weight."""
    return header(
        lambda h: h[f"{WKV}.weight"].update(
            data_offsets=[place + by for place in h[f"{WKV}.weight"]["data_offsets"]]
        )
    )


def raw_header(text: bytes) -> Damage:
    return lambda d: write(d / SHARD, text, b"")


def length_field(length: int) -> Damage:
    return lambda d: (d / SHARD).write_bytes(
        length.to_bytes(8, "little") + (MINI / SHARD).read_bytes()[8:]
    )


def remove(*names: str) -> Damage:
    def damage(d: Path) -> None:
        for name in names:
            (d / name).unlink()

    return damage


def index_text(text: str) -> Damage:
    return lambda d: (d / INDEX).write_text(text)


def remains(name: str, content: bytes) -> Damage:
    """Write something else in place of a file."""
    return lambda d: (d / name).write_bytes(content)


def instead(content: bytes) -> Damage:
    return remains(SHARD, content)


def points_to(file: str) -> Damage:
    return lambda d: edit_index(d, lambda m: m.update({"norm.weight": file}))


def stored(name: str, dtype: str, shape: list[int], data: bytes) -> Damage:
    return lambda d: replace(d, name, dtype, shape, data)


def renamed(new_name: Callable[[str], str | None]) -> Damage:
    return lambda d: rename(d, new_name)


def twice(d: Path) -> None:
    norm = load(MINI / "model-00007-of-00008.safetensors")["norm.weight"]
    save(d / EMBED, load(d / EMBED) | {"norm.weight": norm})


def unknown_without_index(d: Path) -> None:
    edit(d, lambda n, t: {n: t, f"{n}_2": t} if n == "norm.weight" else {n: t})
    (d / INDEX).unlink()


def alone(d: Path) -> None:
    """Keep nothing but a GGUF file."""
    for path in d.iterdir():
        path.unlink()
    (d / "model.gguf").write_bytes(b"GGUF")


def fp8_experts(name: str, t: Stored) -> dict[str, Stored]:
    """As in the Base checkpoint: FP8 weights with an F32 scale per block."""
    if ".ffn.experts." not in name:
        return {name: t}
    if name.endswith(".scale"):
        return {name: Stored("F32", [1, 1], b"\0\0\x80\x3f")}
    return {name: Stored("F8_E4M3", [t.shape[0], 2 * t.shape[1]], 2 * t.data)}


def three_mtp_blocks(name: str, t: Stored) -> dict[str, Stored]:
    if not name.startswith("mtp."):
        return {name: t}
    return {name.replace("mtp.0.", f"mtp.{i}."): t for i in range(3)}


def zero_tail(file: str, size: int) -> Damage:
    def damage(d: Path) -> None:
        content = (d / file).read_bytes()
        (d / file).write_bytes(content[:-size] + bytes(size))

    return damage


BF16_WKV = stored(f"{WKV}.weight", "BF16", [128, 128], bytes(range(256)) * 128)

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3458764512\n"
HTML = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
OTHER_KINDS = [
    # name, content, what it is and what to do
    ("lfs", LFS, "a Git LFS pointer: run `git lfs pull` in its directory"),
    ("html", HTML, "an HTML page, as from a login, a proxy or an error: download the file again"),
    ("html-bom", b"\xef\xbb\xbf<HTML>" + bytes(99), "an HTML page, as from a login"),
    ("xml", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML message, as"),
    ("json", b'{"error": "Invalid username or password."}', """the text '{"error": "Invalid"""),
    ("text", b"Entry not found", "the text 'Entry not found': download the file again"),
    ("short-text", b"404", "the text '404': download the file again"),
    (
        "long-text",
        50 * "Zugriff verweigert, bitte prüfen ".encode(),
        "the text 'Zugriff verweigert, bitte pr\\xfcfen Zugriff verweigert, bitte p...'",
    ),
    ("gguf", b"GGUF\3\0\0\0" + b"{" + bytes(99), "a GGUF file (llama.cpp): v4tool reads the rel"),
    ("pt", b"PK\3\4\0\0\b\b" + bytes(99), "a zip archive, perhaps by torch.save (.pt, .bin): v4"),
    ("old-pt", b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a Python pickle, perhaps by torch.save"),
    (
        "pickle",
        b"\x80\4\x95\xf8\1\0\0\0\0\0\0}",
        "a Python pickle: v4tool reads the release's safetensors",
    ),
    (
        "hdf5",
        b"\x89HDF\r\n\x1a\n" + bytes(99),
        "an HDF5 file: v4tool reads the release's safetensors",
    ),
    ("npy", b"\x93NUMPY\1\0v\0{'descr'", "a NumPy file: v4tool reads the release's safetensors"),
    ("gzip", gzip.compress(bytes(999)), "a gzip file: unpack it first"),
    ("xz", lzma.compress(bytes(999)), "an xz file: unpack it first"),
    ("bzip2", bz2.compress(bytes(999)), "a bzip2 file: unpack it first"),
    ("zstd", b"\x28\xb5\x2f\xfd\x24" + bytes(99), "a Zstandard file: unpack it first"),
    ("zeros", bytes(SIZE), "a file that begins with 4096 zero bytes: download the file again"),
    ("few-zeros", bytes(8), "a file that begins with 8 zero bytes: download the file again"),
]

OPENING = [
    # name, damage, what the line must say
    ("no-directory", shutil.rmtree, "ckpt: there is no such directory"),
    ("empty-directory", lambda d: [p.unlink() for p in d.iterdir()], f"expected {INDEX} and"),
    ("only-gguf", alone, "shards, found only model.gguf"),
    ("no-config", remove("config.json"), "config.json: there is no such file"),
    ("config-field", lambda d: edit_config(d, swiglu_limit=...), "missing field swiglu_limit"),
    ("config-value", lambda d: edit_config(d, o_groups=-2), "o_groups: expected greater than 0"),
    ("config-fp8-experts", lambda d: edit_config(d, expert_dtype="fp8"), "expected 'fp4', found"),
    (
        "config-other-size",
        lambda d: edit_config(d, vocab_size=321),
        "embed.weight expected BF16 [321",
    ),
    # index
    ("index-not-json", index_text("{"), f"{INDEX}: cannot be read as JSON"),
    ("index-empty", index_text(""), f"{INDEX}: cannot be read as JSON"),
    ("index-list", index_text("[]"), "expected a weight_map of tensor names to files, found none"),
    ("index-without-map", index_text('{"metadata": {}}'), "expected a weight_map"),
    ("index-duplicate", index_text('{"weight_map": {"a": "b", "a": "c"}}'), "duplicate key a"),
    ("index-outside", points_to("../model.safetensors"), "found ../model.safetensors"),
    ("index-absolute", points_to("/etc/model.safetensors"), "found /etc/model.safetensors"),
    ("index-below", points_to("a/model.safetensors"), "files beside it, found a/model.safetensors"),
    ("index-other-kind", points_to("config.json"), "files beside it, found config.json"),
    ("index-number", points_to(3), "files beside it, found 3"),  # type: ignore[arg-type]
    ("index-wrong-shard", points_to(EMBED), f"in their shard: norm.weight (not in {EMBED})"),
    (
        "index-ghost",
        lambda d: edit_index(d, lambda m: m.update(ghost=EMBED)),
        "1 tensor in the index but not in their shard: ghost",
    ),
    (
        "index-forgets",
        lambda d: edit_index(d, lambda m: m.pop("norm.weight")),
        "1 tensor in a shard but not in the index: norm.weight",
    ),
    ("key-in-two-shards", twice, f"1 tensor in two shards: norm.weight ({EMBED}, model-00007"),
    # files
    ("shard-missing", remove(SHARD), f"1 of 8 shards missing: {SHARD}"),
    ("shards-missing", remove(EMBED, SHARD), f"2 of 8 shards missing: {EMBED}, {SHARD}"),
    (
        "shards-and-index-missing",
        remove(EMBED, SHARD, INDEX),
        f"2 of 8 shards missing: {EMBED}, {SHARD}",
    ),
    (
        "cut-1",
        cut(SIZE - 1),
        f"{SHARD}: cut short: its header describes {SIZE} bytes, the file has {SIZE - 1} (1 ",
    ),
    ("cut-4096", cut(SIZE - 4096), "(4096 missing)"),
    ("cut-half", cut(SIZE // 2), f"the file has {SIZE // 2} ("),
    ("cut-header", cut(1000), "its header should take 8656 bytes, only 992 follow"),
    ("cut-7", cut(7), f"{SHARD}: expected a safetensors file, found 7 bytes"),
    ("cut-0", cut(0), f"{SHARD}: expected a safetensors file, found 0 bytes"),
    (
        "trailing",
        lambda d: (d / SHARD).write_bytes((MINI / SHARD).read_bytes() + b"abc"),
        f"{SHARD}: 3 trailing bytes",
    ),
    (
        "shard-is-directory",
        lambda d: ((d / SHARD).unlink(), (d / SHARD).mkdir()),
        "1 of 8 shards missing",
    ),
    # another file in place of a shard
    *[
        (
            f"instead-{name}",
            instead(content),
            f"{SHARD}: expected a safetensors file, found {words}",
        )
        for name, content, words in OTHER_KINDS
    ],
    ("lfs-index", remains(INDEX, LFS), f"{INDEX}: is a Git LFS pointer: run `git lfs pull` in its"),
    ("html-index", remains(INDEX, HTML), f"{INDEX}: is an HTML page, as from a login, a proxy"),
    ("lfs-config", remains("config.json", LFS), "config.json: is a Git LFS pointer: run `git"),
    ("index-utf16", remains(INDEX, "{}".encode("utf-16")), f"{INDEX}: is UTF-16 text, expected"),
    # headers
    ("header-longer", length_field(SIZE), f"its header should take {SIZE} bytes, only"),
    ("header-huge", length_field(2**63), f"its header should take {2**63} bytes, only"),
    ("header-shorter", length_field(100), f"{SHARD}: its header is not JSON"),
    ("header-binary", raw_header(b"\xff\xfe"), "its header is not JSON"),
    ("header-list", raw_header(b"[]"), "its header is not a JSON object"),
    ("header-deep", raw_header(b"[" * 100_000), "its header is not JSON"),
    ("header-duplicate", raw_header(b'{"a": 1, "a": 2}'), f"{SHARD}: duplicate key a"),
    (
        "header-newline-in-name",
        header(lambda h: h.update({"a\nb": h.pop(f"{WKV}.weight")})),
        f"{SHARD}: unprintable tensor name 'a\\nb'",
    ),
    (
        "index-newline-in-name",
        lambda d: edit_index(d, lambda m: m.update({"a\nb": EMBED})),
        "1 tensor in the index but not in their shard: a\\nb (not in",
    ),
    ("index-newline-in-file", points_to("a\n.safetensors"), "files beside it, found a\\n.safe"),
    ("header-no-dtype", entry(dtype=None), f"tensor {WKV}.weight: unknown dtype None"),
    ("header-new-dtype", entry(dtype="F3"), f"tensor {WKV}.weight: unknown dtype F3"),
    (
        "header-half-byte",
        entry(dtype="F4", shape=[127, 255]),
        f"tensor {WKV}.weight: F4 [127, 255] takes 129540 bits, not whole bytes",
    ),
    ("header-odd-dtype", entry(dtype="F\n4"), f"tensor {WKV}.weight: unknown dtype F\\n4"),
    ("header-negative", entry(shape=[-128, -128]), "lacks a shape or a byte range"),
    ("header-fraction", entry(shape=[128.0, 128]), "lacks a shape or a byte range"),
    ("header-one-end", entry(data_offsets=[0]), "lacks a shape or a byte range"),
    (
        "header-no-entry",
        header(lambda h: h.update({f"{WKV}.weight": 5})),
        "lacks a shape or a byte",
    ),
    (
        "header-lies",
        entry(shape=[128, 129]),
        f"{WKV}.weight: F8_E4M3 [128, 129] takes 16512 bytes, its range 16384",
    ),
    ("header-wider", entry(dtype="BF16"), "takes 32768 bytes, its range 16384"),
    (
        "header-overlap",
        shift(-1),
        f"tensor {WKV}.weight: its byte range overlaps layers.1.attn.ind",
    ),
    ("header-gap", shift(1), f"tensor {WKV}.weight: its byte range leaves a gap after layers.1"),
    # tensors
    (
        "missing",
        renamed(lambda n: None if n == f"{WKV}.scale" else n),
        f"1 missing tensor: {WKV}.scale",
    ),
    (
        "unexpected",
        unknown_without_index,
        "1 unexpected tensor: norm.weight_2",
    ),
    (
        "misnamed",
        renamed(lambda n: "final.weight" if n == "norm.weight" else n),
        "1 missing tensor: norm.weight; 1 unexpected tensor: final.weight",
    ),
    (
        "dtype",
        BF16_WKV,
        f"1 tensor of wrong dtype or shape: {WKV}.weight expected F8_E4M3 [128, 128], found BF16",
    ),
    (
        "shape",
        stored(f"{WKV}.scale", "F8_E8M0", [1, 2], b"\x7f\x7f"),
        f"{WKV}.scale expected F8_E8M0 [1, 1], found F8_E8M0 [1, 2]",
    ),
    (
        "transposed",
        stored("layers.1.attn.wo_b.scale", "F8_E8M0", [2, 1], b"\x7f\x7f"),
        "expected F8_E8M0 [1, 2], found F8_E8M0 [2, 1] (transposed)",
    ),
    (
        "fp4-logical-shape-in-u8",
        stored(f"{W1}.weight", "U8", [128, 128], bytes(range(256)) * 64),
        f"{W1}.weight expected I8 [128, 64], found U8 [128, 128]",
    ),
    (
        "fp4-stored-shape-in-f4",
        stored(f"{W1}.weight", "F4", [128, 64], bytes(range(256)) * 16),
        f"{W1}.weight expected I8 [128, 64], found F4 [128, 64]",
    ),
    (
        "fp4-one-code-more-in-f4",
        stored(f"{W1}.weight", "F4", [128, 129], bytes(range(129)) * 64),
        f"{W1}.weight expected I8 [128, 64], found F4 [128, 129]",
    ),
    (
        "fp8-in-u8",
        stored(f"{WKV}.weight", "U8", [128, 128], bytes(range(256)) * 64),
        f"{WKV}.weight expected F8_E4M3 [128, 128], found U8 [128, 128]",
    ),
    (
        "scale-inverse-name",
        renamed(lambda n: n.replace(".scale", ".weight_scale_inv")),
        "scales are named weight_scale_inv, expected scale:",
    ),
    ("dialect", renamed(lambda n: f"model.{n}"), "508 names of another dialect begin with model.:"),
    (
        "half-a-dialect",
        renamed(lambda n: f"model.{n}" if n.startswith("layers.1") else n),
        "88 names of another dialect begin with model.:",
    ),
    (
        "experts-in-fp8",
        lambda d: edit(d, fp8_experts),
        "144 weights of routed experts are stored in F8_E4M3 (as in the Base",
    ),
    (
        "table-f32",
        stored(TABLE, "F32", [320, 2], bytes(2560)),
        f"{TABLE} expected I64 [320, 2], found F32",
    ),
    (
        "table-columns",
        stored(TABLE, "I64", [320, 1], bytes(2560)),
        f"{TABLE} expected I64 [320, 2], found I64 [320, 1]",
    ),
    ("table-rows", stored(TABLE, "I64", [319, 2], bytes(5104)), "found I64 [319, 2]"),
    # MTP of another design
    (
        "mtp-norms",
        renamed(lambda n: None if n in MTP_NORMS else n),
        "only the main model can: the checkpoint has 1 mtp block without enorm and hnorm, another",
    ),
    (
        "mtp-blocks",
        lambda d: edit(d, three_mtp_blocks),
        "the checkpoint has 3 mtp blocks with enorm and hnorm, another design",
    ),
    (
        "mtp-ratios",
        lambda d: edit_config(d, compress_ratios=[0, 4, 128, 4, 128, 0, 0, 0]),
        "MTP cannot be computed, only the main model can: compress_ratios has 8",
    ),
    (
        "mtp-none",
        lambda d: edit_config(d, num_nextn_predict_layers=0),
        "num_nextn_predict_layers is 0",
    ),
    # downloads that stopped
    ("zero-tail", zero_tail(SHARD, 100_000), f"{SHARD}: its last 10"),
    ("zero-embed", zero_tail(EMBED, 81920 // 16), f"{EMBED}: its last 512"),
]


def line_of(error: pytest.ExceptionInfo[Exception]) -> str:
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("damage", "words"), [pytest.param(*r[1:], id=r[0]) for r in OPENING])
def test_opening(tmp_path: Path, damage: Damage, words: str) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    damage(directory)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        Checkpoint.open(directory)
    line = line_of(caught)
    assert str(directory) in line
    assert words in line


def test_a_square_tensor_is_not_called_transposed(tmp_path: Path) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    BF16_WKV(directory)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert line_of(caught).endswith("expected F8_E4M3 [128, 128], found BF16 [128, 128]")


@pytest.mark.parametrize(
    ("name", "words"),
    [("model.gguf", "found a GGUF file"), ("model.safetensors", "shards, found a file")],
)
def test_a_file_in_place_of_a_directory(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path / name)


def test_several_defects_are_told_together(tmp_path: Path) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    rename(directory, lambda n: None if n.endswith(".wkv.scale") else n)
    replace(directory, "norm.weight", "F32", [128], bytes(512))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    line = line_of(caught)
    assert "6 missing tensors: layers.0.attn.wkv.scale, layers.1.attn.wkv.scale" in line
    assert "and 2 more" in line
    assert "1 tensor of wrong dtype or shape: norm.weight" in line


def test_damaged_files_are_told_together(tmp_path: Path) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    cut(SIZE - 7)(directory)
    (directory / EMBED).write_bytes(b"")
    (directory / "model-00008-of-00008.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    line = line_of(caught)
    assert "1 of 8 shards missing: model-00008-of-00008.safetensors" in line
    assert f"{EMBED}: expected a safetensors file" in line
    assert f"{SHARD}: cut short" in line
    assert "missing tensor" not in line, "what these files held needs no second complaint"


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_of_another_kind_are_told_in_one_line(tmp_path: Path, with_index: bool) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    for path in directory.glob("*.safetensors"):
        path.write_bytes(LFS)
    (directory / EMBED).write_bytes(HTML)
    if not with_index:
        (directory / INDEX).unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert line_of(caught) == (
        f"{directory}: {EMBED}: expected a safetensors file, found an HTML page, as from a login, "
        "a proxy or an error: download the file again; 7 of 8 shards: expected a safetensors file, "
        "found a Git LFS pointer: run `git lfs pull` in its directory (model-00002-of-00008"
        ".safetensors, model-00003-of-00008.safetensors, model-00004-of-00008.safetensors, "
        "model-00005-of-00008.safetensors and 3 more)"
    )


def test_a_tail_of_zeros_is_measured_and_named(tmp_path: Path) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    tensors = load(directory / SHARD)
    names = list(tensors)
    size = sum(len(tensors[n].data) for n in names[-2:])
    zero_tail(SHARD, size)(directory)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    found = re.search(
        r"its last (\d+) bytes are zero, from (\S+) on \((\d+) weights\)", line_of(caught)
    )
    assert found is not None
    assert size <= int(found[1]) <= size + 16, "codes of 0 before it belong to the tail"
    assert (found[2], found[3]) == (names[-2], "2")


def zeros(name: str) -> Damage:
    def change(n: str, t: Stored) -> dict[str, Stored]:
        return {n: t._replace(data=bytes(len(t.data))) if n == name else t}

    return lambda d: edit(d, change)


def table(first: int, second: int, row: int = 319) -> Damage:
    def change(n: str, t: Stored) -> dict[str, Stored]:
        if n != TABLE:
            return {n: t}
        ids = b"".join(i.to_bytes(8, "little", signed=True) for i in (first, second))
        return {n: t._replace(data=t.data[: row * 16] + ids + t.data[row * 16 + 16 :])}

    return lambda d: edit(d, change)


def scales(*values: bytes) -> Damage:
    """F32 scales of W1 [128, 4] that begin with these bytes."""
    data = b"".join(values) + b"\0\0\x80\x3f" * (512 - len(values))
    return stored(f"{W1}.scale", "F32", [128, 4], data)


READING = [
    # name, damage, tensor, what the line must say
    (
        "nan-scale",
        stored(f"{W1}.scale", "F8_E8M0", [128, 4], bytes(510) + b"\xff\xff"),
        f"{W1}.scale",
        "2 of 512 scales are 0xFF (NaN)",
    ),
    (
        "f32-scale-3",
        scales(b"\0\0\x40\x40"),
        f"{W1}.scale",
        "expected powers of two from 2^-127 to 2^127, found 3.0",
    ),
    ("f32-scale-0", scales(b"\0\0\0\0"), f"{W1}.scale", "found 0.0"),
    ("f32-scale-negative", scales(b"\0\0\x80\xbf"), f"{W1}.scale", "found -1.0"),
    ("f32-scale-nan", scales(b"\0\0\xc0\x7f"), f"{W1}.scale", "found nan"),
    ("f32-scale-inf", scales(b"\0\0\x80\x7f"), f"{W1}.scale", "found inf"),
    ("f32-scale-2^-128", scales(b"\0\0\x20\0"), f"{W1}.scale", "found 2.938735877055719e-39"),
    ("zero-fp4", zeros(f"{W1}.weight"), f"{W1}.weight", "all 8192 bytes are zero"),
    (
        "zero-fp8",
        zeros("layers.0.attn.wq_a.weight"),
        "layers.0.attn.wq_a.weight",
        "all 16384 bytes are zero",
    ),
    ("zero-scale", zeros(f"{W1}.scale"), f"{W1}.scale", "all 512 bytes are zero"),
    (
        "table-negative",
        table(-1, 0),
        TABLE,
        "different experts 0 ... 7 in a row, found [-1, 0] (1 of 320 rows)",
    ),
    ("table-beyond", table(0, 8), TABLE, "found [0, 8] (1 of 320 rows)"),
    ("table-repeated", table(5, 5), TABLE, "found [5, 5] (1 of 320 rows)"),
    ("table-zero", zeros(TABLE), TABLE, "found [0, 0] (320 of 320 rows)"),
]


@pytest.mark.parametrize(
    ("damage", "name", "words"), [pytest.param(*r[1:], id=r[0]) for r in READING]
)
def test_reading(tmp_path: Path, damage: Damage, name: str, words: str) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    damage(directory)
    with Checkpoint.open(directory) as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read(name)
        assert name in line_of(caught)
        assert words in line_of(caught)
        with pytest.raises(CheckpointError):
            checkpoint.gather_rows(name, range(checkpoint.specs[name].shape[0]))
        with pytest.raises(CheckpointError):
            checkpoint.read_rows(name, 0, checkpoint.specs[name].shape[0])


def test_only_the_rows_that_are_read_are_judged(tmp_path: Path) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    table(5, 5, row=100)(directory)
    with Checkpoint.open(directory) as checkpoint:
        assert checkpoint.gather_rows(TABLE, [99, 101]).shape == (2, 2)
        with pytest.raises(CheckpointError, match=re.escape("found [5, 5] (1 of 1 rows)")):
            checkpoint.gather_rows(TABLE, [100])


def test_rows_of_zeros_are_no_proof(tmp_path: Path) -> None:
    """Tokens that training never saw have such rows; only a whole tensor of zeros is refused."""
    directory = copy(MINI, tmp_path / "ckpt")
    rows = load(MINI / EMBED)["embed.weight"].data
    data = bytes(100 * 256) + rows[100 * 256 :]
    replace(directory, "embed.weight", "BF16", [320, 128], data)
    with Checkpoint.open(directory) as checkpoint:
        assert not checkpoint.gather_rows("embed.weight", [3, 99]).any()
    with Checkpoint.open(directory) as checkpoint:
        assert not checkpoint.read_rows("embed.weight", 0, 100).any()
    head = load(MINI / "model-00007-of-00008.safetensors")["head.weight"]
    zeros("head.weight")(directory)
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(CheckpointError, match=f"all {len(head.data)} bytes are zero"):
        checkpoint.read_rows("head.weight", 17, 18)


def test_a_file_that_shrinks_while_open(tmp_path: Path) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    with Checkpoint.open(directory) as checkpoint:
        (directory / EMBED).write_bytes((MINI / EMBED).read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=r"embed\.weight: the file ends early"):
            checkpoint.read("embed.weight")


def test_a_file_that_vanishes_before_it_is_read(tmp_path: Path) -> None:
    directory = copy(MINI, tmp_path / "ckpt")
    with Checkpoint.open(directory) as checkpoint:
        (directory / EMBED).unlink()
        with pytest.raises(CheckpointError, match=f"{EMBED}: No such file"):
            checkpoint.read("embed.weight")


def test_messages_stay_short(tmp_path: Path) -> None:
    """Thousands of wrong names make a count and an example, not a page."""
    directory = copy(MINI, tmp_path / "ckpt")
    rename(directory, lambda n: f"model.{n}")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert len(line_of(caught)) < 1000 + len(str(directory))
    assert json.dumps(line_of(caught)).isascii()


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 8000), byte=st.integers(0, 255))
@example(place=4823, byte=127)  # a dtype with a control character that JSON takes as it is
def test_any_damage_to_a_header_is_seen_or_harmless(place: int, byte: int) -> None:
    """One byte of header changed: another name or dtype of the same size at most, never a crash."""
    content = bytearray((MINI / SHARD).read_bytes())
    content[place] = byte
    with TemporaryDirectory() as directory:
        path = Path(directory) / SHARD
        path.write_bytes(content)
        try:
            found = read_header(path)
        except CheckpointError as e:
            line = str(e)
        else:
            line = ""
    if line:
        assert line.startswith(f"{SHARD}: ")
        assert line.isprintable()
        return
    assert found.size == SIZE
    ends = sorted((e.start, e.stop) for e in found.tensors.values())
    assert [first for first, _ in ends] == [found.length, *(last for _, last in ends[:-1])]
    assert ends[-1][1] == SIZE
