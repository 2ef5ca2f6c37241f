"""Resolves a profile: option before environment before file before default; keeps the origins.

An empty environment variable counts as not set. Paths in a file (`path`, `config`, `cases_file`)
are relative to that file, `out_dir` to the working directory. A file without `cases_file` has the
shipped cases, one without `[checkpoint]` has nano's checkpoint.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from v4tool.errors import ProfileError
from v4tool.profiles import setting_values, toml_files
from v4tool.profiles.schema import Case, CasesFile, CheckpointSettings, Profile, ProfileFile
from v4tool.profiles.tokens import encode
from v4tool.untrusted import kind_of

DEFAULT_PROFILE = "nano"
PROFILE_VARIABLE = "V4TOOL_PROFILE"
CASES_FILE = "cases.toml"
PACKAGE = Path(__file__).resolve().parents[1]


class Setting(NamedTuple):
    """A setting with all four sources. number: numeric text is converted to an integer."""

    key: str
    option: str
    variable: str
    default: object
    parse: Callable[[object], Any]
    number: bool = False


SETTINGS = (
    Setting("ckpt", "--ckpt", "V4TOOL_CKPT", None, setting_values.path),
    Setting("threads", "--threads", "V4TOOL_THREADS", "auto", setting_values.threads, number=True),
    Setting("seed", "--seed", "V4TOOL_SEED", 0, setting_values.seed, number=True),
    Setting("out_dir", "--out", "V4TOOL_OUT_DIR", Path("activations"), setting_values.path),
    Setting(
        "accumulate", "--accumulate", "V4TOOL_ACCUMULATE", "float64", setting_values.accumulate
    ),
    Setting("backend", "--backend", "V4TOOL_BACKEND", "auto", setting_values.backend),
)


def shipped_directory() -> Path:
    """Directory of the shipped profiles: in the package, or `profiles/` of the checkout."""
    installed = PACKAGE / "_profiles"
    return installed if installed.is_dir() else PACKAGE.parents[1] / "profiles"


def available() -> list[str]:
    """The names of the shipped profiles, sorted."""
    found = shipped_directory().glob("*.toml")
    return sorted(path.stem for path in found if path.name != CASES_FILE)


def load(
    name_or_file: str | Path | None = None,
    *,
    options: Mapping[str, object],
    environ: Mapping[str, str],
) -> Profile:
    """Load and resolve a profile: a shipped name or a TOML file, else V4TOOL_PROFILE, else `nano`.

    options: values from the command line by key (ckpt, threads, seed, out_dir, accumulate,
    backend), None if not given; environ: the process environment. ProfileError, which names source,
    key, expected and found, for invalid values.
    """
    chosen, source = _choose(name_or_file, environ)
    path, shown = _find(chosen, source)
    file = toml_files.read(path, shown, ProfileFile)
    resolved, origin = _resolve_all(file, path, shown, options, environ)
    cases, origin["cases"] = _read_cases(file, path, shown)
    checkpoint = file.checkpoint or CheckpointSettings(config=DEFAULT_PROFILE, synth=True)
    return Profile(
        name=path.stem,
        source=path,
        summary=file.summary,
        config=_config(checkpoint, resolved["ckpt"], path),
        checkpoint=checkpoint,
        cases=tuple(_with_ids(case, resolved["ckpt"]) for case in cases),
        origin={"profile": source, **origin},
        **resolved,
    )


def _choose(name_or_file: str | Path | None, environ: Mapping[str, str]) -> tuple[str | Path, str]:
    if name_or_file is not None:
        return name_or_file, "option --profile"
    if environ.get(PROFILE_VARIABLE):
        return environ[PROFILE_VARIABLE], f"environment {PROFILE_VARIABLE}"
    return DEFAULT_PROFILE, "default"


def _find(name_or_file: str | Path, source: str) -> tuple[Path, str]:
    """A profile's path, and its name for messages. ProfileError if it does not exist."""
    known, word = available(), str(name_or_file)
    if isinstance(name_or_file, str) and word in known:
        return shipped_directory() / f"{word}.toml", f"profiles/{word}.toml"
    try:
        path = setting_values.path(name_or_file)
    except ValueError as error:
        raise ProfileError(f"{source}: {error}, found {setting_values.short(word)}") from error
    if kind_of(path) == "a file":
        return path, str(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ProfileError(f"{source}: expected a profile's file, found none at {path}")
    raise ProfileError(
        f"{source}: unknown profile "
        f"{setting_values.short(word)}{setting_values.close(word, known)}: "
        f"shipped are {', '.join(known) or 'none'}; your own goes by its path, FILE.toml"
    )


def _resolve_all(
    file: ProfileFile,
    path: Path,
    shown: str,
    options: Mapping[str, object],
    environ: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and origins of all settings, by key."""
    strange = set(options) - {setting.key for setting in SETTINGS}
    if strange:
        raise TypeError(f"no such settings: {sorted(strange)}")
    own = _in_file(file, path)
    resolved: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for setting in SETTINGS:
        key = setting.key
        resolved[key], origin[key] = _resolve(setting, options, environ, own[key], shown)
    if resolved["ckpt"] is None and file.checkpoint is not None:
        origin["ckpt"] = shown
    origin["config"] = origin["ckpt"]
    if resolved["threads"] == "auto":
        resolved["threads"] = setting_values.usable_cores()
    return resolved, origin


def _in_file(file: ProfileFile, path: Path) -> dict[str, object]:
    """The file's values by setting; its checkpoint directory is relative to the file."""
    own = file.checkpoint.path if file.checkpoint else None
    return {
        "ckpt": None if own is None else path.parent / setting_values.path(own),
        "threads": file.threads,
        "seed": file.seed,
        "out_dir": file.out_dir,
        "accumulate": file.numerics.accumulate,
        "backend": file.backend,
    }


def _resolve(
    setting: Setting,
    options: Mapping[str, object],
    environ: Mapping[str, str],
    in_file: object,
    shown: str,
) -> tuple[Any, str]:
    """Value and origin of one setting."""
    if options.get(setting.key) is not None:
        source = f"option {setting.option}"
        return _given(setting, options[setting.key], source), source
    if environ.get(setting.variable):
        source = f"environment {setting.variable}"
        return _given(setting, environ[setting.variable], source), source
    if in_file is not None:
        return in_file, shown
    return setting.default, "default"


def _given(setting: Setting, value: object, source: str) -> Any:
    """Parse a value from the command line or the environment. ProfileError names the source."""
    try:
        return setting.parse(setting_values.from_text(value) if setting.number else value)
    except ValueError as error:
        raise ProfileError(f"{source}: {error}, found {setting_values.short(value)}") from error


def _config(checkpoint: CheckpointSettings, ckpt: Path | None, path: Path) -> Path:
    """Path of the config.json: of the given checkpoint, or named by the file, or a shipped one."""
    if ckpt is not None:
        return ckpt / "config.json"
    own = setting_values.path(checkpoint.config or ".")
    if own.suffix == ".json":
        return path.parent / own
    return PACKAGE / "data" / f"{checkpoint.config}_config.json"


def _read_cases(file: ProfileFile, path: Path, shown: str) -> tuple[tuple[Case, ...], str]:
    """The cases of `cases_file` and then those of the profile, and their origin."""
    if file.cases_file is None:
        shared, shared_shown = shipped_directory() / CASES_FILE, f"profiles/{CASES_FILE}"
    else:
        shared = path.parent / setting_values.path(file.cases_file)
        shared_shown = str(Path(shown).parent / file.cases_file)
    cases = toml_files.read(shared, shared_shown, CasesFile).cases + file.cases
    for key in ("id", "file"):
        found = [getattr(case, key) for case in cases]
        twice = sorted({value for value in found if found.count(value) > 1})
        if twice:
            raise ProfileError(
                f"{shown}: cases: expected every {key} once, found {twice[0]} twice "
                f"(with those of {shared_shown})"
            )
    return cases, f"{shared_shown}, {shown}" if file.cases else shared_shown


def _with_ids(case: Case, tokenizer: Path | None) -> Case:
    """The case with its text encoded if it has no ids."""
    if case.input_ids or case.text is None:
        return case
    return case.model_copy(update={"input_ids": tuple(encode(case.text, tokenizer))})
