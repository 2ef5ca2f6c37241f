"""`Fault`: what an injected fault changes, the prompt that shows it, and the expected verdict.

A fault replaces one function or constant of the port (`patch.setattr`, which refuses a name that is
not there). The faulty port records a golden prompt on the small golden checkpoint, and the
recording is verified isolated, in full or up to the first layer that fails.
"""

import json
import re
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.conftest import GOLDEN, GOLDEN_MINI
from v4tool.checkpoint.shards import Checkpoint
from v4tool.config import Numerics
from v4tool.model.stream import Sequence, run
from v4tool.names import generic, recording_keys
from v4tool.verify.recording import verify_file
from v4tool.verify.results import VerifyResult

Patch = pytest.MonkeyPatch
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """A fault and the verdict that it must get.

    name: as porters call it. inject: replaces one function or constant. operator, block: the node
    that must be named; key: the first recorded key that shows it (routed experts as `<E>`). prompt:
    the golden recording whose ids are run, the shortest that shows the fault; decode: how many of
    its decode steps, or ids to decode. suspects: nodes without keys that cannot be told apart.
    larger: needs the larger golden checkpoint. backend: the product used (values that are no BF16
    values go through the readable one only). needs: something that the recording must show, or the
    fault would have nothing to change. place: the node's block, where it is not the key's.
    """

    name: str
    inject: Callable[[Patch], None]
    operator: str
    key: str
    prompt: str = "len3"
    decode: int | tuple[int, ...] = 0
    suspects: tuple[str, ...] = ()
    status: str | None = None
    larger: bool = False
    backend: str = "auto"
    needs: Callable[[Tensors], bool] | None = None
    place: str | None = None

    @property
    def directory(self) -> Path:
        """Where the golden prompt and checkpoint lie."""
        return GOLDEN if self.larger else GOLDEN_MINI

    @property
    def block(self) -> str:
        """Where the node is: by default the block of the first wrong key."""
        if self.place is not None:
            return self.place
        match = re.match(r"((?:decode\.\d+\.)?layers\.\d+|mtp\.0\.\w+|decode\.\d+)\.", self.key)
        return match[1] if match else ""


def prompt_ids(directory: Path, prompt: str) -> tuple[list[int], list[int]]:
    """The ids of a golden recording and of its decode steps."""
    with safe_open(str(directory / f"{prompt}.safetensors"), framework="pt") as file:
        metadata = file.metadata()
    return json.loads(metadata["input_ids"]), json.loads(metadata["decode_ids"])


def record(fault: Fault, path: Path) -> Tensors:
    """The port's recording of the fault's prompt, written to `path`."""
    ids, decode_ids = prompt_ids(fault.directory, fault.prompt)
    steps = decode_ids[: fault.decode] if isinstance(fault.decode, int) else list(fault.decode)
    found: Tensors = {}
    with Checkpoint.open(fault.directory / "ckpt") as checkpoint:
        numerics = Numerics(backend=fault.backend)
        sequence = Sequence(ids, found.__setitem__, len(steps), list(steps))
        run(checkpoint, checkpoint.config, numerics, [sequence])
    save(found, path)
    return found


def save(tensors: Tensors, path: Path) -> None:
    """A recording without metadata: floats as FP32, integers as they are."""
    stored = {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}
    save_file({k: v.contiguous().clone() for k, v in stored.items()}, str(path))


def verify(fault: Fault, path: Path) -> VerifyResult:
    """The recording against the description, up to the first layer that fails."""
    return verify_file(path, fault.directory / "ckpt", fail_fast=True)


def without_expert(text: str) -> str:
    """The text with a routed expert's number as `<E>`."""
    return re.sub(r"ffn\.experts\.\d+", "ffn.experts.<E>", text)


def execution_order(fault: Fault) -> list[str]:
    """Every key that the recording of this prompt can have, in the order of execution."""
    ids, decode_ids = prompt_ids(fault.directory, fault.prompt)
    steps = decode_ids[: fault.decode] if isinstance(fault.decode, int) else fault.decode
    with Checkpoint.open(fault.directory / "ckpt") as checkpoint:
        return list(recording_keys(checkpoint.config, len(ids), len(steps)))


def first_of(keys: Listed[str], order: list[str]) -> str:
    """The key that is computed first."""
    return min(map(generic, keys), key=order.index)
