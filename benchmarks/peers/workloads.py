"""What benchmarks.peers.compare asks of every engine, and the figures of its answers.

Standard library only: the peer's process imports this module beside the peer's own packages.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

OFFLINE, ONLINE = "offline", "online"
"""Parts of a comparison: whole answers, and streams."""
_STEADY = (0.25, 0.7)
"""Part of a closed loop in which its rate is taken: behind the start, before clients run out of requests."""
_AGREEMENT = (8, 24, 16)
"""Prompts, their tokens, and the generated ones that are compared."""


class Ask(NamedTuple):
    """A prompt, and how many tokens to generate."""

    prompt: list[int]
    count: int


@dataclass(frozen=True)
class Job:
    """What one process measures; the command writes it as JSON.

    Attributes:
        parts: OFFLINE, ONLINE, or both, one after the other.
        model: directory of Hugging Face; of a made-up model it has a config.json alone.
        is_made_up: whether the engine makes random weights.
        shape: the made-up model's name; empty for a real one.
        checkpoint, model_type: of a real model, as the drop-in engine reads it.
        data_type: fp16, bf16 or fp32.
        kind: of the drop-in engine's numbers, of benchmarks.gpu.models.KINDS; the peer's are in its settings.
        tensor_para_size: GPUs that share each layer.
        vocab: tokens are drawn below it.
        longest: tokens of input and output together, at most.
        memory: part of a GPU's memory that the peer may take.
        kv_cache_bytes: of the drop-in engine; 0: its own choice.
        rows, lengths, repeats: static requests: how many rows, [input, output] tokens, measurements of each.
        burst: requests of mixed lengths that arrive at once; 0: none.
        burst_lengths: their fewest and most tokens in, and out.
        clients, requests: of the closed loop; 0 clients: none.
        shares: rates of the Poisson arrivals, as parts of the highest rate that the closed loop shows.
        rates_per_s: the rates themselves; they take the shares' place.
        seconds: of arrivals.
        peer_settings: NAME=value, further arguments of the peer's engine.
        output: file that takes a JSON line for each case.
    """

    parts: tuple[str, ...]
    model: str
    is_made_up: bool
    shape: str
    checkpoint: str
    model_type: str
    data_type: str
    kind: str
    tensor_para_size: int
    vocab: int
    longest: int
    memory: float
    kv_cache_bytes: int
    rows: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    repeats: int
    burst: int
    burst_lengths: tuple[tuple[int, int], ...]
    clients: int
    requests: int
    shares: tuple[float, ...]
    rates_per_s: tuple[float, ...]
    seconds: float
    peer_settings: tuple[str, ...]
    output: str

    def write(self, path: Path) -> None:
        """Write it for ``read``."""
        path.write_text(json.dumps({each.name: getattr(self, each.name) for each in fields(self)}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what ``write`` wrote."""
        return cls(**json.loads(path.read_text()))

    def name_gpus(self, name: str) -> str:
        """Say how many GPUs of that name the engine has."""
        return f"{self.tensor_para_size} x {name}" if self.tensor_para_size > 1 else name

    def add(self, case: str, **figures: Any) -> None:
        """Append a case's figures to the output, and print them."""
        line = json.dumps({"case": case, "figures": figures})
        with Path(self.output).open("a") as file:
            file.write(line + "\n")
        print(line[:400], flush=True)


@dataclass
class Record:
    """A streamed request: when it was due, and when how many of its tokens were there, in s of perf_counter."""

    due_s: float
    count: int
    times: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        """Time to the first token, from when the request was due."""
        return 1000 * (self.times[0][0] - self.due_s)

    @property
    def whole_ms(self) -> float:
        """Time to the last token."""
        return 1000 * (self.times[-1][0] - self.due_s)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between answers."""
        return [1000 * (later - earlier) for (earlier, _), (later, _) in zip(self.times, self.times[1:], strict=False)]


class Streams(Protocol):
    """An engine that streams."""

    async def stream(self, ask: Ask, record: Record) -> None:
        """Answer a request; note in its record when tokens arrive."""


Answers = Callable[[Sequence[Ask]], Sequence[Sequence[int]]]
"""Answers requests and waits for all: the generated tokens of each."""


def draw_equal(vocab: int, rows: int, given: int, wanted: int, chance: random.Random) -> list[Ask]:
    """Draw requests of equal length."""
    return [Ask(_ids(vocab, given, chance), wanted) for _ in range(rows)]


def draw_mixed(vocab: int, count: int, spans: Sequence[tuple[int, int]], chance: random.Random) -> list[Ask]:
    """Draw requests whose tokens in and out lie in ``spans``, ends included: the lengths are the same every time."""
    lengths = random.Random(1234)
    pairs = [tuple(lengths.randint(*span) for span in spans) for _ in range(count)]
    return [Ask(_ids(vocab, given, chance), wanted) for given, wanted in pairs]


def draw_chats(vocab: int, count: int, seed: int) -> list[Ask]:
    """Draw log-normal lengths as in logs of chats: medians 100 in and 130 out, at most 1024 and 512."""
    chance = random.Random(seed)

    def length(median: int, spread: float, most: int) -> int:
        return min(most, max(4, round(median * chance.lognormvariate(0, spread))))

    return [Ask(_ids(vocab, length(100, 1.1, 1024), chance), length(130, 0.9, 512)) for _ in range(count)]


def draw_arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Draw Poisson arrivals: seconds after the start."""
    chance, moment, found = random.Random(seed), 0.0, []
    for _ in range(count):
        moment += chance.expovariate(rate_per_s)
        found.append(moment)
    return found


def run_offline(job: Job, answer_rows: Answers, answer_requests: Answers) -> None:
    """Measure whole answers.

    Args:
        job: what to measure.
        answer_rows: answers rows of equal lengths, as the engine takes them in one request where it can.
        answer_requests: answers requests that arrive at once.
    """
    chance = random.Random(1)
    for (given, wanted), rows in ((pair, rows) for pair in job.lengths for rows in job.rows):
        drawn = [draw_equal(job.vocab, rows, given, wanted, chance) for _ in range(job.repeats + 1)]
        times = list(_times(answer_rows, drawn, skipped=1))
        job.add(f"static {rows} x {given}/{wanted}", latency_ms=1000 * statistics.median(times))
    if job.burst:
        drawn = [draw_mixed(job.vocab, job.burst, job.burst_lengths, chance) for _ in range(4)]
        seconds = statistics.median(_times(answer_requests, drawn, skipped=1))
        tokens = sum(ask.count for ask in drawn[0])
        job.add(f"{job.burst} at once", output_tokens_per_s=tokens / seconds)
    if not job.is_made_up:
        prompts, given, wanted = _AGREEMENT
        asks = draw_equal(job.vocab, prompts, given, wanted, random.Random(7))
        job.add("agreement", tokens=[list(map(int, tokens)) for tokens in answer_requests(asks)])


async def run_online(job: Job, engine: Streams) -> None:
    """Measure streams: a closed loop, whose rate is the highest, then Poisson arrivals at parts of it."""
    await _closed(engine, draw_chats(job.vocab, min(16, job.requests or 16), 5), 16)
    highest = 0.0
    if job.clients:
        records, start_s = await _closed(engine, draw_chats(job.vocab, job.requests, 11), job.clients)
        tokens_per_s = steady_tokens_per_s(records, start_s)
        highest = tokens_per_s * len(records) / sum(record.count for record in records)
        found = stream_figures(records, start_s) | {"output_tokens_per_s": tokens_per_s, "requests_per_s": highest}
        job.add(f"{job.clients} clients", **found)
    rates = job.rates_per_s or tuple(share * highest for share in job.shares)
    for number, rate in enumerate(rates, 1):
        count = max(8, round(rate * job.seconds))
        asks, moments = draw_chats(job.vocab, count, 100 + number), draw_arrivals(count, rate, 200 + number)
        records, start_s = await _open(engine, asks, moments)
        job.add(f"Poisson, {rate:.4g} requests/s", rate_per_s=rate, **stream_figures(records, start_s))


def stream_figures(records: Sequence[Record], start_s: float) -> dict[str, float]:
    """Compute TTFT, ITL and end-to-end latency in ms (50th and 99th percentile), and output tokens/s until the last."""
    seconds = max(record.times[-1][0] for record in records) - start_s
    gaps = [gap for record in records for gap in record.gaps_ms]
    kinds = {"ttft": [r.first_ms for r in records], "itl": gaps, "e2e": [r.whole_ms for r in records]}
    figures = {
        f"{name}_p{percent}_ms": percentile(values, percent)
        for name, values in kinds.items()
        if values
        for percent in (50, 99)
    }
    return {"output_tokens_per_s": sum(record.count for record in records) / seconds, **figures}


def steady_tokens_per_s(records: Sequence[Record], start_s: float) -> float:
    """Return the output tokens/s of a closed loop while all clients are busy."""
    span = max(record.times[-1][0] for record in records) - start_s
    begin, end = (start_s + part * span for part in _STEADY)
    got = 0
    for record in records:
        before = 0
        for moment, count in record.times:
            got += count - before if begin < moment <= end else 0
            before = count
    return got / (end - begin)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between the two nearest values, as numpy does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _times(answer: Answers, drawn: Sequence[Sequence[Ask]], skipped: int) -> Iterator[float]:
    """Yield the seconds of each set of requests; the first ones do not count."""
    for number, asks in enumerate(drawn):
        start = time.perf_counter()
        answers = answer(asks)
        seconds = time.perf_counter() - start
        _check([ask.count for ask in asks], [len(tokens) for tokens in answers])
        if number >= skipped:
            yield seconds


def _check(wanted: Sequence[int], got: Sequence[int]) -> None:
    if list(wanted) != list(got):
        raise RuntimeError(f"an engine generated {list(got)[:8]} tokens where {list(wanted)[:8]} were asked for")


async def _closed(engine: Streams, asks: Sequence[Ask], clients: int) -> tuple[list[Record], float]:
    """Keep that many requests in flight; each is due when a client is free."""
    places, start_s = asyncio.Semaphore(clients), time.perf_counter()

    async def one(ask: Ask) -> Record:
        async with places:
            return await _ask(engine, ask, time.perf_counter())

    return list(await asyncio.gather(*map(one, asks))), start_s


async def _open(engine: Streams, asks: Sequence[Ask], moments: Sequence[float]) -> tuple[list[Record], float]:
    """Send each request when it is due, whatever the engine does."""
    start_s, tasks = time.perf_counter() + 0.05, []
    for ask, moment in zip(asks, moments, strict=True):
        await asyncio.sleep(max(0.0, start_s + moment - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(engine, ask, start_s + moment)))
    return list(await asyncio.gather(*tasks)), start_s


async def _ask(engine: Streams, ask: Ask, due_s: float) -> Record:
    record = Record(due_s, ask.count)
    await engine.stream(ask, record)
    _check([ask.count], [record.times[-1][1] if record.times else 0])
    return record


def _ids(vocab: int, count: int, chance: random.Random) -> list[int]:
    return chance.choices(range(vocab), k=count)
