"""Writes a random checkpoint in the release's layout, up to the real dimensions (SPEC section 2).

Each shard is written in pieces, so memory stays small for any size. All files go to
`<name>.partial` beside the destination, which is renamed when everything is on disk. Left out: the
values (`random_values`).
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from v4tool.checkpoint.layout import (
    DTYPE_BYTES,
    TensorSpec,
    Totals,
    layout,
    shard_name,
    totals,
)
from v4tool.checkpoint.random_values import SYNTH_VERSION, tensor_bytes
from v4tool.checkpoint.tensor_index import INDEX
from v4tool.config import ModelConfig
from v4tool.errors import ConfigError, InputError, OutputError

__all__ = ["SYNTH_VERSION", "SynthReport", "plan", "reduce", "synth"]


@dataclass(frozen=True)
class SynthReport:
    """What `synth` has written; `totals` counts tensors, bytes and parameters."""

    directory: Path
    config: ModelConfig
    seed: int
    totals: Totals
    shards: int
    seconds: float


def reduce(
    config: ModelConfig, *, experts: int | None = None, layers: Sequence[int] | int | None = None
) -> ModelConfig:
    """The configuration with fewer routed experts and only some of its main layers.

    layers: number of layers from the first on, or which layers (ascending; they are renumbered and
    keep their ratio and kind of routing). The draft blocks stay. Raises InputError for numbers out
    of range.
    """
    config.architecture.require("synth")
    fields = config.to_release_dict()
    if experts is not None:
        if not config.n_activated_experts <= experts <= config.n_routed_experts:
            raise InputError(
                f"experts: expected {config.n_activated_experts} (num_experts_per_tok) ... "
                f"{config.n_routed_experts}, found {experts}"
            )
        fields["n_routed_experts"] = experts
    if layers is not None:
        kept = list(range(layers)) if isinstance(layers, int) else list(layers)
        if not kept or kept != sorted(set(kept) & set(range(config.n_layers))):
            raise InputError(
                f"layers: expected ascending numbers from 0 to {config.n_layers - 1}, "
                f"found {layers}"
            )
        fields |= config.kept(kept)
    return ModelConfig.from_dict(fields, "reduced configuration")


def plan(
    config: ModelConfig, *, experts: int | None = None, layers: Sequence[int] | int | None = None
) -> Totals:
    """Tensors, bytes and parameters that `synth` would write; nothing is written."""
    return totals(writable_layout(reduce(config, experts=experts, layers=layers)))


def synth(
    directory: Path | str,
    config: ModelConfig,
    *,
    seed: int,
    experts: int | None = None,
    layers: Sequence[int] | int | None = None,
    replace: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SynthReport:
    """Write a random checkpoint to a directory that does not exist yet.

    The bytes depend on configuration and seed alone. replace: an existing directory is removed when
    the new one is complete. progress is called after each tensor with its number of bytes. Raises
    InputError as `reduce`, OutputError if the directory exists or is being written by another
    process, or the disk is too small.
    """
    began, directory = time.monotonic(), Path(directory)
    if seed < 0:
        raise InputError(f"seed: expected a number from 0 on, found {seed}")
    config = reduce(config, experts=experts, layers=layers)
    specs = writable_layout(config)
    sums = totals(specs)
    files = shard_contents(specs)
    with _atomic_directory(directory, sums.total_size, replace=replace) as partial:
        _write_shards(partial, files, specs, config, seed, progress)
        for file, data in small_files(config, specs, files).items():
            (partial / file).write_bytes(data)
            _sync(partial / file)
        _sync(partial)
    return SynthReport(directory, config, seed, sums, len(files), time.monotonic() - began)


def writable_layout(config: ModelConfig) -> dict[str, TensorSpec]:
    if config.n_mtp_layers and config.mtp_problem:
        raise ConfigError(f"no checkpoint can be made: {config.mtp_problem}")
    return layout(config)


def shard_contents(specs: Mapping[str, TensorSpec]) -> dict[str, list[str]]:
    """File name -> its tensors in the order of the file.

    Wider elements first keep every tensor aligned; the sort is stable, so an expert stays together.
    """
    count = max(s.shard for s in specs.values())
    out: dict[str, list[str]] = {}
    for name in sorted(specs, key=lambda n: (specs[n].shard, -DTYPE_BYTES[specs[n].dtype])):
        out.setdefault(shard_name(specs[name].shard, count), []).append(name)
    return out


def _write_shards(
    partial: Path,
    files: Mapping[str, Sequence[str]],
    specs: Mapping[str, TensorSpec],
    config: ModelConfig,
    seed: int,
    progress: Callable[[int], None] | None,
) -> None:
    """Write all shards; a thread syncs each to the disk while the next one is made."""
    with ThreadPoolExecutor(1) as disk:
        pending = []
        for file, names in files.items():
            with (partial / file).open("wb") as f:
                f.write(shard_header(names, specs, seed))
                for name in names:
                    f.writelines(tensor_bytes(name, specs, config, seed))
                    if progress:
                        progress(specs[name].nbytes)
            pending.append(disk.submit(_sync, partial / file))
        for future in pending:
            future.result()


def _sync(path: Path) -> None:
    """Call fsync on a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def shard_header(names: Sequence[str], specs: Mapping[str, TensorSpec], seed: int) -> bytes:
    """Length and JSON, padded to 8 bytes; with the seed, so that fingerprints differ by seed."""
    entries: dict[str, object] = {
        "__metadata__": {"format": "pt", "v4tool_synth": f"version {SYNTH_VERSION} seed {seed}"}
    }
    offset = 0
    for name in names:
        spec = specs[name]
        ends = [offset, offset := offset + spec.nbytes]
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": ends}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def small_files(
    config: ModelConfig, specs: Mapping[str, TensorSpec], files: Mapping[str, Sequence[str]]
) -> dict[str, bytes]:
    """File name -> contents of the index and of config.json."""
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": totals(specs).total_size}, "weight_map": weight_map}
    return {INDEX: _json(index), "config.json": _json(config.to_release_dict())}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


@contextmanager
def _atomic_directory(directory: Path, size: int, *, replace: bool) -> Iterator[Path]:
    """A directory beside the destination, renamed to it at the end, removed on failure."""
    if directory.exists() and not replace:
        raise OutputError(f"{directory}: expected a new directory, this one exists")
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked_directory(partial):
            try:
                _require_space(partial, size)
                yield partial
                if replace:
                    _move_away(directory)
                _rename(partial, directory)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as e:
        where = f" ({e.filename})" if e.filename else ""
        raise OutputError(f"{directory}: cannot be written: {e.strerror}{where}") from None


def _move_away(directory: Path) -> None:
    """Rename a directory, so that its name is free at once, and remove it."""
    old = directory.with_name(f"{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        directory.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _rename(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise OutputError(f"{directory}: was made by another process meanwhile") from None


@contextmanager
def _locked_directory(partial: Path) -> Iterator[None]:
    """Make `partial`, or empty what a killed run has left of it; locked against other writers."""
    partial.mkdir(exist_ok=True)
    fd = os.open(partial, os.O_RDONLY)
    try:
        if not _lock(fd, partial):
            raise OutputError(f"{partial}: is being written by another process")
        for left in partial.iterdir():
            left.unlink()
        yield
    finally:
        os.close(fd)


def _lock(fd: int, partial: Path) -> bool:
    """Lock an open directory; False if another process holds the lock or has just renamed it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_ino == partial.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def _require_space(partial: Path, size: int) -> None:
    free = shutil.disk_usage(partial).free
    if free < size:
        raise OutputError(f"{partial.parent}: expected {size} bytes of free space, found {free}")
