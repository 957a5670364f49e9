"""From a checked body to the answers that are asked for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import product

from deployment.openai.bodies.body import Values
from deployment.openai.engine.asked import SequenceRequest
from deployment.openai.engine.tensors import Wanted, first_seed, sequence_tensors
from deployment.openai.service import Record
from deployment.openai.texts.offered_models import Model
from deployment.openai.texts.preparing import Prompt


def plan_sequences(
    values: Values, model: Model, prompts: Sequence[Prompt], answers: int, wanted: Wanted, record: Record
) -> Generator[None, None, list[SequenceRequest]]:
    """Plan every answer, those of the first prompt first; each has a seed of its own.

    Args:
        values: the request's fields, checked.
        model: that is asked.
        prompts: as tokens.
        answers: to each prompt.
        wanted: log probabilities.
        record: of the whole request.
    """
    seed = first_seed(values)
    ends = frozenset() if values["ignore_eos"] else model.texts.end_ids
    outputs = ("output_ids", "sequence_length", *wanted.outputs)
    found = list[SequenceRequest]()
    for prompt, answer in product(prompts, range(answers)):
        tensors = sequence_tensors(values, model, prompt.ids, prompt.max_tokens, seed + answer, wanted)
        found.append(
            SequenceRequest(
                model=model,
                prompt=prompt.ids,
                max_tokens=prompt.max_tokens,
                tensors=tensors,
                outputs=outputs,
                stops=values["stop"],
                stop_ids=frozenset(values["stop_token_ids"]),
                end_ids=ends,
                min_tokens=values["min_tokens"],
                is_searched=values["beam_width"] > 1,
                is_streamed=values["stream"] or bool(values["stop"]),
                request_id=record.id if len(prompts) * answers == 1 else f"{record.id}-{len(found)}",
                arrived_ns=record.arrived_ns,
            )
        )
        yield
    return found
