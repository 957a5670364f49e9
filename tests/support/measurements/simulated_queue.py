"""Queues with one server, M/D/1 and M/M/1, on a clock of their own: what a load records of them, and the truth."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from evaluation.speed.drive import MeasuringPlan
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.probe import plan_probe, with_verdict
from evaluation.speed.rate_search import FoundRate, RateSearch, summarise
from evaluation.speed.tables.figures import FigureContext, compute_newer_figures
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.tables.table import Row

SERVICE_S = 0.01
DETERMINISTIC, EXPONENTIAL = "M/D/1", "M/M/1"
_BLOCK = 4096


def search_arguments(limit_ms: float, percentile: float, duration_s: float, longest_s: float) -> LoadArguments:
    """Arguments of a search, from 5 requests/s on."""
    return LoadArguments(
        endpoint="nowhere:1",
        output=Path("nowhere"),
        slos=(("e2e", limit_ms),),
        search_percentile=percentile,
        search_low=5.0,
        search_duration_s=duration_s,
        search_max_duration_s=longest_s,
    )


def wait_distribution(load: float, services: float) -> float:
    """P(wait <= services) of M/D/1 by Erlang's sum; waits in units of the service time."""
    return (1 - load) * math.fsum(
        (-load * (services - k)) ** k / math.factorial(k) * math.exp(load * (services - k))
        for k in range(math.floor(services) + 1)
    )


def true_rate(system: str, limit_ms: float, percentile: float) -> float:
    """The request rate at which that percentile of requests ends within the limit, in requests/s."""
    share, limit_s = percentile / 100, limit_ms / 1000
    if system == EXPONENTIAL:  # the time in M/M/1 is exponential, with the rate that the server has to spare
        return 1 / SERVICE_S + math.log(1 - share) / limit_s
    low, high = 0.01, 0.999
    for _ in range(60):
        middle = (low + high) / 2
        keeps = wait_distribution(middle, limit_s / SERVICE_S - 1) >= share
        low, high = (middle, high) if keeps else (low, middle)
    return low / SERVICE_S


class Queue:
    """Arrivals and ends of a queue's requests in seconds, by Lindley's recursion, in the order of both."""

    def __init__(self, system: str, rate_per_s: float, random: np.random.Generator) -> None:
        self._system, self._rate, self._random = system, rate_per_s, random
        self.arrived, self.ended = np.empty(0), np.empty(0)

    def extend(self) -> None:
        """Draw a further block of requests."""
        last, free = (self.arrived[-1], self.ended[-1]) if len(self.arrived) else (0.0, 0.0)
        arrived = last + np.cumsum(self._random.exponential(1 / self._rate, _BLOCK))
        is_random = self._system == EXPONENTIAL
        service = self._random.exponential(SERVICE_S, _BLOCK) if is_random else np.full(_BLOCK, SERVICE_S)
        served = np.cumsum(service)
        began = np.maximum(free, np.maximum.accumulate(arrived - (served - service)))
        self.arrived, self.ended = np.append(self.arrived, arrived), np.append(self.ended, served + began)

    def count_arrived(self, time_s: float) -> int:
        """Count the requests that are due at a time."""
        return int(np.searchsorted(self.arrived, time_s, side="right"))


def measure(plan: MeasuringPlan, queue: Queue, lag_ns: int = 0) -> list[Window]:
    """Cut a queue's answers into windows, as ``drive`` does it, until the plan has enough."""
    queue.extend()
    first, windows = plan.warmup, list[Window]()
    while True:
        end = first + plan.requests
        while len(queue.ended) <= end or queue.arrived[-1] <= queue.ended[end - 1]:
            queue.extend()
        arrived, ended = ((1e9 * each[first:end]).round().astype(int).tolist() for each in (queue.arrived, queue.ended))
        records = tuple(
            RequestRecord(due, due, done, 1, (done,), (1,), is_of_schedule=True, lag_ns=lag_ns)
            for due, done in zip(arrived, ended, strict=True)
        )
        started_s, ended_s = queue.ended[first - 1], queue.ended[end - 1]
        due = queue.count_arrived(ended_s)
        bounds = round(1e9 * started_s), round(1e9 * ended_s)
        windows.append(Window(records, *bounds, due - end, due - queue.count_arrived(started_s)))
        first = end
        if len(windows) >= plan.repeats or plan.is_enough(windows):
            return windows


def probe(given: LoadArguments, system: str, row: Row, random: np.random.Generator, lag_ns: int = 0) -> Row:
    """Measure one rate as a search does, of a simulated server."""
    windows = measure(plan_probe(given, row, lambda: None), Queue(system, row.level, random), lag_ns)
    figures = compute_newer_figures(windows, FigureContext({}))
    figures["lasted_s"] = (windows[-1].ended_ns - windows[0].started_ns) / 1e9
    return with_verdict(given, dataclasses.replace(row, state="ok", figures=figures), windows)


def search(given: LoadArguments, system: str, random: np.random.Generator) -> FoundRate:
    """Search for the highest rate of a simulated server."""
    found, rows = RateSearch(given.search_low, given.search_high, given.search_precision), list[Row]()
    while (rate := found.next_rate()) is not None:
        row = Row(mode="open", request_rate_per_s=rate, probe=2 if rate in found.verdicts else None)
        rows.append(probe(given, system, row, random))
        found.add(rate, rows[-1].slo_verdict)
    return summarise(found, rows, given.search_percentile or 0.0, dict(given.slos))
