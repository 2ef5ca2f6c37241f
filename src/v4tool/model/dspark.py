"""DSpark draft head: draft blocks beside the main stack's passes (SPEC41 sections 4 and 7).

In a prefill each block only fills its window ring with rows of the prompt; in a decode step the
blocks take B tokens at the positions after the step's own, and the head drafts B tokens one after
the other. What differs between architectures is in `Parts`.

T tokens of the batch, n segments, B tokens of a draft, M streams, D dim, V vocabulary, R rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v4tool.config_dspark import DSparkFields
from v4tool.model.attention import attend, output, store_window
from v4tool.model.block import EMBEDDING, Attention, embed
from v4tool.model.compress import Rotary
from v4tool.model.head import MATRIX, arg_max, last_rows, logits, main_head
from v4tool.model.layers import by_tokens, ordered_sum
from v4tool.model.port import Streams
from v4tool.model.scope import Scope, Segment
from v4tool.model.sequence import LayerRange, Sequence, Watch
from v4tool.names import Step
from v4tool.names_dspark import draft_blocks, draft_step
from v4tool.quant.activation import to_bf16
from v4tool.quant.linear import linear_hi


@dataclass(frozen=True)
class Parts:
    """What an architecture's draft blocks are made of.

    enter, block: as the main stack's, the block with another attention; queries: BF16 [T, H, C];
    rows: window rows BF16 [T, C], the last argument is the ending of their recorded names;
    collapse: the streams after the last block -> BF16 [T, D].
    """

    enter: Callable[[Tensor], Streams]
    block: Callable[[Scope, Streams, int, Attention], Streams]
    queries: Callable[[Scope, Tensor, Rotary], Tensor]
    rows: Callable[[Scope, Tensor, Rotary, str], Tensor]
    collapse: Callable[[Scope, Streams], Tensor]
    large_weights: Callable[[int], tuple[str, ...]]


def fields(scope: Scope) -> DSparkFields:
    """The head's fields of the configuration."""
    assert isinstance(scope.config, DSparkFields)
    return scope.config


def stream_mean(scope: Scope, x_TMD: Tensor) -> Tensor:
    """Mean over the streams, summed in acc: BF16 [T, M, D] -> BF16 [T, D]."""

    def mean(x: Tensor) -> Tensor:
        return to_bf16(ordered_sum(x.to(scope.acc), 1) / x.shape[1])

    return by_tokens(mean, x_TMD, threads=scope.threads)


def tap_streams(scope: Scope, streams: Streams, layer: int) -> Streams:
    """Note the mean of the streams if the head reads them at this layer."""
    if layer not in fields(scope).dspark_target_layer_ids:
        return streams
    return replace(streams, tapped=(*streams.tapped, stream_mean(scope, streams.x)))


def main_input(scope: Scope, streams: Streams) -> Tensor:
    """What the draft blocks see of the main stack: BF16 [T, D]."""
    head = scope / "mtp"
    hidden = head.tap("main_hidden", torch.cat(streams.tapped, dim=1))
    first = head / "0"
    return first.tap("main_norm.out", first.norm("main_norm", first.linear("main_proj", hidden)))


def fill_window(parts: Parts, scope: Scope, main_TD: Tensor, layer: int) -> Rotary:
    """Put the main stack's positions into a draft block's ring; scope: the block's attention with
    the main stack's segments. Returns the block's rotary embedding.
    """
    rotary = Rotary(scope, scope.config.ratio(layer))
    rows = parts.rows(scope, main_TD, rotary, ".main")
    for segment, rows_sC in scope.parts(rows):
        store_window(segment.state(layer), segment.step, rows_sC, scope.config.window_size)
    return rotary


def draft_table(step: Step, window: int) -> Tensor:
    """Index table of a draft: the ring's written rows, then all of the draft's own: I32 [B, m]."""
    ring = torch.arange(min(window, step.start))
    own = torch.arange(window, window + step.tokens)
    return torch.cat([ring, own]).to(torch.int32).repeat(step.tokens, 1)


def draft_attention(parts: Parts, main: tuple[Segment, ...], main_TD: Tensor) -> Attention:
    """A draft block's attention, over its ring and its own rows; main: the segments of the step."""

    def attention(scope: Scope, x_TD: Tensor, layer: int) -> Tensor:
        window = scope.config.window_size
        rotary = fill_window(parts, replace(scope, segments=main), main_TD, layer).on(scope)
        q, kv = parts.queries(scope, x_TD, rotary), parts.rows(scope, x_TD, rotary, "")
        sink = scope.weight("attn_sink").to(scope.acc)
        heads = []
        for segment, q_s, kv_s in scope.parts(q, kv):
            ring = segment.state(layer).window
            assert ring is not None
            table = draft_table(segment.step, window)
            heads.append(attend(scope, segment, q_s, torch.cat([ring, kv_s]), table, sink))
        return output(scope, torch.cat(heads), rotary)

    return attention


def draft_segments(scope: Scope, sequences: list[Sequence], tokens: list[int]) -> Scope:
    """Scope of the drafts of a step: each sequence's token, then placeholders."""
    size, noise = fields(scope).dspark_block_size, fields(scope).dspark_noise_token_id
    segments = tuple(
        sequence.segment(draft_step(scope.config, main.step), [token] + [noise] * (size - 1))
        for sequence, main, token in zip(sequences, scope.segments, tokens, strict=True)
    )
    drafts = replace(scope / "mtp", segments=segments)
    for segment in segments:
        drafts.tap_for(segment, "input_ids", segment.ids.unsqueeze(0))
    return drafts


def draft(parts: Parts, scope: Scope, drafts: Scope, main_TD: Tensor) -> None:
    """All draft blocks and the head of a decode step; scope: the step's, drafts: their own."""
    config, blocks = scope.config, draft_blocks(scope.config)
    embedded = embed(drafts, EMBEDDING)
    streams = parts.enter(embedded.unsqueeze(1).repeat(1, config.hc_mult, 1))
    attention = draft_attention(parts, scope.segments, main_TD)
    for layer in blocks:
        upcoming = parts.large_weights(layer + 1) if layer + 1 in blocks else ()
        place = replace(drafts / str(layer - config.n_layers), upcoming=upcoming)
        streams = parts.block(place, streams, layer, attention)
        place.tap("out", streams.x)
    head(drafts, place, parts.collapse(place, streams))


def head(drafts: Scope, place: Scope, y_TD: Tensor) -> None:
    """The drafted tokens and their confidence; drafts: scope of the head, place: the last block's;
    y BF16 [T, D].
    """
    place.tap("hidden", y_TD)
    normed = place.tap("norm.out", place.norm("norm", y_TD))
    plain = place.tap("head.out", logits(place, normed, MATRIX))
    size, count = fields(place).dspark_block_size, len(place.segments)
    biased, embedded, ids = markov(drafts, place, plain.unflatten(0, (count, size)))
    for segment, own in zip(drafts.segments, ids, strict=True):
        drafts.tap_for(segment, "output_ids", torch.tensor([own]))
    drafts.tap("logits.out", biased.flatten(0, 1))
    confidence(place, y_TD, embedded.flatten(0, 1))


def markov(
    drafts: Scope, place: Scope, plain_nBV: Tensor
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Each token's logits get a bias by the token before it, which is drafted first.

    Returns biased logits acc [n, B, V], the embedded rows BF16 [n, B, R], and ids [n, B + 1].
    """
    names = fields(place).markov
    ids = [[segment_ids[0]] for segment_ids in drafts.ids.view(len(plain_nBV), -1).tolist()]
    rows, biases, results = [], [], []
    for i in range(plain_nBV.shape[1]):
        before = torch.tensor([own[-1] for own in ids])
        rows.append(place.weights.gather_rows(f"{place.path}{names.embed}.weight", before))
        biases.append(logits(place, rows[-1], f"{place.path}{names.head}.weight"))
        results.append(plain_nBV[:, i] + biases[-1])
        for own, token in zip(ids, arg_max(results[-1]), strict=True):
            own.append(token)
    embedded = torch.stack(rows, dim=1)
    place.tap(f"{names.embed}.out", embedded.flatten(0, 1))
    place.tap(names.bias, torch.stack(biases, dim=1).flatten(0, 1))
    return torch.stack(results, dim=1), embedded, ids


def confidence(place: Scope, y_TD: Tensor, embedded_TR: Tensor) -> None:
    """How sure the head is of each drafted token, recorded: acc [1, B] of each segment."""
    weight = place.weight("confidence_head.proj.weight")
    found = linear_hi(torch.cat([y_TD, embedded_TR], dim=1), weight, place.numerics)
    place.tap("confidence_head.out", found.squeeze(1))


def heads_with_drafts(
    parts: Parts,
    scope: Scope,
    sequences: list[Sequence],
    streams: Streams,
    ends: LayerRange,
    watch: Watch,
    name: str,
) -> Tensor | None:
    """The heads of a pass (see `Port.heads`): a prefill fills the rings, a step drafts."""
    result = None
    if ends.head:
        watch(name, "head")
        y = scope.tap("norm.out", scope.norm("norm", parts.collapse(scope, streams)))
        result = main_head(scope, last_rows(scope, y))
    if ends.mtp:
        watch(name, "mtp")
        main_TD = main_input(scope, streams)
        if scope.segments[0].step.start == 0:
            for layer in draft_blocks(scope.config):
                place = scope / scope.config.block_path(layer) / "attn"
                fill_window(parts, place, main_TD, layer)
        elif result is not None:  # a draft starts from the step's logits
            draft(parts, scope, draft_segments(scope, sequences, arg_max(result)), main_TD)
    return result
