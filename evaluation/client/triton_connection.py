"""A served model that is asked by gRPC, as ``ModelConnection``.

Queries are token ids. They are sent to a model that takes token ids or, as texts, to an ensemble: only where the
tokenizer encodes a text to the same token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evaluation.client.answer_tensors import Completion, Generation, read_completions
from evaluation.client.client import Client, ModelInterface
from evaluation.client.model_connection import Continuation, Ids, ModelFiles, Query, WrittenPrompt
from evaluation.client.request_tensors import GREEDY_UNDER_THE_MODEL, Sampling, prepare_ids, prepare_texts
from evaluation.client.tokenizer import Tokenizer, text_for
from ft_format.tensors import NO_TOKEN
from handover.errors import ServerError


class Asker:
    """Sends queries to one model.

    Args:
        model: Triton's name of the model.
        interface: the model's inputs.
        tokenizer: the tokenizer of a text model.
        end_id: the token that a text model appends to an encoder's input.
    """

    def __init__(
        self, model: str, interface: ModelInterface, tokenizer: Tokenizer | None = None, end_id: int | None = None
    ) -> None:
        self._model, self._interface, self._tokenizer = model, interface, tokenizer
        self._ending: Ids = (end_id,) if interface.is_encoder_decoder and end_id is not None else ()

    def ask(self, client: Client, queries: Sequence[Query]) -> list[Generation | None]:
        """Send queries for the same kind of scores in one request.

        Returns:
            The answer to each query; None where no text is encoded to the query's token ids.

        Raises:
            ServerError: the server failed, or its tokenizer encodes a text differently.
        """
        if self._interface.takes_ids:
            request = prepare_ids(
                [query.prompt for query in queries],
                [query.output_length for query in queries],
                sampling=GREEDY_UNDER_THE_MODEL,
                end_id=NO_TOKEN,
                log_probs=queries[0].wants_log_probs,
                context_log_probs=queries[0].wants_sum,
                prompt_log_probs=queries[0].wants_each,
                prompt_top=queries[0].top,
                is_encoder_decoder=self._interface.is_encoder_decoder,
                begun=[query.begun for query in queries] if self._interface.is_encoder_decoder else (),
            )
            return [*client.generate(request, self._model)]
        texts = [self._text(query.prompt) for query in queries]
        rows = [row for row, text in enumerate(texts) if text is not None]
        answers: list[Generation | None] = [None] * len(queries)
        if rows:
            sent = [queries[row] for row in rows]
            for row, answer in zip(rows, self._send(client, [texts[row] or "" for row in rows], sent), strict=True):
                answers[row] = answer
        return answers

    def _text(self, prompt: Ids) -> str | None:
        """Return the text that is encoded to a prompt; None if there is none."""
        assert self._tokenizer is not None, "a text model comes with its tokenizer"
        own = prompt[: len(prompt) - len(self._ending)]
        return text_for(self._tokenizer, own) if (*own, *self._ending) == prompt else None

    def _send(self, client: Client, texts: Sequence[str], queries: Sequence[Query]) -> list[Generation]:
        request = prepare_texts(
            texts,
            [query.output_length for query in queries],
            GREEDY_UNDER_THE_MODEL,
            end_id=NO_TOKEN,
            context_log_probs=queries[0].wants_sum,
            prompt_log_probs=queries[0].wants_each,
            begun=[query.begun for query in queries],
        )
        answer = client.send(self._model, request)
        completions = read_completions(len(texts), answer, self._interface.is_encoder_decoder)
        return [self._read(query, completion) for query, completion in zip(queries, completions, strict=True)]

    def _read(self, query: Query, completion: Completion) -> Generation:
        assert self._tokenizer is not None
        is_t5, wanted = self._interface.is_encoder_decoder, query.output_length
        given = len(query.begun if is_t5 else query.prompt)
        if completion.length is not None and completion.length != given + wanted:
            raise ServerError(
                f"the ensemble made {completion.length - wanted} tokens of a text of {given}:"
                " its tokenizer is another one"
            )
        # The ids are read back by encoding the text. They are the generated ids where the text continues as its source
        # does; otherwise they are only known to differ, which is all that callers need.
        scores, scored = completion.scores, given if is_t5 else given - 1
        each, best = scores.prompt_log_probs, scores.prompt_argmax
        return replace(
            scores,
            tokens=tuple(self._tokenizer.encode(completion.text)[given:]),
            log_probs=None if scores.log_probs is None else scores.log_probs[:wanted],
            prompt_log_probs=None if each is None else each[:scored],
            prompt_argmax=None if best is None else best[:scored],
        )


class TritonConnection:
    """A connection to one model of a Triton server.

    Args:
        client: connection to the server; it is closed with this one.
        model: Triton's name of the model.
        interface: the model's inputs.
        files: its tokenizer and end token, which reading generated tokens and asking an ensemble need.
    """

    def __init__(self, client: Client, model: str, interface: ModelInterface, files: ModelFiles) -> None:
        self._client, self._model, self._interface, self._files = client, model, interface, files
        self._asker = Asker(model, interface, files.tokenizer, files.end_id)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def ask(self, queries: Sequence[Query]) -> list[Generation | None]:
        """Send queries; see ``ModelConnection``."""
        return self._asker.ask(self._client, queries)

    def complete(
        self, prompts: Sequence[WrittenPrompt], output_length: int, sampling: Sampling | None
    ) -> list[Continuation]:
        """Have prompts continued; see ``ModelConnection``."""
        is_t5 = self._interface.is_encoder_decoder
        if not self._interface.takes_ids:
            texts = [prompt.text for prompt in prompts]
            answer = self._client.send(self._model, prepare_texts(texts, output_length, sampling))
            given = [0 if is_t5 else len(prompt.ids) for prompt in prompts]
            return [
                self._of_text(prompt.text if count else "", count, completion.text, completion.length)
                for prompt, count, completion in zip(prompts, given, read_completions(len(texts), answer), strict=True)
            ]
        request = prepare_ids(
            [prompt.ids for prompt in prompts],
            output_length,
            sampling=sampling,
            is_encoder_decoder=is_t5,
            learnt=self._files.learnt,
        )
        return [self._of_tokens(generation.tokens) for generation in self._client.generate(request, self._model)]

    def _of_tokens(self, tokens: tuple[int, ...]) -> Continuation:
        assert self._files.tokenizer is not None, "prompts are written with a tokenizer"
        end_id = self._files.end_id
        shown = tokens[: tokens.index(end_id)] if end_id in tokens else tokens
        return Continuation(self._files.tokenizer.decode(shown), shown, len(tokens))

    def _of_text(self, prompt: str, given: int, text: str, length: int | None) -> Continuation:
        assert self._files.tokenizer is not None, "prompts are written with a tokenizer"
        tokens = tuple(self._files.tokenizer.encode(text)[given:])
        return Continuation(text.removeprefix(prompt), tokens, len(tokens) if length is None else length - given)
