"""How the tasks ask a served model, whatever its API: a protocol that Triton's gRPC and an OpenAI API implement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from evaluation.client.answer_tensors import Generation
from evaluation.client.request_tensors import LearntPrompt, Sampling
from evaluation.client.tokenizer import Tokenizer

Ids = tuple[int, ...]
OTHER_TOKEN = -1
"""In ``Generation.prompt_argmax``: another token than the given one is the most probable, and its id is not known,
because the API names tokens by their text. Two tokens may have the same text."""


@dataclass(frozen=True, order=True)
class Query:
    """One row of a request: it is decoded greedily, and no end token stops it.

    Attributes:
        output_length: number of tokens to generate.
        prompt: token ids; for an encoder they end with its end token.
        begun: the decoder's input of an encoder-decoder, without the start token.
        wants_sum: whether the log probability of the whole prompt is requested.
        wants_each: whether the log probability of each prompt token is requested; for an encoder-decoder, of each
            token in ``begun``.
        wants_log_probs: whether the log probability of each generated token is requested.
        top: with ``wants_each``, how many of the most probable tokens are requested in each place.
    """

    output_length: int
    prompt: Ids
    begun: Ids = ()
    wants_sum: bool = False
    wants_each: bool = False
    wants_log_probs: bool = False
    top: int = 0


@dataclass(frozen=True)
class WrittenPrompt:
    """A prompt that the model shall continue up to the end token.

    Attributes:
        ids: the same as token ids.
    """

    text: str
    ids: Ids


@dataclass(frozen=True)
class Continuation:
    """What a model wrote behind a prompt.

    Attributes:
        text: without the prompt and the end token.
        tokens: token ids of the text.
        generated: number of generated tokens with the end token; None where the API does not count them.
    """

    text: str
    tokens: Ids
    generated: int | None


@dataclass(frozen=True)
class ModelFiles:
    """What a connection needs of the model's files.

    Attributes:
        tokenizer: of the model; None where token ids are enough.
        end_id: the token that ends a text; None if unknown.
        learnt: the virtual tokens that ids beyond the vocabulary stand for.
    """

    tokenizer: Tokenizer | None = None
    end_id: int | None = None
    learnt: LearntPrompt | None = None


class ModelConnection(Protocol):
    """A connection to one served model. It belongs to one thread."""

    def ask(self, queries: Sequence[Query]) -> list[Generation | None]:
        """Send queries of one kind in one request.

        Returns:
            The answer to each query; None where no text is encoded to the query's token ids, and texts are sent.

        Raises:
            ServerError: the server failed, or its tokenizer encodes a text differently.
        """

    def complete(
        self, prompts: Sequence[WrittenPrompt], output_length: int, sampling: Sampling | None
    ) -> list[Continuation]:
        """Have prompts continued up to the end token.

        Args:
            prompts: at least one.
            output_length: maximum number of tokens of a continuation.
            sampling: None for greedy decoding.

        Raises:
            ServerError: the server failed.
            ConfigError: the API has no such sampling.
        """

    def close(self) -> None:
        """Close the connection."""
