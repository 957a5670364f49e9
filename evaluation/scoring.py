"""Log probabilities of given tokens under a served model (teacher forcing), whichever engine serves it.

The drop-in engine scores every token of a text in one pass (``is_return_context_log_probs``). FasterTransformer's own
cannot: there each place takes one more row, a prompt that ends before it, and a token's log probability is the
difference between two of ``is_return_context_cum_log_probs``' sums. Both give the same figures; the latter takes
longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.client import Client
from evaluation.tensors import GREEDY_UNDER_THE_MODEL, NEVER_END_ID, Generation
from handover.errors import ServerError

SCORES_INPUT = "is_return_context_log_probs"

Ids = Sequence[int]


@dataclass(frozen=True)
class TokenScores:
    """What a model makes of the tokens of a text from some place on.

    Attributes:
        log_probs: natural log probability of each after its predecessors, without temperature and penalties.
        argmax: the most probable token in each place.
    """

    log_probs: tuple[float, ...]
    argmax: tuple[int, ...]


class Scorer:
    """Scores token ids over one connection.

    Args:
        client: of one thread.
        model: Triton's name of a model that takes token ids and continues them.
        batch_size: rows that a request may have.
    """

    def __init__(self, client: Client, model: str, batch_size: int) -> None:
        self._client, self._model, self._batch_size = client, model, batch_size
        self._may_score = SCORES_INPUT in client.describe(model).inputs

    def spare_positions(self, token: int) -> int:
        """Ask about a token, and say how many positions more than its tokens a text takes: 1 where it goes by prefixes.

        Raises:
            ServerError: the server failed, or gives no log probabilities.
        """
        self.score([(token, token)], [1])
        return 0 if self._may_score else 1

    def score(self, texts: Sequence[Ids], firsts: Sequence[int]) -> list[TokenScores]:
        """Score each text's tokens from its place ``first`` on; place 0 has no predecessor and no score.

        Raises:
            ServerError: the server failed, or gives no log probabilities.
        """
        if not all(0 < first < len(ids) for ids, first in zip(texts, firsts, strict=True)):
            raise ValueError("a token that is scored has one before it")
        found: list[TokenScores] = []
        for start in range(0, len(texts), self._batch_size):
            part = slice(start, start + self._batch_size)
            found += self._in_one_pass(texts[part], firsts[part]) or [
                self._by_prefixes(ids, first) for ids, first in zip(texts[part], firsts[part], strict=True)
            ]
        return found

    def _in_one_pass(self, texts: Sequence[Ids], firsts: Sequence[int]) -> list[TokenScores]:
        """Score texts in one request; nothing where the engine cannot."""
        if not self._may_score:
            return []
        answers = self._client.generate_ids(texts, 0, model=self._model, prompt_log_probs=True)
        found = []
        for answer, first in zip(answers, firsts, strict=True):
            if answer.prompt_log_probs is None or answer.prompt_argmax is None:
                self._may_score = False  # FasterTransformer ignores the input
                return []
            found.append(TokenScores(answer.prompt_log_probs[first - 1 :], answer.prompt_argmax[first - 1 :]))
        return found

    def _by_prefixes(self, ids: Ids, first: int) -> TokenScores:
        prefixes = [tuple(ids[:end]) for end in range(first, len(ids) + 1)]
        answers: list[Generation] = []
        for start in range(0, len(prefixes), self._batch_size):
            answers += self._client.generate_ids(
                prefixes[start : start + self._batch_size],
                1,
                model=self._model,
                sampling=GREEDY_UNDER_THE_MODEL,
                end_id=NEVER_END_ID,
                context_log_probs=True,
            )
        sums = [prompt_log_prob(answer) for answer in answers]
        log_probs = tuple(whole - before for before, whole in zip(sums, sums[1:], strict=False))
        return TokenScores(log_probs, tuple(answer.tokens[0] for answer in answers[:-1]))


def prompt_log_prob(answer: Generation) -> float:
    """Log probability of a prompt's tokens but the first: the sum over all without that of the generated ones.

    Raises:
        ServerError: the answer carries no log probabilities.
    """
    if answer.cum_log_prob is None or answer.log_probs is None:
        raise ServerError("the server's answer carries no log probabilities")
    return answer.cum_log_prob - sum(answer.log_probs)
