"""Chunks: while rows decode, a long prompt is run in parts, one a step, so that these rows need not wait for all of it.

A chunk continues what the cache has of the row already, as a session's input does. The row stays first in the queue,
with the pages of what was run, until what is left of its context is one chunk: then it joins the batch. Rows after it
wait, so at any time one row at most is half run.
"""

from __future__ import annotations

from ..arrays import UNBOUNDED
from ..model.config import Stack
from ..rows.sequence import Sequence
from ..steps.steps import Steps
from .tuning import TUNING


class Chunks:
    """How much of a context a step runs.

    Args:
        steps: say what they can run.
        budget: tokens of a step in which rows decode and a context is run in part, theirs included. Half of it are the
            context's at least, so that it is not starved by many rows. Each context that waits adds as much: what they
            wait for is the rate at which contexts are run, and larger passes run more. 0: contexts are run whole. With
            latent attention on a GPU a chunk has several budgets: what is cached before it costs as much, however
            short it is; see latent_continued.
    """

    def __init__(self, steps: Steps, budget: int) -> None:
        self._steps, self._budget, self._most = steps, budget, TUNING.max_budget_tokens
        if steps.device.type == "cpu":
            self._most = min(self._most, TUNING.max_budget_tokens_cpu)
        elif steps.config.decoder and steps.config.decoder.latent:
            self._budget, self._most = TUNING.latent_budgets * budget, TUNING.max_latent_tokens
        self._equal_cells = _cells_like_products(steps.config)

    def choose_tokens(self, sequence: Sequence, decoding: int, waiting: int, room: int = 0) -> int:
        """Choose how many tokens of a context the next step runs; 0: all that are left.

        Args:
            sequence: whose context it is.
            decoding: rows that decode.
            waiting: sequences that wait, this one among them.
            room: tokens of all contexts in this step, at most; 0: as many as a pass of their own runs.
        """
        if not (decoding and self._budget and self._can_be_cut(sequence)):
            return 0
        most = max(self._budget, self._most)
        whole = 0 if sequence.reservation.rows else TUNING.min_budgets_to_chunk * min(self._budget * waiting, most)
        whole = min(whole, room or whole)
        if sequence.tokens_to_run(0) <= whole:
            return 0
        found = sequence.reservation.tokens_found
        left = sequence.tokens_to_run(found)
        if left <= whole:
            return 0
        budget = min(self._budget_after(sequence.start + found) * waiting, most)
        is_short = len(sequence.inputs()) <= TUNING.short_prompt_budgets * self._budget
        if is_short and (tokens := self._mixed(TUNING.min_budgets_to_chunk * budget, decoding, room)):
            tokens = -(-left // -(-left // tokens))  # equal chunks
        else:
            tokens = self._mixed(budget, decoding, room) or budget
        return sequence.reservation.end_chunk(tokens) if tokens < left else 0

    def _mixed(self, budget: int, decoding: int, room: int) -> int:
        """Return a context's tokens in a step of a budget, whose rows decode in the same pass; 0: there is none."""
        tokens = max(budget - decoding, -(-budget // 2))
        tokens = min(tokens, room or tokens)
        return tokens if self._steps.can_mix(decoding, tokens) else 0

    def _budget_after(self, cells: int) -> int:
        """Return the budget of a chunk after some cells, to which its tokens attend, so that its time stays the same.

        It never falls below a half: the context would be run too slowly.
        """
        tokens = int(TUNING.spare_time * self._budget / (1 + cells / self._equal_cells))
        if tokens >= self._budget:
            return self._budget
        return max(tokens // TUNING.token_multiple * TUNING.token_multiple, -(-self._budget // 2))

    def _can_be_cut(self, sequence: Sequence) -> bool:
        """Return whether a context may be run in parts.

        These run whole: rows of encoder-decoders, and of models whose attention has a bias on a GPU; rows that keep
        their last tokens only; those of a step that has failed; and, once they were preempted, beams, which have
        contexts of their own, and sessions, whose earlier tokens are run too.
        """
        row = sequence.session_row
        lacks_past = bool(row and sequence.start and row.saved is None) and not sequence.reservation.rows
        is_restarted = sequence.has_failed or (sequence.count > 0 and sequence.width > 1)
        return self._steps.can_chunk and sequence.window == UNBOUNDED and not (lacks_past or is_restarted)


def _cells_like_products(config: Stack) -> float:
    """Return the cells to which a token attends in the time of its products with a layer's matrices."""
    both_ways, with_cell = config.attention_work
    inner = config.hidden_units * config.inter_size * (3 if config.is_gated else 2)
    return (both_ways + inner) / with_cell / TUNING.attention_cost
