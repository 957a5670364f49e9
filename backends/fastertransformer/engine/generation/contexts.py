"""Prefill: what a sequence's generation starts from is run through the network, and what is asked about it computed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..attention.cache import upload
from ..network.steps import Steps
from ..requests.prompts import Context
from ..requests.request import Array
from .sequence import Sequence

_PAST_TOKENS = 4096  # of one pass of a conversation's earlier tokens
_LOGITS_BYTES = 64 << 20  # of one block of logits for the input's log-probabilities


def run_contexts(steps: Steps, new: list[Sequence], first: int) -> Tensor | None:
    """Run the contexts of sequences that have just come.

    Args:
        steps: the network and its cache.
        new: sequences, whose slots begin at ``first``: their first beams side by side, then the others.
        first: slot.

    Returns:
        The last hidden state of each of their slots, [n, hidden]; None: what has an encoder begins with a step.
    """
    if steps.config.encoder:
        _encode(steps, new, first)
        _copy_to_beams(steps, new, _begin_decoders(steps, new, first))
        return None
    for sequence in new:
        if sequence.lacks_past:
            _remake_past(steps, sequence)
    if are_packed(steps, new):
        last = _begin(steps, new, first)
        return _give_beams(steps, new, first, last, max(len(sequence.context.ids) for sequence in new))
    ids, lengths, embeddings = _side_by_side([sequence.context for sequence in new])
    starts = np.array([sequence.start for sequence in new])
    if new[0].start and new[0].window and lengths[0] > new[0].window:  # one token more than a pass may have
        steps.extend(ids[:, :1], starts, np.ones_like(lengths), first, min(int(starts[0]) + 1, new[0].window))
        ids, lengths, starts = ids[:, 1:].copy(), lengths - 1, starts + 1
    ends = [min(int(end), each.window or int(end)) for end, each in zip(starts + lengths, new, strict=True)]
    longest = max(ends)
    hidden = steps.extend(ids, starts, lengths, first, longest, 0, embeddings)
    for row, sequence in enumerate(new):
        _note_context(steps, sequence, hidden[row, : lengths[row]])
    rows = torch.arange(len(new), device=hidden.device)
    last = hidden[rows, upload(lengths - 1, hidden.device)]
    return _give_beams(steps, new, first, last, longest)


def _remake_past(steps: Steps, sequence: Sequence) -> None:
    """Compute again what a row of a conversation had in the cache: in passes as long as a memory allows."""
    assert sequence.line
    ids = np.array(sequence.line.tokens[: sequence.start], np.int64)
    size = sequence.window or _PAST_TOKENS
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        known = np.array([start]), np.array([end - start])
        steps.extend(ids[None, start:end].copy(), *known, sequence.slots[0], min(end, sequence.window or end))


def are_packed(steps: Steps, new: list[Sequence]) -> bool:
    """Say whether contexts are run one behind the other; else they are padded to the longest."""
    has_past = any(sequence.start or sequence.context.embeddings is not None for sequence in new)
    return steps.packs and not has_past


def _begin(steps: Steps, new: list[Sequence], first: int) -> Tensor:
    """Run contexts one behind the other; give the last hidden state of each, [B, hidden]."""
    contexts = [sequence.context.ids for sequence in new]
    lengths = np.array([len(ids) for ids in contexts])
    ends = np.cumsum(lengths)
    hidden = steps.begin(np.concatenate(contexts), lengths, first)  # [T, hidden]
    for sequence, length, end in zip(new, lengths.tolist(), ends.tolist(), strict=True):
        _note_context(steps, sequence, hidden[end - length : end])
    return hidden[upload(ends - 1, hidden.device)]


def _give_beams(steps: Steps, new: list[Sequence], first: int, last: Tensor, longest: int) -> Tensor:
    """Let all beams of a sequence begin as its first one does; see run_contexts.

    Args:
        steps: see run_contexts.
        new: likewise.
        first: likewise.
        last: hidden states of the first beams, [B, hidden].
        longest: the most entries that one has.
    """
    sources = _copy_to_beams(steps, new, longest)
    return torch.cat((last, last[upload(sources - first, last.device)])) if len(sources) else last


def _copy_to_beams(steps: Steps, new: list[Sequence], longest: int) -> Array:
    """Give the other beams of sequences what the first one has; give the slot that each of them begins like."""
    pairs = sorted((slot, sequence.slots[0]) for sequence in new for slot in sequence.slots[1:])
    others, sources = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    if pairs:
        steps.copy(others, sources, longest)
    return sources


def _encode(steps: Steps, new: list[Sequence], first: int) -> None:
    """Run the encoder for new sequences."""
    ids, lengths, embeddings = _side_by_side([sequence.source for sequence in new if sequence.source])
    tasks = np.array([int(each.job.request.scalars["ia3_tasks"][each.row]) for each in new])
    is_encoder_only = steps.config.family != "t5"
    wants_attentions = is_encoder_only and any(sequence.job.request.wants("attentions") for sequence in new)
    encoded, attentions = steps.encode(ids, lengths, tasks, first, embeddings, int(wants_attentions))
    for row, sequence in enumerate(new if is_encoder_only else ()):
        length = lengths[row]
        sequence.encoded, sequence.is_done = encoded[row, :length].float().cpu().numpy(), True
        if sequence.job.request.wants("attentions"):
            of_row = torch.stack([layer[row, :, :length, :length] for layer in attentions])
            sequence.attentions = of_row.cpu().numpy()


def _begin_decoders(steps: Steps, new: list[Sequence], first: int) -> int:
    """Run what decoders are made to begin with; give the most entries that one has: 0 where none begins with anything.

    The last token of each is run once more, by its first step.
    """
    ids, lengths, _ = _side_by_side([sequence.context for sequence in new])
    longest = ids.shape[1]
    if longest == 1:  # start_id
        return 0
    source = max(sequence.source_length for sequence in new)
    hidden = steps.extend(ids, np.zeros_like(lengths), lengths, first, longest, source)
    for row, sequence in enumerate(new):
        _note_context(steps, sequence, hidden[row, : lengths[row]])
    return longest


def _note_context(steps: Steps, sequence: Sequence, hidden: Tensor) -> None:
    """Compute what is asked about a context itself, given its hidden states, [T, hidden]."""
    if sequence.wants("context_embeddings"):
        sequence.context_embedding = hidden.float().sum(0).cpu().numpy()
    if not (sequence.wants("context_cum_log_probs") or sequence.wants("context_log_probs")):
        return
    log_probs, best = _score_context(steps, hidden, torch.from_numpy(sequence.context.ids).to(hidden.device))
    if sequence.wants("context_cum_log_probs"):
        sequence.scores = [float(log_probs.double().sum()), *sequence.scores[1:]]
    if sequence.wants("context_log_probs"):
        own = sequence.context.own_tokens
        sequence.context_scores = log_probs.cpu().numpy()[own], best.cpu().numpy()[own]


def _score_context(steps: Steps, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compare each token with what its predecessors make of it: [n, hidden] of the last n tokens, [T].

    Returns:
        The token's log-probability, fp32 [T], and the most probable token in its place, [T]; 0 where no state is
        given of the token before it, so for the first.
    """
    log_probs, best = torch.zeros(len(ids), device=ids.device), torch.zeros_like(ids)
    shift = len(ids) - len(hidden) + 1  # from a state to the token that it predicts
    block = max(1, _LOGITS_BYTES // (4 * steps.config.vocab_size))
    for first in range(0, len(hidden) - 1, block):
        end = min(first + block, len(hidden) - 1)
        rows, targets = steps.logits(hidden[first:end]).log_softmax(dim=-1), slice(first + shift, end + shift)
        log_probs[targets] = rows.gather(1, ids[targets, None])[:, 0]
        best[targets] = rows.argmax(dim=-1)
    return log_probs, best


def _side_by_side(contexts: list[Context]) -> tuple[Array, Array, Array | None]:
    """Give ids [B, T], lengths [B], and embeddings [B, T, hidden] where any has some."""
    lengths = np.array([len(context.ids) for context in contexts])
    ids = np.zeros((len(contexts), lengths.max()), np.int64)
    for row, context in zip(ids, contexts, strict=True):
        row[: len(context.ids)] = context.ids
    given = {row: context.embeddings for row, context in enumerate(contexts) if context.embeddings is not None}
    if not given:
        return ids, lengths, None
    hidden = next(iter(given.values())).shape[1]
    embeddings = np.full((*ids.shape, hidden), np.nan, np.float32)
    for row, content in given.items():
        embeddings[row, : len(content)] = content
    return ids, lengths, embeddings
