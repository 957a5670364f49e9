"""Many clients at once against a deployment: every answer compared with its solo run, memory watched.

    python3 -m benchmarks.serving.under_load --endpoint=.../deployment --clients=200 --duration-s=120

The deployment serves one checkpoint twice: as ``whole``, and decoupled as ``streamed`` (``write_models`` makes that).
Before the load each prompt is generated alone, greedily and sampled with a seed, to its greatest length; the tokens of
every shorter request are the beginning of those. Each client then asks for random lengths (0, 1 and the greatest among
them), alone or in batches, cancels some requests, hangs up on some, and sends some that must be refused: too long, over
max_batch_size, malformed. A wrong answer, a missing refusal, a request without an end, or a page of a KV cache that is
still in use when all have ended fails the run.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.serving.server_memory import Holdings, look
from export_scripts.repository.interfaces.gpt import engine
from export_scripts.repository.interfaces.serving import Serving
from export_scripts.repository.pbtxt import to_text
from ft_format.families.family import Family
from ft_format.families.gpt import FAMILY as GPT
from ft_format.tensors import NO_TOKEN
from ft_format.weight_format import NONE
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status

WHOLE, STREAMED = "whole", "streamed"
_USAGE, _FREED_S = "vllm:kv_cache_usage_perc{", 10.0
_SAMPLED = {"runtime_top_k": (4, np.uint32), "temperature": (0.8, np.float32), "random_seed": (7, np.uint64)}


@dataclass(frozen=True)
class UnderLoadArguments(ScriptArguments):
    """Who asks, for how long."""

    endpoint: str = field(metadata={"help": "endpoint.json of a deployment with the models 'whole' and 'streamed'"})
    clients: int = field(default=200, metadata={"help": "clients at a time, each with one request in flight"})
    duration_s: float = field(default=120.0, metadata={"help": "seconds of load"})
    longest: int = field(default=32, metadata={"help": "max_pos_seq_len of the model: input plus output"})
    vocab_size: int = field(default=1000, metadata={"help": "prompts are made of tokens below it"})
    max_batch_size: int = field(default=64, metadata={"help": "of the models"})
    seed: int = field(default=0, metadata={"help": "of the prompts and of what clients do"})


@dataclass
class Outcome:
    """What the load showed.

    Attributes:
        counts: requests by kind of end.
        problems: what must not be, in words.
        holdings: of the deployment, once a second.
        tokens: generated in answers that were compared.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    holdings: list[Holdings] = field(default_factory=list)
    tokens: int = 0


def write_models(ft_checkpoint: Path, repository: Path, max_batch_size: int, family: Family = GPT) -> None:
    """Write a model repository that serves one checkpoint in both ways, without a copy of it."""
    for name in (WHOLE, STREAMED):
        serving = Serving(family, 1, 1, "fp32", NONE, 0, str(ft_checkpoint), max_batch_size, 0, name == STREAMED, 0, 0)
        spec = replace(engine(serving), name=name)
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(to_text(spec))


@dataclass(frozen=True)
class Known:
    """A prompt and what follows it, alone in the server: greedily and sampled."""

    prompt: tuple[int, ...]
    greedy: tuple[int, ...]
    sampled: tuple[int, ...]


def tensors_of(rows: Sequence[Known], counts: Sequence[int], is_sampled: bool) -> list[Any]:
    """Build the tensors of a request."""
    ids = np.zeros((len(rows), max(len(row.prompt) for row in rows)), np.uint32)
    for index, row in enumerate(rows):
        ids[index, : len(row.prompt)] = row.prompt
    column = np.ones((len(rows), 1), np.uint32)
    tensors = {
        "input_ids": ids,
        "input_lengths": np.array([[len(row.prompt)] for row in rows], np.uint32),
        "request_output_len": np.array([[count] for count in counts], np.uint32),
        "end_id": NO_TOKEN * column,
    }
    if is_sampled:
        tensors |= {name: (value * column).astype(dtype) for name, (value, dtype) in _SAMPLED.items()}
    inputs = []
    for name, array in tensors.items():
        inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


async def learn(client: Any, arguments: UnderLoadArguments) -> list[Known]:
    """Generate each prompt alone, to its greatest length."""
    chance, known = random.Random(arguments.seed), []
    for _ in range(24):
        length = chance.randint(1, arguments.longest // 2)
        prompt = tuple(chance.randrange(arguments.vocab_size) for _ in range(length))
        alone = Known(prompt, (), ())
        rest = arguments.longest - length
        texts = []
        for is_sampled in (False, True):
            answer = await client.infer(WHOLE, tensors_of([alone], [rest], is_sampled))
            texts.append(tuple(answer.as_numpy("output_ids")[0, 0, length : length + rest].tolist()))
        known.append(Known(prompt, *texts))
    return known


class Crowd:
    """All clients of one run.

    Args:
        url: of gRPC.
        arguments: of the run.
        known: prompts with their solo runs.
    """

    def __init__(self, url: str, arguments: UnderLoadArguments, known: Sequence[Known]) -> None:
        self._url, self._arguments, self._known = url, arguments, known
        self.outcome = Outcome()
        self._deadline = time.monotonic() + arguments.duration_s

    async def client(self, number: int) -> None:
        """Ask until the time is up."""
        chance = random.Random(self._arguments.seed * 1000 + number)
        async with triton.InferenceServerClient(self._url) as client:
            while time.monotonic() < self._deadline:
                ask = chance.choices(
                    [self._whole, self._streamed, self._given_up, self._hung_up, self._refused], [10, 6, 2, 1, 1]
                )[0]
                try:
                    await asyncio.wait_for(ask(client, chance), 120)
                except Exception as error:
                    self.outcome.problems.append(f"{ask.__name__}: {error!r}"[:300])

    def _choose(self, chance: random.Random) -> tuple[list[Known], list[int], bool]:
        rows = [chance.choice(self._known) for _ in range(chance.choice([1, 1, 1, 2, 5]))]
        rests = [self._arguments.longest - len(row.prompt) for row in rows]
        return rows, [chance.choice([0, 1, rest, chance.randint(0, rest)]) for rest in rests], chance.random() < 0.3

    def _compare(self, answer: Any, asked: tuple[list[Known], list[int], bool]) -> None:
        ids, lengths = answer.as_numpy("output_ids"), answer.as_numpy("sequence_length")
        for index, (row, count) in enumerate(zip(*asked[:2], strict=True)):
            expected = [*row.prompt, *(row.sampled if asked[2] else row.greedy)[:count]]
            found = ids[index, 0, : int(lengths[index, 0])].tolist()
            if found != expected:
                self.outcome.problems.append(f"{found} instead of {expected} ({asked[1]}, sampled {asked[2]})")
            self.outcome.tokens += count

    async def _whole(self, client: Any, chance: random.Random) -> None:
        asked = self._choose(chance)
        self._compare(await client.infer(WHOLE, tensors_of(*asked)), asked)
        self.outcome.counts["whole"] += 1

    async def _streamed(self, client: Any, chance: random.Random, stop_after: int | None = None) -> None:
        asked = self._choose(chance)
        request = {"model_name": STREAMED, "inputs": tensors_of(*asked), "enable_empty_final_response": True}

        async def requests() -> Any:
            yield request

        last, is_final, seen = None, False, 0
        answers = client.stream_infer(requests())
        async for answer, error in answers:
            if error:
                raise error
            is_final = answer.get_response().parameters["triton_final_response"].bool_param
            if answer.get_response().outputs:
                last, seen = answer, seen + 1
            if seen == stop_after and not is_final:
                answers.cancel()
                self.outcome.counts["given up"] += 1
                return
            if is_final:
                break
        # Nothing more is asked for in this stream, so Triton may end it in place of the empty answer; what the last one
        # holds says whether all has come.
        if last is None:
            raise ServerError("a stream ended without an answer")
        self._compare(last, asked)
        self.outcome.counts["streamed"] += 1

    async def _given_up(self, client: Any, chance: random.Random) -> None:
        await self._streamed(client, chance, stop_after=chance.randint(1, 6))

    async def _hung_up(self, client: Any, chance: random.Random) -> None:
        """Close the connection in the middle of a request, or let its time run out."""
        asked = self._choose(chance)
        async with triton.InferenceServerClient(self._url) as other:
            request = asyncio.ensure_future(other.infer(WHOLE, tensors_of(*asked), client_timeout=5))
            await asyncio.sleep(chance.random() * 0.05)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        self.outcome.counts["hung up"] += 1

    async def _refused(self, client: Any, chance: random.Random) -> None:
        longest, row = self._arguments.longest, chance.choice(self._known)
        too_long = Known((1,) * (longest + 1), (), ())
        too_many = [row] * (self._arguments.max_batch_size + 1)
        kind, rows, counts = chance.choice([
            ("over the limit", [row], [longest - len(row.prompt) + 1]), ("input over the limit", [too_long], [0]),
            ("over max_batch_size", too_many, [1] * len(too_many)),
        ])  # fmt: skip
        inputs = tensors_of(rows, counts, False)
        if chance.random() < 0.25:
            kind, inputs = "without request_output_len", tensors_of([row], [1], False)[:2]
        try:
            await client.infer(WHOLE, inputs)
        except InferenceServerException as error:
            if "INVALID_ARGUMENT" not in str(error.status()):
                raise
            self.outcome.counts["refused"] += 1
        else:
            self.outcome.problems.append(f"not refused: {kind}")

    async def watch(self, pid: int) -> None:
        """Note once a second what the deployment holds."""
        while time.monotonic() < self._deadline:
            self.outcome.holdings.append(look(pid))
            await asyncio.sleep(1)


async def check_pages(endpoint: Endpoint) -> list[str]:
    """Wait until all pages of the models' KV caches are free; returns what is wrong if they are not in time."""
    deadline, used = time.monotonic() + _FREED_S, {"": "no figure"}
    while used and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        with urlopen(f"http://{endpoint.host}:{endpoint.metrics_port}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith(_USAGE)]
        shares = dict(line.rsplit(" ", 1) for line in lines)
        used = {name: value for name, value in shares.items() if float(value)} if shares else used
    return [f"pages are in use after the load: {name} {value}" for name, value in used.items()]


async def run(endpoint: Endpoint, arguments: UnderLoadArguments) -> Outcome:
    """Put the deployment under load; afterwards every prompt must still be answered as before."""
    assert endpoint.pid is not None
    async with triton.InferenceServerClient(endpoint.grpc_url) as client:
        known = await learn(client, arguments)
        crowd = Crowd(endpoint.grpc_url, arguments, known)
        await asyncio.gather(crowd.watch(endpoint.pid), *(crowd.client(each) for each in range(arguments.clients)))
        if await learn(client, arguments) != known:
            crowd.outcome.problems.append("after the load the solo runs differ from those before")
    crowd.outcome.problems += await check_pages(endpoint)
    crowd.outcome.holdings.append(look(endpoint.pid))
    return crowd.outcome


def main(argv: Sequence[str]) -> None:
    """Run, print the figures, and fail if anything was wrong."""
    arguments = UnderLoadArguments.from_argv(argv, __doc__)
    endpoint = Endpoint.read(arguments.endpoint)
    started = time.monotonic()
    outcome = asyncio.run(run(endpoint, arguments))
    elapsed_s = time.monotonic() - started
    print(f"{arguments.clients} clients, {elapsed_s:.0f} s: {sum(outcome.counts.values())} requests")
    print("  " + "  ".join(f"{kind} {count}" for kind, count in sorted(outcome.counts.items())))
    print(f"  {outcome.tokens} tokens compared with their solo runs, {len(outcome.problems)} problems")
    for moment in np.linspace(0, len(outcome.holdings) - 1, 6).astype(int):
        print(f"  after {moment:3} s  {outcome.holdings[moment]}")
    if outcome.problems:
        raise ServerError("\n".join(outcome.problems[:10]))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "under_load"))
