"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from deployment.openai.answering import Answer, Plan
from deployment.openai.body import Values, required
from deployment.openai.errors import ApiError
from deployment.openai.fields import CHAT
from deployment.openai.generation import Piece
from deployment.openai.models import Model
from deployment.openai.planning import Prompt, limit_tokens, plan_sequences
from deployment.openai.responding import respond
from deployment.openai.scores import write_chat_scores
from deployment.openai.service import LONG_TEXT, RECORD, head
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

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a whole answer."""
        ids = {"token_ids": answer.tokens, "prompt_token_ids": list(self.prompt)} if self.has_ids else {}
        message = {"role": "assistant", "content": answer.text}
        return {
            "index": index,
            "message": message,
            "logprobs": write_chat_scores(self.texts, answer.tokens, answer.scores) if self.is_scored else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **ids,
        }

    def beginning(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Write who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

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
    return await respond(request, CHAT, _plan)


async def encode_messages(
    model: Model, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """Return the tokens of a conversation, up to where the answer begins.

    Raises:
        ApiError: the model has no chat template that can be used, or it refuses the messages.
    """
    if model.chat is None:
        raise ApiError(
            model.chat_problem or f"model '{model.names[0]}' has no chat template",
            "ask /v1/completions; or give the endpoint --chat-template=FILE; or convert a checkpoint that has one: "
            "chat_template.jinja or tokenizer_config.json beside its tokenizer, or data.chat_prompt_tokens of NeMo",
            param="messages",
            code="no_chat_template",
        )
    rendered = model.chat.render(messages, add_generation_prompt)
    if len(rendered) < LONG_TEXT:
        return model.chat.encode(rendered)
    return await asyncio.to_thread(model.chat.encode, rendered)


async def _plan(request: web.Request, values: Values, model: Model) -> Plan:
    ids = await encode_messages(model, required(values, "messages"))
    if not ids:
        raise ApiError("the chat template makes no token of these messages", "give another message", param="messages")
    name = "max_tokens" if values["max_completion_tokens"] is None else "max_completion_tokens"
    prompt = Prompt(ids, "")
    limited = [(prompt, limit_tokens(model, prompt, values[name], name))]
    wanted = _wanted(values)
    return Plan(
        head=head(request, "chatcmpl", model, values["model"]),
        requests=plan_sequences(values, model, limited, values["n"], wanted, request[RECORD]),
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
