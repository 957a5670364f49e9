"""The load generator over an OpenAI API, against a server on bare asyncio that notes when it sent each token."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.measurements.short_load import short_load
from support.servers.raw_openai_server import VLLM_FIELDS, Exchange, RawServer

from evaluation import benchmark, load, recompute
from evaluation.arguments import BenchmarkArguments
from evaluation.speed.drive import ClosedLoop, MeasuringPlan, drive
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.tables.raw_records import read_records
from evaluation.speed.tables.record import RequestRecord
from evaluation.speed.tables.table import LOAD_TABLE, STATIC_TABLE, Row
from evaluation.speed.transport.openai_wire import Dialect, OpenAIWire
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError
from handover.manifest import Manifest, record_files

pytestmark = pytest.mark.clock

FIRST_S, EACH_S = 0.08, 0.03
NEAR_MS = 12.0  # of a median, on a machine with other work; the delays are several times that


def run(given: LoadArguments) -> list[Row]:
    load.main(given.to_argv())
    return LOAD_TABLE.read(given.output / "load.csv")


def records_of(output: Path, row: Row) -> tuple[RequestRecord, ...]:
    found = read_records(output / row.directory)
    assert found is not None
    return found.records


def measured(server: RawServer) -> list[Exchange]:
    """What the server says of the load's requests, without the questions before it."""
    return [each for each in server.exchanges if each.body["max_tokens"] == 6]


def gaps_ms(times_ns: list[int]) -> list[float]:
    return [(later - earlier) / 1e6 for earlier, later in zip(times_ns, times_ns[1:], strict=False)]


@pytest.mark.parametrize("changes", [{"concurrencies": (2,)}, {"concurrencies": (), "request_rates": (15.0,)}])
def test_first_tokens_gaps_and_counts_are_those_that_were_sent(tmp_path: Path, changes: dict[str, Any]) -> None:
    with RawServer(first_s=FIRST_S, each_s=EACH_S) as server:
        (row,) = run(short_load(server.url, tmp_path, **changes))
        sent = measured(server)
    assert (row.state, row.failed_requests, row.endpoint_kind, row.engine) == ("ok", 0, "openai", "raw")
    figures = {name: value or 0.0 for name, value in row.figures.items()}
    first_ms = statistics.median((each.token_ns[0] - each.read_ns) / 1e6 for each in sent)
    each_ms = statistics.median(gap for each in sent for gap in gaps_ms(each.token_ns))
    assert first_ms - 0.01 >= FIRST_S * 1e3 or first_ms > FIRST_S * 1e3 - 1
    assert figures["ttft_from_send_p50_ms"] == pytest.approx(first_ms, abs=NEAR_MS)
    assert figures["itl_p50_ms"] == pytest.approx(each_ms, abs=NEAR_MS)
    assert figures["e2e_from_send_p50_ms"] == pytest.approx(first_ms + 5 * each_ms, abs=2 * NEAR_MS)
    for record in records_of(tmp_path, row):
        assert (record.input_tokens, record.output_tokens, record.chunk_tokens) == (5, 6, (1,) * 6)
    assert figures["total_tokens_per_s"] == pytest.approx(11 / 6 * figures["output_tokens_per_s"], rel=1e-4)
    assert {name: row.figures[name] for name in ("output_tokens_per_s_per_gpu", "server_queue_mean_ms")} == {
        "output_tokens_per_s_per_gpu": None,
        "server_queue_mean_ms": None,
    }


def test_every_token_is_stamped_after_it_was_written_and_soon() -> None:
    async def ask(server: RawServer) -> list[RequestRecord]:
        dialect = Dialect("raw", stream_fields={"stream_options": {"include_usage": True}})
        request = dialect.encode(LoadPrompt((1, 2, 3), 6), is_streaming=True)
        async with OpenAIWire(Endpoint.read(server.url), dialect, 20.0, is_streaming=True) as wire:
            return [await wire.ask(request, 0) for _ in range(10)]

    with RawServer(first_s=0.01, each_s=0.005) as server:
        records = asyncio.run(ask(server))
        sent = measured(server)
    late_ms = []
    for record, exchange in zip(records, sent, strict=True):
        assert record.sent_ns < exchange.read_ns
        assert record.done_ns == record.chunk_ns[-1]
        late_ms += [(seen - written) / 1e6 for seen, written in zip(record.chunk_ns, exchange.token_ns, strict=True)]
    assert min(late_ms) > 0
    assert statistics.median(late_ms) < NEAR_MS / 2


def test_reading_an_answer_does_not_delay_a_request_that_is_stamped_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four answers end together; each is read in 30 ms here, and then its slot sends its next request."""
    read = OpenAIWire._record

    def read_slowly(*given: Any) -> RequestRecord:
        time.sleep(0.03)
        return read(*given)

    async def ask(server: RawServer) -> list[RequestRecord]:
        dialect = Dialect("raw", stream_fields={"stream_options": {"include_usage": True}})
        request = dialect.encode(LoadPrompt((1, 2, 3), 3), is_streaming=True)
        plan = MeasuringPlan(4, 12, 1, 60.0, lambda windows: False)
        async with OpenAIWire(Endpoint.read(server.url), dialect, 20.0, is_streaming=True) as wire:
            return list((await drive(wire, [request], ClosedLoop(4), plan)).windows[0].records)

    monkeypatch.setattr(OpenAIWire, "_record", read_slowly)
    with RawServer(first_s=0.2) as server:
        records = asyncio.run(ask(server))
        read_ns = sorted(each.read_ns for each in server.exchanges)
    late_ms = [
        (next(each for each in read_ns if each > sent_ns) - sent_ns) / 1e6
        for sent_ns in sorted(record.sent_ns for record in records)
    ]
    assert len(late_ms) == 12 and statistics.median(late_ms) < 15


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        (VLLM_FIELDS, (4, 2)),  # token_ids say how many an event has
        (VLLM_FIELDS - {"return_token_ids"}, (1, 5)),  # usage alone: the total is right, and so are the two times
    ],
)
def test_events_of_several_tokens_are_counted_by_tokens(
    tmp_path: Path, fields: frozenset[str], counts: tuple[int, ...]
) -> None:
    with RawServer(first_s=0.01, each_s=0.02, chunk=4, fields=fields) as server:
        (row,) = run(short_load(server.url, tmp_path))
    assert {record.chunk_tokens for record in records_of(tmp_path, row)} == {counts}
    assert row.figures["tpot_p50_ms"] == pytest.approx(20 / 5, abs=NEAR_MS / 5)


@pytest.mark.parametrize(("count", "is_right"), [(0, False), (2, True), (3, True), (4, False), (7, False)])
def test_a_server_that_ends_early_gives_no_more_than_was_asked(count: int, is_right: bool) -> None:
    dialect = Dialect("raw", ends_at_limit=False)
    request = dialect.encode(LoadPrompt((1, 2, 3), 3), is_streaming=False)
    usage = {"prompt_tokens": 3, "completion_tokens": count}
    pieces = [(9, json.dumps({"choices": [{"index": 0, "text": "a"}], "usage": usage}).encode())]
    wire = OpenAIWire(Endpoint.read("http://127.0.0.1:1/v1"), dialect, 20.0, is_streaming=False)
    with nullcontext() if is_right else pytest.raises(ServerError, match=f"{count} tokens were generated instead of 3"):
        assert wire._record(request, 0, 1, pieces, is_cancelled=False).output_tokens == count


def test_answers_as_a_whole_have_no_first_token(tmp_path: Path) -> None:
    with RawServer(first_s=FIRST_S, each_s=EACH_S) as server:
        (row,) = run(short_load(server.url, tmp_path, streaming=False))
        sent = measured(server)
    assert not any(each.body.get("stream") for each in sent)
    assert not row.is_streaming
    assert row.figures["ttft_mean_ms"] is None
    assert row.figures["e2e_p50_ms"] == pytest.approx(1e3 * (FIRST_S + 5 * EACH_S), abs=2 * NEAR_MS)


def test_a_server_that_takes_no_ids_gets_texts_and_says_how_many_tokens_they_were(tmp_path: Path) -> None:
    with RawServer(takes_ids=False) as server:
        (row,) = run(short_load(server.url, tmp_path, vocab_size=None))
        (prompt, *_) = [each.body["prompt"] for each in measured(server)]
    assert len(prompt.split()) == 5
    assert {record.input_tokens for record in records_of(tmp_path, row)} == {5}


def test_a_server_of_conversations_alone_is_asked_by_conversations(tmp_path: Path) -> None:
    with RawServer(is_chat_only=True, first_s=0.02, each_s=0.01) as server:
        (row,) = run(short_load(server.url, tmp_path))
    records = records_of(tmp_path, row)
    # Three tokens of the template; the event that has the role alone is no token.
    assert {(record.input_tokens, record.output_tokens, len(record.chunk_ns)) for record in records} == {(8, 6, 6)}
    assert row.figures["ttft_p50_ms"] == pytest.approx(20, abs=NEAR_MS)


def test_an_answer_that_ends_early_counts_as_it_is_where_the_end_cannot_be_ignored(tmp_path: Path) -> None:
    with RawServer(fields=frozenset({"stream_options"}), end_after=3) as server:
        (row,) = run(short_load(server.url, tmp_path))
    assert (row.failed_requests, {record.output_tokens for record in records_of(tmp_path, row)}) == (0, {3})


def test_without_a_count_of_tokens_nothing_is_measured(tmp_path: Path) -> None:
    with RawServer(fields=frozenset()) as server:
        with pytest.raises(ServerError, match="how many tokens") as caught:
            run(short_load(server.url, tmp_path))
        assert "streaming=false" in str(caught.value)
        (row,) = run(short_load(server.url, tmp_path, streaming=False))  # whole answers have usage
    assert row.state == "ok"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("html", "text/html and not text/event-stream: <html><body>Please log in"),
        ("cut", "the answer was cut off"),
        ("error event", "the engine has died"),
        ("busy", r"HTTP 429 (Retry-After: 3600): too many requests"),
        ("revoked", "HTTP 401: the key is no longer valid"),
        ("moved", "HTTP 302: nothing"),
        ("hang", "no complete answer within 1 s"),
        ("trickle", "no complete answer within 1 s"),
        ("close", "ServerDisconnectedError"),
    ],
)
def test_a_bad_answer_is_a_counted_failure_with_its_reason_and_never_a_hang(
    tmp_path: Path, fault: str, reason: str
) -> None:
    with RawServer(each_s=0.002) as server:
        given = short_load(server.url, tmp_path, concurrencies=(1,), warmup=1, requests=5, timeout_s=1.0)
        plan = load._prepare(given)
        server.faults += ["", "", fault]  # the probe and the warm-up are answered
        (row,) = run_prepared(given, plan)
    assert (row.state, row.requests, row.failed_requests) == ("ok", 5, 1)
    assert reason in row.error
    failed = [record for record in records_of(tmp_path, row) if record.error]
    assert len(failed) == 1 and reason in failed[0].error


@pytest.mark.parametrize("date", ["Mon, 01 Jan 2035 00:00:00 GMT", "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_a_server_whose_clock_is_wrong_is_measured_by_the_clients_and_waited_for_a_second_at_most(
    tmp_path: Path, date: str
) -> None:
    with RawServer(first_s=FIRST_S, each_s=0.002, date=date) as server:
        given = short_load(server.url, tmp_path, concurrencies=(1,), warmup=1, requests=6)
        plan = load._prepare(given)
        server.faults += ["", "", "busy until"]
        began_s = time.monotonic()
        (row,) = run_prepared(given, plan)
        assert time.monotonic() - began_s < 10
    assert (row.state, row.failed_requests) == ("ok", 1)
    assert "HTTP 503 (Retry-After: " in row.error and "try again at noon" in row.error
    assert FIRST_S * 1e3 - 1 < (row.figures["ttft_p50_ms"] or 0) < 1000, "years apart by the server's clock"
    assert row.timestamp[:4] not in ("1970", "2035")


def test_a_server_that_refuses_everything_ends_the_load_with_its_words(tmp_path: Path) -> None:
    with RawServer() as server:
        given = short_load(server.url, tmp_path, concurrencies=(6,), warmup=1)
        plan = load._prepare(given)
        server.faults += ["", *["busy"] * 1000]
        with pytest.raises(ServerError, match="none of 1 points could be measured.*too many requests"):
            run_prepared(given, plan)
        assert len(server.faults) > 900, "a busy server is not asked again at once"


def run_prepared(given: LoadArguments, plan: Any) -> list[Row]:
    """Run a load whose questions about the server were asked before."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "_prepare", lambda _: plan)
        return run(given)


def test_the_key_is_sent_and_a_wrong_one_is_one_clear_error_that_does_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RawServer(key="right-key") as server:
        monkeypatch.setenv("RAW_KEY", "right-key")
        (row,) = run(short_load(server.url, tmp_path / "right", endpoint_key_env="RAW_KEY"))
        assert row.state == "ok"
        monkeypatch.setenv("RAW_KEY", "wrong-key")
        with pytest.raises(ServerError, match="wrong key") as caught:
            run(short_load(server.url, tmp_path / "wrong", endpoint_key_env="RAW_KEY"))
    assert "wrong-key" not in str(caught.value)
    assert not (tmp_path / "wrong" / "load.csv").exists()
    assert "right-key" not in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "right").rglob("*") if path.suffix in (".json", ".csv")
    )


METRICS = """vllm:request_success_total{engine="0",finished_reason="length",model_name="raw"} %d
vllm:request_success_total{engine="0",finished_reason="stop",model_name="raw"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="raw"} %d
vllm:request_success_total{engine="0",finished_reason="length",model_name="other"} 99.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="raw"} %g
vllm:request_prefill_time_seconds_sum{engine="0",model_name="raw"} %g
vllm:request_decode_time_seconds_sum{engine="0",model_name="raw"} %g
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="raw"} %g
"""


def test_the_servers_own_figures_are_read_where_it_has_vllms_metrics(tmp_path: Path) -> None:
    class Counting(RawServer):
        """Its page of metrics is that of ten requests later once the load has begun."""

        async def _get(self, writer: Any, path: str) -> bool:
            later = METRICS % (20, 2, 1.5, 3.0, 7.0, 11.6)
            is_later = len(measured(self)) > 1  # one is the load's question whether anything comes back
            self.metrics = (later if is_later else METRICS % (10, 1, 1.0, 2.0, 3.0, 6.0)) if path == "/metrics" else ""
            return await super()._get(writer, path)

    with Counting() as server:
        (row,) = run(short_load(server.url, tmp_path))
    assert {name: row.figures[name] for name in row.figures if name.startswith("server_")} | {
        "server_queue_mean_ms": 50.0,
        "server_compute_mean_ms": 500.0,
        "server_request_mean_ms": 560.0,
        "server_mean_batch": None,
        "server_requests": 10.0,
        "server_failures": 1.0,
    } == {name: row.figures[name] for name in row.figures if name.startswith("server_")}
    recompute.main([f"--output={tmp_path}"])  # from the counters that were kept


def test_the_servers_figures_are_of_the_points_own_requests_though_it_publishes_them_late(tmp_path: Path) -> None:
    class Late(RawServer):
        """Its page counts what was asked until its last publication: it publishes five times a second."""

        async def _get(self, writer: Any, path: str) -> bool:
            published_ns = time.perf_counter_ns() // 200_000_000 * 200_000_000
            count = sum(each.read_ns <= published_ns for each in measured(self))
            self.metrics = METRICS % (count, 0, 0.0, 0.0, 0.0, 0.05 * count) if path == "/metrics" else ""
            return await super()._get(writer, path)

    with Late() as server:
        rows = run(short_load(server.url, tmp_path, concurrencies=(1, 3)))
        asked = len(measured(server)) - 1  # without the load's question whether anything comes back
    assert [row.figures["server_requests"] for row in rows] == [row.sent_requests for row in rows]
    assert sum(row.sent_requests or 0 for row in rows) == asked
    assert [row.figures["server_request_mean_ms"] for row in rows] == [pytest.approx(50.0)] * 2


def test_what_is_not_known_of_a_foreign_server_is_empty_and_what_is_given_counts(tmp_path: Path) -> None:
    with RawServer() as server:
        with pytest.raises(ConfigError, match="does not say on how many GPUs it serves"):
            run(short_load(server.url, tmp_path / "none", gpu_hour_price=2.5))
        given = short_load(server.url, tmp_path / "given", gpu_hour_price=2.5, gpus=2, label="the new one")
        (row,) = run(given)
        with pytest.raises(ConfigError, match="benchmark.gpus"):
            benchmark.main(static_arguments(server, tmp_path / "static", gpu_hour_price=2.5).to_argv())
    assert row.max_batch_size is None, "it was not asked"
    figures = row.figures
    assert (row.gpus, row.deployment_label) == (2, "the new one")
    assert figures["output_tokens_per_s_per_gpu"] == pytest.approx(figures["output_tokens_per_s"] / 2, rel=1e-4)  # type: ignore
    hours = 1e6 / figures["output_tokens_per_s"] / 3600  # type: ignore[operator]
    assert figures["cost_per_million_output_tokens"] == pytest.approx(2.5 * 2 * hours, rel=1e-4)
    assert figures["cost_per_million_tokens"] is not None


def test_a_server_that_fails_at_first_is_measured_all_the_same(tmp_path: Path) -> None:
    with RawServer() as server:
        given = short_load(server.url, tmp_path / "load")
        plan = load._prepare(given)
        server.faults += ["busy"] * 3
        (row,) = run_prepared(given, plan)
    assert (row.state, row.failed_requests) == ("ok", 0)


def static_arguments(server: RawServer, output: Path, **changes: Any) -> BenchmarkArguments:
    base = BenchmarkArguments(
        server.url, output, batch_sizes=(1, 3), lengths=((4, 6),), warmup=1, repeats=3, vocab_size=100, timeout_s=20.0
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("takes_lists", [True, False])
def test_a_batch_is_a_list_of_prompts_or_as_many_requests_at_once(
    tmp_path: Path, takes_lists: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with RawServer(first_s=FIRST_S, each_s=0.002, takes_lists=takes_lists) as server:
        benchmark.main(static_arguments(server, tmp_path).to_argv())
        sent = measured(server)
    one, three = STATIC_TABLE.read(tmp_path / "benchmark.csv")
    assert (one.state, three.state, three.endpoint_kind) == ("ok", "ok", "openai")
    for row in (one, three):
        assert row.figures["e2e_p50_ms"] == pytest.approx(1e3 * (FIRST_S + 5 * 0.002), abs=2 * NEAR_MS)
    assert three.figures["output_tokens_per_s"] == pytest.approx(3 * (one.figures["output_tokens_per_s"] or 0), rel=0.3)
    assert len(sent) == 4 + 4 * (1 if takes_lists else 3)
    assert server.most_in_flight == (1 if takes_lists else 3)
    assert ("takes one prompt a request" in capsys.readouterr().out) != takes_lists
    recompute.main([f"--output={tmp_path}"])


def test_a_static_point_whose_answers_are_short_fails_and_says_so(tmp_path: Path) -> None:
    with RawServer(fields=frozenset(), end_after=5) as server, pytest.raises(ServerError, match="5 tokens .* of 6"):
        benchmark.main(static_arguments(server, tmp_path, batch_sizes=(1,)).to_argv())


def test_lengths_need_ids_in_a_static_sweep_and_a_vocabulary_everywhere(tmp_path: Path) -> None:
    with RawServer(takes_ids=False) as server, pytest.raises(ConfigError, match="takes no token ids"):
        benchmark.main(static_arguments(server, tmp_path).to_argv())
    with RawServer() as server, pytest.raises(ConfigError, match="vocabulary size of the model at http"):
        run(short_load(server.url, tmp_path, vocab_size=None))


def test_the_vocabulary_is_that_of_the_directory_which_an_engine_serves(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 17}}))
    Manifest("model_repository", record_files(tmp_path / "served")).write(tmp_path / "served")
    with RawServer() as server:
        settings = {"tensor_para_size": "2", "pipeline_para_size": "1"}
        endpoint = dataclasses.replace(
            Endpoint.read(server.url), model_repository=str(tmp_path / "served"), settings=settings
        )
        endpoint.write(tmp_path / "endpoint.json")
        given = short_load(str(tmp_path / "endpoint.json"), tmp_path / "out", lengths=("200/6",), vocab_size=None)
        (row,) = run(given)
        drawn = {token for each in measured(server) for token in each.body["prompt"]}
    assert drawn == set(range(17))
    # The endpoint file says the tensor parallelism, so that the number of GPUs is known: on a CPU it counts as one.
    assert row.figures["output_tokens_per_s_per_gpu"] == row.figures["output_tokens_per_s"]


def test_a_server_that_goes_away_ends_the_sweep(tmp_path: Path) -> None:
    with RawServer(first_s=0.01) as server:
        given = short_load(server.url, tmp_path, concurrencies=(1, 2), timeout_s=5.0)
        plan = load._prepare(given)
        server.faults += ["", "", "gone"]  # the probe and one request are answered
        with pytest.raises(ServerError, match="no server answers"):
            run_prepared(given, plan)


def test_requests_are_what_other_servers_take(tmp_path: Path) -> None:
    with RawServer() as server:
        run(short_load(server.url, tmp_path))
        body = measured(server)[-1].body
    assert len(body.pop("prompt")) == 5
    assert body == {
        **{"model": "raw", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "min_tokens": 6, "stream": True},
        **{"return_token_ids": True, "stream_options": {"include_usage": True}},
    }
    summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
    assert summary["backend"] == "openai"
    assert summary["total_output_tokens"] == 6 * summary["completed"]
