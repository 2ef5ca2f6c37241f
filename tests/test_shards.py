"""Reading a checkpoint: compared with another reader, by rows, from threads, beyond 4 GiB."""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli import Cli
from tests.conftest import GOLDEN, GOLDEN_MINI, needs_golden
from tests.shard_files import (
    INDEX,
    Stored,
    copy,
    edit,
    edit_config,
    header_of,
    load,
    rename,
    replace,
    save,
    write,
)
from v4tool.check.port import structure
from v4tool.checkpoint import shards
from v4tool.checkpoint.inspection import inspect
from v4tool.checkpoint.layout import layout
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import ModelConfig
from v4tool.errors import CheckpointError

MINI = GOLDEN_MINI / "ckpt"
TABLE = "layers.0.ffn.gate.tid2eid"
SCALE = "layers.2.attn.wq_b.scale"
WEIGHT = "layers.2.attn.wq_b.weight"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A copy of the small golden checkpoint."""
    return copy(MINI, tmp_path / "ckpt")


def raw(t: Tensor) -> Tensor:
    """A tensor's bytes: the comparison must see -0 and NaN."""
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "directory",
    [MINI, pytest.param(GOLDEN / "ckpt", marks=needs_golden)],
    ids=["mini", "golden"],
)
def test_every_tensor_equals_safetensors_own_reader(directory: Path) -> None:
    with Checkpoint.open(directory) as checkpoint:
        files = json.loads((directory / INDEX).read_text())["weight_map"]
        assert checkpoint.specs.keys() == files.keys()
        for name, file in files.items():
            with safe_open(directory / file, "pt") as other:
                expected = other.get_tensor(name)
            found = checkpoint.read(name)
            assert found.shape == expected.shape, name
            assert torch.equal(raw(found), raw(expected)), name
        assert checkpoint.bytes_read == sum(map(checkpoint.nbytes, files))
        assert checkpoint.notes == []


def test_dtypes(mini: Checkpoint) -> None:
    kinds = {
        "F8_E4M3": torch.uint8,
        "F8_E8M0": torch.uint8,
        "I8": torch.uint8,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "I64": torch.int64,
    }
    seen = {spec.dtype: name for name, spec in mini.specs.items()}
    assert {dtype: mini.read(name).dtype for dtype, name in seen.items()} == kinds


@pytest.mark.parametrize("name", ["embed.weight", TABLE, WEIGHT, SCALE, "layers.0.hc_attn_fn"])
def test_rows(mini: Checkpoint, name: str) -> None:
    whole, before = mini.read(name), mini.bytes_read
    last = whole.shape[0]
    for start, stop in [(0, 1), (1, last), (2, 2), (0, last), (last, last)]:
        assert torch.equal(mini.read_rows(name, start, stop), whole[start:stop])
    row = whole[0].numel() * whole.element_size()
    assert mini.bytes_read - before == (1 + last - 1 + 0 + last + 0) * row


def test_gathered_rows(mini: Checkpoint) -> None:
    whole = mini.read("embed.weight")
    ids = torch.tensor([[5, 319, 0], [5, 6, 5]])
    before = mini.bytes_read
    assert torch.equal(mini.gather_rows("embed.weight", ids), whole[ids])
    assert mini.bytes_read - before == 4 * 256, "each row is read once"
    assert torch.equal(mini.gather_rows("embed.weight", [7, 3]), whole[[7, 3]])
    assert mini.gather_rows("embed.weight", []).shape == (0, 128)


def test_what_is_not_there(mini: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"there is no tensor embed\.bias"):
        mini.read("embed.bias")
    for start, stop in [(-1, 2), (3, 2), (0, 321)]:
        with pytest.raises(CheckpointError, match=rf"rows within 0 \.\.\. 320, found {start}:"):
            mini.read_rows("embed.weight", start, stop)
    for ids in ([320], [-1]):
        with pytest.raises(CheckpointError, match=r"embed\.weight: expected rows 0 \.\.\. 319"):
            mini.gather_rows("embed.weight", ids)


def test_reading_into_a_buffer(mini: Checkpoint) -> None:
    buffer = torch.full((200_000,), 7, dtype=torch.uint8)
    for name in (WEIGHT, "layers.0.hc_attn_fn", TABLE):
        found = mini.read(name, buffer)
        assert found.data_ptr() == buffer.data_ptr()
        assert torch.equal(found, mini.read(name))
    assert torch.equal(mini.read_rows(WEIGHT, 3, 9, buffer), mini.read(WEIGHT)[3:9])


def test_a_read_tensor_is_an_own_copy(mini: Checkpoint) -> None:
    first = mini.read("norm.weight")
    first.zero_()
    assert mini.read("norm.weight").any()


def test_reads_in_many_pieces(mini: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mini.read("embed.weight")
    monkeypatch.setattr(shards, "_MAX_READ", 1001)
    assert torch.equal(mini.read("embed.weight"), whole)


def test_hints_change_nothing(mini: Checkpoint) -> None:
    before = mini.bytes_read
    mini.advise([WEIGHT, SCALE, "embed.weight"])
    mini.release(WEIGHT)
    assert mini.bytes_read == before
    with Checkpoint.open(MINI, drop_pages=True) as other:
        assert torch.equal(other.read(WEIGHT), mini.read(WEIGHT))


def test_small_checkpoints_stay_in_the_cache() -> None:
    with Checkpoint.open(MINI) as checkpoint:
        assert checkpoint.drop_pages is False


def test_threads_read_at_once() -> None:
    with Checkpoint.open(MINI) as checkpoint:
        names = list(checkpoint.specs)
        alone = {name: raw(checkpoint.read(name)) for name in names}
        before = checkpoint.bytes_read
        with ThreadPoolExecutor(8) as pool:
            together = pool.map(lambda n: (n, raw(checkpoint.read(n))), names * 4)
            wrong = [n for n, found in together if not torch.equal(found, alone[n])]
        assert wrong == []
        assert checkpoint.bytes_read == 5 * before


def test_files_are_closed_and_opened_again() -> None:
    checkpoint = Checkpoint.open(MINI)
    first = checkpoint.read("norm.weight")
    checkpoint.close()
    assert torch.equal(checkpoint.read("norm.weight"), first)
    checkpoint.close()
    checkpoint.close()


# ---- what is unusual but right


def test_without_an_index(ckpt: Path) -> None:
    (ckpt / INDEX).unlink()
    with Checkpoint.open(ckpt) as checkpoint, Checkpoint.open(MINI) as original:
        assert checkpoint.specs == original.specs
        assert checkpoint.fingerprint == original.fingerprint
        assert checkpoint.notes == [
            f"there is no {INDEX}: the headers of 8 shards were read instead"
        ]


def test_one_single_file(ckpt: Path, mini: Checkpoint) -> None:
    tensors = {}
    for path in sorted(ckpt.glob("*.safetensors")):
        tensors |= load(path)
        path.unlink()
    (ckpt / INDEX).unlink()
    save(ckpt / "model.safetensors", tensors)
    with Checkpoint.open(ckpt) as checkpoint:
        assert torch.equal(checkpoint.read(WEIGHT), mini.read(WEIGHT))
        assert len(checkpoint.notes) == 1


def test_shards_may_be_links(ckpt: Path, tmp_path: Path) -> None:
    """As in a download cache, whose snapshots link to files of other names elsewhere."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(ckpt.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(Path("..") / "blobs" / str(i))
    with Checkpoint.open(ckpt) as checkpoint:
        assert len(checkpoint.specs) == 508


def test_padded_headers(ckpt: Path) -> None:
    path = ckpt / "model-00001-of-00008.safetensors"
    tensors = load(path)
    header = json.dumps(header_of(tensors)).encode() + b" " * 999
    write(path, header, b"".join(t.data for t in tensors.values()))
    with Checkpoint.open(ckpt) as checkpoint:
        found = checkpoint.read("embed.weight")
        assert bytes(raw(found).numpy()) == tensors["embed.weight"].data


def test_other_files_are_noted_or_ignored(ckpt: Path) -> None:
    save(ckpt / "extra.safetensors", {"a": Stored("F32", [1], b"\0" * 4)})
    (ckpt / "._model-00001-of-00008.safetensors").write_bytes(b"what a desktop leaves behind")
    (ckpt / "tokenizer.json").write_text("{}")
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.notes == ["1 safetensors files not in the index: extra.safetensors"]


def test_a_total_size_that_is_not_the_sum_is_noted(ckpt: Path) -> None:
    index = json.loads((ckpt / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (ckpt / INDEX).write_text(json.dumps(index))
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.notes == [
            "the index says total_size 4433017, the tensors have 4433016 bytes"
        ]


def in_f32(name: str, t: Stored) -> dict[str, Stored]:
    """Scales as F32 numbers instead of E8M0 codes."""
    if t.dtype != "F8_E8M0":
        return {name: t}
    values = torch.tensor([2.0 ** (code - 127) for code in t.data], dtype=torch.float32)
    return {name: Stored("F32", t.shape, values.numpy().tobytes())}


def test_scales_in_f32(ckpt: Path, mini: Checkpoint) -> None:
    edit(ckpt, in_f32)
    scales = [n for n, s in mini.specs.items() if s.dtype == "F8_E8M0"]
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.notes == [
            f"{len(scales)} scales are stored in F32 and read as powers of two"
        ]
        wrong = [n for n in scales if not torch.equal(checkpoint.read(n), mini.read(n))]
        assert wrong == []
        assert checkpoint.read(SCALE).dtype == torch.uint8
        rows = checkpoint.read_rows("layers.0.ffn.experts.0.w1.scale", 5, 9)
        assert torch.equal(rows, mini.read("layers.0.ffn.experts.0.w1.scale")[5:9])


def test_every_scale_code(ckpt: Path) -> None:
    """Codes 0 ... 254 pass in both forms; 0 is 2^-127, a subnormal number in F32."""
    name = "layers.0.ffn.experts.0.w1.scale"
    codes = bytes(range(255)) + bytes(257)
    replace(ckpt, name, "F8_E8M0", [128, 4], codes)
    with Checkpoint.open(ckpt) as checkpoint:
        assert bytes(checkpoint.read(name).numpy()) == codes
    edit(ckpt, in_f32)
    with Checkpoint.open(ckpt) as checkpoint:
        assert bytes(checkpoint.read(name).numpy()) == codes


U8_SCALES = "scales are stored as U8 and read as E8M0 codes"


def other_names(weights: str) -> Callable[[str, Stored], dict[str, Stored]]:
    """E8M0 scales as U8, FP4 weights as U8 (pairs of codes) or F4 (codes): the same bytes."""

    def change(name: str, t: Stored) -> dict[str, Stored]:
        if t.dtype == "F8_E8M0":
            return {name: t._replace(dtype="U8")}
        if t.dtype != "I8":
            return {name: t}
        shape = [t.shape[0], t.shape[1] * (2 if weights == "F4" else 1)]
        return {name: Stored(weights, shape, t.data)}

    return change


@pytest.mark.parametrize("weights", ["U8", "F4"])
def test_the_same_bytes_under_another_dtype(ckpt: Path, mini: Checkpoint, weights: str) -> None:
    edit(ckpt, other_names(weights))
    scales = sum(s.dtype == "F8_E8M0" for s in mini.specs.values())
    codes = sum(s.dtype == "I8" for s in mini.specs.values())
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.notes == [
            f"{scales} {U8_SCALES}",
            f"{codes} weights are stored as {weights} and read as FP4 codes, two in a byte",
        ]
        assert checkpoint.specs == mini.specs
        wrong = [n for n in mini.specs if not torch.equal(checkpoint.read(n), mini.read(n))]
        assert wrong == []
        for name in ("layers.0.ffn.experts.0.w1.weight", SCALE):
            assert torch.equal(checkpoint.read_rows(name, 1, 2), mini.read_rows(name, 1, 2))
            assert torch.equal(checkpoint.gather_rows(name, [1, 0]), mini.gather_rows(name, [1, 0]))
        assert checkpoint.fingerprint != mini.fingerprint


def test_fp4_as_safetensors_itself_writes_it(ckpt: Path, mini: Checkpoint) -> None:
    """torch's dtype of two codes a byte becomes F4 with the codes counted one by one."""
    fp4 = getattr(torch, "float4_e2m1fn_x2", None)
    if fp4 is None:
        pytest.skip("this torch has no FP4 dtype")
    name = "layers.0.ffn.experts.0.w1.weight"
    file = ckpt / json.loads((ckpt / INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].view(fp4)}, file)
    with Checkpoint.open(ckpt) as checkpoint:
        assert "1 weights are stored as F4" in checkpoint.notes[0]
        assert torch.equal(checkpoint.read(name), mini.read(name))


@pytest.mark.parametrize("weights", ["U8", "F4"])
def test_a_recording_has_the_same_bits(cli: Cli, ckpt: Path, tmp_path: Path, weights: str) -> None:
    edit(ckpt, other_names(weights))
    hashes = []
    for directory in (MINI, ckpt):
        out = tmp_path / f"{directory.parent.name}.safetensors"
        options = ("--input-ids", "1,2,3,4,5", "--decode", 1, "--out", out, "--json")
        ran = cli("dump", "--ckpt", directory, *options)
        assert ran.status == 0, ran.err
        hashes.append(json.loads(ran.out)[0]["payload_sha256"])
    assert hashes[0] == hashes[1]
    assert f"note: 196 {U8_SCALES}" in ran.err
    assert cli("verify", "--dump", out, "--ckpt", ckpt).status == 0


def test_hash_table_in_i32(ckpt: Path, mini: Checkpoint) -> None:
    table = mini.read(TABLE)
    replace(ckpt, TABLE, "I32", [320, 2], table.to(torch.int32).numpy().tobytes())
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.notes == ["1 tables of experts are stored in I32"]
        assert checkpoint.read(TABLE).dtype == torch.int32
        assert torch.equal(checkpoint.gather_rows(TABLE, [9, 3]).long(), table[[9, 3]])


def test_mtp_of_another_design_can_be_left_out(ckpt: Path, mini: Checkpoint) -> None:
    rename(ckpt, lambda n: None if n in ("mtp.0.enorm.weight", "mtp.0.hnorm.weight") else n)
    edit_config(ckpt, compress_ratios=[0, 4, 128, 4, 128, 0, 0, 0], num_nextn_predict_layers=3)
    with Checkpoint.open(ckpt, mtp=False) as checkpoint:
        assert checkpoint.specs.keys() == {n for n in mini.specs if not n.startswith("mtp.")}
        assert checkpoint.notes == ["85 tensors of mtp.* are left out"]
        with pytest.raises(CheckpointError, match=r"there is no tensor mtp\.0\.norm\.weight"):
            checkpoint.read("mtp.0.norm.weight")


def test_beyond_4_gib(tmp_path: Path) -> None:
    """Sparse files of more than 5 GB; the rows looked at lie past 2^32 bytes."""
    directory = tmp_path / "large"
    directory.mkdir()
    fields = json.loads((MINI / "config.json").read_text())
    fields["vocab_size"] = rows = 20_000_000
    (directory / "config.json").write_text(json.dumps(fields))
    specs = layout(ModelConfig.from_dict(fields))
    header, offset = {}, 0
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].nbytes):
        ends = [offset, offset := offset + spec.nbytes]
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": ends}
    text = json.dumps(header).encode()
    path = directory / "model.safetensors"
    write(path, text, b"")
    row, first = bytes(range(1, 255)) + b"\1\2", 8 + len(text)
    norm = header["norm.weight"]["data_offsets"][0]
    with path.open("rb+") as f:
        f.truncate(first + offset)
        for place in (first + 19_000_000 * 256, first + norm, first + offset - len(row)):
            f.seek(place)
            f.write(row)
    assert 19_000_000 * 256 > 2**32
    with Checkpoint.open(directory) as checkpoint:
        found = checkpoint.gather_rows("embed.weight", [19_000_000, rows - 1])
        assert bytes(raw(found[0]).numpy()) == row
        assert not raw(found[1]).any()
        assert (
            bytes(raw(checkpoint.read_rows("embed.weight", 19_000_000, 19_000_001)).numpy()) == row
        )
        assert bytes(raw(checkpoint.read("norm.weight")).numpy()) == row


NOTE = "not part of the layout, not read"


def last_in_shards(ckpt: Path, extra: dict[str, Stored], count: int = 1) -> None:
    """Put tensors behind the others of the first `count` shards."""
    for path in sorted(ckpt.glob("*.safetensors"))[:count]:
        save(path, load(path) | extra)


def list_all(ckpt: Path) -> None:
    """Let the index name every tensor that the shards hold."""
    edit(ckpt, lambda name, t: {name: t})


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "F32"])
@pytest.mark.parametrize("listed", [True, False])
def test_an_empty_tensor_is_a_note(ckpt: Path, mini: Checkpoint, dtype: str, listed: bool) -> None:
    """Quantisers leave markers of shape [0]; one may stand in every shard."""
    last_in_shards(ckpt, {"scaled_fp8": Stored(dtype, [0], b"")}, count=8)
    if listed:
        list_all(ckpt)
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.notes == [f"1 extra tensor: scaled_fp8: {NOTE}"]
        assert torch.equal(checkpoint.read(WEIGHT), mini.read(WEIGHT))
        with pytest.raises(CheckpointError, match="there is no tensor scaled_fp8"):
            checkpoint.read("scaled_fp8")


def test_unknown_tensors_that_the_index_lists_are_a_note(ckpt: Path, mini: Checkpoint) -> None:
    """Also one of zeros at a shard's end: only the layout's weights tell of a download."""
    extra = {f"layers.0.zero_point.{i}": Stored("I8", [9000], bytes(9000)) for i in range(5)}
    last_in_shards(ckpt, extra)
    list_all(ckpt)
    first = ", ".join(list(extra)[:4])
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.notes == [f"5 extra tensors: {first} and 1 more: {NOTE}"]
        assert checkpoint.specs == mini.specs
    rows = {row.name: row.status for row in inspect(ckpt)}
    assert {rows.pop(name) for name in extra} == {"extra"}
    assert set(rows.values()) == {"ok"}
    assert structure(ckpt) == "508 tensors, all of the layout and 5 that it does not know"


def test_unknown_tensors_that_the_index_does_not_list_are_refused(ckpt: Path) -> None:
    last_in_shards(ckpt, {"a": Stored("F32", [1], b"abcd")})
    with pytest.raises(CheckpointError, match="1 tensor in a shard but not in the index: a"):
        Checkpoint.open(ckpt)


# ---- fingerprint


def test_fingerprint_is_what_it_says() -> None:
    weight_map = json.loads((MINI / INDEX).read_text())["weight_map"]
    text = "".join(f"{name} {file}\n" for name, file in sorted(weight_map.items()))
    for path in sorted(MINI.glob("*.safetensors")):
        content = path.read_bytes()
        header = hashlib.sha256(content[: 8 + int.from_bytes(content[:8], "little")]).hexdigest()
        text += f"{path.name} {len(content)} {header}\n"
    with Checkpoint.open(MINI) as checkpoint:
        assert checkpoint.fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_fingerprint_depends_on_headers_not_payload(ckpt: Path, mini: Checkpoint) -> None:
    path = ckpt / "model-00001-of-00008.safetensors"
    tensors = load(path)
    embed = tensors["embed.weight"]
    with path.open("rb+") as f:
        f.seek(-1, os.SEEK_END)
        f.write(bytes([embed.data[-1] ^ 1]))
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.fingerprint == mini.fingerprint
    write(path, json.dumps(header_of(tensors)).encode() + b" ", embed.data)
    with Checkpoint.open(ckpt) as checkpoint:
        assert checkpoint.fingerprint != mini.fingerprint


# ---- inspection


def test_inspection_of_a_whole_checkpoint(mini: Checkpoint) -> None:
    rows = inspect(MINI)
    assert [row.name for row in rows] == list(layout(mini.config))
    assert {row.status for row in rows} == {"ok"}


def test_inspection_names_what_is_wrong(ckpt: Path) -> None:
    names = {"norm.weight": "final.weight", "head.weight": None}
    rename(ckpt, lambda n: names.get(n, n))
    replace(ckpt, "hc_head_scale", "F32", [2], bytes(8))
    (ckpt / "model-00001-of-00008.safetensors").write_bytes(b"")
    rows = {row.name: row for row in inspect(ckpt)}
    wrong = {name: row.status for name, row in rows.items() if row.status != "ok"}
    assert wrong == {
        "embed.weight": "missing",
        "norm.weight": "missing",
        "head.weight": "missing",
        "hc_head_scale": "different",
        "final.weight": "unexpected",
    }
    assert str(rows["hc_head_scale"].found) == "F32 [2]"
    assert rows["norm.weight"].found is None
    assert rows["final.weight"].spec is None


def test_inspection_against_another_configuration(ckpt: Path) -> None:
    fields = json.loads((MINI / "config.json").read_text()) | {"n_routed_experts": 7}
    rows = inspect(MINI, ModelConfig.from_dict(fields))
    odd = {row.name for row in rows if row.status == "unexpected"}
    assert len(odd) == 6 * 6
    assert all(".ffn.experts.7." in name for name in odd)
    assert [r.name for r in rows if r.status == "different"] == [
        *(f"layers.{i}.ffn.gate.{'weight'}" for i in range(2)),
        *(f"layers.{i}.ffn.gate.{part}" for i in range(2, 5) for part in ("weight", "bias")),
        "mtp.0.ffn.gate.weight",
        "mtp.0.ffn.gate.bias",
    ]
