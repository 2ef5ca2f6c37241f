"""Steps of a map's rule as text, and the sizes that they are written in.

A step is a line of words, for instance `reshape 1,s,H*HD` or `take -1 -R:` (docs/diff.md has them
all). Sizes are sums of products of numbers and letters: those of `model.vt`, and those of the pass:
`s` tokens, `t` compressed blocks that the pass completes, `k` blocks that each token may see (the
indexer's choice), `w` columns of the window, `n` = w + k columns of an index table, `o` the row at
which compressed blocks begin. Left out: applying steps to tensors (`layout`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from v4tool.config import ModelConfig
from v4tool.names import Step as Pass
from v4tool.names import complete_blocks, selected_columns, table_offset, window_columns


@dataclass(frozen=True)
class Sizes:
    """The values of the letters. expert: the routed expert whose rows are asked for, or None."""

    letters: Mapping[str, int]
    expert: int | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, step: Pass, ratio: int = 0, expert: int | None = None
    ) -> "Sizes":
        """The sizes of a model in one pass, in a layer with this compression ratio."""
        window, seen = window_columns(config, step), selected_columns(config, step, ratio)
        letters = {
            "D": config.dim,
            "M": config.hc_mult,
            "H": config.n_heads,
            "HD": config.head_dim,
            "R": config.rope_head_dim,
            "QL": config.q_lora_rank,
            "OL": config.o_lora_rank,
            "G": config.o_groups,
            "IH": config.index_n_heads,
            "ID": config.index_head_dim,
            "I": config.moe_inter_dim,
            "E": config.n_routed_experts,
            "K": config.n_activated_experts,
            "V": config.vocab_size,
            "W": config.window_size,
            "s": step.tokens,
            "t": complete_blocks(step, ratio) if ratio else 0,
            "k": seen,
            "w": window,
            "n": window + seen,
            "o": table_offset(config, step),
        }
        return cls(letters, expert)

    def value(self, text: str) -> int:
        """The number that an expression stands for; ValueError where it is none."""
        terms = re.findall(r"([+-]?)([^+-]+)", text)
        if not terms or "".join(sign + term for sign, term in terms) != text:
            raise ValueError(f"expected a sum of products of numbers and letters, found {text!r}")
        total = 0
        for sign, term in terms:
            product = -1 if sign == "-" else 1
            for factor in term.split("*"):
                product *= self.letters[factor] if factor in self.letters else int(factor)
            total += product
        return total


@dataclass(frozen=True)
class Step:
    """One step: its verb and its arguments as written."""

    verb: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.verb, *self.arguments))

    @property
    def other(self) -> str | None:
        """The name of the other tensor that the step needs."""
        at = OTHER_TENSOR.get(self.verb)
        return None if at is None else self.arguments[at]

    def with_other(self, name: str) -> "Step":
        """The same with another tensor's name."""
        at = OTHER_TENSOR[self.verb]
        return Step(self.verb, (*self.arguments[:at], name, *self.arguments[at + 1 :]))


ARGUMENTS = {
    "reshape": (1,),
    "transpose": (1,),
    "squeeze": (1,),
    "take": (2,),
    "split": (2,),
    "append": (2, 3),
    "prepend": (2, 3),
    "after": (2,),
    "rows": (1,),
    "indices": (1,),
    "unmasked": (1,),
    "sorted": (1,),
    "deinterleave": (1,),
    "heads": (0,),
    "offset": (1,),
}
"""Verb -> numbers of words that may follow it."""
OTHER_TENSOR = {"append": 1, "prepend": 1, "after": 1, "rows": 0, "unmasked": 0}
"""Verb -> which word names another tensor of the candidate."""


def parse_step(text: str) -> Step:
    """A step from its words; ValueError where the verb or the number of words is wrong."""
    verb, *arguments = text.split() or [""]
    if verb not in ARGUMENTS:
        raise ValueError(f"expected one of {', '.join(ARGUMENTS)}, found {verb!r}")
    allowed = ARGUMENTS[verb]
    if len(arguments) not in allowed:
        numbers = " or ".join(map(str, allowed))
        raise ValueError(f"{verb}: expected {numbers} words, found {len(arguments)}")
    return Step(verb, tuple(arguments))


def is_empty(steps: Iterable[Step], sizes: Sizes) -> bool:
    """Whether the steps leave no element, as in a pass that completes no compressed block."""
    for step in steps:
        if step.verb == "reshape" and any(_is_zero(x, sizes) for x in step.arguments[0].split(",")):
            return True
        if step.verb in ("sorted", "indices") and _is_zero(step.arguments[0], sizes):
            return True
        if step.verb == "take" and step.arguments[1].startswith("0:"):
            stop = step.arguments[1].removeprefix("0:")
            if stop and _is_zero(stop, sizes):
                return True
    return False


def _is_zero(text: str, sizes: Sizes) -> bool:
    try:
        return sizes.value(text) == 0
    except ValueError:
        return False
