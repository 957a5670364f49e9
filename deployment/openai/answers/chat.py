"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from deployment.openai.answers.answering import Answer, Plan
from deployment.openai.answers.planning import plan_sequences
from deployment.openai.answers.responding import respond
from deployment.openai.bodies.body import Values
from deployment.openai.bodies.guides import OF_TOOLS
from deployment.openai.engine.generation import STOP, Piece
from deployment.openai.engine.scores import in_batches, write_chat_scores
from deployment.openai.engine.tensors import Wanted
from deployment.openai.errors import ApiError
from deployment.openai.service import RECORD, head
from deployment.openai.texts.offered_models import Model
from deployment.openai.texts.preparing import Prompt
from deployment.openai.texts.texts import Texts
from deployment.openai.tools.declared import Offered, offered
from deployment.openai.tools.dialects import DIALECTS, Dialect
from deployment.openai.tools.grammar import write_grammar
from deployment.openai.tools.harmony import HarmonyReader, write_harmony
from deployment.openai.tools.reading import AnswerReader, CallPart, Part, PieceReader

_LAST = 16
"""Tokens of a prompt in which it is looked for that it begins or ends the model's thoughts."""


@dataclass(frozen=True)
class ChatForm:
    """Writes OpenAI's ``chat.completion``.

    Attributes:
        texts: of the model.
        prompt: the conversation's tokens.
        is_scored: whether log probabilities are given.
        has_ids: whether token ids are returned.
        reader: makes what reads an answer's calls and thoughts; None: all of an answer is its content.
        ends_as_asked: whether the client has named the function, so that a call is no reason to end of its own.
        has_reasoning: whether thoughts are given.
    """

    texts: Texts
    prompt: tuple[int, ...]
    is_scored: bool
    has_ids: bool
    reader: Callable[[], PieceReader] | None = None
    ends_as_asked: bool = False
    has_reasoning: bool = True
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"
    begins_with_scores: bool = False
    _readers: dict[int, PieceReader] = field(default_factory=dict)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a whole answer, but for its log probabilities."""
        ids = {"token_ids": answer.tokens, "prompt_token_ids": list(self.prompt)} if self.has_ids else {}
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        reason = answer.finish_reason
        if self.reader:
            reader = self.reader()
            part = reader.feed(answer.text, is_last=True)
            message = {"role": "assistant", "content": None if part.calls else "", **self._added(part)}
            reason = self._reason(reader, reason)
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": reason,
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
        """Whether parts have neither log probabilities nor token ids, and are content alone."""
        return not (self.is_scored or self.has_ids or self.reader)

    def part(self, index: int, so_far: Answer, piece: Piece) -> dict[str, Any]:
        """Write what a token adds."""
        delta: dict[str, Any] = {"content": piece.text}
        reason = piece.finish_reason
        if self.reader:
            reader = self._readers.get(index) or self._readers.setdefault(index, self.reader())
            delta = self._added(reader.feed(piece.text, is_last=reason is not None), is_streamed=True)
            reason = self._reason(reader, reason)
        return {
            "index": index,
            "delta": delta,
            "logprobs": write_chat_scores(self.texts, piece.tokens, piece.scores) if self.is_scored else None,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
            **({"token_ids": list(piece.tokens)} if self.has_ids else {}),
        }

    def _added(self, part: Part, is_streamed: bool = False) -> dict[str, Any]:
        """Write a part of a message, without what it does not add to."""
        added: dict[str, Any] = {"content": part.content} if part.content else {}
        if part.reasoning and self.has_reasoning:
            added |= {"reasoning_content": part.reasoning, "reasoning": part.reasoning}
        if part.calls:
            added["tool_calls"] = [_call(each, is_streamed) for each in part.calls]
        return added

    def _reason(self, reader: PieceReader, reason: str | None) -> str | None:
        """Return why an answer ended; one that calls ends for that."""
        return "tool_calls" if reason == STOP and reader.has_called and not self.ends_as_asked else reason


def _call(part: CallPart, is_streamed: bool) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.arguments} if part.id else {"arguments": part.arguments}
    return {
        **({"index": part.index} if is_streamed else {}),
        **({"id": part.id, "type": "function"} if part.id else {}),
        "function": function,
    }


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/chat/completions``."""
    return await respond(request, "chat", plan_chat)


def plan_chat(
    request: web.Request, values: Values, model: Model, prompts: Sequence[Prompt]
) -> Generator[None, None, Plan]:
    """Plan the answers to a conversation."""
    ids, wanted = prompts[0].ids, _wanted(values)
    tools = offered(values["tools"], values["tool_choice"], values["parallel_tool_calls"])
    reader, grammar = _reading(model, ids, tools)
    if grammar:
        values = {**values, OF_TOOLS: ("ebnf_grammar", grammar)}
    return Plan(
        head=head(request, "chatcmpl", model, values["model"]),
        requests=(yield from plan_sequences(values, model, prompts, values["n"], wanted, request[RECORD])),
        drawn=values["n"],
        given=values["n"],
        prompt_tokens=len(ids),
        form=ChatForm(
            model.texts,
            ids,
            wanted.top is not None,
            values["return_token_ids"],
            reader,
            tools is not None and tools.is_named,
            values["include_reasoning"],
        ),
        wants_usage=values["stream_options"],
    )


def _reading(
    model: Model, prompt: Sequence[int], tools: Offered | None
) -> tuple[Callable[[], PieceReader] | None, str]:
    """Return what makes the reader of each answer, None where all of it is content, and what an answer must follow."""
    if model.has_channels:
        return partial(HarmonyReader, tools), write_harmony(tools, model.special) if tools else ""
    thoughts, last = model.thoughts, model.texts.decode(prompt[-_LAST:]).rstrip()
    is_thinking = thoughts is not None and last.endswith(thoughts.begin)
    if thoughts and last.endswith(thoughts.end):
        thoughts = None  # the prompt has ended them, as templates do where a client wants none
    grammar = write_grammar(_dialect(model), tools, model.special, thoughts, is_thinking) if tools else ""
    is_plain = not tools and thoughts is None
    return None if is_plain else partial(AnswerReader, model.dialect, tools, thoughts, is_thinking), grammar


def _dialect(model: Model) -> Dialect:
    if model.dialect is None:
        raise ApiError(
            f"tools are not supported by model '{model.names[0]}': its chat template writes calls in no form that is"
            " known here",
            f"leave them out, or deploy with openai_tool_dialect, one of {', '.join(DIALECTS)}",
            param="tools",
            code="unsupported_parameter",
        )
    return model.dialect


def _wanted(values: Values) -> Wanted:
    if not values["logprobs"]:
        if values["top_logprobs"]:
            raise ApiError("top_logprobs is given without logprobs", "give logprobs: true", param="top_logprobs")
        return Wanted()
    return Wanted(values["top_logprobs"] or 0)
