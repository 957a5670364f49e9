"""Prefill: run the contexts of new sequences, and compute the outputs that depend on contexts alone."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..arrays import UNBOUNDED, Array
from ..request.prompts import Context
from ..rows.sequence import Sequence
from ..steps.steps import Steps
from .prefill_pass import most_tokens

_PASS_TOKENS = 4096  # of one pass of a conversation
_LOGITS_BYTES = 64 << 20  # of one block of logits for the input's log-probabilities
_Owner = tuple[Sequence, int]  # and beam


class Extend(Protocol):
    """Steps.extend, or a step in which other rows decode too."""

    def __call__(
        self, ids: Array, starts: Array, lengths: Array, first: int, embeddings: Array | None = None, /
    ) -> Tensor:
        """Run several tokens of each of the rows in the slots from ``first`` on; returns hidden states, [T, hidden]."""


def run_chunk(extend: Extend, sequence: Sequence, count: int, slot: int) -> None:
    """Run the next ``count`` tokens of a sequence's context, whose first beam has its pages in a slot."""
    ids, lengths, embeddings = _packed([_rest(sequence, 0, count)])
    hidden = extend(ids, np.array([sequence.position]), lengths, slot, embeddings)
    sequence.note_chunk(count, hidden)


def run_heads(steps: Steps, new: Several[Sequence], first: int) -> None:
    """Run contexts up to each place where their states are kept.

    Rows that have such places are adjacent, those with the most of them last; behind them only rows may come that share
    what others of this prefill compute.
    """
    while heads := [sequence for sequence in new if sequence.reservation.kept.cuts]:
        parts = [_rest(each, 0, each.reservation.kept.cuts[0] - each.position) for each in heads]
        ids, lengths, embeddings = _packed(parts)
        starts = np.array([sequence.position for sequence in heads])
        steps.extend(ids, starts, lengths, first + new.index(heads[0]), embeddings)
        copies = []
        for sequence, part in zip(heads, parts, strict=True):
            sequence.reservation.note_chunk(len(part.ids))
            copies += [copy] if (copy := sequence.reservation.keep_state()) else []
        if copies:
            steps.slots.copy_states(np.array(copies).T)


def can_mix(sequence: Sequence, count: int | None = None) -> bool:
    """Return whether what is left of a context, or ``count`` tokens of it, may be run in a pass in which rows decode.

    Not if prompt embeddings are among the tokens, or if the row keeps its last tokens only; nor if it was in a step
    that has failed, for it is not known which row has. A session's earlier tokens may have to be run again, which takes
    several passes.
    """
    is_part = count is not None or bool(sequence.chunks)
    is_plain = sequence.window == UNBOUNDED and not sequence.has_failed and sequence.source is None
    return is_plain and (sequence.session_row is None or is_part) and _rest(sequence, 0, count).embeddings is None


def run_contexts(
    steps: Steps, owners: Several[tuple[Sequence, int]], first: int, extend: Extend | None = None
) -> Tensor | None:
    """Run the contexts of new sequences, which own the slots from ``first`` on: all first beams, then the others.

    Args:
        steps: run them.
        owners: sequence and beam of each slot.
        first: slot.
        extend: in place of Steps.extend.

    Returns:
        The last hidden state of each of these slots, [n, hidden]; None: a decoder with an encoder begins with a step.
    """
    new = [sequence for sequence, beam in owners if not beam]
    # All beams begin like the first one; those of a preempted sequence go on from their own tokens.
    begun = owners[: len(new)] if len(new) > 1 or not new[0].count else owners
    states: list[Tensor] = []  # of each context, [T, hidden]
    if steps.config.encoder:
        _encode(steps, [sequence for sequence, _ in begun], first)
        if any(len(sequence.context.ids) + sequence.count > 1 for sequence in new):  # not start_id alone
            states = _extend(steps, steps.extend, begun, first)  # the last token is run once more, by the first step
    else:
        extend = extend or steps.extend
        states = [_continue_session(extend, new[0])] if new[0].session_row else _extend(steps, extend, begun, first)
    for sequence, state in zip(new, states, strict=False):
        chunks = sequence.take_chunks()
        if sequence.needs_hidden:
            _add_context_outputs(steps, sequence, torch.cat((*chunks, state)))
    if others := owners[len(begun) :]:
        pages = [each.reservation.rows[beam] for each, beam in others]
        sources = [each.reservation.rows[0] for each, _ in others]
        steps.slots.copy(pages, sources, max(sequence.first_entries for sequence in new))
    if steps.config.encoder:
        return None
    last = {owner: state[-1] for owner, state in zip(begun, states, strict=True)}
    return torch.stack([last.get((sequence, beam), last[sequence, 0]) for sequence, beam in owners])


def _rest(sequence: Sequence, beam: int, count: int | None = None) -> Context:
    """Return what is left of a beam's context, or the next ``count`` tokens of it."""
    begin = sequence.skipped
    end = None if count is None else begin + count
    context, embeddings = sequence.context, None
    if context.embeddings is not None and not np.isnan(part := context.embeddings[begin:end])[:, 0].all():
        embeddings = part
    return replace(context, ids=sequence.inputs(beam)[begin:end], embeddings=embeddings)


def _extend(steps: Steps, extend: Extend, rows: Several[tuple[Sequence, int]], first: int) -> list[Tensor]:
    """Run what is not known of contexts of sequences and beams, stage by stage; returns its hidden states, [T, hidden].

    New rows have a pass of their own, which is faster. Rows that share what others of this prefill compute come last.
    What is more than a pass runs has several; ``extend`` is the first one of a stage.
    """
    states: list[Tensor] = []
    for _, group in groupby(rows, lambda row: row[0].reservation.stage):
        parts = _cut([(row, _rest(*row)) for row in group], most_tokens(steps.device))
        for at, part in enumerate(parts):
            ids, lengths, embeddings = _packed([context for _, context in part])
            starts = np.array([sequence.position for (sequence, _), _ in part])
            run = steps.extend if at else extend
            hidden = run(ids, starts, lengths, first + len(states), embeddings)
            is_last = len(states) + len(part) == len(rows)
            states += torch.split(hidden if is_last else hidden.clone(), lengths.tolist())
    return states


def _cut(rows: list[tuple[_Owner, Context]], most: int) -> list[list[tuple[_Owner, Context]]]:
    """Cut rows with what is left of their contexts into passes of about as many tokens each, ``most`` or fewer."""
    ends = np.cumsum([len(context.ids) for _, context in rows])
    passes = -(-int(ends[-1]) // most)
    middles = ends - np.diff(ends, prepend=0) / 2
    numbers = (middles * passes / ends[-1]).astype(int).tolist()
    return [[row for _, row in part] for _, part in groupby(zip(numbers, rows, strict=True), lambda each: each[0])]


def _continue_session(extend: Extend, sequence: Sequence) -> Tensor:
    """Run a session's context in passes no longer than its window; returns its hidden states, [T, hidden].

    If the keys and values of the session's earlier tokens were lost, these tokens are run before it.
    """
    start, ids = sequence.position, sequence.inputs()[sequence.skipped :]
    window, slot = sequence.window, sequence.slots[0]
    count = len(ids)
    if sequence.reservation.lacks_past:
        assert sequence.session_row
        start, ids = 0, np.concatenate((np.array(sequence.session_row.tokens[:start], np.int64), ids))
    states = []
    for place in range(0, len(ids), size := min(window, _PASS_TOKENS)):
        part = ids[place : place + size]
        states.append(extend(part, np.array([start + place]), np.array([len(part)]), slot))
    return torch.cat(states)[-count:]


def _encode(steps: Steps, new: list[Sequence], first: int) -> None:
    """Run the encoder for new sequences."""
    sources = [sequence.source for sequence in new if sequence.source]
    ids, lengths, embeddings = _packed(sources)
    tasks = np.array([source.ia3_task for source in sources])
    is_encoder_only = not steps.config.has_decoder
    wants_attentions = is_encoder_only and any(each.job.request.is_return_attentions for each in new)
    encoded, attentions = steps.encode(ids, lengths, tasks, first, embeddings, int(wants_attentions))
    states = torch.split(encoded, lengths.tolist())
    for row, sequence in enumerate(new if is_encoder_only else ()):
        sequence.finish_encoding()
        length = lengths[row]
        sequence.add_context_outputs(output_hidden_state=states[row].float().cpu().numpy())
        if sequence.job.request.is_return_attentions:
            of_row = torch.stack([layer[row, :, :length, :length] for layer in attentions])
            sequence.add_context_outputs(output_attentions=of_row.cpu().numpy())


def _add_context_outputs(steps: Steps, sequence: Sequence, hidden: Tensor) -> None:
    """Compute the outputs that a row requests of its context, given its hidden states, [T, hidden]."""
    params = sequence.sampling
    if params.is_return_context_embeddings:
        embedding = hidden.float().sum(0).cpu().numpy()
        sequence.add_context_outputs(context_embeddings=np.repeat(embedding[None], sequence.width, 0))
    if not (params.is_return_context_cum_log_probs or params.is_return_context_log_probs):
        return
    most = max(int(params.is_return_context_log_probs), params.num_context_top_log_probs)
    place = sequence.adapter.place if sequence.adapter else None
    scores = _score_context(steps, hidden, sequence.context.ids, most, place)
    if params.is_return_context_cum_log_probs:
        sequence.begin_score(float(scores[:, 0].sum(dtype=np.float64)))
    if params.is_return_context_log_probs:
        own, shown = scores[sequence.context.own_tokens], len(sequence.shown)
        own = own[max(0, len(own) - shown) :]  # without a start_id
        own = np.pad(own, ((shown - len(own), 0), (0, 0)))  # 0 for what was answered before
        log_probs, best = own[:, 1 : 1 + most], own[:, 1 + most :].astype(np.uint32)
        sequence.add_context_outputs(context_log_probs=own[:, 0], context_argmax_ids=best[:, 0])
        if params.num_context_top_log_probs:
            sequence.add_context_outputs(context_top_log_probs=log_probs, context_top_ids=best)


def _score_context(steps: Steps, hidden: Tensor, ids: Array, most: int, place: int | None) -> Array:
    """Score each token of a context, [T], by its hidden states, [T, hidden]: fp32 [T, 1 + 2 most], see scoring.py.

    The scores are those given the tokens before it; 0 for the first token. The row's adapter has a place, or None.
    """
    scores = torch.zeros(len(ids), 1 + 2 * most, device=hidden.device)
    block = max(1, _LOGITS_BYTES // (4 * steps.config.vocab_size))
    for first in range(1, len(ids), block):
        targets = slice(first, min(first + block, len(ids)))
        adapters = None if place is None else np.full(targets.stop - first, place)
        scores[targets] = steps.predictions.score(hidden[first - 1 : targets.stop - 1], ids[targets], most, adapters)
    return scores.cpu().numpy()


def _packed(contexts: list[Context]) -> tuple[Array, Array, Array | None]:
    """Concatenate contexts: ids [T], lengths [B], and embeddings [T, hidden] if any context has some."""
    ids, lengths = np.concatenate([each.ids for each in contexts]), np.array([len(each.ids) for each in contexts])
    given = [each.embeddings for each in contexts if each.embeddings is not None]
    if not given:
        return ids, lengths, None
    embeddings = np.full((len(ids), given[0].shape[1]), np.nan, np.float32)
    for begin, each in zip(np.cumsum(lengths) - lengths, contexts, strict=True):
        if each.embeddings is not None:
            embeddings[begin : begin + len(each.embeddings)] = each.embeddings
    return ids, lengths, embeddings
