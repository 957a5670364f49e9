"""Measure one point under load: prepare its requests, send them, and fill in its row."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evaluation.speed.drive import ClosedLoop, MeasuringPlan, OpenLoop, Recorder, drive
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.load_requests import LoadTarget, PreparedRequests, prepare_requests
from evaluation.speed.probe import plan_probe, with_verdict
from evaluation.speed.prompts.workload import arrivals_ns, seeded
from evaluation.speed.provenance import timestamp, wall_clock
from evaluation.speed.tables.costs import CostMeter
from evaluation.speed.tables.derived import derive
from evaluation.speed.tables.figures import FigureContext, compute_figures, compute_newer_figures, is_stable
from evaluation.speed.tables.formulas import NANOSECONDS_PER_S
from evaluation.speed.tables.raw_records import PointRecords, origin_of
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.tables.server_metrics import (
    LONGEST_IDLE_WAIT_S,
    read_after,
    read_settled,
    server_figures,
    wait_until_idle,
)
from evaluation.speed.tables.table import CLOSED, FAILED, OK, Row
from evaluation.speed.transport.openai_wire import OpenAIWire
from evaluation.speed.transport.wire import Wire
from handover.errors import ServerError

_LEAST_REQUESTS = 20
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.0)
"""After each request that failed before anything is measured."""
_MOST_TIMED = 200
"""Answers of a repeat that is prolonged for its duration: the few of a low rate come at another rate by chance."""
_SEARCH_SAMPLES = 8192
_SPARE_REPEATS = 1
"""Requests are prepared for one repeat more than planned: the load goes on until the last answer is counted."""


@dataclass(frozen=True)
class Measured:
    """A measured point.

    Attributes:
        row: the row with its figures.
        raw: every request, with the bounds of the repeats.
    """

    row: Row
    raw: PointRecords

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """Counted requests, in the order in which they ended."""
        return self.raw.records

    @property
    def window_ns(self) -> tuple[int, ...]:
        """Start of each repeat, and end of the last."""
        windows = self.raw.windows
        return (*(window.started_ns for window in windows), *(window.ended_ns for window in windows[-1:]))


def measure_point(
    arguments: LoadArguments, target: LoadTarget, row: Row, advance: Callable[[], None] = lambda: None
) -> Measured:
    """Fill in a point's row, calling ``advance`` after each repeat; without a single success it is failed and empty."""
    plan = plan_point(arguments, row, target, advance)
    requests = prepare_requests(arguments, target, row, _count_requests(arguments, plan))
    before = read_settled(target.endpoint, arguments.model)
    with CostMeter(target.endpoint, target.log, arguments.model) as costs:
        recorder = asyncio.run(_load(arguments, target, row, plan, requests))
    idle_s, left = wait_until_idle(target.endpoint, arguments.model) if arguments.cancel_share else (None, 0)
    counters = before, read_after(target.endpoint, arguments.model, before, recorder.sent)
    row = dataclasses.replace(row, sent_requests=recorder.sent)
    windows, context = recorder.windows, _context(arguments, target)
    raw = PointRecords(tuple(windows), tuple(recorder.warmups), context.slos, counters, origin=origin_of(row))
    raw = dataclasses.replace(raw, started_at=wall_clock(raw.origin_ns))
    records, row = raw.records, _with_counts(arguments, row, raw, requests)
    if left and not row.error:
        late = f"{LONGEST_IDLE_WAIT_S:g} s after the last client had hung up"
        row = dataclasses.replace(row, error=f"{left} requests were still in the server {late}")
    if not any(record.is_complete for record in records):
        return Measured(dataclasses.replace(row, error=row.error or "no request ended in time"), raw)
    row = dataclasses.replace(
        row,
        state=OK,
        is_stable=len(records) == requests.requests
        if target.trace
        else is_stable(windows, context, arguments.stable_within),
        duration_s=(windows[-1].ended_ns - windows[0].started_ns) / NANOSECONDS_PER_S,
        figures={
            **compute_figures(windows, context),
            **compute_newer_figures(windows, context),
            **server_figures(*counters),
            **costs.figures,
            "server_idle_s": idle_s,
        },
    )
    return Measured(derive(with_verdict(arguments, row, windows)), raw)


def _with_counts(arguments: LoadArguments, row: Row, raw: PointRecords, requests: PreparedRequests) -> Row:
    """Fill in what was counted, and the first failure; the row is a failed one until it has figures."""
    failed = [record for record in raw.records if record.error]
    return dataclasses.replace(
        row,
        requests=len(raw.records),
        failed_requests=len(failed),
        cancelled_requests=sum(record.is_cancelled for record in raw.records) if arguments.cancel_share else None,
        warmup_requests=len(raw.warmups),
        clipped_share=requests.clipped / requests.requests,
        repeats=len(raw.windows),
        error=next((record.error for record in (*failed, *raw.warmups) if record.error), ""),
        timestamp=timestamp(),
        started_at=raw.started_at,
        state=FAILED,
    )


def probe(arguments: LoadArguments, target: LoadTarget, row: Row) -> None:
    """Check that one request of a few succeeds before anything is measured: each point counts its own failures.

    Raises:
        ServerError: all failed, or their answers do not continue the prompt.
    """
    request = prepare_requests(arguments, target, row, 1).first[0]

    async def ask() -> RequestRecord:
        async with _open_wire(arguments, target) as wire:
            return await wire.ask(request, 0)

    for pause_s in _PAUSES_S:
        record = asyncio.run(ask())
        if not record.error:
            return
        time.sleep(pause_s)
    if record.error:
        raise ServerError(f"no generation came back from '{arguments.model}': {record.error}")


def plan_point(
    arguments: LoadArguments, row: Row, target: LoadTarget, advance: Callable[[], None] = lambda: None
) -> MeasuringPlan:
    """Choose warm-up and repeats of a point by its load."""
    context = _context(arguments, target)
    if target.trace is not None:
        return MeasuringPlan(0, len(target.trace.requests), 1, arguments.max_point_s, lambda windows: True)
    if arguments.search_percentile is not None:
        return plan_probe(arguments, row, advance)
    if row.mode == CLOSED:
        in_flight = round(row.level)
        requests = arguments.requests or max(_LEAST_REQUESTS, 4 * in_flight)
        warmup = arguments.warmup or 2 * in_flight
    else:
        timed = min(_MOST_TIMED, round(arguments.repeat_s * row.level))
        requests = arguments.requests or max(_LEAST_REQUESTS, round(2 * row.level), timed)
        warmup = arguments.warmup or _LEAST_REQUESTS

    def is_enough(windows: Sequence[Window]) -> bool:
        advance()
        return len(windows) >= arguments.min_repeats and is_stable(windows, context, arguments.stable_within)

    return MeasuringPlan(warmup, requests, arguments.repeats, arguments.max_point_s, is_enough)


def _count_requests(arguments: LoadArguments, plan: MeasuringPlan) -> int:
    wanted = plan.warmup + (plan.repeats + _SPARE_REPEATS) * plan.requests
    most = arguments.samples or (_SEARCH_SAMPLES if arguments.search_percentile is not None else wanted)
    return min(wanted, most)


async def _load(
    arguments: LoadArguments, target: LoadTarget, row: Row, plan: MeasuringPlan, requests: PreparedRequests
) -> Recorder:
    load: ClosedLoop | OpenLoop
    if row.mode == CLOSED:
        load = ClosedLoop(round(row.level), arguments.ramp_s)
    else:
        load = _open_loop(arguments, target, row, requests)
    async with _open_wire(arguments, target) as wire:
        return await drive(wire, requests.first, load, plan)


def _open_loop(arguments: LoadArguments, target: LoadTarget, row: Row, requests: PreparedRequests) -> OpenLoop:
    if target.trace is not None:
        return OpenLoop(target.trace.arrivals_ns(arguments.trace_speed), arguments.max_in_flight)
    again = () if row.probe is None else (row.probe,)  # that a rate is exceeded is confirmed with other arrivals
    random = seeded(arguments.seed, "arrivals", row.workload, row.level, *again)
    rate_per_s = row.level / requests.requests_each  # of conversations
    due = arrivals_ns(rate_per_s, arguments.arrival, arguments.ramp_s, random)
    return OpenLoop(due, arguments.max_in_flight, arguments.ramp_s)


def _open_wire(arguments: LoadArguments, target: LoadTarget) -> Wire | OpenAIWire:
    """Return the connections through which the load asks."""
    endpoint, is_streaming = target.endpoint, bool(arguments.streaming)
    if target.dialect is None:
        return Wire(endpoint.grpc_url, arguments.timeout_s, is_streaming)
    return OpenAIWire(endpoint, target.dialect, arguments.timeout_s, is_streaming)


def _context(arguments: LoadArguments, target: LoadTarget) -> FigureContext:
    return FigureContext(dict(arguments.slos), target.gpus)
