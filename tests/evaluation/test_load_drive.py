"""How the load is kept up, against a server of a known delay in the same event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from evaluation.speed.drive import ClosedLoop, MeasuringPlan, OpenLoop, Recorder, drive
from evaluation.speed.prompts.workload import LoadPrompt, arrivals_ns, seeded
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.transport.wire import Encoded

pytestmark = pytest.mark.clock

REQUESTS = [Encoded(bytes([number]), LoadPrompt((number,), 1)) for number in range(7)]


@dataclass
class Server:
    """Answers after a delay and keeps count."""

    delay_s: float = 0.01
    fails: Callable[[int], bool] = lambda number: False
    in_flight: int = 0
    most: int = 0
    asked: int = 0

    async def ask(self, request: Encoded, scheduled_ns: int) -> RequestRecord:
        number, self.asked = self.asked, self.asked + 1
        sent_ns = time.perf_counter_ns()
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(self.delay_s)
        self.in_flight -= 1
        done_ns = time.perf_counter_ns()
        error = "refused" if self.fails(number) else ""
        return RequestRecord(scheduled_ns, sent_ns, done_ns, 1, (done_ns,), (1,), error=error)


def never(windows: Sequence[Window]) -> bool:
    return False


def run(server: Server, load: ClosedLoop | OpenLoop, plan: MeasuringPlan) -> Recorder:
    return asyncio.run(drive(server, REQUESTS, load, plan))


def test_the_closed_loop_keeps_exactly_so_many_requests_in_flight() -> None:
    server = Server()
    recorder = run(server, ClosedLoop(4), MeasuringPlan(8, 20, 3, 60, never))
    assert server.most == 4
    assert len(recorder.warmups) == 8
    assert [len(window.records) for window in recorder.windows] == [20, 20, 20]
    assert server.in_flight == 0, "what was in flight at the end was waited for"
    assert server.asked <= 8 + 60 + 4
    # Little's law: concurrency = throughput * latency
    seconds = (recorder.windows[-1].ended_ns - recorder.windows[0].started_ns) / 1e9
    records = [record for window in recorder.windows for record in window.records]
    latency_s = sum(record.done_ns - record.sent_ns for record in records) / len(records) / 1e9
    assert 60 / seconds * latency_s == pytest.approx(4, rel=0.1)


def test_windows_follow_each_other_without_a_gap() -> None:
    windows = run(Server(0.001), ClosedLoop(2), MeasuringPlan(2, 5, 4, 60, never)).windows
    assert all(window.started_ns == before.ended_ns for before, window in zip(windows, windows[1:], strict=False))
    assert all(window.records[-1].done_ns == window.ended_ns for window in windows)


def test_the_open_loop_sends_when_due_however_slow_the_server_is() -> None:
    server = Server(delay_s=0.2)
    due = arrivals_ns(200.0, "constant", 0.0, seeded(0))
    recorder = run(server, OpenLoop(due, 1000), MeasuringPlan(0, 20, 1, 60, never))
    assert server.most >= 30, "at 200 requests/s and 0.2 s each, 40 are in flight"
    records = recorder.windows[0].records
    gaps = [later.scheduled_ns - earlier.scheduled_ns for earlier, later in zip(records, records[1:], strict=False)]
    assert all(gap == pytest.approx(5_000_000, abs=2) for gap in gaps)


def test_requests_beyond_the_limit_wait_in_the_client_and_their_wait_is_kept_apart() -> None:
    server = Server(delay_s=0.05)
    due = arrivals_ns(200.0, "constant", 0.0, seeded(0))
    records = run(server, OpenLoop(due, 2), MeasuringPlan(0, 10, 1, 60, never)).windows[0].records
    assert server.most == 2
    assert records[-1].sent_ns - records[-1].scheduled_ns > 100_000_000
    assert all(record.done_ns - record.sent_ns < 100_000_000 for record in records)


def test_a_point_ends_early_once_the_repeats_agree() -> None:
    recorder = run(Server(0.001), ClosedLoop(1), MeasuringPlan(1, 3, 10, 60, lambda windows: len(windows) >= 4))
    assert len(recorder.windows) == 4


def test_failures_are_counted_and_a_window_of_nothing_else_ends_the_point() -> None:
    some = run(Server(0.001, fails=lambda number: number % 2 == 1), ClosedLoop(1), MeasuringPlan(0, 6, 2, 60, never))
    assert [bool(record.error) for record in some.windows[0].records] == [False, True] * 3
    assert len(some.windows) == 2
    none = run(Server(0.001, fails=lambda number: True), ClosedLoop(2), MeasuringPlan(2, 4, 10, 60, never))
    assert len(none.windows) == 1


def test_the_ramp_is_warm_up() -> None:
    server = Server(0.01)
    recorder = run(server, ClosedLoop(4, ramp_s=0.2), MeasuringPlan(1, 4, 1, 60, never))
    first = recorder.warmups[0].sent_ns
    assert recorder.windows[0].started_ns - first > 180_000_000
    assert server.most == 4


def test_time_ends_a_point_with_what_it_has() -> None:
    recorder = run(Server(0.01), ClosedLoop(1), MeasuringPlan(1, 1000, 10, 0.1, never))
    assert len(recorder.windows) == 1
    assert 2 <= len(recorder.windows[0].records) < 15


def test_time_also_ends_a_warm_up_that_would_never_end() -> None:
    assert run(Server(0.01), ClosedLoop(1), MeasuringPlan(1000, 1000, 10, 0.05, never)).windows == []
