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
from ..requests.request import Array
from ..requests.words import ban
from . import beam
from .sampling import LOST
from .sequence import Sequence
from .slots import NewRow, SlotState, traits_of

Owners = list[tuple[Sequence, int]]  # sequence and beam in each slot


class Flight:
    """Tokens that are on their way to the host.

    Args:
        owners: whose they are.
        tokens: int64 [N], LOST among them.
        log_probs: fp32 [2, n], of the slots in ``wanting``; None: nobody wants any.
        wanting: slots.

    Attributes:
        owners: those.
    """

    def __init__(self, owners: Owners, tokens: Tensor, log_probs: Tensor | None, wanting: list[int]) -> None:
        self.owners, self._wanting = owners, wanting
        # To a host from a GPU that is a copy into pinned memory which nobody waits for yet.
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._log_probs = None if log_probs is None else log_probs.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def land(self) -> tuple[list[int], dict[int, tuple[float, float]]]:
        """Wait for the tokens; give them, and the log-probabilities by slot; see sampling.token_log_probs."""
        if self._event:
            self._event.synchronize()
        pairs = [] if self._log_probs is None else self._log_probs.T.tolist()
        tokens: list[int] = self._tokens.tolist()
        return tokens, {slot: (full, reported) for slot, (full, reported) in zip(self._wanting, pairs, strict=True)}


class Choice:
    """Chooses for all rows at once.

    Args:
        steps: the network and its cache.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._state = SlotState(steps.config.vocab_size, steps.device)

    def begin(self, first: int, owners: Several[tuple[Sequence, int]]) -> None:
        """Learn of the rows in the slots from ``first`` on."""
        rows: list[NewRow] = []
        for sequence, _ in owners:
            request = sequence.job.request
            if not sequence.traits:
                sequence.traits = traits_of(request, sequence.row, self._steps.config.vocab_size)
            rows.append((request, sequence.row, sequence.traits, sequence.shown))
        self._state.write(first, rows)

    def move(self, targets: Array, sources: Array) -> None:
        """Let rows change their slots, int64 [n] each."""
        self._state.copy(targets, sources)

    def arrange(self, owners: Owners) -> None:
        """Learn whose row is in each slot."""
        self._state.arrange([sequence.traits for sequence, _ in owners if sequence.traits])

    def launch(self, owners: Owners, before: int, parts: Several[Chosen]) -> Flight:
        """Choose, and have the next step go on from there.

        Args:
            owners: of all slots.
            before: slots whose rows have just had a decode step, which has put its likeliest tokens in its place.
            parts: what follows: of those slots, and of the others; where there are any.
        """
        tokens = parts[0][1] if len(parts) == 1 else torch.cat([each[1] for each in parts])
        wanting = self._state.wanting_log_probs
        log_probs = None
        if self._state.is_plain and not any(sequence.needs_host for sequence, _ in owners):
            if before < len(tokens):
                self._steps.go_on_with(before, tokens[before:].clamp(min=0))
        else:
            wholes = [self._steps.whole(each) for each in parts]
            chosen, log_probs = self._choose(owners, wholes[0] if len(wholes) == 1 else torch.cat(wholes))
            self._steps.go_on_with(0, chosen)
            tokens = torch.where(tokens == LOST, LOST, chosen)
        return Flight(owners, tokens, log_probs, wanting)

    def _choose(self, owners: Owners, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose by fp32 logits [N, V]; give tokens, and the log-probabilities that are asked for."""
        state = self._state
        if any(sequence.bad_words for sequence, _ in owners):
            banned = [each.bad_words.completions(each.tail(place, each.bad_words.reach)) for each, place in owners]
            logits = ban(logits, banned)
        logits = state.penalise(logits)
        tokens = state.choose(logits)
        log_probs = state.log_probs(logits, tokens) if state.wanting_log_probs else None
        for sequence, place in owners:
            if sequence.width > 1 and sequence.limit and not place:
                self._search(sequence, logits, tokens)
        state.record(tokens)
        return tokens, log_probs

    def _search(self, sequence: Sequence, logits: Tensor, tokens: Tensor) -> None:
        """Choose a sequence's next beams and write their tokens into [N]."""
        slots = np.array(sequence.slots)
        index = upload(slots, logits.device)
        scalars, row = sequence.job.request.scalars, sequence.row
        found = beam.candidates(
            logits[index].log_softmax(-1),
            sequence.scores,
            sequence.has_ended,
            sequence.end_id,
            sequence.beam_length,
            float(scalars["len_penalty"][row]),
            float(scalars["beam_search_diversity_rate"][row]),
        )
        chosen = sequence.branch(found)
        parents = np.array([each.parent for each in chosen])
        if (moved := parents != np.arange(len(slots))).any():
            used = sequence.cached
            self._steps.copy(slots[moved], slots[parents[moved]], min(used, sequence.window or used))
            self._state.copy(slots[moved], slots[parents[moved]])
        tokens[index] = torch.tensor([each.token for each in chosen], device=tokens.device)
