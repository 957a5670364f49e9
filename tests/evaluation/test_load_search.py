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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up
from support.servers.streaming_triton import StreamingTriton

from evaluation import load as sweep
from evaluation.speed.drive import Arrivals, MeasuringPlan, OpenLoop, Recorder, drive
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.probe import judge_backlog, plan_probe, with_verdict
from evaluation.speed.prompts.workload import LoadPrompt, arrivals_ns, seeded
from evaluation.speed.rate_search import RateSearch
from evaluation.speed.tables.backlog import Growth, measure_growth
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.tables.slo_verdict import BACKLOG, EXCEEDED, HOLDS, UNDECIDED, judge, share_interval
from evaluation.speed.tables.table import LOAD_TABLE, Row
from evaluation.speed.transport.wire import Encoded
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError

MS = 1_000_000
TABLE_HEADERS = Path(__file__).resolve().parents[1] / "data" / "table_headers.json"
RECORDED: dict[str, str] = json.loads(TABLE_HEADERS.read_text())


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


def stop_clock(monkeypatch: pytest.MonkeyPatch, now_ns: Callable[[], int]) -> None:
    monkeypatch.setattr("evaluation.speed.drive.time", types.SimpleNamespace(perf_counter_ns=now_ns))


def queue_up(
    plan: MeasuringPlan, rate: float, seed: int, service_s: float, monkeypatch: pytest.MonkeyPatch
) -> Recorder:
    """What the generator records of M/D/1, whose answers are computed by Lindley's recursion: no time passes."""
    stop_clock(monkeypatch, lambda: 0)
    recorder, free_ns, service_ns = Recorder(plan, 0.0), 0, round(service_s * 1e9)
    arrivals = Arrivals(arrivals_ns(rate, "poisson", 0.0, seeded(seed, rate)), 0)
    recorder.count_waiting = arrivals.count_due  # the one that is served has ended when an answer is recorded
    for due_ns in arrivals:
        free_ns = max(free_ns, due_ns) + service_ns
        recorder.add(RequestRecord(due_ns, due_ns, free_ns, 1, (free_ns,), (1,), is_streamed=True))
        if recorder.is_over:
            return recorder
    raise AssertionError("arrivals never end")


def simulate(rate: float, given: LoadArguments, service_s: float, monkeypatch: pytest.MonkeyPatch) -> Row:
    """A rate, measured as a search measures it, but of a simulated server."""
    row = Row(mode="open", request_rate_per_s=rate)
    recorder = queue_up(plan_probe(given, row, lambda: None), rate, given.seed, service_s, monkeypatch)
    return with_verdict(given, row, recorder.windows)


def search_by_simulation(given: LoadArguments, service_s: float, monkeypatch: pytest.MonkeyPatch) -> RateSearch:
    search = RateSearch(given.search_low, given.search_high, given.search_precision)
    while (rate := search.next_rate()) is not None:
        search.add(rate, simulate(rate, given, service_s, monkeypatch).slo_verdict)
    return search


def test_the_load_itself_records_what_lindleys_recursion_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole generator on a clock of its own, with and without room in flight for all requests."""
    rate, service_s, plan = 110.0, 0.01, MeasuringPlan(20, 30, 10, 1e9, lambda windows: False)
    expected = queue_up(plan, rate, 3, service_s, monkeypatch).windows
    assert expected[-1].backlog is not None and expected[-1].backlog > 20, "more arrives than is answered"
    for most in (100_000, 4):
        loop = VirtualLoop()
        stop_clock(monkeypatch, lambda loop=loop: round(loop.time() * 1e9))  # type: ignore[misc]
        server = OneServer(service_s, loop.time)
        load = OpenLoop(arrivals_ns(rate, "poisson", 0.0, seeded(3, rate)), most)
        asyncio.set_event_loop(loop)
        try:
            work = drive(server, [Encoded(b"", LoadPrompt((1,), 1))], load, plan)
            found = loop.run_until_complete(work).windows
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        assert [window.backlog for window in found] == [window.backlog for window in expected]
        assert [window.ended_ns for window in found] == pytest.approx(
            [window.ended_ns for window in expected], abs=1000
        )


@pytest.mark.parametrize(("percentile", "limit_ms", "seed"), [(90.0, 50.0, 0), (99.0, 80.0, 1)])
def test_the_search_finds_the_rate_that_queueing_theory_gives(
    percentile: float, limit_ms: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service_s = 0.01
    expected = highest_load(limit_ms / 1000 / service_s - 1, percentile / 100) / service_s
    assert 50 < expected < 100, "below the capacity of the server"
    given = arguments(slos=(("e2e", limit_ms),), search_percentile=percentile, seed=seed)
    search = search_by_simulation(given, service_s, monkeypatch)
    assert search.held is not None
    assert search.not_held is not None
    assert search.exceeded is not None
    assert search.not_held <= search.held * 1.05
    assert 0.8 * expected < search.held < expected
    assert expected < search.exceeded < 1.15 * expected


SHORT = {"search_duration_s": 15.0, "search_max_duration_s": 120.0, "slos": (("e2e", 4000.0),)}


@pytest.mark.parametrize("seed", range(8))
def test_a_short_probe_does_not_hold_while_its_queue_grows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 requests/s are answered; 108 to 115 arrive, and in 15 s none of them has waited as long as the limit."""
    service_s, given = 0.01, arguments(seed=seed, **SHORT)
    for rate in (108.0, 115.0):
        plan = MeasuringPlan(20, round(15 * rate / 20), 20, 1e9, lambda windows: False)
        windows = queue_up(plan, rate, seed, service_s, monkeypatch).windows
        records = [record for window in windows for record in window.records]
        assert judge(records, dict(given.slos), 90).share == 1.0, "the limits alone would not refuse it"
        row = simulate(rate, given, service_s, monkeypatch)
        assert row.slo_verdict == EXCEEDED, row
    row = simulate(80.0, given, service_s, monkeypatch)
    assert (row.slo_verdict, row.slo_limit) == (HOLDS, "e2e")
    assert row.figures["backlog_growth_high"] <= 0.025 * 80  # type: ignore[operator]


def test_short_probes_find_the_capacity_where_the_limit_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_by_simulation(arguments(**SHORT), 0.01, monkeypatch)
    assert search.held is not None and search.exceeded is not None
    # A rate that holds may be above the capacity by the precision of the search.
    assert 90 < search.held < 105 and 100 < search.exceeded < 115


def test_a_limit_that_a_queue_never_breaks_does_not_hold_beyond_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(**{**SHORT, "slos": (("tpot", 5.0),)})
    over = simulate(120.0, given, 0.01, monkeypatch)
    assert (over.slo_verdict, over.slo_limit) == (EXCEEDED, BACKLOG)
    assert over.figures["slo_kept_share"] == 1.0
    assert over.figures["backlog_growth_per_s"] == pytest.approx(20, abs=6)
    assert "more arrive than are answered" in sweep._reason(over)
    assert simulate(90.0, given, 0.01, monkeypatch).slo_verdict == HOLDS


def grown(backlogs: Sequence[int], each_s: float = 1.0) -> Growth | None:
    ends = [round(number * each_s * 1e9) for number in range(len(backlogs) + 1)]
    return measure_growth([Window((), ends[k], ends[k + 1], backlog) for k, backlog in enumerate(backlogs)])


def test_growth_by_hand() -> None:
    assert grown([3, 5, 7, 9, 11, 13, 15, 17]) == Growth(2.0, 2.0, 2.0)
    assert grown([4] * 100) == Growth(0.0, 0.0, 0.0)
    assert grown([1] * 6) is None, "five of them are in the last three quarters"
    assert measure_growth([]) is None
    # What a load builds up in its first quarter is no growth.
    assert grown([0, 50, 100, *[100] * 9]) == Growth(0.0, 0.0, 0.0)
    # numpy's slope; the residuals alternate, which makes the error no larger.
    found, times = grown(numbers := [5, 9, 4, 8, 6, 9, 5, 8, 5, 9, 6, 8]), np.arange(3, 13)
    assert found is not None
    assert found.per_s == pytest.approx(np.polyfit(times, numbers[2:], 1)[0])
    assert not found.is_significant and found.low < 0 < found.high


@pytest.mark.parametrize(
    ("growth", "is_final", "verdict"),
    [
        (None, True, UNDECIDED),
        (Growth(0.5, -1.0, 2.0), False, HOLDS),
        (Growth(1.0, -1.0, 3.0), False, UNDECIDED),  # half of the precision while there is time
        (Growth(1.0, -1.0, 3.0), True, HOLDS),
        (Growth(3.0, -1.0, 7.0), False, UNDECIDED),  # chance, or growth
        (Growth(3.0, -1.0, 7.0), True, UNDECIDED),
        (Growth(8.0, 1.0, 15.0), False, UNDECIDED),
        (Growth(8.0, 1.0, 15.0), True, EXCEEDED),
        (Growth(8.0, 6.0, 10.0), False, EXCEEDED),
    ],
)
def test_verdicts_on_the_backlog(growth: Growth | None, is_final: bool, verdict: str) -> None:
    assert judge_backlog(growth, 5.0, is_final) == verdict


def test_a_stable_queue_seldom_seems_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 99% interval: of 100 queues at 70 of 100 requests/s, one is expected above zero."""
    plan, alarms = MeasuringPlan(20, 70, 20, 1e9, lambda windows: False), 0
    for seed in range(100):
        growth = measure_growth(queue_up(plan, 70.0, seed, 0.01, monkeypatch).windows)
        assert growth is not None
        alarms += growth.is_significant
    assert alarms <= 3


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
    assert search.exceeded is not None
    assert 11.5 < search.exceeded <= 11.5 * 1.05, "the upper end is narrowed, too"


def test_a_search_without_a_boundary_ends_at_its_bounds() -> None:
    all_hold, none_holds = RateSearch(3.0, 10.0, 0.1), RateSearch(3.0, 10.0, 0.1)
    asked = []
    while (rate := all_hold.next_rate()) is not None:
        asked.append(rate)
        all_hold.add(rate, HOLDS)
    assert asked == [3, 6, 10]
    assert (all_hold.held, all_hold.exceeded) == (10, None)
    none_holds.add(3.0, EXCEEDED)
    assert none_holds.next_rate() == 3.0, "once more"
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
    """Answer after 10 ms, one request after the other: no more than 100 in a second."""
    with LOCK:
        time.sleep(0.01)
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
        search_low=40.0,
        search_high=150.0,
        search_precision=0.99,
        search_duration_s=0.7,
        search_max_duration_s=2.5,
        samples=50,
        remark="only a test",
    )


@pytest.mark.clock
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
        assert 0 < len(fake.requests) - asked < asked
    again = LOAD_TABLE.read(given.output / "load.csv")
    assert [row.point for row in again[: len(rows)]] == [row.point for row in rows]
    assert again[: len(rows) - 1] == rows[:-1]
    assert [row.level for row in rows][:2] == [40, 80]
    assert {row.arrival for row in rows} == {"poisson"}
    assert rows[0].slo_verdict == HOLDS
    assert rows[0].slo_limit == "e2e"
    assert rows[0].figures["slo_kept_low"] >= 0.6  # type: ignore[operator]
    assert {row.remark for row in rows} == {"only a test"}
    written = json.loads((given.output / "search.json").read_text())
    (found,) = written["found"]
    assert 30 < found["rate_per_s"] < 110, "the server answers 100 in a second, and a few arrivals come at another rate"
    held = max((row for row in again if row.slo_verdict == HOLDS), key=lambda row: row.level)
    assert found["nominal_rate_per_s"] == held.level
    offered_per_s = held.figures["offered_requests_per_s"] or 0.0
    assert found["rate_per_s"] == pytest.approx(min(held.level, offered_per_s))
    # On a busy machine the rates above may all stay undecided.
    exceeded = min((row.level for row in again if row.slo_verdict == EXCEEDED), default=None)
    assert found["exceeded_at_per_s"] is None or found["exceeded_at_per_s"] >= (exceeded or 0)
    assert [probe["verdict"] for probe in written["probes"]] == [row.slo_verdict for row in again]
    header, line = (given.output / "search.csv").read_text().splitlines()
    assert header == RECORDED["search.csv"]
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
        ({"search_low": 500.0}, "search_low 500 is above search_high 150"),
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
        sweep.main(dataclasses.replace(given, slos=limits, search_high=40.0).to_argv())
    (row,) = LOAD_TABLE.read(given.output / "load.csv")
    assert (row.slo_verdict, row.slo_limit) == (HOLDS, "tpot")
