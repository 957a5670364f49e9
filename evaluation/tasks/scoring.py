"""Log probabilities of given tokens under a served model (teacher forcing), with either engine.

The drop-in engine scores every token of a text in one forward pass (``is_return_context_log_probs``). FasterTransformer
cannot do so: each position takes a row of its own, a prompt that ends before it, and a token's log probability is the
difference between two sums of ``is_return_context_cum_log_probs``. Both ways give the same figures; the second one
takes longer. For an encoder-decoder the drop-in engine scores the decoder's input (``decoder_input_ids``), which
FasterTransformer does not support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.client.answer_tensors import Generation
from evaluation.client.client import DECODER_INPUT
from evaluation.client.connecting import connect
from evaluation.client.model_connection import Ids, ModelConnection, ModelFiles, Query
from evaluation.client.served_model import Target, target_inside
from evaluation.client.tokenizer import Tokenizer
from handover.errors import ConfigError, ServerError
from handover.provenance import PROGRAM

Pair = tuple[Ids, Ids]  # context and target
_COUNTS_ONE = "vllm"
"""A server that refuses a prompt as long as the model's positions even where no token is to be generated."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of the target tokens of a text.

    Attributes:
        log_probs: natural log probability of each token given its predecessors, without temperature and penalties.
        argmax: the most probable token at each of these positions.
        top: log probabilities of the most probable tokens there; empty if they were not asked for.
    """

    log_probs: tuple[float, ...]
    argmax: tuple[int, ...]
    top: tuple[Mapping[int, float], ...] = ()


class Scorer:
    """Scores token ids over connections that belong to one thread.

    An ensemble scores the texts that its tokenizer encodes to the same token ids, if it has the tensors; all others are
    scored by the model inside it that takes token ids. An OpenAI API is asked by token ids, if it takes them.

    Args:
        target: the served model.
        timeout_s: limit of one request in seconds.
        tokenizer: tokenizer of a model that takes texts.
        end_id: the token that a text model appends to an encoder's input.
    """

    def __init__(
        self, target: Target, timeout_s: float, tokenizer: Tokenizer | None = None, end_id: int | None = None
    ) -> None:
        files = ModelFiles(tokenizer, end_id)
        self._url, self._batch_size = target.url, target.batch_size
        self._texts: ModelConnection | None = None
        inside: Target | None = target
        if not target.interface.takes_ids:
            if target.interface.takes_text and target.interface.can_score:
                self._texts = connect(target, timeout_s, files)
            inside = target_inside(target)
        self._ids = connect(inside, timeout_s, files) if inside else None
        interface, self._name = (inside or target).interface, (inside or target).model
        self._is_t5, self._may_score = interface.is_encoder_decoder, interface.can_score
        self._is_api, self._spare = target.is_openai, 0
        can = target.capabilities
        if can and (not can.scores_alone or can.card.owned_by == _COUNTS_ONE):
            self._spare = 1  # with each score a token is generated, or room for one is needed

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._texts, self._ids):
            if connection is not None:
                connection.close()

    def spare_positions(self, token: int) -> int:
        """Score one token to find how many positions more than its tokens a text needs.

        It is 1 if a text is scored by prefixes, or by an OpenAI API that generates a token with each score.

        Raises:
            ServerError: the server failed, or returns no log probabilities.
        """
        self.score([((token,), (token,))])
        return self._spare if self._may_score else 1

    def score(self, pairs: Sequence[tuple[Ids, Ids]], top: int = 0) -> list[TokenScores]:
        """Score the tokens of targets given their contexts.

        Args:
            pairs: token ids of context and target; an encoder's context ends with its end token.
            top: most probable tokens to ask for in each place, of a model that takes token ids.

        Raises:
            ConfigError: no served model scores tokens, or some texts cannot be scored.
            ServerError: the server failed, or returns no log probabilities.
        """
        if not all(context and target for context, target in pairs):
            raise ValueError("a scored token has one before it")
        found: list[TokenScores] = []
        for start in range(0, len(pairs), self._batch_size):
            part = [(tuple(context), tuple(target)) for context, target in pairs[start : start + self._batch_size]]
            scores: list[TokenScores | None] = [None] * len(part)
            if self._texts and not top:
                scores = _in_one_pass(self._texts, part, self._is_t5)
            if missing := [row for row, each in enumerate(scores) if each is None]:
                for row, each in zip(missing, self._by_ids([part[row] for row in missing], top), strict=True):
                    scores[row] = each
            found += [each for each in scores if each is not None]
        return found

    def _by_ids(self, pairs: Sequence[Pair], top: int) -> Sequence[TokenScores]:
        if self._ids is None:
            raise ConfigError(
                f"{len(pairs)} texts cannot be scored: the model takes texts, it has no tensors for scores or these are"
                " cut or begin with a special token, and no model inside it that takes token ids is served",
                f"serve the ensemble's models side by side, as {PROGRAM} stages=[export,deploy] does",
            )
        if self._may_score or self._is_api:  # an API that cannot says so in its own words
            scores = [each for each in _in_one_pass(self._ids, pairs, self._is_t5, top) if each is not None]
            if len(scores) == len(pairs) or self._is_api:
                return scores
            self._may_score = False  # FasterTransformer ignores the input
        if self._is_t5:
            check_answers(f"'{self._name}' at {self._url}", False)
        return [self._by_prefixes(self._ids, (*context, *target), len(context)) for context, target in pairs]

    def _by_prefixes(self, asker: ModelConnection, ids: Ids, first: int) -> TokenScores:
        prefixes = [Query(1, ids[:end], wants_sum=True) for end in range(first, len(ids) + 1)]
        answers: list[Generation] = []
        for start in range(0, len(prefixes), self._batch_size):
            found = asker.ask(prefixes[start : start + self._batch_size])
            answers += [answer for answer in found if answer is not None]
        sums = [prompt_log_prob(answer) for answer in answers]
        log_probs = tuple(whole - before for before, whole in zip(sums, sums[1:], strict=False))
        return TokenScores(log_probs, tuple(answer.tokens[0] for answer in answers[:-1]))


def _in_one_pass(asker: ModelConnection, pairs: Sequence[Pair], is_t5: bool, top: int = 0) -> list[TokenScores | None]:
    """Score pairs in one request; None where the model cannot."""
    given = [(context, target) if is_t5 else (context + target, ()) for context, target in pairs]
    answers = asker.ask([Query(0, prompt, begun, wants_each=True, top=top) for prompt, begun in given])
    found: list[TokenScores | None] = []
    for answer, (_, target) in zip(answers, pairs, strict=True):
        if answer is None or answer.prompt_log_probs is None or answer.prompt_argmax is None:
            found.append(None)
        else:
            scored = slice(-len(target), None)
            best = (answer.prompt_top or ())[scored]
            found.append(TokenScores(answer.prompt_log_probs[scored], answer.prompt_argmax[scored], best))
    return found


def check_answers(model: str, can_score: bool) -> None:
    """Refuse an encoder-decoder that does not take the decoder's input.

    Raises:
        ConfigError: the model does not take it.
    """
    if not can_score:
        raise ConfigError(
            f"model {model} is an encoder-decoder that takes no {DECODER_INPUT}: nothing scores given tokens there",
            "export it again and serve it with the drop-in engine; FasterTransformer's own T5 can only generate",
        )


def prompt_log_prob(answer: Generation) -> float:
    """Return the log probability of a prompt without its first token: the cumulative sum less the generated tokens'.

    Raises:
        ServerError: the answer contains no log probabilities.
    """
    if answer.cum_log_prob is None or answer.log_probs is None:
        raise ServerError("the server's answer carries no log probabilities")
    return answer.cum_log_prob - sum(answer.log_probs)
