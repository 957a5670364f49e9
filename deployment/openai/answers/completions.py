"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from aiohttp import web

from deployment.openai.answers.answering import Answer, Plan
from deployment.openai.answers.planning import plan_sequences
from deployment.openai.answers.responding import respond
from deployment.openai.bodies.body import Values
from deployment.openai.engine.generation import Piece
from deployment.openai.engine.scores import CompletionScores, Score, in_batches
from deployment.openai.engine.tensors import Wanted, check_tensor
from deployment.openai.errors import ApiError
from deployment.openai.service import RECORD, head
from deployment.openai.texts.offered_models import Model
from deployment.openai.texts.preparing import Prompt
from deployment.openai.texts.texts import Texts


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
        """Write a whole answer, but for its log probabilities."""
        prompt = self.prompts[index // self.given]
        text = (prompt.text if self.is_echoed else "") + answer.text
        ids = {"token_ids": answer.tokens, "prompt_token_ids": list(prompt.ids)} if self.has_ids else {}
        return {"index": index, "text": text, "logprobs": None, **_ended(answer), **ids}

    def logprobs(self, index: int, answer: Answer) -> Iterator[dict[str, list[Any]]]:
        """Write the log probabilities of a whole answer."""
        if not self.is_echoed:
            return self._scored(index, answer.tokens, answer.scores)
        prompt = self.prompts[index // self.given]
        tokens = chain(prompt.ids, answer.tokens)
        return self._scored(index, tokens, chain([None], answer.prompt_scores, answer.scores))

    def beginning(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Write the prompt, where it is echoed, but for its log probabilities."""
        if not self.is_echoed:
            return None
        text = self.prompts[index // self.given].text
        return {"index": index, "text": text, "logprobs": None, **_ended(Answer())}

    @property
    def begins_with_scores(self) -> bool:
        """Whether the prompt's log probabilities come before an answer."""
        return self.is_echoed and self.is_scored

    def beginning_logprobs(self, index: int, answer: Answer) -> Iterator[dict[str, list[Any]]]:
        """Write the prompt's log probabilities."""
        prompt = self.prompts[index // self.given]
        return self._scored(index, prompt.ids, chain([None], answer.prompt_scores))

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
        return {"index": index, "text": text, "logprobs": self._writer(index).write(tokens, scores)}

    def _writer(self, index: int) -> CompletionScores:
        """Return what writes an answer's log probabilities, piece by piece."""
        if index not in self._scores:
            prompt = self.prompts[index // self.given]
            is_empty = not prompt.text and prompt.ids == (self.texts.start_id,)
            self._scores[index] = CompletionScores(self.texts, prompt.ids, self.is_echoed, self.names_ids, is_empty)
        return self._scores[index]

    def _scored(
        self, index: int, tokens: Iterable[int], scores: Iterable[Score | None]
    ) -> Iterator[dict[str, list[Any]]]:
        """Write scores batch by batch, at least one."""
        if self.is_scored:
            yield from in_batches(self._writer(index).write, tokens, scores)


def _ended(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer ``POST /v1/completions``."""
    return await respond(request, "completions", _plan)


def _plan(request: web.Request, values: Values, model: Model, prompts: Sequence[Prompt]) -> Generator[None, None, Plan]:
    drawn = _drawn(values, model)
    wanted = _wanted(values, model, drawn)
    return Plan(
        head=head(request, "cmpl", model, values["model"]),
        requests=(yield from plan_sequences(values, model, prompts, drawn, wanted, request[RECORD])),
        drawn=drawn,
        given=values["n"],
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        form=CompletionForm(
            model.texts,
            tuple(prompts),
            values["n"],
            values["echo"],
            values["logprobs"] is not None,
            values["return_token_ids"],
            values["return_tokens_as_token_ids"],
        ),
        wants_usage=values["stream_options"],
    )


def _wanted(values: Values, model: Model, drawn: int) -> Wanted:
    """Return which log probabilities are needed: those that are asked for, and those that tell the best answers."""
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
