"""The fields of the DSpark draft head, which several architectures have (SPEC41 4 and 7)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel

from v4tool.config_fields import Size, SizeOrNone, wrong

if TYPE_CHECKING:
    from v4tool.config import ModelConfig

DSPARK_NAMES = {
    name: name
    for name in (
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
    )
}
"""Short name -> name in `config.json`."""


@dataclass(frozen=True)
class MarkovNames:
    """Below the last draft block: the modules of the Markov head's two matrices [V, R], and the key
    of the bias that they give; the key of the embedded row is `<embed>.out`.
    """

    embed: str
    head: str
    bias: str


class DSparkFields(BaseModel):
    """What a configuration says of its DSpark head: B tokens a step, T target layers, rank R."""

    markov: ClassVar[MarkovNames]

    dspark_block_size: Size
    dspark_noise_token_id: SizeOrNone
    dspark_target_layer_ids: tuple[SizeOrNone, ...]
    dspark_markov_rank: Size

    @property
    def draft_tokens(self) -> int:
        """Tokens that a draft block takes in a decode step."""
        return self.dspark_block_size


def kept_targets(c: DSparkFields, layers: Sequence[int]) -> list[int]:
    """Numbers of the target layers that are among these main layers, or of the last of these."""
    targets = [n for n, layer in enumerate(layers) if layer in c.dspark_target_layer_ids]
    return targets or [len(layers) - 1]


def check_targets(c: "ModelConfig") -> list[str]:
    """The draft reads main layers, and its placeholder token is one of the vocabulary."""
    assert isinstance(c, DSparkFields)
    if not c.n_mtp_layers:
        return []
    out = []
    ids = c.dspark_target_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[-1] >= c.n_layers:
        expected = f"ascending numbers of main layers (0 to {c.n_layers - 1})"
        out.append(wrong(c, "dspark_target_layer_ids", expected, list(ids)))
    if c.dspark_noise_token_id >= c.vocab_size:
        expected = f"a token id below vocab_size {c.vocab_size}"
        out.append(wrong(c, "dspark_noise_token_id", expected, c.dspark_noise_token_id))
    return out


def check_draft_ratios(c: "ModelConfig") -> list[str]:
    """There is a ratio for every block, and the drafts have a plain window."""
    needed, found = c.n_layers + c.n_mtp_layers, len(c.compress_ratios)
    if found < needed:
        what = f"{needed} entries ({c.n_layers} layers, then {c.n_mtp_layers} draft blocks)"
        return [wrong(c, "compress_ratios", what, found)]
    drafts = c.compress_ratios[c.n_layers :]
    if any(drafts):
        return [wrong(c, "compress_ratios", "0 for the draft blocks", list(drafts))]
    return []
