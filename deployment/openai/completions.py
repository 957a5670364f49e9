"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from deployment.openai.answering import Answer, Plan
from deployment.openai.body import Values, required
from deployment.openai.errors import ApiError
from deployment.openai.fields import COMPLETIONS
from deployment.openai.generation import Piece
from deployment.openai.models import Model
from deployment.openai.planning import Prompt, limit_tokens, plan_sequences
from deployment.openai.responding import respond
from deployment.openai.scores import CompletionScores, Score
from deployment.openai.service import RECORD, encode, head
from deployment.openai.tensors import Wanted, check_tensor
from deployment.openai.texts import Texts


@dataclass(frozen=True)
class CompletionForm:
    """Writes OpenAI's ``text_completion``.

    Attributes:
        texts: of the model.
        prompts: that were given.
        given: answers to each.
        is_echoed: whether an answer begins with its prompt.
        is_scored: whether log probabilities are given.
        has_ids: whether token ids are returned.
        names_ids: whether log probabilities name tokens by id.
    """

    texts: Texts
    prompts: tuple[Prompt, ...]
    given: int
    is_echoed: bool
    is_scored: bool
    has_ids: bool
    names_ids: bool = False
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    _scores: dict[int, CompletionScores] = field(default_factory=dict)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a whole answer."""
        prompt = self.prompts[index // self.given]
        tokens: list[int] = list(answer.tokens)
        scores: list[Score | None] = list(answer.scores)
        if self.is_echoed:
            tokens, scores = [*prompt.ids, *tokens], [*self._of_prompt(prompt, answer), *scores]
        text = (prompt.text if self.is_echoed else "") + answer.text
        ids = {"token_ids": answer.tokens, "prompt_token_ids": list(prompt.ids)} if self.has_ids else {}
        return {**self._part(index, text, tokens, scores), **_ended(answer), **ids}

    def beginning(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Write the prompt, where it is echoed."""
        if not self.is_echoed:
            return None
        prompt = self.prompts[index // self.given]
        return {**self._part(index, prompt.text, prompt.ids, self._of_prompt(prompt, answer)), **_ended(Answer())}

    @property
    def is_text_alone(self) -> bool:
        """Whether parts have neither log probabilities nor token ids."""
        return not (self.is_scored or self.has_ids)

    def part(self, index: int, so_far: Answer, piece: Piece) -> dict[str, Any]:
        """Write what a token adds."""
        ids: dict[str, Any] = {"token_ids": list(piece.tokens)} if self.has_ids else {}
        if self.has_ids and len(so_far.tokens) <= 1:
            ids["prompt_token_ids"] = list(self.prompts[index // self.given].ids)
        return {**self._part(index, piece.text, piece.tokens, piece.scores), **_ended(so_far), **ids}

    def _part(self, index: int, text: str, tokens: Sequence[int], scores: Sequence[Score | None]) -> dict[str, Any]:
        if not self.is_scored:
            return {"index": index, "text": text, "logprobs": None}
        writer = self._scores.setdefault(index, CompletionScores(self.texts, self.names_ids))
        return {"index": index, "text": text, "logprobs": writer.write(tokens, scores)}

    def _of_prompt(self, prompt: Prompt, answer: Answer) -> list[Score | None]:
        return [None, *answer.prompt_scores] if self.is_scored else [None] * len(prompt.ids)


def _ended(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/completions``."""
    return await respond(request, COMPLETIONS, _plan)


async def _plan(request: web.Request, values: Values, model: Model) -> Plan:
    drawn = _drawn(values, model)
    given = [await _prompt(model, prompt, values["echo"]) for prompt in required(values, "prompt")]
    limited = [(prompt, limit_tokens(model, prompt, values["max_tokens"], "max_tokens")) for prompt in given]
    return Plan(
        head=head(request, "cmpl", model, values["model"]),
        requests=plan_sequences(values, model, limited, drawn, _wanted(values, model, drawn), request[RECORD]),
        drawn=drawn,
        given=values["n"],
        prompt_tokens=sum(len(prompt.ids) for prompt in given),
        form=CompletionForm(
            model.texts,
            tuple(given),
            values["n"],
            values["echo"],
            values["logprobs"] is not None,
            values["return_token_ids"],
            values["return_tokens_as_token_ids"],
        ),
        wants_usage=values["stream_options"],
    )


async def _prompt(model: Model, given: str | tuple[int, ...], is_echoed: bool) -> Prompt:
    if isinstance(given, str):
        return Prompt(await encode(model, given), given)
    model.check_ids(given, "prompt")
    return Prompt(given, model.texts.prompt_text(given) if is_echoed else "")


def _wanted(values: Values, model: Model, drawn: int) -> Wanted:
    """Say which log probabilities are needed: those that are asked for, and those that tell the best answers."""
    top = values["logprobs"]
    if top is None:
        return Wanted(0 if drawn > values["n"] else None)
    if not values["echo"]:
        return Wanted(top)
    if model.is_encoder_decoder:
        raise ApiError("an encoder's input has no log probabilities", "leave echo or logprobs out", param="echo")
    check_tensor(model, "num_context_top_log_probs", "echo with logprobs")
    return Wanted(top, top)


def _drawn(values: Values, model: Model) -> int:
    drawn: int = values["n"] if values["best_of"] is None else values["best_of"]
    if drawn < values["n"]:
        raise ApiError(f"best_of is {drawn} and n is {values['n']}", "best_of is at least n", param="best_of")
    if drawn > values["n"]:
        check_tensor(model, "is_return_raw_log_probs", "best_of")
        if values["stream"] or values["beam_width"] > 1:
            raise ApiError(
                "the best of several answers is known when all are complete, and beams are compared by themselves",
                "leave best_of out, or stream and beam_width",
                param="best_of",
            )
    return drawn
