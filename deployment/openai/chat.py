"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from deployment.openai.answering import Answer, Plan
from deployment.openai.body import Values
from deployment.openai.errors import ApiError
from deployment.openai.generation import Piece
from deployment.openai.offered_models import Model
from deployment.openai.planning import plan_sequences
from deployment.openai.preparing import Prompt
from deployment.openai.responding import respond
from deployment.openai.scores import in_batches, write_chat_scores
from deployment.openai.service import RECORD, head
from deployment.openai.tensors import Wanted
from deployment.openai.texts import Texts


@dataclass(frozen=True)
class ChatForm:
    """Writes OpenAI's ``chat.completion``.

    Attributes:
        texts: of the model.
        prompt: the conversation's tokens.
        is_scored: whether log probabilities are given.
        has_ids: whether token ids are returned.
    """

    texts: Texts
    prompt: tuple[int, ...]
    is_scored: bool
    has_ids: bool
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"
    begins_with_scores: bool = False

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a whole answer, but for its log probabilities."""
        ids = {"token_ids": answer.tokens, "prompt_token_ids": list(self.prompt)} if self.has_ids else {}
        message = {"role": "assistant", "content": answer.text}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **ids,
        }

    def logprobs(self, index: int, answer: Answer) -> Iterator[dict[str, list[Any]]]:
        """Write the log probabilities of a whole answer."""
        if self.is_scored:
            yield from in_batches(partial(write_chat_scores, self.texts), answer.tokens, answer.scores)

    def beginning(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Write who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def beginning_logprobs(self, index: int, answer: Answer) -> Iterator[dict[str, list[Any]]]:
        """Write nothing: a conversation is not echoed."""
        yield from ()

    @property
    def is_text_alone(self) -> bool:
        """Whether parts have neither log probabilities nor token ids."""
        return not (self.is_scored or self.has_ids)

    def part(self, index: int, so_far: Answer, piece: Piece) -> dict[str, Any]:
        """Write what a token adds."""
        return {
            "index": index,
            "delta": {"content": piece.text},
            "logprobs": write_chat_scores(self.texts, piece.tokens, piece.scores) if self.is_scored else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **({"token_ids": list(piece.tokens)} if self.has_ids else {}),
        }


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/chat/completions``."""
    return await respond(request, "chat", _plan)


def _plan(request: web.Request, values: Values, model: Model, prompts: Sequence[Prompt]) -> Generator[None, None, Plan]:
    ids, wanted = prompts[0].ids, _wanted(values)
    return Plan(
        head=head(request, "chatcmpl", model, values["model"]),
        requests=(yield from plan_sequences(values, model, prompts, values["n"], wanted, request[RECORD])),
        drawn=values["n"],
        given=values["n"],
        prompt_tokens=len(ids),
        form=ChatForm(model.texts, ids, wanted.top is not None, values["return_token_ids"]),
        wants_usage=values["stream_options"],
    )


def _wanted(values: Values) -> Wanted:
    if not values["logprobs"]:
        if values["top_logprobs"]:
            raise ApiError("top_logprobs is given without logprobs", "give logprobs: true", param="top_logprobs")
        return Wanted()
    return Wanted(values["top_logprobs"] or 0)
