"""Where drafts come from: a text's own words, a small model of the same vocabulary, or a predictor beside the model.

What a proposer says decides how fast rows are, and nothing of what they answer: see speculation.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import takewhile
from typing import Protocol

import numpy as np
import torch

from ..arrays import Array, upload
from ..cache.page_allocator import PAGE
from ..cache.page_pool import RowPages
from ..model.config import ModelConfig
from ..model.predictor import Predictor
from ..ops.logits import NOT_FINITE
from ..rows.prompt_lookup import PromptLookup
from ..rows.sequence import Sequence
from ..steps.steps import Steps
from .prefill_pass import most_tokens

Drafts = dict[Sequence, list[int]]
_log = logging.getLogger(__name__)


class Proposer(Protocol):
    """Proposes drafts of rows that have some, see Sequence.drafting.

    Attributes:
        token_cost: what one more token in the drafts of all rows takes, in steps of the model.
        ran: tokens that it lacked for the last drafts, and ran.
    """

    token_cost: float
    ran: int

    def expect(self, row: Sequence, most: int) -> int:
        """Return how many tokens it would propose for a row, ``most`` at most."""

    def lacks(self, row: Sequence) -> int:
        """Return how many tokens of a row it would run before the first of a draft."""

    def propose(self, lengths: Mapping[Sequence, int]) -> Drafts:
        """Propose drafts of these lengths at most, of rows whose tokens the host knows; NOT_FINITE is no token."""


class TextLookup:
    """Proposes what followed earlier in a row's text; see PromptLookup."""

    token_cost, ran = 0.0, 0

    def expect(self, row: Sequence, most: int) -> int:
        """See Proposer."""
        return len(self._draft(row, most))

    def lacks(self, row: Sequence) -> int:
        """See Proposer."""
        return 0

    def propose(self, lengths: Mapping[Sequence, int]) -> Drafts:
        """See Proposer."""
        return {row: self._draft(row, most) for row, most in lengths.items()}

    def _draft(self, row: Sequence, most: int) -> list[int]:
        assert row.drafting
        if row.drafting.lookup is None:
            row.drafting.lookup = PromptLookup(row.text)
        row.drafting.lookup.follow(row.beams[0].tokens)
        return row.drafting.lookup.draft(most)


class DraftModel:
    """Proposes the argmax tokens of a small model, one after the other, for all rows at once.

    The small model keeps its keys and values in the rows' own pages. What it lacks of a row's tokens it runs when the
    row is to have a draft: so rows without drafts cost nothing, and nothing has to go back by wrong tokens.

    Args:
        steps: of the small model, in slots of their own.
        config: of the model.
    """

    _shift = 0  # positions from that of an input to its token's own

    def __init__(self, steps: Steps, config: ModelConfig) -> None:
        self._steps, self._is_broken, self.ran = steps, False, 0
        self.token_cost = numbers_read(steps.config) / numbers_read(config)

    def expect(self, row: Sequence, most: int) -> int:
        """See Proposer; none of a row that begins with what is no token."""
        has_tokens = row.context.embeddings is None and (row.session_row is not None or not row.start)
        room = self._steps.config.max_pos_seq_len - row.cached
        return max(0, min(most, room)) if has_tokens and not self._is_broken else 0

    def lacks(self, row: Sequence) -> int:
        """See Proposer."""
        return row.cached - self._shift - self._known(row)

    def propose(self, lengths: Mapping[Sequence, int]) -> Drafts:
        """See Proposer; nothing from now on if the small model fails."""
        try:
            return self._propose(lengths)
        except RuntimeError as error:
            self._is_broken = True
            _log.exception("the draft model failed; rows have no drafts any more: %s", error)
            return {}

    def _propose(self, lengths: Mapping[Sequence, int]) -> Drafts:
        steps = self._steps
        rows = sorted(lengths, key=lambda row: -lengths[row])  # those that need no more tokens come last
        counts, nothing = np.array([lengths[row] for row in rows]), np.empty(0, np.int64)
        known = np.array([self._known(row) for row in rows])
        ends = np.array([row.cached + 1 for row in rows]) - self._shift
        self.ran = int((ends - known).sum())
        steps.slots.allocate(0, [_pages(row) for row in rows], ends)
        try:
            hidden = self._catch_up(rows, known, ends)
            self._begin_draft(hidden, ends)
            tokens = [steps.predictions.argmax(hidden)[1]]
            steps.slots.set_tokens(0, tokens[0].clamp(min=0))
            for place in range(1, counts[0]):
                chosen = steps.decode(int((counts > place).sum()))
                tokens.append(chosen[1].clone())
        finally:
            steps.slots.free(len(rows), 0, nothing, nothing)
        said = self._said(torch.nn.utils.rnn.pad_sequence(tokens, padding_value=NOT_FINITE)).tolist()
        drafts = {row: said[at][: lengths[row]] for at, row in enumerate(rows)}
        for row, draft in drafts.items():
            if NOT_FINITE in draft:
                self._forget(row)
            else:
                self._note(row, draft[:-1])  # the last one was not run
        return drafts

    def _catch_up(self, rows: list[Sequence], known: Array, ends: Array) -> torch.Tensor:
        """Run what it lacks of each row's tokens; returns the last one's hidden state of each, [rows, hidden]."""
        steps = self._steps
        share = max(1, most_tokens(steps.device) // len(rows))
        for slot, row in enumerate(rows):
            while (left := ends[slot] - known[slot]) > share:
                part = self._inputs(row, known[slot])[: min(left - 1, most_tokens(steps.device))]
                steps.extend(part, known[slot : slot + 1], np.array([len(part)]), slot)
                known[slot] += len(part)
        ids = [self._inputs(row, first) for row, first in zip(rows, known, strict=True)]
        hidden = steps.extend(np.concatenate(ids), known, ends - known, 0)
        return hidden[upload(np.cumsum(ends - known) - 1, steps.device)]

    def _inputs(self, row: Sequence, first: int) -> Array:
        """Return the row's tokens that are the inputs from a position on, int64 [n]."""
        return _tokens(row, first + self._shift)

    def _begin_draft(self, hidden: torch.Tensor, ends: Array) -> None:
        """Prepare what goes on behind the last inputs, given their hidden states, [rows, hidden], and the positions."""

    def _said(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the model's tokens for those of drafts."""
        return tokens

    def _known(self, row: Sequence) -> int:
        """Return how many of a row's tokens have keys and values of this model; never its last, which is run again."""
        pages, drafting = _pages(row), row.drafting
        assert drafting
        if drafting.pages is not pages:  # it has joined the batch, perhaps again
            drafted = self._steps.cache.allocator.drafted
            count = next((at for at, page in enumerate(pages.pages) if page not in drafted), len(pages.pages))
            drafting.pages, drafting.known, drafting.assumed = pages, max(0, count * PAGE - self._shift), []
        elif drafting.assumed:
            pairs = zip(_tokens(row, drafting.known).tolist(), drafting.assumed, strict=False)
            drafting.known += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            drafting.assumed = []
        return min(drafting.known, row.cached - self._shift)

    def _forget(self, row: Sequence) -> None:
        """Zero what it keeps of a row, so that numbers that are not finite do not stay for the next row."""
        assert row.drafting
        pages, row.drafting.pages = [page for page in _pages(row).pages if page], None
        self._steps.cache.allocator.drafted.difference_update(pages)
        self._steps.slots.clear(np.array(pages))

    def _note(self, row: Sequence, assumed: list[int]) -> None:
        """Note that it has run all of a row's tokens, and then these."""
        assert row.drafting
        first, row.drafting.known, row.drafting.assumed = row.drafting.known, row.cached + 1 - self._shift, assumed
        full = row.drafting.known // PAGE
        self._steps.cache.allocator.drafted.update(_pages(row).pages[first // PAGE : full])


class OwnPredictor(DraftModel):
    """Proposes what the model's own predictor, or an EAGLE-3 head, says, likewise.

    An input is the token behind its position, for the model's output for the position comes with it. So the row's last
    token is the last input, and what is run of a draft is run again: with the model's outputs for its tokens. The last
    entry of a page that rows share is that of the row that joined last, whose token behind the page made it.
    """

    _shift = 1

    def _begin_draft(self, hidden: torch.Tensor, ends: Array) -> None:
        network = self._steps.network
        assert isinstance(network, Predictor)
        network.carry(hidden, self._steps.cache, slice(0, len(ends)), upload(ends, self._steps.device))

    def _said(self, tokens: torch.Tensor) -> torch.Tensor:
        network = self._steps.network
        assert isinstance(network, Predictor)
        return network.said(tokens)

    def _note(self, row: Sequence, assumed: list[int]) -> None:
        super()._note(row, [])


def proposer_of(steps: Steps) -> Proposer:
    """Return what proposes drafts that some steps verify."""
    if not steps.drafting:
        return TextLookup()
    kind = OwnPredictor if isinstance(steps.drafting.network, Predictor) else DraftModel
    return kind(steps.drafting, steps.config)


def _pages(row: Sequence) -> RowPages:
    return row.reservation.rows[0]


def _tokens(row: Sequence, first: int) -> Array:
    """Return a row's tokens from a position on, int64 [n]."""
    behind = row.start + len(row.context.ids)
    if first >= behind:
        return np.array(row.beams[0].tokens[first - behind :], np.int64)
    before = row.session_row.tokens[: row.start] if row.session_row else []
    return np.concatenate((np.array(before, np.int64), row.inputs()))[first:]


def numbers_read(config: ModelConfig) -> int:
    """Return how many numbers of a decoder's matrices one token is multiplied with."""
    inner, mixture = config.inter_size, config.decoder.mixture if config.decoder else None
    if mixture and config.has_experts:
        inner = mixture.inter_size * mixture.experts_per_token + mixture.shared_inter_size
    layer = config.attention_work[0] + config.hidden_units * inner * (3 if config.is_gated else 2)
    return config.num_layer * layer + config.hidden_units * config.vocab_size
