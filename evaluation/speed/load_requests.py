"""The requests of a point, encoded before its load starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.prompts.trace import Trace
from evaluation.speed.prompts.workload import DrawingContext, LoadPrompt, Tokens, Workload, seeded
from evaluation.speed.tables.table import Row
from evaluation.speed.transport.openai_wire import Dialect
from evaluation.speed.transport.wire import Encoded, encode
from handover.endpoint import Endpoint


@dataclass(frozen=True)
class LoadTarget:
    """The deployment under load, and the source of its prompts.

    Attributes:
        endpoint: address of the server.
        log: path of the server's log; None if unknown.
        tokens: what random prompts are made of; None where the prompt file has them all.
        prompts: prompts of the prompt file; empty for random prompts.
        trace: the trace that is replayed; None for none.
        is_text: whether the model takes text.
        max_positions: of the model; None where they are unknown.
        gpus: number of GPUs, TP x PP; None if unknown.
        dialect: how an OpenAI API is asked; None for a server that is asked by gRPC.
    """

    endpoint: Endpoint
    log: Path | None
    tokens: Tokens | None
    prompts: tuple[LoadPrompt, ...] = ()
    trace: Trace | None = None
    is_text: bool = False
    max_positions: int | None = None
    gpus: int | None = 1
    is_encoder_decoder: bool = False
    dialect: Dialect | None = None


@dataclass(frozen=True)
class PreparedRequests:
    """The requests of a point.

    Attributes:
        first: the first request of each conversation, in the order of sending; most have one request.
        requests: number of all requests.
        clipped: how many of them are shorter than drawn or recorded, so that they fit the model's positions.
    """

    first: tuple[Encoded, ...]
    requests: int
    clipped: int

    @property
    def requests_each(self) -> float:
        """Mean number of requests of a conversation."""
        return self.requests / len(self.first)


def prepare_requests(arguments: LoadArguments, target: LoadTarget, row: Row, count: int) -> PreparedRequests:
    """Encode at least ``count`` requests of a point, or those of the trace.

    They depend on the seed and the point only, so that two deployments get the same ones.
    """
    conversations, requests, clipped = [], 0, 0
    hang_ups = seeded(arguments.seed, "hang-ups", row.workload, row.mode, row.level)
    for prompt in _prompts(arguments, target, row, count):
        if requests >= count and target.trace is None:
            break
        turns = [_cut_short(turn, arguments, hang_ups) for turn in _turns(prompt)]
        conversations.append(_encode(arguments, target, turns))
        requests += len(turns)
        clipped += sum(turn.is_clipped for turn in turns)
    return PreparedRequests(tuple(conversations), requests, clipped)


def _prompts(arguments: LoadArguments, target: LoadTarget, row: Row, count: int) -> Iterator[LoadPrompt]:
    random = seeded(arguments.seed, row.workload, row.mode, row.level)
    if target.prompts:
        order = random.permutation(len(target.prompts))
        return cycle([target.prompts[i] for i in order[:count]])
    assert target.tokens is not None
    context = DrawingContext(target.tokens, random, target.max_positions, arguments.think_s)
    if target.trace is not None:
        return target.trace.prompts(context, arguments.seed)
    return Workload.parse(row.workload).prompts(context)


def _cut_short(prompt: LoadPrompt, arguments: LoadArguments, random: np.random.Generator) -> LoadPrompt:
    """Return a prompt whose client hangs up, of a share of those whose answer is long enough."""
    if not arguments.cancel_share or random.random() >= arguments.cancel_share:
        return prompt
    if prompt.output_length <= arguments.cancel_after:
        return prompt
    return dataclasses.replace(prompt, cancel_after=arguments.cancel_after)


def _turns(prompt: LoadPrompt | None) -> Iterator[LoadPrompt]:
    while prompt is not None:
        yield prompt
        prompt = prompt.follow_up


def _encode(arguments: LoadArguments, target: LoadTarget, turns: list[LoadPrompt]) -> Encoded:
    """Encode a conversation: each turn knows the next one."""
    following: Encoded | None = None
    for turn in reversed(turns):
        if target.dialect is not None:
            encoded = target.dialect.encode(turn, bool(arguments.streaming))
        else:
            encoded = encode(arguments.model, turn, target.is_encoder_decoder, target.is_text)
        following = dataclasses.replace(encoded, follow_up=following)
    assert following is not None
    return following
