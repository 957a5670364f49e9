"""Streamed text, and conversations whose earlier turns the server keeps in its KV cache."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from tritonclient.grpc import InferInput

from evaluation.client.answer_tensors import read_completions
from evaluation.client.client import Client
from evaluation.client.request_tensors import Sampling, add_session, prepare_texts
from evaluation.client.streaming import Turn


class Conversation:
    """A conversation with a stateful text model.

    Args:
        client: connection to the server.
        model: an ensemble of a repository that was exported with sessions.
        session: id of the session; not 0 and not empty.
        session_len: maximum number of tokens of all turns together.
        memory_len: number of the latest tokens that the model attends to.
    """

    def __init__(self, client: Client, model: str, session: int | str, session_len: int, memory_len: int) -> None:
        self._client, self._model, self._session = client, model, session
        self._limits: tuple[int | None, int | None] = (session_len, memory_len)
        self._text = ""  # of all turns so far
        self._has_begun = False

    def say(self, prompt: str, output_length: int, sampling: Sampling, is_last: bool) -> Iterator[str]:
        """Send the next turn and yield the text generated in it so far, longer with each answer.

        Raises:
            ServerError: the server is unreachable, refuses or fails; above all, it no longer has the session.
        """
        turn = Turn(self._session, not self._has_begun, is_last)
        inputs = add_session(prepare_texts([prompt], output_length, sampling), *self._limits)
        before = self._text
        for text in _texts(self._client, self._model, inputs, turn):
            self._text = text
            yield _completion(text, before, prompt)
        self._has_begun, self._limits = True, (None, None)


def stream_text(client: Client, model: str, prompt: str, output_length: int, sampling: Sampling) -> Iterator[str]:
    """Send a prompt to a text model and yield the completion so far, longer with each answer.

    Raises:
        ServerError: the server is unreachable, refuses or fails.
    """
    continues_the_prompt = not client.describe(model).is_encoder_decoder
    for text in _texts(client, model, prepare_texts([prompt], output_length, sampling), None):
        yield _completion(text, "", prompt) if continues_the_prompt else text


def show(texts: Iterable[str], is_streaming: bool) -> None:
    """Print a completion: with streaming each answer's addition as it arrives, otherwise the whole at the end."""
    shown = ""
    for text in texts:
        added = text.removeprefix(shown) if is_streaming else ""
        sys.stdout.write(added)
        sys.stdout.flush()
        shown = text
    sys.stdout.write("\n" if is_streaming else f"{shown}\n")
    sys.stdout.flush()


def _texts(client: Client, model: str, inputs: Sequence[InferInput], turn: Turn | None) -> Iterator[str]:
    for answer in client.stream(model, inputs, turn):
        yield read_completions(1, answer)[0].text


def _completion(text: str, before: str, prompt: str) -> str:
    """Remove the earlier turns and, where the text repeats it unchanged, the prompt."""
    start = text.find(prompt, len(before)) if text.startswith(before) else -1
    return text[start + len(prompt) :] if start >= 0 else text.removeprefix(before)
