"""Many clients of the OpenAI endpoint at once, of whom some hang up: every answer compared with its solo run.

    python3 -m benchmarks.serving.openai_under_load --endpoint=.../deployment --clients=200 --duration-s=120

The deployment has deployment.openai_port and a decoupled model. Before the load each prompt is generated alone,
greedily and drawn with a seed, to its greatest length; the tokens of every shorter request are the beginning of those.
Each client then asks for random lengths, whole or as a stream, for one prompt or several. Some leave a stream in the
middle, cut the connection within a body or before an answer, send a body or read an answer slowly, or ask for what is
refused. A wrong answer, a status 500, or a request that is still in the engine ten seconds after the last client fails
the run; so does an endpoint whose memory still rises in the last quarter of a run of several minutes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks.serving.server_memory import Holdings, look, resident_mb
from deployment.processes.linux import command_line, descendants
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status

_PATH = "/v1/completions"
_SAMPLED = {"temperature": 0.8, "top_k": 4, "seed": 7}
_GREEDY = {"temperature": 0}
_FREE_S = 10.0
_JUDGED_S = 180.0
"""Duration of a run from which its memory is judged; allocators reach their level in the first minutes."""
_LEVEL_MB = 2.0
_METRIC = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{.*\} (\S+)$", re.MULTILINE
)


@dataclass(frozen=True)
class OpenAIUnderLoadArguments(ScriptArguments):
    """Who asks, for how long."""

    endpoint: str = field(metadata={"help": "endpoint.json of a deployment with an OpenAI port"})
    model: str = field(default="fastertransformer", metadata={"help": "that is asked"})
    clients: int = field(default=200, metadata={"help": "clients at a time, each with one request in flight"})
    duration_s: float = field(default=120.0, metadata={"help": "seconds of load"})
    longest: int = field(default=48, metadata={"help": "tokens of a prompt and its answer"})
    vocab_size: int = field(default=1000, metadata={"help": "prompts are made of tokens below it"})
    seed: int = field(default=0, metadata={"help": "of the prompts and of what clients do"})


@dataclass(frozen=True)
class Known:
    """A prompt and the tokens that follow it, alone in the server: greedily and drawn."""

    prompt: tuple[int, ...]
    greedy: tuple[int, ...]
    sampled: tuple[int, ...]


@dataclass
class Outcome:
    """What the load showed.

    Attributes:
        counts: requests by kind of end.
        problems: what must not be, in words.
        holdings: of the deployment, once a second.
        endpoint_mb: memory of the endpoint's processes, once a second.
        tokens: of answers that were compared.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    holdings: list[Holdings] = field(default_factory=list)
    endpoint_mb: list[float] = field(default_factory=list)
    tokens: int = 0


class Crowd:
    """All clients of one run.

    Args:
        endpoint: of the deployment.
        arguments: of the run.
        known: prompts with their solo runs.
    """

    def __init__(self, endpoint: Endpoint, arguments: OpenAIUnderLoadArguments, known: Sequence[Known]) -> None:
        self._endpoint, self._arguments, self._known = endpoint, arguments, known
        self.outcome = Outcome()
        self._deadline = time.monotonic() + arguments.duration_s

    async def client(self, number: int) -> None:
        """Ask until the time is up."""
        chance = random.Random(self._arguments.seed * 1000 + number)
        kinds = [self._whole, self._streamed, self._left, self._cut, self._slow, self._refused]
        async with session_of(self._endpoint) as session:
            while time.monotonic() < self._deadline:
                (ask,) = chance.choices(kinds, [8, 8, 3, 2, 1, 1])
                try:
                    await asyncio.wait_for(ask(session, chance), 120)
                except Exception as error:
                    self.outcome.problems.append(f"{ask.__name__}: {error!r}"[:300])

    def _choose(self, chance: random.Random, most: int = 1) -> tuple[list[Known], int, dict[str, Any]]:
        """Choose prompts and a length; give the expected tokens' length and the body."""
        rows = [chance.choice(self._known) for _ in range(chance.randint(1, most))]
        count = chance.randint(1, self._arguments.longest - max(len(row.prompt) for row in rows))
        way = _SAMPLED if chance.random() < 0.3 else _GREEDY
        prompts = [list(row.prompt) for row in rows]
        body = {"model": self._arguments.model, "prompt": prompts, "max_tokens": count, "ignore_eos": True, **way}
        return rows, count, {**body, "return_token_ids": True}

    def _compare(self, row: Known, count: int, body: dict[str, Any], found: Sequence[int]) -> None:
        expected = (row.sampled if "seed" in body else row.greedy)[:count]
        if tuple(found) != expected:
            self.outcome.problems.append(f"{found} instead of {expected} behind {row.prompt}")
        self.outcome.tokens += count

    async def _whole(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        rows, count, body = self._choose(chance, most=3)
        async with session.post(_PATH, json=body) as answer:
            content = await answer.json()
        for row, choice in zip(rows, content["choices"], strict=True):
            self._compare(row, count, body, choice["token_ids"])
        self.outcome.counts["whole"] += 1

    async def _streamed(
        self, session: aiohttp.ClientSession, chance: random.Random, leaves_after: int | None = None, pause_s: float = 0
    ) -> None:
        rows, count, body = self._choose(chance)
        found: list[int] = []
        async with session.post(_PATH, json={**body, "stream": True}) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                found += json.loads(line[6:])["choices"][0]["token_ids"]
                await asyncio.sleep(pause_s)
                if leaves_after is not None and len(found) >= leaves_after:
                    self.outcome.counts["left"] += 1
                    return  # the connection is closed with the rest of the answer unread
        self._compare(rows[0], count, body, found)
        self.outcome.counts["read slowly" if pause_s else "streamed"] += 1

    async def _left(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        await self._streamed(session, chance, leaves_after=chance.randint(1, 6))

    async def _cut(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Close the connection in the middle of a body, or while the answer is being made."""
        whole = _request(self._choose(chance, most=3)[2])
        sent = whole[: chance.randrange(len(whole))] if chance.random() < 0.5 else whole
        _, writer = await asyncio.open_connection("127.0.0.1", self._endpoint.openai_port)
        writer.write(sent)
        await asyncio.sleep(chance.random() * 0.05)
        writer.transport.abort()
        self.outcome.counts["cut"] += 1

    async def _slow(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        """Read an answer slowly, or send a body in small parts."""
        if chance.random() < 0.5:
            await self._streamed(session, chance, pause_s=0.02)
            return
        rows, count, body = self._choose(chance)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._endpoint.openai_port)
        whole = _request(body)
        for place in range(0, len(whole), 40):
            writer.write(whole[place : place + 40])
            await asyncio.sleep(0.02)
        answer = await reader.read()
        writer.close()
        (choice,) = json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"]
        self._compare(rows[0], count, body, choice["token_ids"])
        self.outcome.counts["sent slowly"] += 1

    async def _refused(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        wrong = chance.choice([{"max_tokens": -1}, {"nonsense": 1}, {"temperature": "hot"}, {"prompt": [10**9]}])
        async with session.post(_PATH, json={**self._choose(chance)[2], **wrong}) as answer:
            if answer.status != 400:
                self.outcome.problems.append(f"status {answer.status} for {wrong}")
        self.outcome.counts["refused"] += 1

    async def watch(self) -> None:
        """Note once a second what the deployment holds."""
        assert self._endpoint.pid is not None
        while time.monotonic() < self._deadline:
            self.note()
            await asyncio.sleep(1)

    def note(self) -> None:
        """Note what the deployment holds now."""
        assert self._endpoint.pid is not None
        below = descendants([self._endpoint.pid])
        own = [each.pid for each in below if "deployment.openai" in command_line(each.pid)]
        self.outcome.holdings.append(look(self._endpoint.pid))
        self.outcome.endpoint_mb.append(sum(map(resident_mb, own)))


def rise_mb(memory: Sequence[float]) -> float:
    """Return how far memory rises late in a run: the median of its last quarter above that of the one before."""
    third, fourth = (np.median(part) for part in np.array_split(np.asarray(memory), 4)[2:])
    return float(fourth - third)


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def session_of(endpoint: Endpoint) -> aiohttp.ClientSession:
    """Open a client's connections."""
    return aiohttp.ClientSession(f"http://127.0.0.1:{endpoint.openai_port}")


async def learn(endpoint: Endpoint, arguments: OpenAIUnderLoadArguments) -> list[Known]:
    """Generate each prompt alone, to its greatest length."""
    chance, known = random.Random(arguments.seed), []
    async with session_of(endpoint) as session:
        for _ in range(24):
            prompt = [chance.randrange(arguments.vocab_size) for _ in range(chance.randint(1, arguments.longest // 2))]
            body = {"model": arguments.model, "prompt": prompt, "max_tokens": arguments.longest - len(prompt)}
            rows = []
            for way in (_GREEDY, _SAMPLED):
                asked = {**body, **way, "ignore_eos": True, "return_token_ids": True}
                async with session.post(_PATH, json=asked) as answer:
                    rows.append(tuple((await answer.json())["choices"][0]["token_ids"]))
            known.append(Known(tuple(prompt), *rows))
    return known


async def orphans(endpoint: Endpoint) -> str:
    """Wait until the engine works on nothing; what it still holds after ten seconds."""
    deadline = time.monotonic() + _FREE_S
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"http://127.0.0.1:{endpoint.metrics_port}/metrics") as page:
                found = {name: float(value) for name, value in _METRIC.findall(await page.text())}
            if len(found) == 3 and not any(found.values()):
                return ""
            if time.monotonic() > deadline:
                return f"after the load the engine still holds {found}"
            await asyncio.sleep(0.2)


async def run(endpoint: Endpoint, arguments: OpenAIUnderLoadArguments) -> Outcome:
    """Put the deployment under load; afterwards every page is free, and every prompt is answered as before."""
    known = await learn(endpoint, arguments)
    crowd = Crowd(endpoint, arguments, known)
    await asyncio.gather(crowd.watch(), *(crowd.client(each) for each in range(arguments.clients)))
    if left := await orphans(endpoint):
        crowd.outcome.problems.append(left)
    if await learn(endpoint, arguments) != known:
        crowd.outcome.problems.append("after the load the solo runs differ from those before")
    if arguments.duration_s >= _JUDGED_S and (rise := rise_mb(crowd.outcome.endpoint_mb)) > _LEVEL_MB:
        crowd.outcome.problems.append(f"in its last quarter the endpoint holds {rise:.1f} MB more than in the third")
    crowd.note()
    return crowd.outcome


def main(argv: Sequence[str]) -> None:
    """Run, print the figures, and fail if anything was wrong."""
    arguments = OpenAIUnderLoadArguments.from_argv(argv, __doc__)
    started = time.monotonic()
    outcome = asyncio.run(run(Endpoint.read(arguments.endpoint), arguments))
    lines = [
        f"{arguments.clients} clients, {time.monotonic() - started:.0f} s: {outcome.counts.total()} requests",
        "  " + "  ".join(f"{kind} {count}" for kind, count in sorted(outcome.counts.items())),
        f"  {outcome.tokens} tokens compared with their solo runs, {len(outcome.problems)} problems",
    ]
    for moment in np.linspace(0, len(outcome.holdings) - 1, 13).astype(int):
        lines.append(f"  {moment:3} s  endpoint {outcome.endpoint_mb[moment]:6.1f} MB  {outcome.holdings[moment]}")
    sys.stdout.write("\n".join(lines) + "\n")
    if outcome.problems:
        raise ServerError("\n".join(outcome.problems[:10]))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "openai_under_load"))
