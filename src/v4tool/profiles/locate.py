"""Locates a profile's checkpoint directory, or names the random checkpoint to generate.

Nothing is downloaded or written. Left out: whether the checkpoint is complete (its reader checks
that), and the generation (`checkpoint/synth.py`).
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from v4tool.errors import CheckpointError, ProfileError
from v4tool.profiles.schema import Profile
from v4tool.untrusted import kind_of, read_small


@dataclass(frozen=True)
class SynthRequest:
    """A checkpoint of random weights, to be generated from a config and a seed, below `cache`."""

    config: Path
    seed: int
    cache: Path

    def directory(self, version: str | int) -> Path:
        """Its directory; the name has a hash of config, seed and the generator's version."""
        try:
            digest = hashlib.sha256(read_small(self.config))
        except OSError as error:
            raise ProfileError(f"{self.config}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ProfileError(f"{self.config}: cannot be read: {error}") from error
        digest.update(f"\0seed {self.seed}\0version {version}".encode())
        name = self.config.stem.removesuffix("_config")
        return self.cache / f"{name}-{digest.hexdigest()[:16]}"


def locate_checkpoint(profile: Profile, *, hub_cache: Path | None = None) -> Path | SynthRequest:
    """The checkpoint's directory, or the checkpoint to generate.

    hub_cache: Hugging Face cache to search (default: the library's, from HF_HUB_CACHE and HF_HOME).
    CheckpointError if a named directory is not one, ProfileError if no checkpoint is found.
    """
    if profile.ckpt is not None:
        return _named(profile.ckpt, profile.origin["ckpt"])
    if profile.checkpoint.synth:
        import platformdirs

        cache = platformdirs.user_cache_path("v4tool") / "checkpoints"
        return SynthRequest(profile.config, profile.seed, cache)
    repo = profile.checkpoint.repo
    found = cached_snapshot(repo, profile.checkpoint.revision, hub_cache) if repo else None
    if found is None:
        third = f", or download {repo} into the local Hugging Face cache yourself" if repo else ""
        raise ProfileError(
            f"profile {profile.name}: no checkpoint found: give its directory with --ckpt DIR, "
            f"set V4TOOL_CKPT=DIR{third} (v4tool never downloads)"
        )
    return found


def _named(directory: Path, origin: str) -> Path:
    found = kind_of(directory)
    if found == "a directory":
        return directory
    raise CheckpointError(
        f"{origin}: expected a checkpoint directory, found {found} at {directory}"
    )


def cached_snapshot(repo: str, revision: str, hub_cache: Path | None = None) -> Path | None:
    """A snapshot in the local Hugging Face cache that has an index and a config, or None.

    The given revision, or if the cache lacks it, the only other one. ProfileError if there are
    several others.
    """
    asked = _snapshot(repo, revision, hub_cache)
    if asked is not None:
        return asked
    others = [_snapshot(repo, commit, hub_cache) for commit in _commits(repo, hub_cache)]
    found = sorted(other for other in others if other is not None)
    if len(found) > 1:
        raise ProfileError(
            f"{repo}: expected revision {revision} in the local Hugging Face cache, found "
            f"{', '.join(other.name for other in found)}: name one as `revision` in the profile, "
            f"or give its directory with --ckpt"
        )
    return found[0] if found else None


def _snapshot(repo: str, revision: str, hub_cache: Path | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    directory = None
    for name in ("config.json", "model.safetensors.index.json"):
        file = try_to_load_from_cache(repo, name, hub_cache, revision=revision)
        if not isinstance(file, str):
            return None
        directory = Path(file).parent
    return directory


def _commits(repo: str, hub_cache: Path | None) -> list[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(hub_cache).repos
    except CacheNotFound:
        return []
    models = [found for found in repos if found.repo_id == repo and found.repo_type == "model"]
    return [revision.commit_hash for found in models for revision in found.revisions]
