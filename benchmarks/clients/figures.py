"""One set of formulas for the time stamps of every load tool, and the part of a latency that is the client's own."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.clients.timed_openai import Exchange
from evaluation.speed.tables.formulas import NANOSECONDS_PER_MS, NANOSECONDS_PER_S
from handover.errors import ServerError

TTFT, ITL, E2E = "ttft p50 ms", "itl mean ms", "e2e p50 ms"
RATE, TOKEN_RATE, PAUSE = "requests/s", "output tokens/s", "pause mean ms"
WHOLE_RATE = "n/(end-start)"
"""Answers a second by aiperf's formula: all requests, from the first one's start to the last one's end."""
PARTS = ("sent - read", "read - token", "token - seen", "last - seen", "ttft - server")
"""The way there, the server, the way back of the first and of the last token, and both ways of the first together."""
Figures = dict[str, float]
"""Values by the name of the figure."""


@dataclass(frozen=True)
class Times:
    """One request of a stream; times are in ns of ``time.perf_counter_ns``.

    Attributes:
        sent_ns: when the request was sent.
        first_ns, last_ns: when its first and its last token arrived.
        tokens: number of generated tokens.
    """

    sent_ns: float
    first_ns: float
    last_ns: float
    tokens: int


def figures_of(times: Sequence[Times], concurrency: int) -> Figures:
    """Compute the figures of one tool's turn in a closed loop.

    ``RATE`` and ``TOKEN_RATE`` divide as ``evaluation.load`` does, by the time from one answer to another: from the one
    with which every slot has answered once to the last one after which a whole number of answers for each slot lies
    between, since the slots of a server with fixed delays answer at once.

    Args:
        times: of more than ``concurrency`` requests, in any order.
        concurrency: requests in flight.
    """
    firsts = [(each.first_ns - each.sent_ns) / NANOSECONDS_PER_MS for each in times]
    wholes = [(each.last_ns - each.sent_ns) / NANOSECONDS_PER_MS for each in times]
    gaps = [(each.last_ns - each.first_ns) / NANOSECONDS_PER_MS / max(each.tokens - 1, 1) for each in times]
    ended = sorted(times, key=lambda each: each.last_ns)
    counted = ended[concurrency : len(ended) - len(ended) % concurrency]
    rate = NANOSECONDS_PER_S / (counted[-1].last_ns - ended[concurrency - 1].last_ns)
    whole_ns = ended[-1].last_ns - min(each.sent_ns for each in times)
    return {
        "ttft mean ms": statistics.mean(firsts),
        TTFT: statistics.median(firsts),
        ITL: statistics.mean(gaps),
        "e2e mean ms": statistics.mean(wholes),
        E2E: statistics.median(wholes),
        RATE: len(counted) * rate,
        TOKEN_RATE: sum(each.tokens for each in counted) * rate,
        WHOLE_RATE: len(times) * NANOSECONDS_PER_S / whole_ns,
        PAUSE: statistics.mean(pauses_ms(times)),
    }


def pauses_ms(times: Sequence[Times]) -> list[float]:
    """Return how long a slot of a closed loop was free before each request, taking the earliest free slot for it."""
    free_ns, pauses = deque[float](), list[float]()
    ends = deque(sorted(each.last_ns for each in times))
    for sent_ns in sorted(each.sent_ns for each in times):
        while ends and ends[0] <= sent_ns:
            free_ns.append(ends.popleft())
        if free_ns:
            pauses.append((sent_ns - free_ns.popleft()) / NANOSECONDS_PER_MS)
    return pauses


def parts_of(times: Sequence[Times], exchanges: Sequence[Exchange]) -> Figures:
    """Compute means and medians of ``PARTS`` in ms: a request is the exchange that was read first after it.

    Raises:
        ServerError: the server has read fewer requests than the client has sent.
    """
    left, parts = sorted(exchanges, key=lambda each: each.read_ns), list[tuple[float, ...]]()
    for each in sorted(times, key=lambda each: each.sent_ns):
        found = next((one for one in left if one.read_ns >= each.sent_ns), None)
        if found is None:
            raise ServerError("a client says that it sent a request which the server did not read after that")
        left.remove(found)
        served_ns, back_ns = found.first_ns - found.read_ns, each.first_ns - found.first_ns
        of_client_ns = each.first_ns - each.sent_ns - served_ns
        there_ns, last_ns = found.read_ns - each.sent_ns, each.last_ns - found.last_ns
        parts.append((there_ns, served_ns, back_ns, last_ns, of_client_ns))
    columns = dict(zip(PARTS, zip(*parts, strict=True), strict=True))
    means = {f"{part} mean ms": statistics.mean(column) for part, column in columns.items()}
    medians = {f"{part} p50 ms": statistics.median(column) for part, column in columns.items()}
    return {name: value / NANOSECONDS_PER_MS for name, value in (means | medians).items()}
