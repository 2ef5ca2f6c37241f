"""NaN and infinity in a dump: the first key is named with its weights, or all are recorded."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import v4tool
from tests import shard_files
from tests.cli import Cli, one_line
from tests.conftest import GOLDEN_MINI
from tests.shard_files import Stored
from v4tool.checkpoint.shards import Checkpoint
from v4tool.errors import NotFiniteError
from v4tool.model.stream import Sequence, greedy
from v4tool.names import recording_keys
from v4tool.not_finite import all_finite, describe, weights_of
from v4tool.record.writer import BUFFER_BYTES, RecordingWriter

CKPT = GOLDEN_MINI / "ckpt"
IDS = "35,11,74,5,6"
NAN_BF16, NAN_F32, MINUS_INF_F32 = b"\xc0\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff"


@pytest.fixture
def with_bytes(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """A copy of the golden checkpoint in which one tensor begins with other bytes."""

    def changed(wanted: str, start: bytes) -> Path:
        directory = shard_files.copy(CKPT, tmp_path / "ckpt")

        def change(name: str, t: Stored) -> dict[str, Stored]:
            data = start + t.data[len(start) :] if name == wanted else t.data
            return {name: Stored(t.dtype, t.shape, data)}

        shard_files.edit(directory, change)
        return directory

    return changed


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint with the bytes of every BF16 and F32 value exchanged."""
    directory = shard_files.copy(CKPT, tmp_path / "ckpt")

    def change(name: str, t: Stored) -> dict[str, Stored]:
        word = {"BF16": "u2", "F32": "u4"}.get(t.dtype, "u1")
        return {name: Stored(t.dtype, t.shape, np.frombuffer(t.data, word).byteswap().tobytes())}

    shard_files.edit(directory, change)
    return directory


FOUND = [
    # tensor, its first bytes, what the line says of the first key
    (
        "layers.1.attn.wo_a.weight",
        b"\x7f",
        "layers.1.attn.wo_b.in: 5 NaN of 1280 values, the first at [0, 0, 0], computed with "
        "layers.1.attn.wo_a.weight (1 of 65536 are NaN or infinite), layers.1.attn.wo_a.scale;",
    ),
    (
        "layers.2.hc_attn_base",
        NAN_F32,
        "layers.2.hc_attn.pre: 5 NaN of 20 values, the first at [0, 0, 0], computed with "
        "layers.2.hc_attn_fn, layers.2.hc_attn_base (1 of 24 are NaN or infinite), "
        "layers.2.hc_attn_scale;",
    ),
    (
        "layers.2.attn.attn_sink",
        NAN_F32,
        "layers.2.attn.sparse_attn.out: ",
    ),
    (
        "layers.1.attn.compressor.ape",
        NAN_F32 * 256,
        "layers.1.attn.compressor.norm.out: 128 NaN of 128 values, the first at [0, 0, 0], "
        "computed with layers.1.attn.compressor.ape (256 of 1024 are NaN or infinite), "
        "layers.1.attn.compressor.norm.weight;",
    ),
    (
        "layers.0.ffn.gate.weight",
        NAN_BF16,
        "layers.0.ffn.gate.out.0: ",
    ),
    (
        "norm.weight",
        NAN_BF16,
        "norm.out: 5 NaN of 640 values, the first at [0, 0, 0], computed with hc_head_fn, "
        "hc_head_base, hc_head_scale, norm.weight (1 of 128 are NaN or infinite);",
    ),
    (
        "head.weight",
        NAN_BF16,
        "head.out: 1 NaN of 320 values, the first at [0, 0], computed with head.weight (1 of ",
    ),
    (
        "mtp.0.e_proj.weight",
        b"\xff",
        "mtp.0.prefill.e_proj.out: 5 NaN of 640 values, the first at [0, 0, 0], computed with "
        "mtp.0.e_proj.weight (1 of 16384 are NaN or infinite), mtp.0.e_proj.scale;",
    ),
]


@pytest.mark.parametrize(("name", "start", "words"), FOUND, ids=[name for name, *_ in FOUND])
def test_the_first_key_and_its_weights(
    cli: Cli,
    with_bytes: Callable[[str, bytes], Path],
    tmp_path: Path,
    name: str,
    start: bytes,
    words: str,
) -> None:
    ckpt, out = with_bytes(name, start), tmp_path / "out"
    line = one_line(
        cli("dump", "--ckpt", ckpt, "--input-ids", IDS, "--decode", 2, "--out", out, "--quiet")
    )
    assert line.startswith(f"v4tool: case custom: {words}")
    assert name in line
    assert line.endswith("; nothing is recorded (--keep-going records on)")
    assert list(out.iterdir()) == []


def test_finite_weights_are_not_reported(
    cli: Cli, with_bytes: Callable[[str, bytes], Path], tmp_path: Path
) -> None:
    """An overflow: the weights of the key are said to be finite."""
    ckpt = with_bytes("layers.0.attn_norm.weight", b"\x7f\x7f" * 128)  # the largest BF16
    line = one_line(cli("dump", "--ckpt", ckpt, "--input-ids", IDS, "--out", tmp_path, "--quiet"))
    assert line.startswith("v4tool: case custom: layers.0.attn_norm.out: ")
    assert "infinite of 640 values" in line
    assert "computed with layers.0.attn_norm.weight (all finite);" in line


def test_byte_swapped_shards(cli: Cli, swapped: Path, tmp_path: Path) -> None:
    """Greedy decoding does not get as far as to choose among NaN."""
    out = tmp_path / "out.safetensors"
    dump = ("dump", "--ckpt", swapped, "--input-ids", IDS, "--out", out, "--quiet")
    line = one_line(cli(*dump, "--decode", 3))
    assert line.startswith("v4tool: case custom: embed.out: 2 NaN of 640 values")
    assert "embed.weight (109 of 40960 are NaN or infinite)" in line
    assert not out.exists()
    # without the embedding in the recording, too
    assert "embed.out: 2 NaN" in one_line(cli(*dump, "--only", "norm.out"))


def test_the_api_raises_the_same_line(swapped: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match=r"embed\.out: 1 NaN of 384 values") as caught:
        v4tool.dump(swapped, input_ids=[35, 11, 74], out=tmp_path / "a.safetensors")
    assert isinstance(caught.value, v4tool.V4ToolError)
    [result] = v4tool.dump(
        swapped, input_ids=[35, 11, 74], out=tmp_path / "a.safetensors", keep_going=True
    )
    assert result.not_finite > 100
    assert (result.first_not_finite or "").startswith("embed.out: 1 NaN of 384 values")


@pytest.mark.parametrize("backend", ["auto", "numpy", "readable"])
def test_keep_going_records_on(cli: Cli, swapped: Path, tmp_path: Path, backend: str) -> None:
    out = tmp_path / "out.safetensors"
    ran = cli(
        "dump", "--ckpt", swapped, "--input-ids", IDS, "--decode", 3, "--out", out, "--json",
        "--keep-going", "--backend", backend,
    )  # fmt: skip
    assert ran.status == 0
    [result] = json.loads(ran.out)
    tensors = load_file(out)
    wrong = {key for key, value in tensors.items() if not value.float().isfinite().all()}
    assert result["not_finite"] == len(wrong) > 0
    assert result["first_not_finite"].startswith("embed.out: 2 NaN of 640 values")
    note = f"note: case custom: NaN or infinity in {len(wrong)} keys, first embed.out: 2 NaN"
    assert note in ran.err
    # all logits are NaN: id 0 is chosen
    assert tensors["head.out"].isnan().all()
    assert result["decode_ids"] == [0, 0, 0]


NAN_AT_READING = [
    # tensor, its first bytes, the line, the first key that has NaN
    (
        "layers.1.attn.wq_b.scale",
        b"\xff",
        "v4tool: layers.1.attn.wq_b.scale: 1 of 4 scales are 0xFF (NaN)",
        "layers.1.attn.wq_b.out: ",
    ),
    (
        "layers.3.ffn.gate.bias",
        NAN_F32,
        "v4tool: layers.3.ffn.gate.bias: 1 of 8 biases are NaN",
        None,  # a bias only selects
    ),
]


@pytest.mark.parametrize(
    ("name", "start", "line", "first"), NAN_AT_READING, ids=[name for name, *_ in NAN_AT_READING]
)
def test_what_is_refused_at_reading_is_kept_going_with(
    cli: Cli,
    with_bytes: Callable[[str, bytes], Path],
    tmp_path: Path,
    name: str,
    start: bytes,
    line: str,
    first: str | None,
) -> None:
    out = tmp_path / "out.safetensors"
    dump = ("dump", "--ckpt", with_bytes(name, start), "--input-ids", IDS, "--out", out, "--quiet")
    assert one_line(cli(*dump)) == line
    [result] = json.loads(cli(*dump, "--keep-going", "--json").out)
    if first is None:
        assert (result["not_finite"], result["first_not_finite"]) == (0, None)
    else:
        assert result["first_not_finite"].startswith(first)


def test_f32_scales_that_are_nan(
    with_bytes: Callable[[str, bytes], Path], mini: Checkpoint
) -> None:
    """They are read as the E8M0 code of NaN."""
    directory, name = with_bytes("none", b""), "layers.1.attn.wq_b.scale"
    codes = mini.read(name)
    scales = (codes.numpy().astype(np.uint32) << 23).view(np.float32)
    scales[1, 0] = math.nan
    shard_files.replace(directory, name, "F32", list(codes.shape), scales.tobytes())
    with Checkpoint.open(directory, allow_nan=True) as checkpoint:
        read = checkpoint.read(name)
    codes[1, 0] = 255
    assert torch.equal(read, codes)


def test_infinity_by_design_is_not_reported(
    cli: Cli, with_bytes: Callable[[str, bytes], Path], tmp_path: Path
) -> None:
    """A sink of minus infinity is none; masked scores of 129 tokens, of blocks not complete."""
    ckpt = with_bytes("layers.2.attn.attn_sink", MINUS_INF_F32)
    ids = ",".join(str(7 * i % 320) for i in range(129))
    ran = cli("dump", "--ckpt", ckpt, "--input-ids", ids, "--out", tmp_path / "out", "--json")
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)[0]["not_finite"] == 0


BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LARGEST = torch.finfo(F32).max
VALUES = [
    # dtype, values, finite in FP32
    (BF16, [1.0, -2.0], True),
    (BF16, [], True),
    (BF16, [3e38, 3e38, 3e38], True),  # whose sum is not
    (BF16, [math.inf, -math.inf], False),
    (BF16, [0.0, math.nan], False),
    (F32, [LARGEST, LARGEST], True),
    (F32, [1.0, -math.inf], False),
    (F64, [LARGEST, -LARGEST], True),
    (F64, [LARGEST * (1 + 2.0**-26)], True),  # rounds to the largest
    (F64, [1.0, 3.5e38], False),
    (F64, [math.nan], False),
    (torch.int64, [-1], True),
]


@pytest.mark.parametrize(("dtype", "values", "finite"), VALUES)
def test_all_finite(dtype: torch.dtype, values: list[float], finite: bool) -> None:
    assert all_finite(torch.tensor(values, dtype=dtype)) is finite


def test_describe() -> None:
    x = torch.zeros(2, 3)
    x[1, 0], x[1, 2], x[0, 2] = math.nan, math.inf, -math.inf
    assert describe(x) == "1 NaN and 2 infinite of 6 values, the first at [0, 2]"
    assert describe(x[:1]) == "1 infinite of 3 values, the first at [0, 2]"


WEIGHTS = [
    # key, its weights
    ("embed.out", ["embed.weight"]),
    ("mtp.0.decode.embed.out", ["embed.weight"]),
    ("decode.1.layers.3.attn.wq_a.out", ["layers.3.attn.wq_a.weight", "layers.3.attn.wq_a.scale"]),
    ("layers.1.attn.kv_norm.out", ["layers.1.attn.kv_norm.weight"]),
    ("layers.1.attn.indexer.weights_proj.out", ["layers.1.attn.indexer.weights_proj.weight"]),
    ("layers.1.attn.compressor.wgate.out", ["layers.1.attn.compressor.wgate.weight"]),
    ("layers.0.ffn.gate.out.1", ["layers.0.ffn.gate.weight", "layers.0.ffn.gate.tid2eid"]),
    ("layers.3.ffn.gate.out.1", ["layers.3.ffn.gate.weight", "layers.3.ffn.gate.bias"]),
    (
        "layers.2.ffn.experts.7.w2.out",
        ["layers.2.ffn.experts.7.w2.weight", "layers.2.ffn.experts.7.w2.scale"],
    ),
    ("mtp.0.prefill.head.out", ["head.weight"]),
    (
        "mtp.0.prefill.norm.out",
        ["mtp.0.hc_head_fn", "mtp.0.hc_head_base", "mtp.0.hc_head_scale", "mtp.0.norm.weight"],
    ),
    ("layers.2.out", []),
    ("mtp.0.decode.out", []),
    ("layers.2.ffn.experts.7.out", []),
    ("layers.2.attn.rope.rot.0.out", []),
    ("layers.2.attn.sparse_attn.in.kv", []),
    ("input_ids", []),
]


@pytest.mark.parametrize(("key", "weights"), WEIGHTS)
def test_weights_of(mini: Checkpoint, key: str, weights: list[str]) -> None:
    assert weights_of(key, mini.specs) == weights


def test_every_weight_is_behind_some_key(mini: Checkpoint) -> None:
    keys = recording_keys(mini.config, 129, 1)
    experts = range(mini.config.n_routed_experts)
    every = {key.replace("<E>", str(e)) for key in keys for e in experts}
    assert {name for key in every for name in weights_of(key, mini.specs)} == mini.specs.keys()


LOGITS = [
    ([1.0, 3.0, 3.0], 1),
    ([math.nan, 3.0, 4.0], 2),
    ([5.0, math.nan, math.inf], 2),
    ([-math.inf, math.nan, -math.inf], 0),
    ([math.nan, math.nan, math.nan], 0),
]


@pytest.mark.parametrize(("logits", "chosen"), LOGITS)
def test_greedy(logits: list[float], chosen: int) -> None:
    sequence = Sequence([1], lambda key, value: None, decode=1)
    greedy([sequence], torch.tensor([logits], dtype=F64), 0)
    assert sequence.decode_ids == [chosen]


def test_the_writer_inspects_in_order(tmp_path: Path) -> None:
    """Only what shares a buffer with NaN, what spans buffers and what waits for its pair; in the
    order of `put`. Indices, whose bits may be those of NaN, are not taken for floats.
    """
    seen: list[tuple[str, Tensor]] = []

    def inspect(name: str, value: Tensor) -> None:
        seen.append((name, value.clone()))

    nan = torch.tensor([[1.0, math.nan]])
    large = torch.ones(BUFFER_BYTES // 4)
    with RecordingWriter(tmp_path / "a", 20, {}, inspect=inspect) as writer:
        writer.put("a", torch.ones(4))
        writer.put("indices", torch.full((4,), -1, dtype=torch.int32))
        writer.put("b", torch.ones(2))
        writer.inspect_new()
        assert seen == []
        writer.put("c", torch.ones(2))
        writer.put("nan", nan)
        writer.put("odd", torch.ones(3))
        writer.put("large", large)
        writer.put("d", torch.ones(2))
        writer.put("nan again", nan)
        writer.close()
    assert [name for name, _ in seen] == ["c", "nan", "odd", "large", "d", "nan again", "odd"]
    assert seen[1][1].isnan().tolist() == [[False, True]]
    assert torch.equal(seen[3][1], large)
