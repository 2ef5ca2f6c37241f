"""Cases given on the command line or to the API: a custom prompt, other decode steps.

Left out: the cases of a profile (`schema`), and parsing of token ids (`tokens`).
"""

from collections.abc import Sequence
from pathlib import Path

from v4tool.errors import InputError
from v4tool.profiles.schema import Case
from v4tool.profiles.tokens import encode


def custom_case(
    text: str | None, input_ids: Sequence[int] | None, tokenizer: Path | None = None
) -> Case:
    """The case `custom` with a text or token ids. InputError unless exactly one is given.

    tokenizer: see `encode`. `dump_cases` checks that the ids are in the vocabulary.
    """
    if text is not None and input_ids is not None:
        raise InputError("--text and --input-ids: expected one of them, found both")
    if text is None and not input_ids:
        raise InputError("--input-ids: expected at least one token id, found none")
    ids = encode(text, tokenizer) if text is not None else input_ids or ()
    return Case(id="custom", subject="given by the user", text=text, input_ids=tuple(ids))


def with_decode(case: Case, steps: int | None, ids: Sequence[int] = ()) -> Case:
    """The case with another number of decode steps and token ids for the first of them.

    steps: None for as many as there are ids; without ids, the case unchanged. InputError for a
    negative number, or more ids than steps.
    """
    if steps is None and not ids:
        return case
    if steps is not None and steps < 0:
        raise InputError(f"--decode: expected 0 or more steps, found {steps}")
    if steps is not None and len(ids) > steps:
        raise InputError(f"--decode {steps}: expected at most {steps} ids, found {len(ids)}")
    return case.model_copy(update={"decode": len(ids) if steps is None else steps,
                                   "decode_ids": tuple(ids)})  # fmt: skip
