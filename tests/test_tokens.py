"""Token ids: encoding, decoding, and parsing of ids given by a user."""

from pathlib import Path

import pytest

from v4tool.errors import CheckpointError, InputError
from v4tool.profiles import decode, encode, load, parse_ids, shipped_tokenizer, validate_ids

VOCABULARY = 129280


def test_encode_and_decode() -> None:
    assert encode("What is rain?") == [3085, 344, 9641, 33]
    assert decode([3085, 344, 9641, 33]) == "What is rain?"
    assert decode([]) == ""
    assert encode("<\uff5cUser\uff5c>hi")[0] == 128803  # a special token that is spelt out


def test_encode_adds_no_special_token() -> None:
    assert decode(encode("rain")) == "rain"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text: expected at least one token, found none in ''"),
        ("a\udcffb", r"text: expected Unicode, found '\udcff' at 1"),
    ],
)
def test_refused_text(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        encode(text)
    assert str(caught.value) == message


def test_decode_refuses_an_id_that_the_tokenizer_lacks() -> None:
    with pytest.raises(InputError, match=r"ids: position 1: .* to 129279, found 129280"):
        decode([1, VOCABULARY])


WORDS = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
"normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
"decoder": null, "model": {"type": "WordLevel", "vocab": {"rain": 0, "sun": 1, "?": 2},
"unk_token": "?"}}"""


def test_the_checkpoints_own_tokenizer_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(WORDS)
    assert encode("sun rain", tmp_path) == encode("sun rain", tmp_path / "tokenizer.json") == [1, 0]


def test_a_case_without_ids_is_encoded_with_the_checkpoints_own_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(WORDS)
    own = tmp_path / "own.toml"
    own.write_text('[checkpoint]\npath = "."\n[[cases]]\nid = "mine"\ntext = "rain"\n')
    assert load(own, options={}, environ={}).case("mine").input_ids == (0,)


def test_without_a_tokenizer_the_releases_is_used(tmp_path: Path) -> None:
    assert encode("What is rain?", tmp_path) == encode("What is rain?", shipped_tokenizer())


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer: "):
        encode("rain", tmp_path)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("1,2,3", (1, 2, 3)), ("[1, 2]", (1, 2)), (" 0 ,129279 ", (0, 129279)), ("7", (7,))],
)
def test_parse_ids(text: str, ids: tuple[int, ...]) -> None:
    assert parse_ids(text, VOCABULARY) == ids


@pytest.mark.parametrize(
    ("text", "position", "found"),
    [
        ("1,-2", 1, "-2"),
        ("129280", 0, "129280"),
        ("5,1.0", 1, "'1.0'"),
        ("[1,[2,3]]", 1, "'[2'"),
        ("1,,2", 1, "''"),
        ("1,2,", 2, "''"),
        ("1 2", 0, "'1 2'"),
        ("one", 0, "'one'"),
        ("+1", 0, "'+1'"),
        ("1_0", 0, "'1_0'"),
        ("0x1", 0, "'0x1'"),
        ("\u0663", 0, "'\u0663'"),
        ("9" * 5000, 0, "'" + "9" * 56 + "..."),
    ],
)
def test_refused_ids(text: str, position: int, found: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_ids(text, VOCABULARY)
    assert str(caught.value) == (
        f"--input-ids: position {position}: expected a whole number from 0 to 129279, found {found}"
    )


@pytest.mark.parametrize("text", ["", "  ", "[]", "[ ]"])
def test_no_ids_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--input-ids: expected at least one token id, found none"):
        parse_ids(text, VOCABULARY)


@pytest.mark.parametrize("value", [True, 1.0, None, "1", [1], -1, 320])
def test_validate_ids_names_place_position_and_value(value: object) -> None:
    with pytest.raises(InputError) as caught:
        validate_ids([0, value], 320, where="--decode-ids")
    assert str(caught.value) == (
        f"--decode-ids: position 1: expected a whole number from 0 to 319, found {value!r}"
    )


def test_validate_ids_takes_both_ends_of_the_vocabulary() -> None:
    assert validate_ids([0, 319], 320) == (0, 319)
