"""Self-test of bit-exactness: payload hash of a small recording, compared with a constant.

A random checkpoint of 4 MiB with all kinds of layers is written to a temporary directory, a prompt
that exceeds the window and two decode steps are recorded with it (float64), and the SHA-256 of the
payload is compared with `PAYLOAD`, the same on every machine. A row of `check --port`.
"""

import hashlib
import tempfile
from pathlib import Path

import torch

from v4tool import dumping, profiles
from v4tool.check.kernels import CheckFailed
from v4tool.check.port import PortRow, run_row
from v4tool.checkpoint.shards import Checkpoint
from v4tool.checkpoint.synth import reduce, synth
from v4tool.config import ModelConfig

ROW = "payload hash"
LAYERS = (0, 2, 3, 4, 5)
"""Of nano: ratios 0, 4, 128, 4, 128; the first two route by token id."""
SIZES = {
    "hidden_size": 128,
    "head_dim": 128,
    "index_topk": 8,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "vocab_size": 320,
}
"""Fields of config.json that are smaller than nano's."""
CASE = profiles.Case(
    id="selftest",
    subject="more tokens than the window, two decode steps",
    input_ids=tuple(13 * i % 320 for i in range(131)),
    decode=2,
    decode_ids=(7, 300),
)
WEIGHTS = "50a304217bc93c12f7a713133e22a0f1c2cd585cf3a2a3b369ca2eecc585bc67"
"""SHA-256 of the random checkpoint's tensors, in the order of their names."""
PAYLOAD = "52380a89d3e4dd52021c94ccb37cab468acf505425ea6c7736c5a5ca9b82ad0b"
"""SHA-256 of the recording's payload."""


def payload_row(threads: int, backend: str) -> PortRow:
    """Run the self-test as a row of `check --port` with both hashes; failed if they differ.

    threads, backend: as in a profile. OutputError if the temporary directory has no room for the
    checkpoint and the recording (20 MiB).
    """
    return run_row(ROW, lambda: compare_payload(threads, backend))


def compare_payload(threads: int, backend: str) -> str:
    """Both hashes as text; CheckFailed if they differ, naming checkpoint or recording as cause."""
    made, found = record(threads, backend)
    if found == PAYLOAD:
        return f"found {found}, expected {PAYLOAD}"
    first = "the recording" if made == WEIGHTS else "the random checkpoint it is made from"
    raise CheckFailed(f"found {found}, expected {PAYLOAD}: {first} differs")


def record(threads: int, backend: str) -> tuple[str, str]:
    """Write the checkpoint and the recording; returns SHA-256 of the weights and of the payload."""
    with tempfile.TemporaryDirectory(prefix="v4tool-selftest-") as directory:
        ckpt, out = Path(directory) / "ckpt", Path(directory) / "out.safetensors"
        synth(ckpt, tiny_config(), seed=0)
        options = {"ckpt": ckpt, "threads": threads, "backend": backend}
        profile = profiles.load("nano", options=options, environ={})
        with Checkpoint.open(ckpt) as checkpoint:
            (result,) = dumping.dump_cases(profile, checkpoint, [CASE], [out])
            return weights_sha256(checkpoint), result.payload_sha256


def tiny_config() -> ModelConfig:
    """nano's configuration with few layers and small widths."""
    nano = ModelConfig.from_file(profiles.load("nano", options={}, environ={}).config)
    fields = reduce(nano, layers=LAYERS).to_release_dict() | SIZES
    return ModelConfig.from_dict(fields, "configuration of the self-test")


def weights_sha256(checkpoint: Checkpoint) -> str:
    """SHA-256 of all tensors' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(checkpoint.specs):
        digest.update(checkpoint.read(name).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
