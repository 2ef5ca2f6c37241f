"""The Python API: functions `v4tool.dump`, `check`, `verify`, `open_recording` and `capture`.

Each function does what the command of its name does, without printing; `capture`, which has none,
records a torch model while it runs. Settings that are not given come from the environment, the
profile and the defaults. Unusable input raises `V4ToolError` with the line that the command would
print (it names arguments by their options). Notes go to the logger `v4tool`. Left out: progress,
tables, and the commands `regen`, `list` and `synth`. Slow imports (torch) are made inside the
functions, so that `import v4tool` is fast.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from v4tool.check.recording import CheckResult
    from v4tool.diff.capture import Capture
    from v4tool.dumping import DumpResult
    from v4tool.profiles import Case, Profile
    from v4tool.record.reader import Recording
    from v4tool.verify.results import VerifyResult

LOG = logging.getLogger("v4tool")
StrPath = str | os.PathLike[str]


def dump(
    ckpt: StrPath | None = None,
    *,
    case: str | Sequence[str] | None = None,
    input_ids: Sequence[int] | None = None,
    text: str | None = None,
    decode: int | None = None,
    decode_ids: Sequence[int] = (),
    out: StrPath | None = None,
    only: Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    mtp: bool = True,
    force: bool = False,
    keep_going: bool = False,
    profile: StrPath | None = None,
    threads: int | None = None,
    seed: int | None = None,
    accumulate: str | None = None,
    backend: str | None = None,
) -> "list[DumpResult]":
    """Record every module's output for cases of the profile, token ids or a text.

    Returns one result per case.

    ckpt: the checkpoint's directory (default: the profile's; nano's is made on first use). Of
    case (one id or several), input_ids and text exactly one is given. decode: decode steps of the
    main stack, greedy after the ids in decode_ids. out: a .safetensors file, or a directory, which
    gets a manifest (default: the profile's). only: shell patterns of keys; layers: main layers.
    force: replace files that exist. keep_going: record NaN and infinity; the results count them.
    seed: of the weights that nano makes.

    Files appear under their names when they are whole. Raises V4ToolError: InputError for prompts,
    patterns and layers, NotFiniteError for the first key with NaN or infinity, CheckpointError,
    ConfigError, ProfileError, OutputError.
    """
    from v4tool import dumping
    from v4tool.checkpoint.directory import open_checkpoint
    from v4tool.profiles import validate_ids, with_decode
    from v4tool.selection import Selection

    resolved = _profile(
        profile, ckpt, threads=threads, seed=seed, accumulate=accumulate, backend=backend
    )
    kept = None if layers is None else frozenset(layers)
    selection = Selection(tuple(only) if only else None, kept, mtp)
    target = None if out is None else Path(out)
    with open_checkpoint(resolved, LOG.info, mtp=mtp, allow_nan=keep_going) as checkpoint:
        vocab_size = checkpoint.config.vocab_size
        chosen = _prompts(resolved, case, text, input_ids, vocab_size)
        if decode_ids:
            decode_ids = validate_ids(decode_ids, vocab_size, where="decode_ids")
        cases = [with_decode(each, decode, decode_ids) for each in chosen]
        paths = dumping.output_paths(cases, target, resolved.out_dir, force=force)
        results = dumping.dump_cases(
            resolved, checkpoint, cases, paths,
            selection=selection, force=force, keep_going=keep_going,
        )  # fmt: skip
        if not dumping.is_one_file(target):
            dumping.enter_in_manifest(resolved, checkpoint.config, results)
    return results


def check(
    path: StrPath,
    ckpt: StrPath | None = None,
    *,
    input_ids: Sequence[int] | None = None,
    decode_ids: Sequence[int] | None = None,
    weights: bool = True,
    deep: bool = False,
    partial: bool = False,
    profile: StrPath | None = None,
) -> "CheckResult":
    """Check a recording: file structure, hashes, keys, shapes, token ids, values and identities.

    ckpt: as in `dump`. input_ids, decode_ids: expected ids (default: those in its metadata).
    weights: also compare with the checkpoint; otherwise only its config.json is read. deep: also
    recompute every matrix product. partial: keys may be missing.

    `result.findings` lists the defects; `result.ok` is True if there are none. Raises V4ToolError
    for a file or a checkpoint that cannot be read.
    """
    from v4tool.check.recording import check_recording
    from v4tool.checkpoint.directory import open_checkpoint
    from v4tool.config import ModelConfig
    from v4tool.record.manifest import Manifest

    resolved, file = _profile(profile, ckpt), Path(path)
    opened = open_checkpoint(resolved, LOG.info) if weights else nullcontext()
    with opened as checkpoint:
        return check_recording(
            file,
            config=checkpoint.config if checkpoint else ModelConfig.from_file(resolved.config),
            ids=input_ids,
            decode_ids=decode_ids,
            manifest=Manifest.entry_beside(file),
            checkpoint=checkpoint,
            deep=deep,
            partial=partial,
        )


def verify(
    path: StrPath,
    ckpt: StrPath | None = None,
    *,
    chained: bool = False,
    node: str | None = None,
    layer: int | None = None,
    atol: float = 1e-4,
    rtol: float = 1e-4,
    exact: bool | None = None,
    jobs: int = 1,
    vt: StrPath | None = None,
    partial: bool = False,
    fail_fast: bool = False,
    profile: StrPath | None = None,
) -> "VerifyResult":
    """Compare a recording, node by node, with a second description of the model.

    ckpt: as in `dump`. chained: nodes take computed inputs, not recorded ones. node, layer: report
    only these. exact: bits must be equal (default: if it was accumulated in binary64); otherwise
    atol and rtol apply. jobs: processes, by layers; with more than one, a script must keep its
    calls below `if __name__ == "__main__":`. vt: another description, which is executed. partial:
    keys may be missing. fail_fast: stop after the first layer that fails.

    The result has `passed`, `verdict`, `failures` and `findings`. It does not include `check`.
    Raises V4ToolError if the recording or the checkpoint cannot be read.
    """
    from v4tool.checkpoint.directory import checkpoint_directory
    from v4tool.verify.recording import verify_file

    return verify_file(
        Path(path),
        checkpoint_directory(_profile(profile, ckpt), LOG.info),
        chained=chained,
        node=node,
        layer=layer,
        atol=atol,
        rtol=rtol,
        exact=exact,
        jobs=jobs,
        vt_file=None if vt is None else Path(vt),
        partial=partial,
        fail_fast=fail_fast,
    )


def open_recording(path: StrPath) -> "Recording":
    """Open a recording: `recording[key]` is a NumPy array, `recording.torch(key)` a torch tensor.

    A context manager with `keys()`, `len`, `in`, iteration over keys and `metadata`. Tensors are
    read on access. RecordingError if it is not a readable safetensors file.
    """
    from v4tool.record.reader import Recording

    return Recording.open(Path(path))


def capture(
    model: "nn.Module", path: StrPath, *, map: StrPath | None = None, force: bool = False
) -> "AbstractContextManager[Capture]":
    """Record a running torch model: `with capture(model, "mine.safetensors"): model(ids)`.

    map: a shipped map or a TOML file, whose modules are recorded (default: outputs and arguments
    of all modules). The first call of the model in the block is the prefill, each after it a decode
    step. force: replace a file that exists. Ranks of a process group write a file each.

    The file appears when the block ends without an exception. Values are as the model computed
    them, in FP32 (BF16 and FP16 exactly) and integers. Raises V4ToolError: InputError for a model
    that the map names no module of, for a batch of prompts and for a block without a call,
    OutputError.
    """
    from v4tool.diff.capture import capture as opened

    return opened(model, Path(path), None if map is None else os.fspath(map), force=force)


def _profile(profile: StrPath | None, ckpt: StrPath | None, **settings: object) -> "Profile":
    """The profile, resolved from arguments, environment, file and defaults."""
    from v4tool import profiles

    name = None if profile is None else os.fspath(profile)
    directory = None if ckpt is None else os.fspath(ckpt)
    return profiles.load(name, options={"ckpt": directory, **settings}, environ=os.environ)


def _prompts(
    profile: "Profile",
    case: str | Sequence[str] | None,
    text: str | None,
    input_ids: Sequence[int] | None,
    vocab_size: int,
) -> "list[Case]":
    """The cases given by `dump`'s arguments. InputError unless exactly one of them is given."""
    from v4tool.errors import InputError
    from v4tool.profiles import custom_case, validate_ids

    given = [value for value in (case, text, input_ids) if value is not None]
    if len(given) != 1:
        raise InputError(f"expected one of case, input_ids and text, found {len(given)} of them")
    if case is None:
        ids = None if input_ids is None else validate_ids(input_ids, vocab_size)
        return [custom_case(text, ids, profile.ckpt)]
    names = [case] if isinstance(case, str) else list(case)
    if not names:
        raise InputError("case: expected at least one case, found none")
    return [profile.case(name) for name in dict.fromkeys(names)]
