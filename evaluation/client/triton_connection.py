"""A served model that is asked by gRPC, as ``ModelConnection``."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.client.answer_tensors import Generation, read_completions
from evaluation.client.client import Client, ModelInterface
from evaluation.client.model_connection import Continuation, ModelFiles, Query, WrittenPrompt
from evaluation.client.request_tensors import Sampling, prepare_ids, prepare_texts
from evaluation.client.token_queries import Asker


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
