"""Paths of the golden data, and fixtures shared by the tests."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.cli import cli  # noqa: F401  (a fixture for every test)
from tests.quant_operands import HAS_KERNEL
from v4tool.checkpoint.shards import Checkpoint
from v4tool.model import moe
from v4tool.names import Keys, generic, recording_keys

ROOT = Path(__file__).parent.parent
GOLDEN_MINI = ROOT / "tests" / "golden"
"""The small golden data: always there."""
GOLDEN_DSPARK = ROOT / "tests" / "golden0731"
"""The same main stack with a DSpark head (SPEC41 section 7): always there."""
SHARED = ROOT.parent / "shared"
GOLDEN = SHARED / "golden"
"""The larger golden data: beside the repository where somebody has it."""

needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the larger golden data is not beside this checkout (shared/golden)"
)

needs_golden41 = pytest.mark.skipif(
    not (SHARED / "golden41").is_dir(),
    reason="the golden data of V4.1 is not beside this checkout (shared/golden41)",
)


@dataclass(frozen=True)
class GoldenFile:
    """One golden recording; complete: it holds every key of SPEC section 6."""

    directory: Path
    name: str
    complete: bool

    @property
    def path(self) -> Path:
        return self.directory / f"{self.name}.safetensors"

    @property
    def ckpt(self) -> Path:
        return self.directory / "ckpt"

    def metadata(self, field: str) -> list[int]:
        with safe_open(str(self.path), framework="pt") as file:
            ids: list[int] = json.loads(file.metadata()[field])
        return ids

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with safe_open(str(self.path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (no mapping)
                yield key, file.get_tensor(key)

    def specs(self, checkpoint: Checkpoint) -> Keys:
        length, decode = len(self.metadata("input_ids")), len(self.metadata("decode_ids"))
        return recording_keys(checkpoint.config, length, decode)


MINI_FILES = [
    GoldenFile(GOLDEN_MINI, "len3", True),
    GoldenFile(GOLDEN_MINI, "len6", True),
    GoldenFile(GOLDEN_MINI, "len33", True),
    GoldenFile(GOLDEN_MINI, "len129", False),
]
DSPARK_FILES = [
    GoldenFile(GOLDEN_DSPARK, "len6", True),
    GoldenFile(GOLDEN_DSPARK, "len3", False),
    GoldenFile(GOLDEN_DSPARK, "len33", False),
    GoldenFile(GOLDEN_DSPARK, "len129", False),
]
LARGE_FILES = [
    GoldenFile(GOLDEN, "len6", True),
    GoldenFile(GOLDEN, "len32", True),
    GoldenFile(GOLDEN, "len129", False),
    GoldenFile(GOLDEN, "len126", False),
    GoldenFile(GOLDEN, "len300", False),
]


def every_golden() -> list[object]:
    """Golden files of all architectures as pytest parameters."""
    return golden_params() + [pytest.param(g, id=f"dspark-{g.name}") for g in DSPARK_FILES]


def golden_params() -> list[object]:
    """Every golden file of V4 with MTP as a pytest parameter; the larger ones are skipped where
    they are not.
    """
    mini = [pytest.param(g, id=f"mini-{g.name}") for g in MINI_FILES]
    return mini + [pytest.param(g, id=f"golden-{g.name}", marks=needs_golden) for g in LARGE_FILES]


def difference(expected: Tensor, found: Tensor, kind: str) -> str | None:
    """Why two tensors differ, or None. Values kept in acc may differ by 1 ulp of FP32 (SPEC 8)."""
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"{expected.dtype} {list(expected.shape)} != {found.dtype} {list(found.shape)}"
    if expected.dtype != torch.float32:
        return None if torch.equal(expected, found) else "integers differ"
    ulps = (expected.view(torch.int32).long() - found.view(torch.int32).long()).abs()
    worst = int(ulps.max()) if ulps.numel() else 0
    return None if worst <= (1 if kind == "acc" else 0) else f"{worst} ulp apart"


def kind_of(key: str, specs: Keys) -> str:
    """Whether a key holds BF16 values, acc values or indices."""
    return specs[generic(key)].kind


@pytest.fixture(scope="session")
def mini() -> Iterator[Checkpoint]:
    """The small golden checkpoint, open."""
    with Checkpoint.open(GOLDEN_MINI / "ckpt") as checkpoint:
        yield checkpoint


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """torch's own threads would only disturb a busy machine; the results do not depend on them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shared_out() -> Iterator[None]:
    """Work is shared out among threads however little it is, as tests have little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "PRODUCTS_AT_LEAST", 0)
        if HAS_KERNEL:
            patch.setattr("v4tool.quant._c_product._LEAST", 1)
        yield
