"""A served model that is asked through an OpenAI API, as ``ModelConnection``.

Given tokens are scored by ``echo`` with ``logprobs=1``: the answer has each prompt token's log probability and the most
probable token at its place. Token ids are sent where the API takes them; otherwise texts are sent, and a text that the
API encodes to another number of tokens is an error, not a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.client.answer_tensors import Generation
from evaluation.client.errors import RequestError
from evaluation.client.model_connection import OTHER_TOKEN, Continuation, Ids, ModelFiles, Query, WrittenPrompt
from evaluation.client.openai_capabilities import GREEDY, TOKEN_PREFIX, Capabilities
from evaluation.client.openai_client import Choice, Completed, OpenAIClient
from evaluation.client.request_tensors import Sampling
from evaluation.client.tokenizer import text_for
from handover.errors import ConfigError

_GREEDY_SAMPLING = Sampling()
_MOST_STOPS = 4


class OpenAIConnection:
    """A connection to one model of an OpenAI API.

    Args:
        client: connection to the server; it is closed with this one.
        capabilities: what the endpoint can do.
        files: the model's tokenizer, which is needed where the endpoint takes or returns texts alone.
    """

    def __init__(self, client: OpenAIClient, capabilities: Capabilities, files: ModelFiles) -> None:
        self._client, self._can, self._tokenizer = client, capabilities, files.tokenizer
        self._names: dict[str, Any] = {"return_tokens_as_token_ids": True} if capabilities.names_ids else {}
        self._ids: dict[str, Any] = {"return_token_ids": True} if capabilities.returns_ids else {}

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def ask(self, queries: Sequence[Query]) -> list[Generation | None]:
        """Send queries; see ``ModelConnection``. An answer may be shorter where the API has no ``ignore_eos``."""
        answers: list[Generation | None] = [None] * len(queries)
        for length in sorted({query.output_length for query in queries}):
            rows = [row for row, query in enumerate(queries) if query.output_length == length]
            if not self._can.takes_ids:
                rows = [row for row in rows if self._text(queries[row].prompt) is not None]
            if rows:
                for row, answer in zip(rows, self._send([queries[row] for row in rows]), strict=True):
                    answers[row] = answer
        return answers

    def complete(
        self, prompts: Sequence[WrittenPrompt], output_length: int, sampling: Sampling | None, stop: Sequence[str] = ()
    ) -> list[Continuation]:
        """Have prompts continued; see ``ModelConnection``. Only the first four stop strings are sent, as OpenAI allows.

        What follows another stop string is the caller's to cut.
        """
        fields = {**sampling_fields(sampling or _GREEDY_SAMPLING), **self._ids, "max_tokens": output_length}
        if stop:
            fields["stop"] = list(stop[:_MOST_STOPS])
        given: Sequence[Any] = [prompt.ids if self._can.takes_ids else prompt.text for prompt in prompts]
        found: list[Continuation] = []
        # Without ids ``usage`` counts the tokens, of all prompts of a request together.
        for start in range(0, len(given), len(given) if self._ids else 1):
            part = given[start : start + (len(given) if self._ids else 1)]
            answer = self._client.complete(self._can.card.id, part, **fields)
            found += [self._continuation(choice, answer.completion_tokens) for choice in answer.choices]
        return found

    def _continuation(self, choice: Choice, counted: int | None) -> Continuation:
        if choice.token_ids is not None:
            return Continuation(choice.text, choice.token_ids, len(choice.token_ids))
        assert self._tokenizer is not None, "prompts are written with a tokenizer"
        return Continuation(choice.text, tuple(self._tokenizer.encode_part(choice.text)), counted)

    def _text(self, prompt: Ids) -> str | None:
        """Return the text that is encoded to a prompt; None if there is none."""
        assert self._tokenizer is not None, "a server that takes texts comes with its tokenizer"
        return text_for(self._tokenizer, prompt)

    def _send(self, queries: Sequence[Query]) -> list[Generation]:
        kind, length = queries[0], queries[0].output_length
        is_scored = kind.wants_each or kind.wants_sum
        if is_scored and not self._can.scores_prompts:
            raise ConfigError(
                f"{self._client.url} scores no given tokens: {self._can.why_not('echo with logprobs')}",
                "give an endpoint whose /v1/completions has echo with logprobs",
            )
        fields: dict[str, Any] = {**GREEDY, **self._ids}
        if kind.wants_each:  # callers ask for a token that only FasterTransformer has to generate
            length = 0 if self._can.scores_alone else 1
        if is_scored:
            fields["echo"] = True
        if is_scored or kind.wants_log_probs:
            fields |= {"logprobs": max(1, kind.top), **self._names}
        if self._can.ignores_end and length:
            fields["ignore_eos"] = True
        prompts: Sequence[Any] = [
            query.prompt if self._can.takes_ids else self._text(query.prompt) for query in queries
        ]
        answer = self._client.complete(self._can.card.id, prompts, max_tokens=length, **fields)
        self._check_counts(answer, queries)
        return [self._read(query, choice) for query, choice in zip(queries, answer.choices, strict=True)]

    def _check_counts(self, answer: Completed, queries: Sequence[Query]) -> None:
        given = sum(len(query.prompt) for query in queries)
        if answer.prompt_tokens not in (None, given):
            raise RequestError(
                f"{self._client.url} read {answer.prompt_tokens} tokens where {given} were given: its tokenizer is"
                " another one, or it adds tokens of its own"
            )

    def _read(self, query: Query, choice: Choice) -> Generation:
        given, is_scored = len(query.prompt), query.wants_each or query.wants_sum
        if not is_scored and not query.wants_log_probs:
            return Generation(self._generated(query.prompt, choice, 0))
        log_probs, top = choice.log_probs or (), choice.top or ()
        first = given if is_scored else 0
        counts = {len(log_probs), len(top), len(choice.tokens or ())}
        if len(log_probs) < first or len(counts) > 1 or None in log_probs[1 if is_scored else 0 :]:
            raise RequestError(f"{self._client.url} gave {len(log_probs)} log probabilities for {given} tokens")
        known = [value for value in log_probs if value is not None]  # all but a prompt's first token have one
        made = tuple(known[given - 1 if is_scored else 0 :])
        tokens = () if query.wants_each else self._generated(query.prompt, choice, first)
        prompt_scores = tuple(known[: given - 1]) if is_scored else ()
        return Generation(
            tokens,
            sum(known) if query.wants_sum else None,
            made,
            prompt_scores if query.wants_each else None,
            self._argmax(query.prompt, choice) if query.wants_each else None,
            tuple(_by_id(top[at]) for at in range(1, given)) if query.top else None,
        )

    def _argmax(self, prompt: Ids, choice: Choice) -> Ids:
        """Return the most probable token at each place of a prompt but the first."""
        names, scores, tops = choice.tokens or (), choice.log_probs or (), choice.top or ()
        return tuple(
            most_probable(token, names[at], scores[at] or 0.0, tops[at] or {}) for at, token in enumerate(prompt) if at
        )

    def _generated(self, prompt: Ids, choice: Choice, first: int) -> Ids:
        """Return the generated ids: as the API says them or, from a text, where it is encoded as it was written."""
        if choice.token_ids is not None:
            return choice.token_ids
        if self._names and choice.tokens is not None:
            return tuple(_number(name) for name in choice.tokens[first:])
        assert self._tokenizer is not None, "a server that returns texts comes with its tokenizer"
        whole = choice.text if first else self._tokenizer.decode(prompt) + choice.text
        return tuple(self._tokenizer.encode(whole)[len(prompt) :])


def most_probable(token: int, name: str, log_prob: float, top: Mapping[str, float]) -> int:
    """Return the most probable token at a place, from what ``logprobs=1`` gives: it, and the given token.

    Args:
        token: the given token.
        name: its name.
        log_prob: its log probability.
        top: log probabilities by name: the most probable token's and, in most servers, the given one's.

    Returns:
        The token's id, or ``OTHER_TOKEN`` where names are texts and it is another one than the given token.
    """
    others = {other: value for other, value in top.items() if other != name}
    if others:
        best = max(others, key=lambda other: others[other])
        # With another token of the same log probability the server's own choice counts, and that is the other one.
        return token if log_prob > others[best] else _number(best)
    # Names may be equal where tokens are not: then the log probability under that name is another token's.
    return token if top.get(name, log_prob) <= log_prob else OTHER_TOKEN


def _by_id(top: Mapping[str, float] | None) -> dict[int, float]:
    """Return what a place's most probable tokens have; those whose names are texts are left out."""
    return {token: value for name, value in (top or {}).items() if (token := _number(name)) != OTHER_TOKEN}


def _number(name: str) -> int:
    digits = name.removeprefix(TOKEN_PREFIX)
    return int(digits) if name != digits and digits.isdigit() else OTHER_TOKEN


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Translate sampling parameters; the default is greedy decoding.

    Raises:
        ConfigError: beams, which OpenAI's API does not have.
    """
    if sampling.beam_width > 1:
        raise ConfigError(
            f"beam_width is {sampling.beam_width}, and OpenAI's API has no beam search",
            "take beam_width=1, or ask Triton by gRPC",
        )
    if sampling.top_k == 1:
        return dict(GREEDY)
    fields: dict[str, Any] = {"temperature": sampling.temperature, "seed": sampling.random_seed}
    fields |= {"top_p": sampling.top_p} if 0 < sampling.top_p < 1 else {}
    fields |= {"top_k": sampling.top_k} if sampling.top_k else {}
    return fields | ({} if sampling.repetition_penalty == 1 else {"repetition_penalty": sampling.repetition_penalty})
