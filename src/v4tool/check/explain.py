"""Coverage of the identities: the keys each one covers, and the keys that only weights can check.

Counted on the keys that configuration, prompt length and decode steps require; no file is needed.
Routed experts count once per layer and pass, as `experts.<E>`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from v4tool.check.rules import RULES, Needs, Rule
from v4tool.config import ModelConfig
from v4tool.names import has_indexer, layer_of, pass_of, recording_keys

PARTLY = "same in, same out"
"""Compares only rows whose inputs are equal, so a key is not counted as covered by it."""


@dataclass(frozen=True)
class Explained:
    """One identity. keys: how many it covers; covers: suffixes of their names."""

    id: str
    says: str
    needs: Needs
    keys: int
    covers: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """All identities; only_weights: keys that none covers without the checkpoint, suffix -> count.

    keys: how many keys the recording has in all.
    """

    identities: list[Explained]
    only_weights: dict[str, int]
    keys: int


def explain(
    config: ModelConfig, length: int, decode: int = 0, *, mtp: bool | None = None
) -> Explanation:
    """The identities of a recording of `length` tokens and `decode` steps."""
    config.architecture.require("check")
    mtp = config.mtp_supported if mtp is None else mtp
    keys = recording_keys(config, length, decode, mtp=mtp)
    rules = [rule for rule in RULES.values() if rule.family in ("identity", "weights")]
    without_weights = [rule for rule in rules if rule.family == "identity" and rule.id != PARTLY]
    counts, only_weights = Counter[str](), Counter[str]()
    for key, spec in keys.items():
        counts.update(rule.id for rule in rules if covers(rule, key, config))
        if spec.kind != "int" and not any(covers(rule, key, config) for rule in without_weights):
            only_weights[_shown(set(names_of(key, config)))] += 1
    rows = [Explained(r.id, r.says, r.needs, counts[r.id], r.covers) for r in rules]
    return Explanation(rows, dict(only_weights.most_common()), len(keys))


def covers(rule: Rule, key: str, config: ModelConfig) -> bool:
    """Whether a rule covers a key; an expert's key has `<E>` for its number."""
    if rule.covers == ("*",):
        return not key.endswith("input_ids")
    return _applies(rule, key, config) and not set(rule.covers).isdisjoint(names_of(key, config))


def _applies(rule: Rule, key: str, config: ModelConfig) -> bool:
    """Whether the rule applies to the key's block and pass (`Rule.only`)."""
    prefix, layer = pass_of(key), layer_of(key)
    is_mtp = prefix.startswith("mtp.")
    ratio = config.ratio(config.n_layers if is_mtp else layer or 0)
    return {
        "": True,
        "compressed": ratio > 0,
        "ratio 4": has_indexer(ratio),
        "ratio 128": ratio > 0 and not has_indexer(ratio),
        "hash": layer is not None and config.is_hash(layer),
        "later passes": "decode." in prefix,
        "main": not is_mtp,
    }[rule.only]


def _shown(names: set[str]) -> str:
    """The shortest of a key's names, for the table."""
    return min(names, key=len)


def names_of(key: str, config: ModelConfig) -> Iterator[str]:
    """The names by which rules refer to a key: its suffix after pass and layer.

    Where a rule distinguishes keys with the same suffix, the name says which one is meant
    (`main.embed.out`, `layers.<last>.out`, `score.ffn.gate.out.0`).
    """
    prefix, layer = pass_of(key), layer_of(key)
    name = key.removeprefix(prefix)
    if layer is None:
        yield f"mtp.{name}" if prefix.startswith("mtp.") else f"main.{name}"
        layer = config.n_layers
    else:
        name = name.split(".", 2)[2]
        if name == "out":
            yield from _names_of_streams(prefix, last=layer == config.n_layers - 1)
            return
    if name.startswith("attn.rope.rot.") and _of_compressor(name, config.ratio(layer)):
        yield "attn.rope.rot.<last>.out"
        return
    if name == "ffn.gate.out.0" and not config.is_hash(layer):
        yield "score.ffn.gate.out.0"
    yield name


def _names_of_streams(prefix: str, *, last: bool) -> Iterator[str]:
    """The names of a layer's `out`: MTP's input is that of the last layer of the prefill."""
    yield "layers.<n>.out"
    if not last:
        yield "layers.<inner>.out"
    elif not prefix:
        yield "layers.<last>.out"


def _of_compressor(name: str, ratio: int) -> bool:
    """Whether `attn.rope.rot.<n>.out` is the main compressor's, which follows the indexer's two."""
    number = int(name.split(".")[-2])
    return (number == 2 and not has_indexer(ratio)) or number == 4
