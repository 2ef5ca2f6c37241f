"""Opens a candidate: its tensors under our keys, with the ids that it ran.

Left out: file forms (`readers`), rules of names (`maps`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from v4tool.config import ModelConfig
from v4tool.diff.maps import load_map
from v4tool.diff.matching import Candidate, match
from v4tool.diff.readers import open_tensors
from v4tool.errors import InputError
from v4tool.names import recording_keys
from v4tool.profiles import validate_ids
from v4tool.verify.tensors import decode_steps


def open_candidate(
    path: Path,
    map_name: str,
    config: ModelConfig,
    ids: Sequence[int] | None = None,
    decode_ids: Sequence[int] = (),
) -> Candidate:
    """The tensors of a file or directory under our keys.

    ids: of the prompt, where the tensors and their metadata hold none. Raises RecordingError for
    files that cannot be read, InputError for a map without a match, for ids that are missing,
    outside the vocabulary or contradict each other.
    """
    candidate = match(open_tensors(path), load_map(map_name), config)
    found = _recorded_ids(candidate)
    if ids is not None and found is not None and list(ids) != found:
        raise InputError(f"{path}: expected the ids {list(ids)[:8]}, found {found[:8]}")
    chosen = found if ids is None else list(ids)
    if chosen is None:
        raise InputError(
            f"{path}: expected the prompt's ids as a tensor, in the metadata, by --case or by "
            f"--input-ids, found none"
        )
    validate_ids(chosen, config.vocab_size, where=f"{path}: input_ids")
    candidate.given["input_ids"] = torch.tensor([chosen])
    candidate.has_tokens(len(chosen))
    for step, token in enumerate(decode_ids or _metadata_ids(candidate, "decode_ids") or ()):
        candidate.given.setdefault(f"decode.{step}.input_ids", torch.tensor([[token]]))
    specs = recording_keys(config, len(chosen), decode_steps(candidate.specs))
    for key, spec in specs.items():
        shape = tuple(size for size in spec.shape if size is not None)
        if len(shape) == len(spec.shape):
            candidate.shapes[key] = shape
    return candidate


def _recorded_ids(candidate: Candidate) -> list[int] | None:
    """The prompt's ids as the candidate recorded them."""
    if "input_ids" in candidate:
        return [int(i) for i in candidate.read("input_ids").flatten()]
    return _metadata_ids(candidate, "input_ids")


def _metadata_ids(candidate: Candidate, name: str) -> list[int] | None:
    """Ids in the metadata, a JSON list; None where there are none."""
    try:
        found = json.loads(candidate.metadata.get(name, ""))
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(i, int) for i in found) else None
