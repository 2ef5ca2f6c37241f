"""Profiles: precedence of sources, shipped profiles, cases of a file."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from v4tool.errors import ProfileError
from v4tool.profiles import Profile, available, load, shipped_directory, usable_cores


def profile_file(directory: Path, text: str) -> Path:
    """A profile of the user's own."""
    path = directory / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def settle(
    name_or_file: str | Path | None = None,
    options: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Profile:
    """`load` with nothing given unless the test gives it."""
    return load(name_or_file, options=options or {}, environ=environ or {})


# ---- which source wins

# key, option, value of each of the four sources as given, and what each becomes
SOURCES = [
    (
        "threads",
        "--threads",
        (3, "5", "threads = 7"),
        (3, 5, 7, usable_cores()),
    ),
    ("seed", "--seed", (1, "2", "seed = 4"), (1, 2, 4, 0)),
    (
        "out_dir",
        "--out",
        ("by-option", "by-environment", 'out_dir = "by-file"'),
        (Path("by-option"), Path("by-environment"), Path("by-file"), Path("activations")),
    ),
    (
        "accumulate",
        "--accumulate",
        ("float32", "float32", '[numerics]\naccumulate = "float32"'),
        ("float32", "float32", "float32", "float64"),
    ),
    (
        "backend",
        "--backend",
        ("c", "numpy", 'backend = "readable"'),
        ("c", "numpy", "readable", "auto"),
    ),
    (
        "ckpt",
        "--ckpt",
        (Path("/by/option"), "/by/environment", '[checkpoint]\npath = "/by/file"'),
        (Path("/by/option"), Path("/by/environment"), Path("/by/file"), None),
    ),
]


@pytest.mark.parametrize(("key", "option", "given", "expected"), SOURCES)
def test_option_over_environment_over_file_over_default(
    tmp_path: Path, key: str, option: str, given: tuple[object, str, str], expected: tuple[object]
) -> None:
    by_option, by_environment, by_file = given
    variable = f"V4TOOL_{key.upper()}"
    own, bare = profile_file(tmp_path, by_file), tmp_path / "bare.toml"
    bare.write_text("")
    options, environ = {key: by_option}, {variable: by_environment}
    found = [
        settle(own, options, environ),
        settle(own, {key: None}, environ),
        settle(own, {}, {variable: ""}),
        settle(bare),
    ]
    assert [getattr(profile, key) for profile in found] == list(expected)
    assert [profile.origin[key] for profile in found] == [
        f"option {option}",
        f"environment {variable}",
        str(own),
        "default",
    ]


def test_zero_counts_as_set(tmp_path: Path) -> None:
    own = profile_file(tmp_path, "seed = 0\n")
    assert settle(own).origin["seed"] == str(own)
    by_option = settle(own, {"seed": 0}, {"V4TOOL_SEED": "3"})
    assert (by_option.seed, by_option.origin["seed"]) == (0, "option --seed")


def test_profile_comes_from_option_environment_or_default(tmp_path: Path) -> None:
    environ = {"V4TOOL_PROFILE": "flash"}
    own = profile_file(tmp_path, "")
    cases = [
        (settle("nano", environ=environ), "nano", "option --profile"),
        (settle(own, environ=environ), "own", "option --profile"),
        (settle(str(own)), "own", "option --profile"),
        (settle(environ=environ), "flash", "environment V4TOOL_PROFILE"),
        (settle(environ={"V4TOOL_PROFILE": str(own)}), "own", "environment V4TOOL_PROFILE"),
        (settle(), "nano", "default"),
    ]
    for profile, name, origin in cases:
        assert (profile.name, profile.origin["profile"]) == (name, origin)


def test_settings_list_every_value_with_its_origin() -> None:
    rows = settle("flash", {"threads": 2}, {"V4TOOL_SEED": "9"}).settings()
    assert ("threads", "2", "option --threads") in rows
    assert ("seed", "9", "environment V4TOOL_SEED") in rows
    assert ("accumulate", "float64", "profiles/flash.toml") in rows
    assert ("cases", "12 cases", "profiles/cases.toml, profiles/flash.toml") in rows
    place = "deepseek-ai/DeepSeek-V4-Flash at main, from the local Hugging Face cache"
    assert ("ckpt", place, "profiles/flash.toml") in rows
    assert sorted(row[0] for row in rows) == sorted(settle("flash").origin)


def test_auto_threads_are_the_usable_cores() -> None:
    assert settle("nano").threads == usable_cores() >= 1
    assert settle("nano", {"threads": "auto"}, {"V4TOOL_THREADS": "7"}).threads == usable_cores()


def test_paths_in_a_file_are_relative_to_it_and_out_dir_is_not(tmp_path: Path) -> None:
    text = 'out_dir = "out"\n[checkpoint]\npath = "weights"\n'
    profile = settle(profile_file(tmp_path, text))
    assert profile.ckpt == tmp_path / "weights"
    assert profile.config == tmp_path / "weights" / "config.json"
    assert profile.out_dir == Path("out")


def test_own_config_is_relative_to_the_file(tmp_path: Path) -> None:
    text = '[checkpoint]\nconfig = "tiny/config.json"\nsynth = true\n'
    assert settle(profile_file(tmp_path, text)).config == tmp_path / "tiny" / "config.json"


# ---- what is shipped


def test_shipped_profiles() -> None:
    assert available() == ["flash", "nano"]
    assert all((shipped_directory() / f"{name}.toml").is_file() for name in available())


@pytest.mark.parametrize("name", ["flash", "nano"])
def test_shipped_profile_is_bit_exact_by_default_and_has_its_config(name: str) -> None:
    profile = settle(name)
    assert (profile.accumulate, profile.backend, profile.seed) == ("float64", "auto", 0)
    assert profile.out_dir == Path("activations") / name
    assert profile.config.is_file()
    assert profile.config.name == f"{name}_config.json"
    assert profile.summary


def test_what_is_loaded_is_frozen() -> None:
    profile = settle("flash")
    anchor = profile.case("anchor-7x8")
    for model, field in [
        (profile, "threads"),
        (profile.checkpoint, "repo"),
        (anchor, "input_ids"),
        (anchor.expect, "id"),
    ]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(model, field, 1)
    with pytest.raises(TypeError):
        profile.origin["threads"] = "elsewhere"  # type: ignore[index]
    assert isinstance(profile.cases, tuple)
    assert isinstance(anchor.input_ids, tuple)


def test_a_resolved_profile_can_be_written_as_json_and_copied() -> None:
    profile = settle("nano", {"threads": 2})
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


# ---- cases of a file


def test_unknown_case_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError) as caught:
        settle("nano").case("promt32")
    assert str(caught.value) == (
        "unknown case 'promt32' (did you mean prompt32?): profile nano has baseline6, prompt32, "
        "prompt129, prompt3, prompt4, prompt127, prompt128, prompt2100"
    )


def test_own_cases_follow_the_shared_ones(tmp_path: Path) -> None:
    profile = settle(profile_file(tmp_path, '[[cases]]\nid = "mine"\ninput_ids = [5, 6]\n'))
    assert [case.id for case in profile.cases][-2:] == ["prompt2100", "mine"]
    assert profile.case("mine").file == "deepseek-v4-flash-vt-mine.safetensors"
    assert profile.case("mine").text is None


def test_own_cases_file_replaces_the_shared_ones(tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text('[[cases]]\nid = "one"\ninput_ids = [1]\n')
    profile = settle(profile_file(tmp_path, 'cases_file = "few.toml"\n'))
    assert [case.id for case in profile.cases] == ["one"]
    assert profile.origin["cases"] == str(tmp_path / "few.toml")


def test_text_without_ids_is_encoded(tmp_path: Path) -> None:
    profile = settle(profile_file(tmp_path, '[[cases]]\nid = "mine"\ntext = "What is rain?"\n'))
    assert profile.case("mine").input_ids == (3085, 344, 9641, 33)


def test_fixed_decode_ids_set_the_number_of_steps(tmp_path: Path) -> None:
    text = '[[cases]]\nid = "mine"\ninput_ids = [1]\ndecode_ids = [7, 8, 9]\n'
    case = settle(profile_file(tmp_path, text)).case("mine")
    assert (case.decode, case.decode_ids) == (3, (7, 8, 9))
