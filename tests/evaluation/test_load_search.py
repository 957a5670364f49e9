"""The search for the highest rate that keeps the SLOs, against queues whose answer is known from theory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import selectors
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_triton import FakeTriton, RefusalError, Tensors, count_up
from support.streaming_triton import StreamingTriton

from evaluation import load as sweep
from evaluation.speed import under_load
from evaluation.speed.drive import OpenLoop, drive
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.rate_search import RateSearch
from evaluation.speed.record import RequestRecord
from evaluation.speed.slo_verdict import EXCEEDED, HOLDS, UNDECIDED, judge, share_interval
from evaluation.speed.table import LOAD_TABLE, Row
from evaluation.speed.wire import Encoded
from evaluation.speed.workload import LoadPrompt, arrivals_ns, seeded
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError

MS = 1_000_000


class Skipping(selectors.DefaultSelector):
    """Lets time pass at once: what would be a wait moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self.skipping = Skipping()
        super().__init__(self.skipping)

    def time(self) -> float:
        return self.skipping.now_s


class OneServer:
    """A queue with one server and a fixed service time: M/D/1 under Poisson arrivals."""

    def __init__(self, service_s: float, now_s: Callable[[], float]) -> None:
        self.service_s, self.now_s, self.free_s = service_s, now_s, 0.0

    async def ask(self, request: Encoded, scheduled_ns: int) -> RequestRecord:
        sent_ns = round(self.now_s() * 1e9)
        self.free_s = done_s = max(self.free_s, self.now_s()) + self.service_s
        await asyncio.sleep(done_s - self.now_s())
        done_ns = round(done_s * 1e9)
        return RequestRecord(scheduled_ns, sent_ns, done_ns, 1, (done_ns,), (1,))


def wait_distribution(load: float, services: float) -> float:
    """P(wait <= services) of M/D/1 by Erlang's sum; waits in units of the service time."""
    return (1 - load) * math.fsum(
        (-load * (services - k)) ** k / math.factorial(k) * math.exp(load * (services - k))
        for k in range(math.floor(services) + 1)
    )


def highest_load(services: float, share: float) -> float:
    """The load at which that share of requests waits at most that many service times."""
    low, high = 0.01, 0.999
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if wait_distribution(middle, services) >= share else (low, middle)
    return low


def arguments(**changes: Any) -> LoadArguments:
    base = LoadArguments(
        endpoint="nowhere:1",
        output=Path("nowhere"),
        slos=(("e2e", 50.0),),
        search_percentile=90.0,
        search_low=5.0,
        search_duration_s=40.0,
        search_max_duration_s=240.0,
    )
    return dataclasses.replace(base, **changes)


def simulate(rate: float, given: LoadArguments, service_s: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """The verdict on a rate, measured as a search measures it, but of a simulated server."""
    row = Row(mode="open", request_rate_per_s=rate)
    plan = under_load._plan_probe(given, row, lambda: None)
    loop = VirtualLoop()
    monkeypatch.setattr(
        "evaluation.speed.drive.time", types.SimpleNamespace(perf_counter_ns=lambda: round(loop.time() * 1e9))
    )
    due = arrivals_ns(rate, "poisson", 0.0, seeded(given.seed, rate))
    server = OneServer(service_s, loop.time)
    asyncio.set_event_loop(loop)
    try:
        work = drive(server, [Encoded(b"", LoadPrompt((1,), 1))], OpenLoop(due, 100_000), plan)
        recorder = loop.run_until_complete(work)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    records = [record for window in recorder.windows for record in window.records]
    return judge(records, dict(given.slos), given.search_percentile or 0).verdict


@pytest.mark.parametrize(("percentile", "limit_ms", "seed"), [(90.0, 50.0, 0), (99.0, 80.0, 1)])
def test_the_search_finds_the_rate_that_queueing_theory_gives(
    percentile: float, limit_ms: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service_s = 0.01
    expected = highest_load(limit_ms / 1000 / service_s - 1, percentile / 100) / service_s
    assert 50 < expected < 100, "below the capacity of the server"
    given = arguments(slos=(("e2e", limit_ms),), search_percentile=percentile, seed=seed)
    search = RateSearch(given.search_low, given.search_high, given.search_precision)
    while (rate := search.next_rate()) is not None:
        search.add(rate, simulate(rate, given, service_s, monkeypatch))
    assert search.held is not None
    assert search.not_held is not None
    assert search.exceeded is not None
    assert search.not_held <= search.held * 1.05
    assert 0.85 * expected < search.held < 1.01 * expected
    assert 0.99 * expected < search.exceeded < 1.15 * expected


def test_waits_of_theory_are_those_of_a_simulated_queue() -> None:
    """The oracle itself, by Lindley's recursion in numpy."""
    random, load, wait, waits = np.random.default_rng(0), 0.8, 0.0, []
    for gap in random.exponential(1 / load, 200_000):
        wait = max(0.0, wait + 1 - gap)
        waits.append(wait)
    for services in (0.5, 2.0, 4.7):
        assert np.mean(np.array(waits) <= services) == pytest.approx(wait_distribution(load, services), abs=0.01)


def record(
    due_ms: float, ttft_ms: float, tpot_ms: float = 1.0, queue_ms: float = 0.0, error: str = ""
) -> RequestRecord:
    sent = round((due_ms + queue_ms) * MS)
    times = tuple(sent + round((ttft_ms + tpot_ms * number) * MS) for number in range(3))
    if error:
        return RequestRecord(round(due_ms * MS), sent, sent, 1, error=error)
    return RequestRecord(round(due_ms * MS), sent, times[-1], 1, times, (1, 1, 1), is_streamed=True)


def test_a_verdict_is_reached_only_with_enough_requests() -> None:
    slos = {"ttft": 100.0, "tpot": 5.0}
    good = [record(number, 50) for number in range(1000)]
    # Without a miss the lower end is n / (n + z^2): 657 requests for 99 of 100.
    assert judge(good[:656], slos, 99).verdict == UNDECIDED
    assert judge(good[:657], slos, 99).verdict == HOLDS
    assert judge([], slos, 99).verdict == UNDECIDED
    slow = [record(number, 50, tpot_ms=9) for number in range(30)]
    found = judge(slow, slos, 90)
    assert (found.verdict, found.limit, found.share) == (EXCEEDED, "tpot", 0.0)


def test_failures_and_waits_in_the_client_exceed_a_limit() -> None:
    slos = {"ttft": 100.0}
    assert judge([record(number, 50, queue_ms=60) for number in range(99)], slos, 90).verdict == EXCEEDED
    assert judge([record(number, 50, error="no room") for number in range(99)], slos, 90).verdict == EXCEEDED
    assert judge([record(number, 50, queue_ms=40) for number in range(99)], slos, 90).verdict == HOLDS
    one_token = RequestRecord(0, 0, 50 * MS, 1, (50 * MS,), (1,), is_streamed=True)
    assert judge([one_token] * 99, {"tpot": 1.0}, 90).verdict == HOLDS, "one token has no time between tokens"


def test_the_interval_covers_the_share_of_independent_requests() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(300):
        _, low, high = share_interval(list(random.random(400) < 0.9))
        covered += low <= 0.9 <= high
    assert covered >= 290, "99% of 300"


def test_requests_that_miss_together_count_less_than_single_ones() -> None:
    single = [number % 10 != 0 for number in range(2000)]
    together = [number // 200 != 3 for number in range(2000)]
    assert sum(single) == sum(together) == 1800
    assert share_interval(single)[1] > 0.88
    assert share_interval(together)[1] < 0.7


def test_bisection_asks_for_rates_until_it_is_precise_enough() -> None:
    search = RateSearch(1.0, 100.0, 0.05)
    asked = []
    while (rate := search.next_rate()) is not None:
        asked.append(rate)
        search.add(rate, HOLDS if rate <= 11 else UNDECIDED if rate <= 11.5 else EXCEEDED)
    assert asked[:6] == [1, 2, 4, 8, 16, 11.314]
    assert search.held is not None
    assert search.not_held is not None
    assert search.held <= 11 < search.not_held <= search.held * 1.05
    assert search.exceeded == 16


def test_a_search_without_a_boundary_ends_at_its_bounds() -> None:
    all_hold, none_holds = RateSearch(3.0, 10.0, 0.1), RateSearch(3.0, 10.0, 0.1)
    asked = []
    while (rate := all_hold.next_rate()) is not None:
        asked.append(rate)
        all_hold.add(rate, HOLDS)
    assert asked == [3, 6, 10]
    assert (all_hold.held, all_hold.exceeded) == (10, None)
    none_holds.add(3.0, EXCEEDED)
    assert none_holds.next_rate() is None
    assert (none_holds.held, none_holds.exceeded) == (None, 3)


def test_a_low_rate_that_stays_undecided_for_want_of_requests_does_not_end_the_search() -> None:
    search = RateSearch(1.0, 100.0, 0.2)
    asked = []
    while (rate := search.next_rate()) is not None:
        asked.append(rate)
        search.add(rate, UNDECIDED if rate < 3 else HOLDS if rate <= 11 else EXCEEDED)
    assert asked[:6] == [1, 2, 4, 8, 16, 11.314]
    assert search.held is not None
    assert search.exceeded is not None
    assert search.held <= 11 < search.exceeded <= search.held * 1.2


def one_at_a_time(tensors: Tensors) -> Tensors:
    """Answer after 20 ms, one request after the other: no more than 50 in a second."""
    with LOCK:
        time.sleep(0.02)
    return count_up(tensors)


LOCK = threading.Lock()


def searching(output: Path, fake: FakeTriton, path: Path) -> LoadArguments:
    Endpoint("127.0.0.1", grpc_port=fake.port, model_digest="sha256:abc").write(path)
    return LoadArguments(
        endpoint=str(path),
        output=output,
        lengths=("3/2",),
        vocab_size=100,
        slos=(("e2e", 150.0),),
        search_percentile=60.0,
        search_low=6.0,
        search_high=200.0,
        search_precision=0.5,
        search_duration_s=1.0,
        search_max_duration_s=3.0,
        remark="only a test",
    )


def test_a_search_leaves_a_row_for_each_rate_and_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeTriton(one_at_a_time) as fake:
        given = searching(tmp_path / "out", fake, tmp_path / "e.json")
        sweep.main(given.to_argv())
        rows = LOAD_TABLE.read(given.output / "load.csv")
        asked = len(fake.requests)
        before = (given.output / "load.csv").read_bytes()
        sweep.main(given.to_argv())
        assert len(fake.requests) == asked, "a finished search measures nothing again"
        assert (given.output / "load.csv").read_bytes() == before
        LOAD_TABLE.write(given.output / "load.csv", rows[:-1])
        sweep.main(given.to_argv())
        assert 0 < len(fake.requests) - asked <= asked / 2 + 100
    again = LOAD_TABLE.read(given.output / "load.csv")
    assert [row.point for row in again[: len(rows)]] == [row.point for row in rows]
    assert again[: len(rows) - 1] == rows[:-1]
    assert [row.level for row in rows][:3] == [6, 12, 24]
    assert {row.arrival for row in rows} == {"poisson"}
    assert rows[0].slo_verdict == HOLDS
    assert rows[0].slo_limit == "e2e"
    assert rows[0].figures["slo_kept_low"] >= 0.6  # type: ignore[operator]
    assert {row.remark for row in rows} == {"only a test"}
    written = json.loads((given.output / "search.json").read_text())
    (found,) = written["found"]
    assert 12 <= found["rate_per_s"] < 55, "the server answers 50 in a second"
    assert found["rate_per_s"] == max(row.level for row in again if row.slo_verdict == HOLDS)
    # On a busy machine the rates above may all stay undecided.
    exceeded = min((row.level for row in again if row.slo_verdict == EXCEEDED), default=None)
    assert found["exceeded_at_per_s"] == exceeded
    assert [probe["verdict"] for probe in written["probes"]] == [row.slo_verdict for row in again]
    header, line = (given.output / "search.csv").read_text().splitlines()
    assert dict(zip(header.split(","), line.split(","), strict=True))["workload"] == "3/2"
    printed = capsys.readouterr().out
    assert f"3/2: p60 of e2e 150 ms holds at {found['rate_per_s']:g} requests/s" in printed
    assert "(only a test)" in printed


def test_a_model_that_only_refuses_holds_at_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse_later(tensors: Tensors) -> Tensors:
        if len(fake.requests) > 1:
            raise RefusalError("no room")
        return count_up(tensors)

    with FakeTriton(refuse_later) as fake, pytest.raises(ServerError, match="no room"):
        sweep.main(searching(tmp_path / "out", fake, tmp_path / "e.json").to_argv())
    assert "was not shown to hold at the lowest rate" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "search.json").read_text())["found"][0]["rate_per_s"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slos": ()}, "needs limits"),
        ({"search_low": 300.0}, "search_low 300 is above search_high 200"),
        ({"search_duration_s": 5.0}, "search_duration_s 5 is above"),
        ({"search_percentile": 100.0}, "search_percentile is 100"),
        ({"search_percentile": 99.0}, "fewer than the 657 requests"),
        ({"trace": Path("x.jsonl")}, "has its own rate"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with FakeTriton(count_up) as fake, pytest.raises(ConfigError, match=message):
        given = searching(tmp_path / "out", fake, tmp_path / "e.json")
        sweep.main(dataclasses.replace(given, **changes).to_argv())


def test_limits_on_tokens_need_a_model_that_streams(tmp_path: Path) -> None:
    limits = (("tpot", 50.0),)
    with FakeTriton(count_up) as fake, pytest.raises(ConfigError, match="no request has a tpot"):
        given = searching(tmp_path / "out", fake, tmp_path / "e.json")
        sweep.main(dataclasses.replace(given, slos=limits).to_argv())
    with StreamingTriton(count_up) as fake:
        given = searching(tmp_path / "out", fake, tmp_path / "e.json")
        sweep.main(dataclasses.replace(given, slos=limits, search_high=6.0).to_argv())
    (row,) = LOAD_TABLE.read(given.output / "load.csv")
    assert (row.slo_verdict, row.slo_limit) == (HOLDS, "tpot")
