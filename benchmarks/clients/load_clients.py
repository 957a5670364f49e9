"""Compare the load generator's client of OpenAI APIs with aiperf and perf_analyzer on one endpoint in one run.

    make .venv-aiperf/.ready
    python3 -m benchmarks.clients.load_clients                                                     # fixed delays
    python3 -m benchmarks.clients.load_clients --endpoint=http://127.0.0.1:9000/v1 --vocab-size=8000 # and a running one

The same bodies go by turns from each of the three, in another order in each round: first to a server that answers after
fixed delays, which shows the clients alone, then to the given endpoint, whose times change with whatever else the
machine does. Figures are computed by one set of formulas from each tool's own time stamps (``figures``),
requests/s also by aiperf's formula, and the pause between an answer and the next request of its slot, by which closed
loops of equal latency differ in requests/s. Printed are medians over the rounds, and medians of each round's ratio of
ours to theirs. The server with fixed delays also says when it had each request and when it wrote its tokens, so that a
second table shows which part of each client's figures is the client's own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from benchmarks.clients.figures import PARTS, PAUSE, Figures, Times, figures_of, parts_of
from benchmarks.clients.peers import AiPerf, PerfAnalyzer
from benchmarks.clients.timed_openai import MODEL, Exchange, timed_api
from evaluation.client.served_model import open_target
from evaluation.speed.drive import ClosedLoop, MeasuringPlan, drive
from evaluation.speed.prompts.tokens import RandomIds
from evaluation.speed.prompts.workload import DrawingContext, Workload, seeded
from evaluation.speed.tables.record import Window
from evaluation.speed.transport.openai_dialect import open_dialect
from evaluation.speed.transport.openai_wire import Dialect, OpenAIWire
from evaluation.speed.transport.wire import Encoded
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status

OURS, AIPERF, PERF_ANALYZER = "slipway", "aiperf", "perf_analyzer"
_PROMPTS = 64
Turn = Callable[[int, int], list[Times]]


@dataclass(frozen=True)
class LoadClientsArguments(ScriptArguments):
    """What to compare on."""

    endpoint: str | None = field(default=None, metadata={"help": "base URL of an OpenAI API, beside the fixed delays"})
    vocab_size: int = field(default=1000, metadata={"help": "of the random prompts"})
    concurrencies: tuple[int, ...] = field(default=(1, 4), metadata={"help": "JSON list"})
    lengths: str = field(default="60/20", metadata={"help": "input and output length in tokens"})
    rounds: int = field(default=5, metadata={"help": "turns of each tool at each concurrency"})
    requests: int = field(default=48, metadata={"help": "answers a turn"})
    first_ms: float = field(default=50.0, metadata={"help": "fixed delay before the first token"})
    each_ms: float = field(default=5.0, metadata={"help": "fixed delay before each further one"})
    aiperf: Path = field(default=Path(".venv-aiperf/bin/aiperf"), metadata={"help": "its program"})


def main(argv: Sequence[str]) -> None:
    """Print a table for the fixed delays, and one for the endpoint."""
    arguments = LoadClientsArguments.from_argv(argv, __doc__)
    if not arguments.aiperf.is_file():
        raise ServerError(f"there is no {arguments.aiperf}", "make .venv-aiperf/.ready")
    with timed_api(arguments.first_ms / 1e3, arguments.each_ms / 1e3) as api:
        usage = {"stream_options": {"include_usage": True}}
        dialect = Dialect(MODEL, ends_at_limit=True, stream_fields=usage)
        what = f"fixed delays of {arguments.first_ms:g} ms and {arguments.each_ms:g} ms"
        compare(arguments, Endpoint.read(api.url), dialect, what, api.take_exchanges)
    if arguments.endpoint is not None:
        target = open_target(arguments.endpoint, "")
        found = open_dialect(target, streaming=True)
        assert found is not None
        compare(arguments, target.served.endpoint, found, arguments.endpoint)


def compare(
    arguments: LoadClientsArguments,
    endpoint: Endpoint,
    dialect: Dialect,
    what: str,
    take_exchanges: Callable[[], list[Exchange]] | None = None,
) -> None:
    """Let all tools ask an endpoint by turns, and print what each has seen.

    Args:
        arguments: of the program.
        endpoint: the API.
        dialect: how it is asked.
        what: what the API is, for people.
        take_exchanges: returns what the server saw since the last call; None for one that does not say it.
    """
    context = DrawingContext(RandomIds(arguments.vocab_size), seeded(0, arguments.lengths))
    prompts = islice(Workload.parse(arguments.lengths).prompts(context), _PROMPTS)
    requests = [dialect.encode(prompt, is_streaming=True) for prompt in prompts]
    bodies = [json.loads(request.payload) for request in requests]
    root = endpoint.openai_url.removesuffix("/v1")
    sys.stdout.write(f"\n{what}: {arguments.lengths} tokens, medians of {arguments.rounds} rounds\n")
    with tempfile.TemporaryDirectory() as directory:
        tools: dict[str, Turn] = {
            OURS: lambda concurrency, count: times_of(ask(endpoint, dialect, requests, concurrency, count)),
            AIPERF: AiPerf(arguments.aiperf, root, dialect.model, bodies, Path(directory)).turn,
            PERF_ANALYZER: PerfAnalyzer(root, dialect.model, bodies, Path(directory)).turn,
        }
        for concurrency in arguments.concurrencies:
            turns = take_turns(tools, concurrency, arguments, take_exchanges)
            show(concurrency, {name: [figures for figures, _ in each] for name, each in turns.items()})
            if take_exchanges is not None:
                show_parts({name: [parts for _, parts in each] for name, each in turns.items()})


def take_turns(
    tools: Mapping[str, Turn],
    concurrency: int,
    arguments: LoadClientsArguments,
    take_exchanges: Callable[[], list[Exchange]] | None = None,
) -> dict[str, list[tuple[Figures, Figures]]]:
    """Return each tool's figures and their parts by round; the order of the tools turns round by round."""
    found: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in tools}
    names = list(tools)
    for number in range(arguments.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times = tools[name](concurrency, arguments.requests)
            parts = parts_of(times, take_exchanges()) if take_exchanges is not None else {}
            found[name].append((figures_of(times, concurrency), parts))
    return found


def ask(endpoint: Endpoint, dialect: Dialect, requests: Sequence[Encoded], concurrency: int, count: int) -> Window:
    """Let our client ask, with as many requests before as are in flight; return what it counts."""

    async def run() -> Window:
        plan = MeasuringPlan(concurrency, count, 1, 600.0, lambda windows: False)
        async with OpenAIWire(endpoint, dialect, 60.0, is_streaming=True) as wire:
            recorder = await drive(wire, requests, ClosedLoop(concurrency), plan)
        records = [record for window in recorder.windows for record in window.records]
        failed = [record.error for record in records if record.error]
        if failed or not records:
            raise ServerError(f"requests failed: {failed[:1]}")
        return recorder.windows[0]

    return asyncio.run(run())


def times_of(window: Window) -> list[Times]:
    """Return the times of what our client has counted."""
    return [
        Times(record.sent_ns, record.chunk_ns[0], record.chunk_ns[-1], record.output_tokens)
        for record in window.records
    ]


def show_parts(found: Mapping[str, Sequence[Figures]]) -> None:
    """Print the parts of each tool's latencies in ms, by the server's clock and its own."""
    for part in (f"{part} {kind} ms" for kind in ("mean", "p50") for part in PARTS):
        values = [statistics.median(turn[part] for turn in turns) for turns in found.values()]
        sys.stdout.write(f"{part:<22}" + "".join(f"{value:15.2f}" for value in values)[6:] + "\n")
    sys.stdout.flush()


def show(concurrency: int, found: Mapping[str, Sequence[Figures]]) -> None:
    """Print a line for each figure: what each tool has seen, and how far ours is from each."""
    others = [name for name in found if name != OURS]
    heads = "".join(f"{name:>15}" for name in found) + "".join(f"{f'ours/{name}':>20}" for name in others)
    sys.stdout.write(f"{f'{concurrency} in flight':<16}{heads}\n")
    for figure in found[OURS][0]:
        values = {name: [turn[figure] for turn in turns] for name, turns in found.items()}
        line = "".join(f"{statistics.median(values[name]):15.2f}" for name in found)
        for name in others if figure != PAUSE else ():
            ratio = statistics.median(ours / their for ours, their in zip(values[OURS], values[name], strict=True))
            line += f"{100 * (ratio - 1):+19.1f}%"
        sys.stdout.write(f"{figure:<16}{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "load_clients"))
