"""Token by token: the engine in process, and through Triton; called by ``triton_overhead``."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2 as messages

from backends.fastertransformer.engine.engine import Engine
from backends.fastertransformer.engine.rows.answer import Answer
from benchmarks.gpu.models import Table
from benchmarks.serving.made_up_repository import EMPTY
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.transport.wire import encode
from export_scripts.repository.names import ENGINE, ENSEMBLE, PREPROCESSING
from export_scripts.repository.tokenizer_models.slipway_tokenizer import load_tokenizer
from ft_format.tensors import NO_TOKEN
from handover.errors import ServerError

NEW_STREAM = ", a new stream"
_BLOCK = 5  # measurements of a side before its neighbour's turn, the first of which is not counted
_TEXT = "The ship lay at the slipway, and no sailor had thought of asking how she would ever come down into the water. "


@dataclass(frozen=True)
class Arrivals:
    """One request.

    Attributes:
        sent_ns: when it was handed over.
        chunk_ns: when each answer came; under load one may bring several tokens.
        tokens: of all answers.
    """

    sent_ns: int
    chunk_ns: tuple[int, ...]
    tokens: int

    @property
    def first_ms(self) -> float:
        """To the first token."""
        return (self.chunk_ns[0] - self.sent_ns) / 1e6

    @property
    def further_ms(self) -> float:
        """To each further token, on average; 0 where there is none."""
        return (self.chunk_ns[-1] - self.chunk_ns[0]) / 1e6 / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Row:
    """One line of the table: medians, and what they are above those of the engine in process."""

    model: str
    data_type: str
    input_length: int
    output_length: int
    clients: int
    requests: int
    first_ms: float
    first_added_ms: float
    further_ms: float
    further_added_ms: float
    side: str


Side = Callable[[int], Awaitable[list[Arrivals]]]  # sends that many requests at once, and waits for all


def make_prompt(repository: Path, input_length: int, output_length: int) -> LoadPrompt:
    """Make a prompt of some tokens, known as text and as ids."""
    tokenizer = load_tokenizer(repository / PREPROCESSING / "1")
    ids = tokenizer.encode(_TEXT * (1 + input_length // 16))[:input_length]
    text = tokenizer.decode(ids)
    return LoadPrompt(tuple(tokenizer.encode(text)), output_length, text)


def prompts_of(prompt: LoadPrompt, count: int, are_alike: bool) -> list[LoadPrompt]:
    """Give the prompts of requests: the same one, or its tokens in as many orders, which no prefix cache knows.

    The latter have no text, so the ensemble cannot be asked with them.
    """
    if are_alike:
        return [prompt] * count
    return [replace(prompt, ids=tuple(random.sample(prompt.ids, len(prompt.ids))), text="") for _ in range(count)]


def in_process(engine: Engine, prompt: LoadPrompt, are_alike: bool = True) -> Side:
    """Ask the engine."""

    async def ask(count: int) -> list[Arrivals]:
        requests = [_tensors(each) for each in prompts_of(prompt, count, are_alike)]
        found: list[tuple[int, list[int]]] = []
        waiting = []
        for tensors in requests:
            chunks: list[int] = []
            is_done = threading.Event()

            def answer(given: Answer, chunks: list[int] = chunks, is_done: threading.Event = is_done) -> None:
                chunks.append(time.perf_counter_ns())
                if given.is_final:
                    is_done.set()

            found.append((time.perf_counter_ns(), chunks))
            engine.submit(engine.parse(tensors), answer, is_streaming=True)
            waiting.append(is_done)
        for is_done in waiting:
            is_done.wait()
        return [Arrivals(sent_ns, tuple(chunks), prompt.output_length) for sent_ns, chunks in found]

    return ask


def _tensors(prompt: LoadPrompt) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "input_ids": np.array([prompt.ids], np.uint32),
        "input_lengths": np.array([[len(prompt.ids)]], np.uint32),
        "request_output_len": np.array([[prompt.output_length]], np.uint32),
        "end_id": np.array([[NO_TOKEN]], np.uint32),
    }


class Stream:
    """One gRPC stream that is kept open from request to request, as tritonclient keeps one.

    Args:
        channel: of the connection.
    """

    def __init__(self, channel: Any) -> None:
        self._call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()

    async def ask(self, payload: bytes) -> list[int]:
        """Send one request; when each of its answers came.

        Raises:
            ServerError: it was refused.
        """
        chunks = []
        await self._call.write(payload)
        while raw := await self._call.read():
            now = time.perf_counter_ns()
            message = messages.ModelStreamInferResponse.FromString(raw)
            if message.error_message:
                raise ServerError(message.error_message)
            if message.infer_response.outputs:
                chunks.append(now)
            if message.infer_response.parameters["triton_final_response"].bool_param:
                return chunks
        raise ServerError("the stream ended before the last answer")

    async def end(self) -> None:
        """Let it go."""
        await self._call.done_writing()


def through_triton(channel: Any, model: str, prompt: LoadPrompt, is_kept: bool = True, are_alike: bool = True) -> Side:
    """Ask a decoupled model over one connection, each client in a stream of its own: kept open, or new each time."""
    kept = list[Stream]()

    async def one(index: int, payload: bytes) -> Arrivals:
        sent_ns = time.perf_counter_ns()
        stream = kept[index] if is_kept else Stream(channel)
        chunks = await stream.ask(payload)
        if not is_kept:
            await stream.end()
        return Arrivals(sent_ns, tuple(chunks), prompt.output_length)

    async def ask(count: int) -> list[Arrivals]:
        while is_kept and len(kept) < count:
            kept.append(Stream(channel))
        payloads = [_payload(model, each) for each in prompts_of(prompt, count, are_alike)]
        return await asyncio.gather(*(one(*each) for each in enumerate(payloads)))

    return ask


def _payload(model: str, prompt: LoadPrompt) -> bytes:
    request = messages.ModelInferRequest.FromString(encode(model, prompt, is_text=model.endswith(ENSEMBLE)).payload)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request.SerializeToString()


def refused(channel: Any) -> Side:
    """Ask for a model that there is not: what gRPC takes, and the server's reading of a request."""
    stream = Stream(channel)

    async def ask(count: int) -> list[Arrivals]:
        sent_ns = time.perf_counter_ns()
        with contextlib.suppress(ServerError):
            await stream.ask(messages.ModelInferRequest(model_name="none").SerializeToString())
        return [Arrivals(sent_ns, (time.perf_counter_ns(),), 1)]

    return ask


def show_tokens(
    engine: Engine, url: str, repository: Path, table: Table, asked: tuple[tuple[int, int], Sequence[int], int]
) -> None:
    """Fill the table: medians over the requests of all rounds, in which the sides take turns.

    Args:
        engine: in process.
        url: of gRPC.
        repository: that is served there.
        table: of Row.
        asked: tokens in and out, requests at once, turns of each side.
    """
    lengths, clients, rounds = asked
    prompt = make_prompt(repository, *lengths)
    names = [name for name in (ENGINE, ENSEMBLE, EMPTY + ENGINE, EMPTY + ENSEMBLE) if (repository / name).is_dir()]
    model = f"{engine.config.num_layer} x {engine.config.hidden_units}", engine.config.weight_data_type

    async def measure() -> None:
        async with grpc.aio.insecure_channel(url) as channel:
            sides = {"engine in process": in_process(engine, prompt)}
            sides |= {name: through_triton(channel, name, prompt) for name in names}
            new = {f"{name}{NEW_STREAM}": through_triton(channel, name, prompt, is_kept=False) for name in names}
            alone = {**new, "gRPC alone": refused(channel)}
            for count in clients:
                # The empty ones answer one request after the other.
                here = {name: ask for name, ask in sides.items() if count == 1 or not name.startswith(EMPTY)}
                here |= alone if count == 1 else {}
                turns = await _turns(here, count, rounds)
                base = medians(next(iter(turns.values())))
                for name, each in turns.items():
                    first, further = medians(each)
                    figures = first, first - base[0], further, further - base[1]
                    table.add(Row(*model, len(prompt.ids), prompt.output_length, count, len(each), *figures, name))

    asyncio.run(measure())


async def _turns(sides: dict[str, Side], count: int, rounds: int) -> dict[str, list[Arrivals]]:
    found: dict[str, list[Arrivals]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, ask in sides.items():
            for turn in range(_BLOCK):
                arrivals = await ask(count)
                found[name] += arrivals if turn else []
    return found


def medians(turns: Sequence[Arrivals]) -> tuple[float, float]:
    """Give the medians of the first and the further tokens' times."""
    return statistics.median(each.first_ms for each in turns), statistics.median(each.further_ms for each in turns)
