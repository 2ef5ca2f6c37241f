"""Compares a cached random checkpoint with the one that this version of `synth` writes.

Detects a generator that was changed without a new `SYNTH_VERSION`, and a damaged cache. To be fast,
it compares file sizes, the configuration, the index, the headers, and the beginning of one tensor
of each kind. Left out: all other bytes.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from v4tool.checkpoint.layout import TensorSpec
from v4tool.checkpoint.random_values import tensor_bytes
from v4tool.checkpoint.synth import shard_contents, shard_header, small_files, writable_layout
from v4tool.config import ModelConfig

_BLOCK = re.compile(r"^(layers|mtp)\.\d+\.")
_NUMBER = re.compile(r"\.\d+(?=\.)")


def outdated(directory: Path, config: ModelConfig, seed: int) -> str | None:
    """The first difference of a directory from what `synth` writes now; None if there is none."""
    specs = writable_layout(config)
    files = shard_contents(specs)
    try:
        for file, data in small_files(config, specs, files).items():
            if (directory / file).read_bytes() != data:
                return f"{file} is another one"
        for file, names in files.items():
            if reason := _shard(directory / file, names, specs, seed):
                return reason
        return _values(directory, files, specs, config, seed)
    except OSError as e:
        return f"{Path(e.filename or directory).name}: {e.strerror}"


def _shard(path: Path, names: list[str], specs: Mapping[str, TensorSpec], seed: int) -> str | None:
    header = shard_header(names, specs, seed)
    expected = len(header) + sum(specs[name].nbytes for name in names)
    with path.open("rb") as f:
        if (found := path.stat().st_size) != expected:
            return f"{path.name}: {found} bytes instead of {expected}"
        return None if f.read(len(header)) == header else f"{path.name} has another header"


def _values(
    directory: Path,
    files: Mapping[str, list[str]],
    specs: Mapping[str, TensorSpec],
    config: ModelConfig,
    seed: int,
) -> str | None:
    sample = set(_sample(specs))
    for file, names in files.items():
        with (directory / file).open("rb") as f:
            offset = len(shard_header(names, specs, seed))
            for name in names:
                if name in sample:
                    made = next(tensor_bytes(name, specs, config, seed))
                    f.seek(offset)
                    if f.read(len(made)) != made:
                        return f"{name} has other values"
                offset += specs[name].nbytes
    return None


def _sample(specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    """One tensor of each kind (its path without numbers, its dtype), spread over the blocks."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, spec in specs.items():
        path = _NUMBER.sub("", _BLOCK.sub("", name))
        kinds.setdefault((path, spec.dtype), []).append(name)
    for (path, _), names in kinds.items():
        yield names[zlib.crc32(path.encode()) % len(names)]
