"""Choose the next token of every row from its logits, on the device, and bring the tokens to the host behind it.

What is chosen goes into the network's next step on the device; the host learns of it later, so it need not wait before
it asks for that step. Beams and bad words are chosen with the host's help: it then waits; see Sequence.needs_host.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from ..attention.cache import upload
from ..network.graphs import Chosen
from ..network.steps import Steps
from .beam import candidates
from .sampling import LOST, ban
from .sequence import Sequence
from .slots import SlotState

Owners = list[tuple[Sequence, int]]  # sequence and beam in each slot


class Flight:
    """Tokens that are on their way to the host.

    Args:
        owners: whose they are.
        tokens: int64 [N], LOST among them.
        wanting: slots whose rows ask for log-probabilities.
        log_probs: of those, fp32 [2, n]; None: there are none.
    """

    def __init__(self, owners: Owners, tokens: Tensor, wanting: list[int], log_probs: Tensor | None) -> None:
        self._owners, self._wanting = owners, wanting
        # To a host from a GPU that is a copy into pinned memory which nobody waits for yet.
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._log_probs = None if log_probs is None else log_probs.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def land(self) -> list[tuple[tuple[Sequence, int], int, Several[float]]]:
        """Wait; give of each slot its owner, its token, and the two of sampling.token_log_probs or nothing."""
        if self._event:
            self._event.synchronize()
        gains: list[Several[float]] = [()] * len(self._owners)
        if self._log_probs is not None:
            for slot, pair in zip(self._wanting, self._log_probs.T.tolist(), strict=True):
                gains[slot] = pair
        return list(zip(self._owners, self._tokens.tolist(), gains, strict=True))


def choose_next(steps: Steps, state: SlotState, owners: Owners, before: int, parts: Several[Chosen]) -> Flight:
    """Choose for all rows at once, and have the next step go on from there.

    Args:
        steps: the network and its cache.
        state: of all slots.
        owners: likewise.
        before: slots whose rows have just had a decode step, which has put its likeliest tokens in its place.
        parts: what follows: of those slots, and of the others; where there are any.
    """
    tokens, log_probs = _joined([each[1] for each in parts]), None
    if state.is_plain and not any(sequence.needs_host for sequence, _ in owners):
        if before < len(tokens):
            steps.go_on_with(before, tokens[before:].clamp(min=0))
    else:
        chosen, log_probs = _choose(steps, state, owners, _joined([steps.whole(each) for each in parts]))
        steps.go_on_with(0, chosen)
        tokens = torch.where(tokens == LOST, LOST, chosen)
    return Flight(owners, tokens, state.wanting_log_probs, log_probs)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _choose(steps: Steps, state: SlotState, owners: Owners, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Choose by fp32 logits [N, V]; give tokens, and the log-probabilities that are asked for."""
    if any(sequence.bad_words for sequence, _ in owners):
        words = ((each.bad_words, each.tail(each.beams[place], each.bad_words.reach)) for each, place in owners)
        logits = ban(logits, [bad.completions(tail) for bad, tail in words])
    logits = state.penalise(logits)
    tokens = state.choose(logits)
    log_probs = state.log_probs(logits, tokens) if state.wanting_log_probs else None
    for sequence, place in owners:
        if sequence.width > 1 and sequence.limit and not place:
            _search(steps, state, sequence, logits, tokens)
    state.record(tokens)
    return tokens, log_probs


def _search(steps: Steps, state: SlotState, sequence: Sequence, logits: Tensor, tokens: Tensor) -> None:
    """Choose a sequence's next beams and write their tokens into [N]."""
    slots = np.array(sequence.slots)
    index = upload(slots, logits.device)
    numbers = sequence.numbers
    rate, length = numbers["beam_search_diversity_rate"], sequence.beam_length
    log_probs = logits[index].log_softmax(-1)
    found = candidates(log_probs, sequence.beams, sequence.end_id, length, numbers["len_penalty"], rate)
    chosen = sequence.branch(found)
    parents = np.array([each.parent for each in chosen])
    if (moved := parents != np.arange(len(slots))).any():
        used = sequence.cached
        steps.copy(slots[moved], slots[parents[moved]], min(used, sequence.window or used))
        state.copy(slots[moved], slots[parents[moved]])
    tokens[index] = torch.tensor([each.token for each in chosen], device=tokens.device)
