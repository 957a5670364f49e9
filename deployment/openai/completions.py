"""``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from deployment.openai.answering import Answer, Plan, answer_stream, answer_whole
from deployment.openai.body import Values, read_body, required
from deployment.openai.errors import ApiError
from deployment.openai.fields import COMPLETIONS
from deployment.openai.generation import Piece
from deployment.openai.models import Model
from deployment.openai.planning import Prompt, limit_tokens, plan_sequences
from deployment.openai.service import RECORD, encode, head, service_of
from deployment.openai.tensors import check_offered


@dataclass(frozen=True)
class CompletionForm:
    """Writes OpenAI's ``text_completion``.

    Attributes:
        prompts: that were given.
        given: answers to each.
        is_echoed: whether an answer begins with its prompt.
        has_ids: whether token ids are returned.
    """

    prompts: tuple[Prompt, ...]
    given: int
    is_echoed: bool
    has_ids: bool
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a whole answer."""
        text = self._echo(index) + answer.text
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **self._ids(index, answer.tokens, True),
        }

    def beginning(self, index: int) -> dict[str, Any] | None:
        """Write the prompt, where it is echoed."""
        if not self.is_echoed:
            return None
        return {"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None, "stop_reason": None}

    def part(self, index: int, so_far: Answer, piece: Piece) -> dict[str, Any]:
        """Write what a token adds."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **self._ids(index, list(piece.tokens), len(so_far.tokens) == len(piece.tokens)),
        }

    def _echo(self, index: int) -> str:
        return self.prompts[index // self.given].text if self.is_echoed else ""

    def _ids(self, index: int, tokens: list[int], is_first: bool) -> dict[str, Any]:
        if not self.has_ids:
            return {}
        given = {"prompt_token_ids": list(self.prompts[index // self.given].ids)} if is_first else {}
        return {"token_ids": tokens, **given}


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/completions``."""
    service = service_of(request)
    values = await read_body(request, COMPLETIONS)
    model = service.models.find(values["model"])
    check_offered(values, COMPLETIONS, model)
    _check_combinations(values, service.arguments.max_sequences)
    async with service.admitted():
        plan = await _plan(request, values, model)
        record = request[RECORD]
        record.model = model.names[0]
        if values["stream"]:
            response, record.usage = await answer_stream(request, service.triton, plan)
            return response
        answer = await answer_whole(service.triton, plan)
    record.usage = answer["usage"]
    return web.json_response(answer)


async def _plan(request: web.Request, values: Values, model: Model) -> Plan:
    given = [await _prompt(model, prompt) for prompt in required(values, "prompt")]
    limited = [(prompt, limit_tokens(model, prompt, values["max_tokens"], "max_tokens")) for prompt in given]
    drawn = values["best_of"] or values["n"]
    needs_scores = values["logprobs"] is not None or drawn > values["n"]
    return Plan(
        head=head(request, "cmpl", model, values["model"]),
        requests=plan_sequences(values, model, limited, drawn, needs_scores, request[RECORD].id),
        drawn=drawn,
        given=values["n"],
        prompt_tokens=sum(len(prompt.ids) for prompt in given),
        form=CompletionForm(tuple(given), values["n"], values["echo"], values["return_token_ids"]),
        wants_usage=values["stream_options"],
    )


async def _prompt(model: Model, given: str | tuple[int, ...]) -> Prompt:
    if isinstance(given, str):
        return Prompt(await encode(model, given), given)
    model.check_ids(given, "prompt")
    return Prompt(given, model.texts.prompt_text(given))


def _check_combinations(values: Values, most: int) -> None:
    drawn = values["best_of"] or values["n"]
    if drawn < values["n"]:
        raise ApiError(f"best_of is {drawn} and n is {values['n']}", "best_of is at least n", param="best_of")
    if values["stream"] and drawn > values["n"]:
        raise ApiError(
            "the best of several answers is known when all are complete, so it cannot be streamed",
            "leave best_of or stream out",
            param="best_of",
        )
    check_count(len(required(values, "prompt")) * drawn, most)
    check_stream(values)


def check_count(answers: int, most: int) -> None:
    """Refuse a request for too many answers; ApiError."""
    if answers > most:
        raise ApiError(
            f"the request asks for {answers} answers",
            f"one request has at most {most}: prompts times n",
            param="prompt",
        )


def check_stream(values: Values) -> None:
    """Refuse what makes no sense of a stream, or only of one; ApiError."""
    if values["stream_options"] and not values["stream"]:
        raise ApiError("stream_options.include_usage is for streams", "give stream: true", param="stream_options")
