"""Find out what a served model makes of spans, by what it can do.

The drop-in engine scores every token of a text in one pass (``is_return_context_log_probs``), so each sequence is sent
once. FasterTransformer's own cannot: there a span is generated greedily, and its log probability is that of the whole
sequence minus that of what precedes it (``is_return_context_cum_log_probs``). Both work through ``fastertransformer``
and, as text, through ``ensemble``; a sequence that its tokenizer would not encode to the same tokens is not sent there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evaluation.arguments import TaskArguments
from evaluation.asking import Target, ask_all, in_batches
from evaluation.client import Client, RequestError
from evaluation.lambada_score import Answer, Verdict, judge_scored
from evaluation.lambada_task import Ids, Span
from evaluation.scoring import SCORES_INPUT, prompt_log_prob
from evaluation.tensors import (
    GREEDY_UNDER_THE_MODEL,
    NEVER_END_ID,
    Generation,
    prepare_texts,
    read_completions,
)
from evaluation.tokenizer import Tokenizer
from handover.errors import ServerError


@dataclass(frozen=True, order=True)
class Query:
    """One row to send: greedy, never stopped by an end token.

    Attributes:
        output_length: tokens to generate.
        prompt: token ids.
        wants_sum: the prompt's log probability is asked for.
        wants_each: that of each of its tokens is.
    """

    output_length: int
    prompt: Ids
    wants_sum: bool = False
    wants_each: bool = False


class Judge:
    """Asks one model about spans.

    Args:
        target: the model.
        arguments: how to ask it.
        tokenizer: the served model's.
    """

    def __init__(self, target: Target, arguments: TaskArguments, tokenizer: Tokenizer) -> None:
        self._target, self._arguments, self._tokenizer = target, arguments, tokenizer

    def judge(self, spans: Mapping[Span, bool]) -> dict[Span, Answer]:
        """Find out about spans; true: its log probability is wanted too.

        Raises:
            UnreachableError: no server answers.
        """
        if not self._scores_in_one_pass(next(iter(spans))):
            return self._by_generation(spans)
        answers = self._ask(Query(1, span.sequence, wants_each=True) for span in spans)
        return {span: _scored(span, answers[Query(1, span.sequence, wants_each=True)]) for span in spans}

    def _scores_in_one_pass(self, span: Span) -> bool:
        """Ask about one span: FasterTransformer takes the input of our configuration too, and ignores it."""
        if SCORES_INPUT not in self._target.interface.inputs:
            return False
        with Client(self._target.url, self._arguments.timeout_s) as client:
            try:
                (answer,) = self._send(client, [Query(1, span.sequence, wants_each=True)])
            except RequestError:
                return True  # whatever is wrong will be said where it counts
        return answer is not None and answer.prompt_argmax is not None

    def _by_generation(self, spans: Mapping[Span, bool]) -> dict[Span, Answer]:
        queries = {span: _queries(span, wants_log_prob) for span, wants_log_prob in spans.items()}
        answers = self._ask(query for each in queries.values() for query in each)
        return {span: _generated(span, [answers[query] for query in each]) for span, each in queries.items()}

    def _ask(self, queries: Iterable[Query]) -> dict[Query, Generation | str | None]:
        # Rows of one request cost as much as its longest; long ones first, so that none is left for the end. Rows of
        # one kind, because a score that one row asks for is laid out for all.
        def cost(query: Query) -> tuple[object, ...]:
            return query.wants_each, query.wants_sum, query.output_length, len(query.prompt), query.prompt

        ordered = sorted(set(queries), key=cost, reverse=True)
        kinds: dict[tuple[bool, bool], list[Query]] = {}
        for query in ordered:
            kinds.setdefault((query.wants_each, query.wants_sum), []).append(query)
        batches = [batch for kind in kinds.values() for batch in in_batches(kind, self._target.batch_size)]
        arguments = self._arguments
        return ask_all(self._target.url, arguments.timeout_s, batches, arguments.concurrency, self._send)

    def _send(self, client: Client, queries: Sequence[Query]) -> list[Generation | None]:
        if self._target.interface.takes_ids:
            return list(
                client.generate_ids(
                    [query.prompt for query in queries],
                    [query.output_length for query in queries],
                    model=self._arguments.model,
                    sampling=GREEDY_UNDER_THE_MODEL,
                    end_id=NEVER_END_ID,
                    context_log_probs=queries[0].wants_sum,
                    prompt_log_probs=queries[0].wants_each,
                )
            )
        texts = [self._tokenizer.decode(query.prompt) for query in queries]
        rows = [row for row, text in enumerate(texts) if tuple(self._tokenizer.encode(text)) == queries[row].prompt]
        answers: list[Generation | None] = [None] * len(queries)
        if rows:
            sent = [queries[row] for row in rows]
            for row, answer in zip(rows, self._send_texts(client, [texts[row] for row in rows], sent), strict=True):
                answers[row] = answer
        return answers

    def _send_texts(self, client: Client, texts: Sequence[str], queries: Sequence[Query]) -> list[Generation]:
        request = prepare_texts(
            texts,
            [query.output_length for query in queries],
            GREEDY_UNDER_THE_MODEL,
            end_id=NEVER_END_ID,
            context_log_probs=queries[0].wants_sum,
            prompt_log_probs=queries[0].wants_each,
        )
        completions = read_completions(len(texts), client.send(self._arguments.model, request))
        generations = []
        for query, completion in zip(queries, completions, strict=True):
            given, wanted = len(query.prompt), query.output_length
            if completion.length is not None and completion.length != given + wanted:
                raise ServerError(
                    f"the ensemble made {completion.length - wanted} tokens of a text of {given}: its tokenizer is "
                    "another one"
                )
            # Only a generation of the text's own tokens is a text that is encoded to them; others need no names.
            tokens = tuple(self._tokenizer.encode(completion.text)[given:])
            scores = completion.scores
            each, best = scores.prompt_log_probs, scores.prompt_argmax
            generations.append(
                Generation(
                    tokens,
                    scores.cum_log_prob,
                    None if scores.log_probs is None else scores.log_probs[:wanted],
                    None if each is None else each[: given - 1],
                    None if best is None else best[: given - 1],
                )
            )
        return generations


def _queries(span: Span, wants_log_prob: bool) -> list[Query]:
    """The generation of a span and, for its log probability, the whole sequence."""
    generation = Query(len(span.target), span.sequence[: span.start], wants_sum=wants_log_prob)
    return [generation, Query(1, span.sequence, wants_sum=True)] if wants_log_prob else [generation]


def _scored(span: Span, answer: Generation | str | None) -> Answer:
    if not isinstance(answer, Generation):
        return answer
    if answer.prompt_log_probs is None or answer.prompt_argmax is None:
        return "the answer scores no token"
    return judge_scored(span, answer.prompt_log_probs, answer.prompt_argmax)


def _generated(span: Span, answers: Sequence[Generation | str | None]) -> Answer:
    for answer in answers:
        if not isinstance(answer, Generation):
            return answer
    known = [answer for answer in answers if isinstance(answer, Generation)]
    log_prob = None
    if len(known) > 1:
        log_prob = prompt_log_prob(known[1]) - prompt_log_prob(known[0])
    return Verdict(known[0].tokens == span.target, log_prob)
