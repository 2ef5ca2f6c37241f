"""The shipped cases: texts and frozen ids, lengths, files, anchors (SPEC section 7)."""

from collections import Counter

import pytest

from v4tool.profiles import Case, Expect, available, decode, encode, load

RELEASE_VOCABULARY = 129280

# id, tokens, file: SPEC's three references first
SHARED = [
    ("baseline6", 6, "deepseek-v4-flash-vt.safetensors"),
    ("prompt32", 32, "deepseek-v4-flash-vt-prompt32.safetensors"),
    ("prompt129", 129, "deepseek-v4-flash-vt-prompt129.safetensors"),
    ("prompt3", 3, "deepseek-v4-flash-vt-prompt3.safetensors"),
    ("prompt4", 4, "deepseek-v4-flash-vt-prompt4.safetensors"),
    ("prompt127", 127, "deepseek-v4-flash-vt-prompt127.safetensors"),
    ("prompt128", 128, "deepseek-v4-flash-vt-prompt128.safetensors"),
    ("prompt2100", 2100, "deepseek-v4-flash-vt-prompt2100.safetensors"),
]

# id, input ids, what was published for the next token
DIVISION = (0, 128803, 7805, 418, 1353, 270, 1167, 28, 223, 11154, 26, 7203, 513, 223, 7833, 344)
TRANSLATE: tuple[int, ...] = (
    97520,
    304,
    55827,
    108780,
    7891,
    1137,
    24049,
    34788,
    588,
    5831,
    16276,
    305,
    6252,
)
TRANSLATE += (52636, 14, 790, 436, 990, 25532, 18180, 11265, 304, 270, 11868, 2968, 603, 70246, 28)
ANCHORS = [
    (
        "anchor-division",
        (*DIVISION, 128804, 128822),
        Expect(id=926, margin=8.5, runner_up=11154),
    ),
    (
        "anchor-7x8",
        (10375, 28, 1999, 344, 223, 25, 12, 26, 2755, 7805, 28),
        Expect(id=223, logprob=(-0.059, -0.056)),
    ),
    ("anchor-translate", TRANSLATE, Expect(id=223, logprob=(-0.043, -0.018))),
    (
        "anchor-france",
        (0, 128803, 671, 6102, 294, 8760, 344, 128804, 128822),
        Expect(id=671),
    ),
]


def shipped(profile: str) -> dict[str, Case]:
    """The cases of a shipped profile by id."""
    return {case.id: case for case in load(profile, options={}, environ={}).cases}


FLASH = shipped("flash")


def test_nano_has_the_shared_cases_and_flash_the_anchors_too() -> None:
    shared = [case_id for case_id, _, _ in SHARED]
    assert list(shipped("nano")) == shared
    assert list(FLASH) == shared + [case_id for case_id, _, _ in ANCHORS]


@pytest.mark.parametrize(("case_id", "tokens", "file"), SHARED)
def test_shared_case(case_id: str, tokens: int, file: str) -> None:
    case = FLASH[case_id]
    assert (len(case.input_ids), case.file) == (tokens, file)
    assert (case.decode, case.decode_ids, case.expect) == (0, (), None)
    assert case.subject


@pytest.mark.parametrize(("case_id", "ids", "expect"), ANCHORS)
def test_anchor(case_id: str, ids: tuple[int, ...], expect: Expect) -> None:
    assert FLASH[case_id].input_ids == ids
    assert FLASH[case_id].expect == expect
    assert expect.within == 0.5  # nats: other engines' kernels allow no tighter claim


@pytest.mark.parametrize("case_id", FLASH)
def test_frozen_ids_are_what_the_release_tokenizer_gives(case_id: str) -> None:
    case = FLASH[case_id]
    assert case.text is not None
    assert tuple(encode(case.text)) == case.input_ids
    assert decode(case.input_ids) == case.text
    assert max(case.input_ids) < RELEASE_VOCABULARY


def test_baseline6_is_the_published_prompt() -> None:
    assert FLASH["baseline6"].text == "你好，简单介绍一下你自己。"  # noqa: RUF001
    assert FLASH["baseline6"].input_ids == (30594, 303, 6573, 70979, 36005, 320)


def test_expected_ids_of_the_anchors_read_as_published() -> None:
    assert {token: decode([token]) for token in (926, 11154, 223, 671)} == {
        926: "16",
        11154: "204",
        223: " ",
        671: "The",
    }


def test_cases_of_two_profiles_never_differ() -> None:
    seen: dict[str, Case] = {}
    for profile in available():
        for case_id, case in shipped(profile).items():
            assert seen.setdefault(case_id, case) == case, f"{profile}: {case_id}"


def test_ids_files_and_texts_are_distinct() -> None:
    for key in ("file", "text", "input_ids"):
        values = [getattr(case, key) for case in FLASH.values()]
        assert len(set(values)) == len(values), key


def test_prompt2100_is_longer_than_the_indexer_keeps() -> None:
    assert len(FLASH["prompt2100"].input_ids) // 4 == 525  # complete blocks; index_topk is 512


@pytest.mark.parametrize("case_id", ["prompt127", "prompt128", "prompt129", "prompt2100"])
def test_the_long_prompt_does_not_repeat_itself(case_id: str) -> None:
    """No run of eight tokens comes twice: a text that repeats itself would exercise less."""
    ids = FLASH[case_id].input_ids
    runs = Counter(ids[start : start + 8] for start in range(len(ids) - 7))
    assert runs.most_common(1)[0][1] == 1
