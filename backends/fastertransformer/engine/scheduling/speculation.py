"""Speculation: which rows have drafts in a step, and how long these are, by how many tokens of earlier ones were right.

Where they come from, proposers.py says.

A step that verifies drafts computes a token more for each token of a draft, and takes longer. How much is estimated by
a line in the number of tokens, see tuning.py. A row's next drafted token is worth its probability of being right, and
is drafted while that is more than its part of the step. So drafts grow where they are right, become short where they
are not, and end in a large batch first. From time to time a row whose drafts have ended has one of a token, by which it
is found out whether they are right again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Several

from ..arrays import UNBOUNDED
from ..errors import RequestError
from ..grammar.masks import count_allowed
from ..ops.logits import NOT_FINITE
from ..rows.drafting import Acceptance, Drafting
from ..rows.sequence import Sequence
from ..sampling.pending import OwnedToken
from ..steps.steps import Steps
from .draft_costs import DraftCosts
from .metrics import EngineMetrics
from .proposers import Drafts, proposer_of
from .tuning import TUNING


class Speculation:
    """Chooses the drafts of steps.

    Args:
        steps: verify them.
        most: tokens of a draft at most.
        is_default: whether rows have drafts whose requests do not say whether they want them.
        metrics: count drafts and tokens.
    """

    def __init__(self, steps: Steps, most: int, is_default: bool, metrics: EngineMetrics) -> None:
        self._steps, self._most, self._default, self._metrics = steps, most, most if is_default else 0, metrics
        is_on_host = steps.device.type == "cpu"
        self._row_cost = TUNING.draft_row_cost_cpu if is_on_host else TUNING.draft_row_cost
        self._step_cost = 0.0 if is_on_host else TUNING.draft_step_cost
        self._proposer = proposer_of(steps)
        self._costs = DraftCosts(self._proposer.token_cost)
        self._overall = Acceptance(TUNING.acceptance_prior, TUNING.acceptance_memory_all)
        self._steps_to_try = TUNING.steps_between_tries  # until rows whose drafts were wrong are tried again

    def begin(self, row: Sequence) -> None:
        """Decide whether a row that has just arrived has drafts.

        Raises:
            RequestError: it asks for them, and the model cannot verify any.
        """
        self._costs.note_arrival()
        asked = row.sampling.max_speculative_tokens
        most = self._default if asked < 0 else min(asked, self._most)
        if most and (problem := self._steps.problem_with_drafts):
            raise RequestError(f"max_speculative_tokens is {asked}, and {problem}", "leave it out, or send 0")
        if most and row.width == 1 and row.max_tokens > 1 and not row.sampling.has_moving_top_p:
            prior = self._overall.probability
            row.drafting = Drafting(most, Acceptance(prior, TUNING.acceptance_memory))

    def choose(self, rows: Iterable[Sequence], count: int, is_certain: bool) -> Drafts:
        """Choose the drafts of a step; empty: none is worth it.

        Args:
            rows: of the batch.
            count: slots that they have.
            is_certain: whether the host knows all of their tokens. Else the drafts mean only that it is worth to wait
                for these.
        """
        base = 1 + self._row_cost * count  # what a step takes; in units of one of a single row
        self._costs.begin_step(base)
        lengths = self._choose_lengths(rows, count, base, is_certain) if self._costs.are_known else {}
        if not lengths:
            self._costs.note_plain()
        is_known = is_certain and lengths
        return self._propose(lengths, base) if is_known else {row: [NOT_FINITE] * most for row, most in lengths.items()}

    def _choose_lengths(
        self, rows: Iterable[Sequence], count: int, base: float, is_certain: bool
    ) -> dict[Sequence, int]:
        """Choose how long drafts are at most; see choose."""
        token_cost, step_cost = self._costs.of_pass, max(self._step_cost, self._costs.of_step)
        self._steps_to_try -= 1
        is_trying, gain, lengths, tried = self._steps_to_try < 0, 0.0, dict[Sequence, int](), list[Sequence]()
        lacked = 0.0  # tokens that are run once, as part of those of each step until the rows end
        least = self._row_cost * count / base + token_cost
        wanted = [
            (row, *self._choose_length(row, least))
            for row in rows
            if row.drafting and row.window == UNBOUNDED and not row.has_failed and row.count
        ]
        # Of most steps this is all, which matters where a step takes a millisecond: no draft would be worth as much.
        if not is_trying and sum(each[2] for each in wanted) * base <= count * (step_cost + token_cost * base):
            return {}
        for row, most, worth in wanted:
            if most and (length := self._room(row, most, is_certain)):
                lengths[row], gain = length, gain + worth * length / most
                lacked += self._proposer.lacks(row) * (1 + worth) / (row.max_tokens - row.count)
            elif row.count < row.max_tokens - 1:
                tried.append(row)
        drafted, longest = sum(lengths.values()), max(lengths.values(), default=0)
        run = longest * base + self._row_cost * lacked
        if gain * base <= count * (self._row_cost * drafted + step_cost + token_cost * run):
            tried, lengths = [*lengths, *tried], {}
        if token_cost:  # one row is enough to find out
            tried = sorted(tried, key=self._proposer.lacks)[:1]
        if is_trying:
            lengths |= {row: length for row in tried if (length := self._room(row, 1, is_certain))}
        if not self._steps.can_verify(count, count + sum(lengths.values())):
            lengths = {}
        if is_trying and (is_certain or not lengths):
            self._wait_for_try(tried if lengths else [], base)
        return lengths

    def _wait_for_try(self, tried: list[Sequence], base: float) -> None:
        """Choose after how many steps rows are tried again."""
        ran = sum(map(self._proposer.lacks, tried))
        cost = self._costs.of_step + self._costs.of_pass * (1 + self._row_cost * ran / base)
        self._steps_to_try = max(TUNING.steps_between_tries, int(cost / TUNING.tries_share))

    def _choose_length(self, row: Sequence, least: float) -> tuple[int, float]:
        """Return how long a row's draft is best, and how many of its tokens will be right.

        Args:
            row: which has drafts.
            least: what a token costs.
        """
        assert row.drafting
        probability, worth, most = row.drafting.acceptance.probability, 0.0, 0
        part = probability
        while most < min(row.drafting.most, row.max_tokens - row.count - 1) and part > least:
            most, worth, part = most + 1, worth + part, part * probability
        return most, worth

    def _room(self, row: Sequence, most: int, is_certain: bool) -> int:
        """Return how many tokens a row's draft may have: as many as it has pages for."""
        length = self._proposer.expect(row, most)
        return row.reservation.room_for_draft(length) if is_certain and length else length

    def _propose(self, lengths: Mapping[Sequence, int], base: float) -> Drafts:
        """Return drafts of rows, as far as their grammars allow, and before the rows may end."""
        found, begun_s = Drafts(), self._costs.now()
        drafts = self._proposer.propose(lengths)
        run = max(lengths.values()) * base + self._row_cost * self._proposer.ran
        self._costs.note_drafted(begun_s, base + self._row_cost * sum(map(len, drafts.values())), run)
        for row, draft in drafts.items():
            if draft[:1] == [NOT_FINITE]:
                self._overall.note(1, 0)
                row.drafting = None
            ends = {*row.end_ids, NOT_FINITE}
            count = next((at for at, token in enumerate(draft) if token in ends), len(draft))
            if row.guided:
                count = count_allowed(row.guided, row.beams[0].tokens, draft[:count])
            if count:
                found[row] = draft[:count]
        return found

    def accept(
        self, tokens: Several[OwnedToken], present: Container[Sequence]
    ) -> tuple[dict[int, int], list[Sequence]]:
        """Append what follows on those tokens of drafts that were right, to rows that are present.

        Each token was chosen as without drafts: the argmax, or drawn by the random number of its place. So a draft's
        token, which is certain, is accepted with its own probability, and what comes in the place of another one has
        the distribution of the rest: that is rejection sampling.

        Returns:
            The slot of each row that goes on as another slot, and that one; and rows that have numbers in the cache
            that are not finite, of tokens that were wrong.
        """
        moved, spoilt, accepted = dict[int, int](), list[Sequence](), dict[Sequence, list[int]]()
        for slot, ((assumed, _), token, scores) in enumerate(tokens):
            row = assumed.origin
            if row is None or row not in present:
                continue
            counts = accepted.setdefault(row, [0, 0])
            counts[0] += 1
            if not assumed.is_right:
                spoilt += [row] if token == NOT_FINITE and row not in spoilt and not row.is_done else []
            elif token != NOT_FINITE:  # else the next step finds it again
                row.append(row.beams[0], token, *scores)
                row.launched += 1
                row.end_step()
                moved[row.slots[0]], counts[1] = slot, counts[1] + 1
        for row, (drafted, right) in accepted.items():
            assert row.drafting
            row.drafting.acceptance.note(drafted, right)
            self._overall.note(drafted, right)
            self._metrics.note_draft(drafted, right)
        return moved, spoilt
