"""Invalid profiles: one line with source, key, expected and found."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from v4tool.errors import ProfileError
from v4tool.profiles import load

MAKES = '[checkpoint]\nconfig = "nano"\nsynth = true\n'


def profile_file(directory: Path, text: str) -> Path:
    """A profile of the user's own."""
    path = directory / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(
    name_or_file: str | Path | None = None,
    options: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """The one line that refuses a profile."""
    with pytest.raises(ProfileError) as caught:
        load(name_or_file, options=options or {}, environ=environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def case_text(line: str) -> str:
    return f'[[cases]]\nid = "mine"\n{line}\n'


THREADS = 'expected a whole number from 1 to 1024 or "auto"'
SEED = "expected a whole number from 0 to 9223372036854775807"
REFUSED = [
    ("thread = 3", "thread: unknown key (did you mean threads?), known are summary, threads, seed"),
    ("[numerics]\nprecision = 1", "numerics.precision: unknown key, known are accumulate"),
    (f"{MAKES}rpo = 'x/y'", "checkpoint.rpo: unknown key (did you mean repo?), known are config"),
    (case_text("ids = [1]"), "cases.mine.ids: unknown key (did you mean id?), known are id, subje"),
    (
        case_text("input_ids = [1]\nexpect = {id = 1, withn = 1.0}"),
        "cases.mine.expect.withn: unknown key (did you mean within?), known are id, logprob, m",
    ),
    ("threads = 0", f"threads: {THREADS}, found 0"),
    ("threads = 1025", f"threads: {THREADS}, found 1025"),
    ("threads = '4'", f"threads: {THREADS}, found '4'"),
    ("threads = true", f"threads: {THREADS}, found True"),
    ("threads = 2.0", f"threads: {THREADS}, found 2.0"),
    ("seed = -1", f"seed: {SEED}, found -1"),
    ("seed = 9223372036854775808", f"seed: {SEED}, found 9223372036854775808"),
    ("seed = '1'", f"seed: {SEED}, found '1'"),
    ("out_dir = ''", "out_dir: expected a path, found ''"),
    ("out_dir = 3", "out_dir: expected a path, found 3"),
    ("backend = 'gpu'", "backend: expected one of auto, readable, numpy, c, found 'gpu'"),
    ("summary = 3", "summary: expected a valid string, found 3"),
    (
        "[numerics]\naccumulate = 'bfloat16'",
        "numerics.accumulate: expected one of float64, float32, found 'bfloat16'",
    ),
    ("numerics = 3", "numerics: expected a table, found 3"),
    ("[checkpoint]\nsynth = true", "checkpoint: expected config or path, found neither"),
    (f"{MAKES}path = 'x'", "checkpoint: expected at most one of path, synth and repo"),
    (
        "[checkpoint]\nconfig = 'nano'\nsynth = 'yes'",
        "checkpoint.synth: expected a valid boolean, found 'yes'",
    ),
    (
        "[checkpoint]\nconfig = 'nano'\nrepo = 'flash'",
        "checkpoint.repo: expected a repository ORGANISATION/NAME, found 'flash'",
    ),
    ("cases = 3", "cases: expected a list, found 3"),
    ("cases = ['a']", "cases.0: expected a table, found 'a'"),
    ("[[cases]]\ntext = 'a'", "cases.0.id: missing"),
    (
        "[[cases]]\nid = 'A b'\ntext = 'a'",
        "cases.A b.id: expected small letters, digits and - _ ., found 'A b'",
    ),
    (case_text(""), "cases.mine: expected text or at least one of input_ids, found neither"),
    (case_text("text = ''"), "cases.mine.text: expected to have at least 1 character, found ''"),
    (
        case_text("text = 'a'\ninput_ids = []"),
        "cases.mine: expected at least one of input_ids, found none",
    ),
    (
        case_text("input_ids = [1, -2]"),
        "cases.mine.input_ids.1: expected a whole number from 0 up, found -2",
    ),
    (
        case_text("input_ids = [1.0]"),
        "cases.mine.input_ids.0: expected a whole number from 0 up, found 1.0",
    ),
    (
        case_text("input_ids = [[1]]"),
        "cases.mine.input_ids.0: expected a whole number from 0 up, found [1]",
    ),
    (case_text("input_ids = '1'"), "cases.mine.input_ids: expected a list, found '1'"),
    (
        case_text("input_ids = [1]\ndecode = -1"),
        "cases.mine.decode: expected a whole number from 0 up, found -1",
    ),
    (
        case_text("input_ids = [1]\ndecode = 3\ndecode_ids = [1]"),
        "cases.mine: expected as many decode_ids as decode steps, found 1 ids for 3 steps",
    ),
    (
        case_text("input_ids = [1]\nfile = '../x.safetensors'"),
        "cases.mine.file: expected a bare file name ending in .safetensors, "
        "found '../x.safetensors'",
    ),
    (
        case_text("input_ids = [1]\nexpect = {id = 1, logprob = [-1.0, -2.0]}"),
        "cases.mine.expect: expected logprob = [lowest, highest], neither above 0",
    ),
    (
        case_text("input_ids = [1]\nexpect = {id = 1, margin = 2.0}"),
        "cases.mine.expect: expected margin and runner_up together",
    ),
    (
        case_text("input_ids = [1]\nexpect = {id = 1, within = 0.0}"),
        "cases.mine.expect: expected margin from 0 up and within above 0",
    ),
    (
        case_text("input_ids = [1]\nexpect = {id = 1, within = nan}"),
        "cases.mine.expect.within: expected a finite number, found nan",
    ),
    ("[[cases]]\nid = 'baseline6'\ninput_ids = [1]", "cases: expected every id once, found base"),
    (
        case_text("input_ids = [1]\nfile = 'deepseek-v4-flash-vt.safetensors'"),
        "cases: expected every file once, found deepseek-v4-flash-vt.safetensors twice",
    ),
    ("x = = 3", "not valid TOML: Invalid value (at line 1, column 5)"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused_file(tmp_path: Path, text: str, message: str) -> None:
    path = profile_file(tmp_path, text)
    assert refusal(path).startswith(f"{path}: {message}")


def test_several_errors_are_counted(tmp_path: Path) -> None:
    assert refusal(profile_file(tmp_path, "threads = 0\nthread = 3")).endswith("(and 1 more)")


def test_refused_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = profile_file(tmp_path, 'cases_file = "none.toml"')
    assert refusal(path) == f"{tmp_path / 'none.toml'}: cannot be read: No such file or directory"
    path.write_bytes(b"summary = '\xff'")
    assert refusal(path) == f"{path}: expected UTF-8, found none at byte 11"


def test_a_refused_case_of_a_shared_file_names_that_file(tmp_path: Path) -> None:
    shared = tmp_path / "few.toml"
    shared.write_text(case_text("input_ids = [true]"))
    line = refusal(profile_file(tmp_path, 'cases_file = "few.toml"'))
    assert (
        line == f"{shared}: cases.mine.input_ids.0: expected a whole number from 0 up, found True"
    )


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("threads", "0"),
        ("threads", "two"),
        ("threads", "1.5"),
        ("threads", "\u0663"),
        ("seed", "-1"),
        ("seed", "1e3"),
        ("seed", "1_000"),
        ("out_dir", " "),
        ("accumulate", "f64"),
        ("backend", "C"),
        ("ckpt", "a\0b"),
    ],
)
def test_refused_option_and_variable(key: str, text: str) -> None:
    variable = f"V4TOOL_{key.upper()}"
    by_environment = refusal("nano", environ={variable: text})
    assert by_environment.startswith(f"environment {variable}: expected ")
    assert by_environment.endswith(f", found {text!r}")
    option = {"out_dir": "--out"}.get(key, f"--{key}")
    by_option = refusal("nano", options={key: text})
    assert by_option == by_environment.replace(f"environment {variable}", f"option {option}")


def test_unknown_profile_lists_the_shipped_ones(tmp_path: Path) -> None:
    listed = "shipped are flash, nano; your own goes by its path, FILE.toml"
    assert refusal("nan") == (
        f"option --profile: unknown profile 'nan' (did you mean nano?): {listed}"
    )
    assert refusal(environ={"V4TOOL_PROFILE": "xyz"}) == (
        f"environment V4TOOL_PROFILE: unknown profile 'xyz': {listed}"
    )
    assert refusal("~nobody-there/own.toml") == (
        "option --profile: expected a path whose ~ is the home of a known user, "
        "found '~nobody-there/own.toml'"
    )
    for missing in (tmp_path / "none.toml", tmp_path, tmp_path / ("x" * 300 + ".toml")):
        assert refusal(missing) == (
            f"option --profile: expected a profile's file, found none at {missing}"
        )


def test_a_setting_that_does_not_exist_is_the_callers_error() -> None:
    with pytest.raises(TypeError, match="thread"):
        load("nano", options={"thread": 3}, environ={})
