"""Random checkpoints: figures, reproducible bytes, values that reach all paths, atomic writing."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import v4tool
from tests.conftest import GOLDEN_DSPARK, GOLDEN_MINI
from tests.shard_files import INDEX, load
from v4tool.checkpoint import synth as making
from v4tool.checkpoint.layout import Totals, layout, totals
from v4tool.checkpoint.random_values import tensor_bytes
from v4tool.checkpoint.shards import Checkpoint
from v4tool.checkpoint.synth import plan, reduce, synth
from v4tool.config import ModelConfig, Numerics
from v4tool.errors import ConfigError, InputError, OutputError
from v4tool.model.stream import Sequence, run
from v4tool.names import generic, recording_keys
from v4tool.quant.formats import E2M1, E4M3, E8M0, unpack_fp4

DATA = Path(v4tool.__file__).parent / "data"
FLASH = ModelConfig.from_file(DATA / "flash_config.json")
NANO = ModelConfig.from_file(DATA / "nano_config.json")
MINI = ModelConfig.from_file(GOLDEN_MINI / "ckpt")


class Made(NamedTuple):
    directory: Path
    report: making.SynthReport
    progress: list[int]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The whole of `nano`, 250 MB; removed afterwards."""
    directory, progress = tmp_path_factory.mktemp("synth") / "nano", []
    yield Made(directory, synth(directory, NANO, seed=0, progress=progress.append), progress)
    shutil.rmtree(directory)


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


def dequantised(checkpoint: Checkpoint, name: str) -> Tensor:
    """A quantised weight in F32, written for this test: elements times their block's scale."""
    codes, scale = checkpoint.read(f"{name}.weight"), E8M0[checkpoint.read(f"{name}.scale").int()]
    if checkpoint.specs[f"{name}.weight"].dtype == "I8":
        return E2M1[unpack_fp4(codes).int()] * scale.repeat_interleave(32, 1)
    n, k = codes.shape
    return E4M3[codes.int()] * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


# ---- what would be written


def test_plan_of_the_release() -> None:
    assert plan(FLASH) == Totals(69187, 1575, 159609485896, 290942289362)


def test_plan_of_a_part() -> None:
    """Real widths, 32 experts, one layer of each kind."""
    assert plan(FLASH, experts=32, layers=[0, 2, 3]) == totals(
        layout(reduce(FLASH, experts=32, layers=[0, 2, 3]))
    )
    dropped = 3 * 2 * 224  # weight and scale of w1, w2, w3 of 224 experts, in every block
    assert plan(FLASH, experts=32).tensors == 69187 - 44 * dropped


@pytest.mark.parametrize(
    ("layers", "ratios", "n_hash"),
    [
        (None, FLASH.compress_ratios, 3),
        (1, (0, 0), 1),
        (4, (0, 0, 4, 128, 0), 3),
        ([2], (4, 0), 1),
        ([0, 2, 3, 42], (0, 4, 128, 4, 0), 2),
        ([3, 4], (128, 4, 0), 0),
    ],
)
def test_kept_layers_keep_their_kind(
    layers: list[int] | int | None, ratios: tuple[int, ...], n_hash: int
) -> None:
    config = reduce(FLASH, layers=layers)
    assert config.compress_ratios == ratios
    assert config.n_layers == len(ratios) - 1
    assert config.n_hash_layers == n_hash
    assert config.mtp_supported
    changed = {"compress_ratios", "n_layers", "n_hash_layers"}
    assert config.model_dump(exclude=changed) == FLASH.model_dump(exclude=changed)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"experts": 5}, "experts: expected 6 (num_experts_per_tok) ... 256, found 5"),
        ({"experts": 257}, "experts: expected 6 (num_experts_per_tok) ... 256, found 257"),
        ({"layers": 0}, "layers: expected ascending numbers from 0 to 42, found 0"),
        ({"layers": 44}, "layers: expected"),
        ({"layers": []}, "layers: expected"),
        ({"layers": [3, 2]}, "layers: expected"),
        ({"layers": [2, 2]}, "layers: expected"),
        ({"layers": [-1, 2]}, "layers: expected"),
        ({"layers": [42, 43]}, "layers: expected"),
    ],
)
def test_invalid_reductions(wrong: dict[str, int | list[int]], words: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(FLASH, **wrong)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_mtp_of_another_design_cannot_be_made() -> None:
    fields = FLASH.to_release_dict()
    fields["compress_ratios"] += [0, 0]
    with pytest.raises(ConfigError, match="no checkpoint can be made: compress_ratios has 46"):
        plan(ModelConfig.from_dict(fields))


# ---- what is written


def test_nano_is_a_checkpoint(nano: Made) -> None:
    with Checkpoint.open(nano.directory) as checkpoint:
        assert checkpoint.config == NANO
        assert checkpoint.specs == layout(NANO)
        assert checkpoint.notes == []
        for name in checkpoint.specs:
            checkpoint.read(name)
    index = json.loads((nano.directory / INDEX).read_text())
    files = sorted(p.name for p in nano.directory.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00046.safetensors" for i in range(1, 47)]
    assert index["weight_map"]["layers.7.attn.wkv.scale"] == files[8]
    assert index["metadata"]["total_size"] == plan(NANO).total_size
    assert sum((nano.directory / f).stat().st_size for f in files) <= 256 * 2**20


def test_report_and_progress(nano: Made) -> None:
    report = nano.report
    assert (report.directory, report.config, report.seed) == (nano.directory, NANO, 0)
    assert (report.totals, report.shards) == (plan(NANO), 46)
    assert report.seconds > 0
    assert len(nano.progress) == report.totals.tensors
    assert sum(nano.progress) == report.totals.total_size


def test_tensors_are_aligned_and_experts_stay_together(nano: Made) -> None:
    path = nano.directory / "model-00005-of-00046.safetensors"
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    names = list(load(path))
    first = names.index("layers.3.ffn.experts.4.w1.weight")
    assert [n.removeprefix("layers.3.ffn.experts.4.") for n in names[first : first + 6]] == [
        "w1.weight",
        "w1.scale",
        "w3.weight",
        "w3.scale",
        "w2.weight",
        "w2.scale",
    ]
    with Checkpoint.open(nano.directory) as checkpoint:
        for name, spec in checkpoint.specs.items():
            width = {"I64": 8, "F32": 4, "BF16": 2}.get(spec.dtype, 1)
            assert checkpoint._found.entry(name).start % width == 0, name


def test_same_seed_same_bytes_in_another_process(tmp_path: Path) -> None:
    synth(tmp_path / "a", MINI, seed=7)
    code = (
        "import sys, torch; torch.set_num_threads(2)\n"
        "from v4tool.checkpoint.synth import synth\n"
        "from v4tool.config import ModelConfig\n"
        "synth(sys.argv[2], ModelConfig.from_file(sys.argv[1]), seed=7)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(GOLDEN_MINI / "ckpt"), str(tmp_path / "b")], check=True
    )
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_bytes_are_frozen(tmp_path: Path) -> None:
    """Another digest here means other references everywhere: raise SYNTH_VERSION with it."""
    synth(tmp_path / "mini", MINI, seed=0)
    digest = hashlib.sha256("".join(sorted(digests(tmp_path / "mini").values())).encode())
    assert (making.SYNTH_VERSION, digest.hexdigest()[:16]) == (1, "3836e7a7a13a8c57")


def test_seeds_differ_in_every_tensor(tmp_path: Path) -> None:
    synth(tmp_path / "a", MINI, seed=1)
    synth(tmp_path / "b", MINI, seed=2)
    with Checkpoint.open(tmp_path / "a") as a, Checkpoint.open(tmp_path / "b") as b:
        same = [n for n in a.specs if a.nbytes(n) > 4 and torch.equal(a.read(n), b.read(n))]
        assert same == []
        assert a.fingerprint != b.fingerprint


def test_bytes_do_not_depend_on_the_piece_size(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = layout(MINI)
    names = ["embed.weight", "layers.0.attn.wq_b.weight", "layers.0.ffn.experts.0.w1.weight"]
    whole = [b"".join(tensor_bytes(n, specs, MINI, 5)) for n in names]
    monkeypatch.setattr("v4tool.checkpoint.random_values.CHUNK", 1 << 10)
    pieces = [list(tensor_bytes(n, specs, MINI, 5)) for n in names]
    assert [len(ps) for ps in pieces] == [1, 64, 8]
    assert [b"".join(ps) for ps in pieces] == whole


# ---- values


def test_no_nan_codes_and_all_others(nano: Made) -> None:
    fp8, fp4 = np.zeros(256, int), np.zeros(256, int)
    with Checkpoint.open(nano.directory) as checkpoint:
        for name, spec in checkpoint.specs.items():
            if spec.dtype in ("F8_E4M3", "I8"):
                counts = fp8 if spec.dtype == "F8_E4M3" else fp4
                counts += np.bincount(checkpoint.read(name).numpy().reshape(-1), minlength=256)
    assert np.flatnonzero(fp8 == 0).tolist() == [0x7F, 0xFF]
    assert np.flatnonzero(fp4 == 0).tolist() == []


GAINS = [
    # tensors, root mean square of the output for an input of 1
    ("attn.wq_a", 1.0),
    ("attn.wq_b", 1.0),
    ("attn.wo_a", 1.0),
    ("attn.indexer.wq_b", 1.0),
    ("ffn.experts.3.w1", 3.5),
    ("ffn.experts.3.w2", 0.1),
    ("ffn.shared_experts.w3", 3.5),
]


@pytest.mark.parametrize(("name", "gain"), GAINS)
def test_gains(nano: Made, name: str, gain: float) -> None:
    """Over all layers; blocks differ by powers of two, so the mean square of few blocks varies."""
    with Checkpoint.open(nano.directory) as checkpoint:
        squares = []
        for layer in range(2, 43, 2):
            w = dequantised(checkpoint, f"layers.{layer}.{name}").double()
            squares.append(w.square().sum(1).mean())
    measured = float(torch.stack(squares).mean().sqrt())
    assert gain / 1.25 < measured < gain * 1.25


def test_scales_vary_within_a_tensor(nano: Made) -> None:
    with Checkpoint.open(nano.directory) as checkpoint:
        codes = checkpoint.read("layers.5.ffn.experts.0.w1.scale")
        assert len(codes.unique()) >= 5


def test_unquantised_values(nano: Made) -> None:
    """Means within five, deviations within ten per cent of what `values.py` states."""
    expected = [
        ("embed.weight", 0.0, 1.0),
        ("head.weight", 0.0, 2 / 16),
        ("layers.4.ffn.gate.weight", 0.0, 1.5 / 16),
        ("layers.4.attn.compressor.wgate.weight", 0.0, 1 / 16),
        ("layers.4.attn.compressor.ape", 0.0, 0.5),
        ("layers.4.attn_norm.weight", 1.0, 0.1),
        ("layers.4.hc_attn_fn", 0.0, 1 / 32),
    ]
    with Checkpoint.open(nano.directory) as checkpoint:
        for name, mean, deviation in expected:
            rows = min(4096, checkpoint.specs[name].shape[0])
            values = checkpoint.read_rows(name, 0, rows).double()
            assert values.isfinite().all(), name
            assert abs(values.mean() - mean) < 5 * deviation / values.numel() ** 0.5, name
            assert abs(values.std() / deviation - 1) < 0.1, name


def test_hc_bases_distinguish_the_streams(nano: Made) -> None:
    """The comb part of an hc base favours the diagonal; pre and post come first."""
    with Checkpoint.open(nano.directory) as checkpoint:
        bases = torch.stack([checkpoint.read(f"layers.{i}.hc_ffn_base") for i in range(43)])
    mean = bases.double().mean(0)
    assert (mean[:8].abs() < 0.5).all()
    assert ((mean[8:].view(4, 4) - 3 * torch.eye(4)).abs() < 0.5).all()


def test_hash_tables(nano: Made) -> None:
    with Checkpoint.open(nano.directory) as checkpoint:
        tables = [checkpoint.read(f"layers.{i}.ffn.gate.tid2eid") for i in range(3)]
    for table in tables:
        assert table.shape == (129280, 4)
        shares = torch.bincount(table.reshape(-1), minlength=10).double() / table.numel()
        assert ((shares - 0.1).abs() < 0.002).all()
        first, last = (torch.bincount(table[:, k], minlength=10) for k in (0, 3))
        assert ((first - last).abs() < 1000).all(), "no place prefers an expert"
    assert not torch.equal(tables[0], tables[1])


def test_as_many_experts_as_picks(tmp_path: Path) -> None:
    synth(tmp_path / "c", MINI, seed=3, experts=2)
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        table = checkpoint.read("layers.0.ffn.gate.tid2eid")
        assert checkpoint.config.n_routed_experts == 2
    assert table.sort(1).values.tolist() == [[0, 1]] * 320


def test_activations_through_the_model(nano: Made, tmp_path: Path) -> None:
    """Twelve layers and MTP: nothing vanishes, nothing grows, the SwiGLU limit is passed at
    times.
    """
    config = reduce(NANO, layers=12)
    synth(tmp_path / "c", NANO, seed=0, layers=12)
    seen: dict[str, Tensor] = {}
    ids = [30594, 303, 6573, 70979, 36005, 320]
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        run(
            checkpoint,
            config,
            Numerics(),
            [Sequence(ids, lambda k, v: seen.update({k: v.clone()}))],
        )
    shutil.rmtree(tmp_path / "c")
    floats = {k: v.double() for k, v in seen.items() if v.is_floating_point()}
    assert [k for k, v in floats.items() if not v.isfinite().all()] == []
    sizes = {k: float(v.square().mean().sqrt()) for k, v in floats.items()}
    outputs = [f"layers.{i}.{part}.out" for i in range(12) for part in ("attn", "ffn")]
    assert [k for k in outputs if not 0.02 < sizes[k] < 5] == []
    assert [i for i in range(12) if not 0.5 < sizes[f"layers.{i}.out"] < 8] == []
    assert 1 < sizes["head.out"] < 4
    before_the_clamp = [v for k, v in floats.items() if ".experts." in k and "w1.out" in k]
    share = (torch.cat([v.flatten() for v in before_the_clamp]) > 10).double().mean()
    assert 0.0005 < share < 0.05
    comb = floats["layers.5.hc_attn.comb"]
    assert 0.3 < comb.diagonal(dim1=-2, dim2=-1).mean() < 0.99


# ---- all or nothing


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine").write_text("precious")
    with pytest.raises(OutputError, match="here: expected a new directory, this one exists"):
        synth(tmp_path / "here", MINI, seed=0)
    assert [p.name for p in tmp_path.rglob("*")] == ["here", "mine"]


def test_parents_are_made(tmp_path: Path) -> None:
    synth(tmp_path / "a" / "b", MINI, seed=0, layers=1)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_seed_must_be_natural(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="seed: expected a number from 0 on, found -1"):
        synth(tmp_path / "c", MINI, seed=-1)


class Stop(Exception):
    """What a test interrupts a run with."""


def stop_after(count: int) -> Callable[[int], None]:
    left = iter(range(count))

    def progress(_: int) -> None:
        if next(left, None) is None:
            raise Stop

    return progress


@pytest.mark.parametrize("count", [0, 1, 100, 507])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, count: int) -> None:
    with pytest.raises(Stop):
        synth(tmp_path / "c", MINI, seed=0, progress=stop_after(count))
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from v4tool.checkpoint.synth import synth
from v4tool.config import ModelConfig
left = iter(range(300))
def progress(_):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
synth(sys.argv[2], ModelConfig.from_file(sys.argv[1]), seed=0, progress=progress)
"""


def test_leftovers_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    args = [sys.executable, "-c", KILLED, str(GOLDEN_MINI / "ckpt"), str(tmp_path / "c")]
    assert subprocess.run(args, check=False).returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == ["c.partial"]
    (tmp_path / "c.partial" / "model-00001-of-99999.safetensors").write_bytes(b"old")
    synth(tmp_path / "c", MINI, seed=0)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    synth(tmp_path / "d", MINI, seed=0)
    assert digests(tmp_path / "c") == digests(tmp_path / "d")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.partial").mkdir()
    fd = os.open(tmp_path / "c.partial", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(OutputError, match=r"c\.partial: is being written by another process"):
        synth(tmp_path / "c", MINI, seed=0)
    os.close(fd)
    synth(tmp_path / "c", MINI, seed=0)


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """No disk holds experts of this width (13 TB), and nothing is written to find out."""
    huge = ModelConfig.from_dict(MINI.to_release_dict() | {"moe_intermediate_size": 2**30})
    with pytest.raises(OutputError, match=r"expected \d+ bytes of free space, found \d+"):
        synth(tmp_path / "c", huge, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"c: cannot be written: File exists \(.*/file\)$"):
        synth(tmp_path / "file" / "c", MINI, seed=0)


FILLED = """
import resource, sys
from v4tool.checkpoint.synth import synth
from v4tool.config import ModelConfig
from v4tool.errors import OutputError
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
try:
    synth(sys.argv[2], ModelConfig.from_file(sys.argv[1]), seed=0)
except OutputError as e:
    print(e)
"""


def test_a_write_that_fails_midway(tmp_path: Path) -> None:
    """The third shard is larger than a file may be here, as on a disk that fills up."""
    args = [sys.executable, "-c", FILLED, str(GOLDEN_MINI / "ckpt"), str(tmp_path / "c")]
    output = subprocess.run(args, check=True, capture_output=True, text=True).stdout
    assert output == f"{tmp_path / 'c'}: cannot be written: File too large\n"
    assert list(tmp_path.iterdir()) == []


# ---- memory and pages

READ_ALL = """
import resource, sys
from v4tool.checkpoint.shards import Checkpoint

def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

with Checkpoint.open(sys.argv[1]) as checkpoint:
    checkpoint.read("norm.weight")
    before = peak()
    for name in checkpoint.specs:
        checkpoint.read(name)
    print(before, peak(), max(map(checkpoint.nbytes, checkpoint.specs)), checkpoint.bytes_read)
"""


def test_memory_does_not_grow_with_the_checkpoint(nano: Made) -> None:
    """Reading 260 MB takes no more memory than its largest tensor."""
    args = [sys.executable, "-c", READ_ALL, str(nano.directory)]
    output = subprocess.run(args, check=True, capture_output=True, text=True).stdout
    before, peak, largest, read = map(int, output.split())
    assert read == plan(NANO).total_size + 512
    # the allocator may keep a small piece that was freed beside the one in use
    assert peak - before <= largest + 16 * 2**20


def cached_share(path: Path) -> float:
    """Share of a file's 64 KiB pieces in the page cache; skips where the system does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("the system cannot read without waiting")
    hits, places = 0, range(0, path.stat().st_size, 1 << 16)
    with path.open("rb") as f:
        for place in places:
            try:
                hits += os.preadv(f.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError as e:
                if e.errno == errno.EOPNOTSUPP:
                    pytest.skip("the file system cannot read without waiting")
                raise
    return hits / len(places)


MOST = 0.5
"""Of a file's pages: dropping is a hint, and a busy kernel keeps some (0.18 of them was seen)."""


def test_pages_are_dropped_when_asked_for(nano: Made) -> None:
    path = nano.directory / "model-00001-of-00046.safetensors"
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are yet to be written cannot be dropped
    with Checkpoint.open(nano.directory, drop_pages=False) as checkpoint:
        checkpoint.read("embed.weight")
        assert cached_share(path) > 0.9
        checkpoint.release("embed.weight")
        assert cached_share(path) < MOST
    with Checkpoint.open(nano.directory, drop_pages=True) as checkpoint:
        checkpoint.read("embed.weight")
        assert cached_share(path) < MOST


def test_a_checkpoint_with_a_draft_head(tmp_path: Path) -> None:
    """Layout, values and a step with its draft; targets that are not kept are left out."""
    config = ModelConfig.from_file(GOLDEN_DSPARK / "ckpt")
    synth(tmp_path / "made", config, seed=3, layers=[0, 1, 3])
    found: dict[str, Tensor] = {}
    with Checkpoint.open(tmp_path / "made") as checkpoint:
        assert checkpoint.config.to_release_dict()["dspark_target_layer_ids"] == [2]
        assert checkpoint.config.to_release_dict()["num_hash_layers"] == 2
        sequence = Sequence([5, 6, 7], found.__setitem__, 1)
        run(checkpoint, checkpoint.config, Numerics(), [sequence])
        keys = recording_keys(checkpoint.config, 3, 1)
    assert {generic(key) for key in found} == set(keys)
    assert all(value.isfinite().all() for value in found.values())
    assert found["decode.0.mtp.output_ids"].shape == (1, 5)
