"""From a checked body to the answers that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployment.openai.body import Values
from deployment.openai.errors import ApiError
from deployment.openai.generation import SequenceRequest
from deployment.openai.models import Model
from deployment.openai.service import Record
from deployment.openai.tensors import Wanted, first_seed, sequence_tensors

_UNLIMITED_TOKENS = 2048
"""Tokens of an answer where neither the client nor the model sets a limit."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and its own text.

    Attributes:
        ids: token ids.
        text: as the client gave it; of tokens what they stand for, where the answer echoes it.
    """

    ids: tuple[int, ...]
    text: str


def limit_tokens(model: Model, prompt: Prompt, max_tokens: int | None, name: str) -> int:
    """Return how many tokens an answer may have.

    Args:
        model: that is asked.
        prompt: that is continued.
        max_tokens: that the client asks for; None: as many as the model has positions for.
        name: of the field.

    Raises:
        ApiError: prompt and answer do not fit the model's positions.
    """
    most = model.max_positions
    if most is None:
        return _UNLIMITED_TOKENS if max_tokens is None else max_tokens
    given = len(prompt.ids)
    room = most if model.is_encoder_decoder and given <= most else most - given
    wanted = max(1, room) if max_tokens is None else max_tokens
    if wanted > room:
        raise ApiError(
            f"the prompt has {given} tokens and {name} is {wanted}, and the model has {most} positions",
            f"{name} is at most {room} here" if room > 0 else f"the prompt has at most {most - 1} tokens",
            param=name if room > 0 else "prompt",
            code="context_length_exceeded",
        )
    return wanted


def plan_sequences(
    values: Values,
    model: Model,
    prompts: Sequence[tuple[Prompt, int]],
    answers: int,
    wanted: Wanted,
    record: Record,
) -> list[SequenceRequest]:
    """Plan every answer, those of the first prompt first; each has a seed of its own.

    Args:
        values: the request's fields, checked.
        model: that is asked.
        prompts: each with the number of tokens that its answers may have.
        answers: to each prompt.
        wanted: log probabilities.
        record: of the whole request.
    """
    seed = first_seed(values)
    ends = frozenset() if values["ignore_eos"] else model.texts.end_ids
    outputs = ("output_ids", "sequence_length", *wanted.outputs)
    return [
        SequenceRequest(
            model=model,
            prompt=prompt.ids,
            max_tokens=max_tokens,
            tensors=sequence_tensors(values, model, prompt.ids, max_tokens, seed + answer, wanted),
            outputs=outputs,
            stops=values["stop"],
            stop_ids=frozenset(values["stop_token_ids"]),
            end_ids=ends,
            min_tokens=values["min_tokens"],
            is_searched=values["beam_width"] > 1,
            is_streamed=values["stream"] or bool(values["stop"]),
            request_id=record.id if len(prompts) * answers == 1 else f"{record.id}-{index * answers + answer}",
            arrived_ns=record.arrived_ns,
        )
        for index, (prompt, max_tokens) in enumerate(prompts)
        for answer in range(answers)
    ]
