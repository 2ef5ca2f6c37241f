"""Bit-equality of devices: the port on a CPU and on a GPU, both in binary64.

First the golden recordings in `tests/golden` (and the larger ones where they are), computed on the
device. Then one layer with the release's dimensions and random weights, and the MTP block, on the
CPU and on the device. Run as `python -m bench.device --device cuda` from the repository. Away from
the CPU the product of quantised weights is the readable one, so this says something about bits and
nothing about speed.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from v4tool.checkpoint.shards import Checkpoint
from v4tool.checkpoint.synth import synth
from v4tool.config import ModelConfig, Numerics
from v4tool.model.stream import Sequence, run

ROOT = Path(__file__).parent.parent
FLASH = ROOT / "src" / "v4tool" / "data" / "flash_config.json"


class OnDevice:
    """A weight reader that moves tensors to a device."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self.checkpoint, self.device = checkpoint, device

    def nbytes(self, name: str) -> int:
        return self.checkpoint.nbytes(name)

    def read(self, name: str, buffer: Tensor | None = None) -> Tensor:
        with torch.device("cpu"):
            return self.checkpoint.read(name).to(self.device)

    def read_rows(self, name: str, start: int, stop: int, buffer: Tensor | None = None) -> Tensor:
        with torch.device("cpu"):
            return self.checkpoint.read_rows(name, start, stop).to(self.device)

    def gather_rows(self, name: str, ids: Tensor) -> Tensor:
        with torch.device("cpu"):
            return self.checkpoint.gather_rows(name, ids.cpu()).to(self.device)

    def advise(self, names: list[str]) -> None:
        self.checkpoint.advise(names)


def recorded(
    checkpoint: Checkpoint, device: str, ids: list[int], decode: list[int]
) -> dict[str, Tensor]:
    """The port's outputs computed on a device, as they would be recorded."""
    seen: dict[str, Tensor] = {}

    def tap(key: str, value: Tensor) -> None:
        seen[key] = (value.float() if value.is_floating_point() else value).cpu()

    weights: Any = OnDevice(checkpoint, device) if device != "cpu" else checkpoint
    with torch.device(device):
        run(weights, checkpoint.config, Numerics(), [Sequence(ids, tap, len(decode), decode)])
    return seen


def compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Any]:
    """Number of keys and elements with equal bits, and the first keys that differ."""
    different, elements, unequal = [], 0, 0
    for key, value in expected.items():
        words = (torch.int32 if value.element_size() == 4 else torch.int64,)
        a, b = (x.contiguous().view(*words) for x in (value, found[key]))
        wrong = int((a != b).sum())
        elements, unequal = elements + a.numel(), unequal + wrong
        if wrong:
            different.append(f"{key} ({wrong} of {a.numel()})")
    return {
        "keys": len(expected), "keys_different": len(different),
        "elements": elements, "elements_different": unequal, "first": different[:8],
    }  # fmt: skip


def golden_files() -> list[Path]:
    """The available golden recordings."""
    places = (ROOT / "tests" / "golden", ROOT.parent / "shared" / "golden")
    return [path for place in places for path in sorted(place.glob("len*.safetensors"))]


def golden(path: Path, device: str) -> dict[str, Any]:
    """Compare one golden recording with the device's results."""
    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
        expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    ids, decode = json.loads(metadata["input_ids"]), json.loads(metadata["decode_ids"])
    with Checkpoint.open(path.parent / "ckpt") as checkpoint:
        return compare(expected, recorded(checkpoint, device, ids, decode))


def real_layer(device: str, layer: int, tokens: int, experts: int) -> dict[str, Any]:
    """Compare CPU and device on one layer and MTP with the release's dimensions."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "ckpt"
        synth(target, ModelConfig.from_file(FLASH), seed=0, layers=[layer], experts=experts)
        ids = [(7919 * i + 13) % 129280 for i in range(tokens)]
        with Checkpoint.open(target) as checkpoint:
            return compare(
                recorded(checkpoint, "cpu", ids, []), recorded(checkpoint, device, ids, [])
            )


def main() -> None:
    """Print one JSON line per comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layer", type=int, default=2, help="which of the release's layers")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--golden", default="*", help="golden files by pattern of their name")
    parser.add_argument("--no-layer", action="store_true", help="leave the large layer out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device.startswith("cuda")
    name = torch.cuda.get_device_name() if cuda else options.device
    print(json.dumps({"device": name, "torch": torch.__version__}), flush=True)
    for path in golden_files():
        if path.match(options.golden):
            started = time.monotonic()
            row = golden(path, options.device)
            shown = f"{path.parent.name}/{path.stem}"
            print(
                json.dumps({"golden": shown, "s": round(time.monotonic() - started), **row}),
                flush=True,
            )
    if not options.no_layer:
        row = real_layer(options.device, options.layer, options.tokens, options.experts)
        print(
            json.dumps({"real layer": options.layer, "tokens": options.tokens, **row}), flush=True
        )


if __name__ == "__main__":
    main()
