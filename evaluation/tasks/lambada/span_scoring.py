"""Score spans of text under a served model, in the way that its engine supports.

The drop-in engine scores every token of a text in one forward pass (``is_return_context_log_probs``), so each sequence
is sent once. FasterTransformer cannot do so: a span is generated greedily, and its log probability is that of the whole
sequence minus that of what precedes it (``is_return_context_cum_log_probs``). Both work through ``fastertransformer``
and, as text, through ``ensemble``; see ``client/triton_connection.py``. For an encoder-decoder, what precedes the span
is the encoder's input and the span the decoder's (``decoder_input_ids``), which FasterTransformer does not take. An
OpenAI API scores a sequence by ``echo`` with ``logprobs``; one without it generates the spans, and has no log
probabilities of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from evaluation.arguments import TaskArguments
from evaluation.client.answer_tensors import Generation
from evaluation.client.connecting import connect
from evaluation.client.errors import RequestError
from evaluation.client.model_connection import ModelConnection, ModelFiles, Query
from evaluation.client.served_model import Target
from evaluation.client.tokenizer import Tokenizer
from evaluation.tasks.lambada.score import SpanAnswer, Verdict, judge_scored
from evaluation.tasks.lambada.spans import Span
from evaluation.tasks.scoring import check_answers, prompt_log_prob
from evaluation.tasks.target import ask_all, in_batches


class SpanScorer:
    """Scores spans with one model."""

    def __init__(self, target: Target, arguments: TaskArguments, tokenizer: Tokenizer) -> None:
        self._target, self._arguments, end_id = target, arguments, target.served.end_id
        self._files = ModelFiles(tokenizer, end_id)
        self._ending = () if end_id is None else (end_id,)  # of an encoder's input

    def score(self, spans: Mapping[Span, bool]) -> dict[Span, SpanAnswer]:
        """Score spans; True means that the span's log probability is requested too.

        Raises:
            UnreachableError: no server answers.
        """
        can_score = self._scores_in_one_pass(spans)
        if self._target.interface.is_encoder_decoder:
            check_answers(f"'{self._arguments.model}' at {self._target.url}", can_score)
        elif not can_score:
            return self._by_generation(spans)
        queries = {span: self._scoring(span) for span in spans}
        answers = self._ask(queries.values())
        return {span: _scored(span, query, answers[query]) for span, query in queries.items()}

    def _scoring(self, span: Span) -> Query:
        """Return the query that scores a span."""
        if self._target.interface.is_encoder_decoder:
            return Query(1, span.sequence[: span.start] + self._ending, span.target, wants_each=True)
        return Query(1, span.sequence, wants_each=True)

    def _scores_in_one_pass(self, spans: Iterable[Span]) -> bool:
        """Try to score one span: FasterTransformer also accepts the inputs that request scores, and ignores them."""
        if not self._target.interface.can_score:
            return False
        with closing(self._connect()) as connection:
            try:
                found = (connection.ask([self._scoring(span)])[0] for span in spans)
                answer = next((each for each in found if each is not None), None)
            except RequestError:
                return True  # the scoring request itself will report what is wrong
        return answer is not None and answer.prompt_argmax is not None

    def _by_generation(self, spans: Mapping[Span, bool]) -> dict[Span, SpanAnswer]:
        if self._target.is_openai:  # without echo an OpenAI API gives no prompt's log probability: it is missing
            spans = dict.fromkeys(spans, False)
        queries = {span: _queries(span, wants_log_prob) for span, wants_log_prob in spans.items()}
        answers = self._ask(query for each in queries.values() for query in each)
        return {span: _generated(span, [answers[query] for query in each]) for span, each in queries.items()}

    def _ask(self, queries: Iterable[Query]) -> dict[Query, Generation | str | None]:
        # Every row of a request costs as much as its longest one. The longest come first, so that none starts last.
        # A request has queries of one kind, because scores that one row requests are computed for all.
        def cost(query: Query) -> tuple[object, ...]:
            return query.wants_each, query.wants_sum, query.output_length, len(query.prompt), query

        ordered = sorted(set(queries), key=cost, reverse=True)
        kinds: dict[tuple[bool, bool], list[Query]] = {}
        for query in ordered:
            kinds.setdefault((query.wants_each, query.wants_sum), []).append(query)
        batches = [batch for kind in kinds.values() for batch in in_batches(kind, self._target.batch_size)]
        return ask_all(
            self._connect, batches, self._arguments.concurrency, lambda connection, batch: connection.ask(batch)
        )

    def _connect(self) -> ModelConnection:
        return connect(self._target, self._arguments.timeout_s, self._files)


def _queries(span: Span, wants_log_prob: bool) -> list[Query]:
    """Return the query that generates a span and, for its log probability, one for the whole sequence."""
    generation = Query(len(span.target), span.sequence[: span.start], wants_sum=wants_log_prob)
    return [generation, Query(1, span.sequence, wants_sum=True)] if wants_log_prob else [generation]


def _scored(span: Span, query: Query, answer: Generation | str | None) -> SpanAnswer:
    if not isinstance(answer, Generation):
        return answer
    if answer.prompt_log_probs is None or answer.prompt_argmax is None:
        return "the answer scores no token"
    if query.begun:
        return Verdict(answer.prompt_argmax == span.target, math.fsum(answer.prompt_log_probs))
    return judge_scored(span, answer.prompt_log_probs, answer.prompt_argmax)


def _generated(span: Span, answers: Sequence[Generation | str | None]) -> SpanAnswer:
    for answer in answers:
        if not isinstance(answer, Generation):
            return answer
    known = [answer for answer in answers if isinstance(answer, Generation)]
    log_prob = None
    if len(known) > 1:
        log_prob = prompt_log_prob(known[1]) - prompt_log_prob(known[0])
    return Verdict(known[0].tokens == span.target, log_prob)
