"""The load generator against a fake server: honest rows, streams, refusals, and what a killed run leaves."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up
from support.servers.loopback_http import JsonHandler, listening
from support.servers.streaming_triton import DELAY_S, StreamingTriton

from evaluation import load as sweep
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.raw_records import read_records
from evaluation.speed.tables.server_metrics import count_busy, parse_counters, server_figures
from evaluation.speed.tables.table import LOAD_TABLE, Row
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError
from handover.manifest import FileRecord, Manifest

pytestmark = pytest.mark.clock


def slow(tensors: Tensors) -> Tensors:
    time.sleep(DELAY_S)
    return count_up(tensors)


def arguments(output: Path, endpoint: Path | str, **changes: Any) -> LoadArguments:
    base = LoadArguments(
        endpoint=str(endpoint),
        output=output,
        lengths=("3/2",),
        concurrencies=(1, 2),
        requests=4,
        repeats=3,
        stable_within=0.5,
        vocab_size=100,
    )
    return dataclasses.replace(base, **changes)


def endpoint_of(fake: FakeTriton, path: Path, digest: str = "sha256:abc", **changes: Any) -> Path:
    settings = {"tensor_para_size": "2", "pipeline_para_size": "1", "weight_data_type": "fp16", "data_type": "fp32"}
    Endpoint("127.0.0.1", grpc_port=fake.port, model_digest=digest, settings=settings, **changes).write(path)
    return path


def run(given: LoadArguments) -> list[Row]:
    sweep.main(given.to_argv())
    return LOAD_TABLE.read(given.output / "load.csv")


def test_every_point_has_a_row_with_figures_that_fit_the_servers_delay(tmp_path: Path) -> None:
    with FakeTriton(slow) as fake:
        given = arguments(tmp_path / "out", endpoint_of(fake, tmp_path / "e.json"), request_rates=(40.0,))
        rows = run(dataclasses.replace(given, arrival="constant"))
    assert [row.point for row in rows] == [("3/2", "closed", 1.0), ("3/2", "closed", 2.0), ("3/2", "open", 40.0)]
    for row in rows:
        figures = row.figures
        assert (row.state, row.failed_requests, row.model_digest) == ("ok", 0, "sha256:abc")
        assert figures["e2e_p50_ms"] >= DELAY_S * 1000  # type: ignore[operator]
        assert figures["output_tokens_per_s"] == pytest.approx(2 * figures["requests_per_s"], rel=1e-4)  # type: ignore
        assert figures["ttft_mean_ms"] is None
        assert figures["client_cpu_cores"] is not None
        assert row.requests == 4 * row.repeats
    assert rows[2].figures["requests_per_s"] == pytest.approx(40, rel=0.25)


def test_streams_are_stamped_token_by_token(tmp_path: Path) -> None:
    with StreamingTriton(count_up) as fake:
        given = arguments(tmp_path / "out", endpoint_of(fake, tmp_path / "e.json"), lengths=("3/5",))
        (row,) = run(dataclasses.replace(given, concurrencies=(1,), slos=(("ttft", 1000.0), ("tpot", 1000.0))))
    figures = row.figures
    for name in ("ttft", "itl", "tpot"):
        assert DELAY_S * 1000 <= figures[f"{name}_p50_ms"] < 4 * DELAY_S * 1000  # type: ignore[operator]
    # Five tokens: one first and four after it.
    assert figures["e2e_mean_ms"] == pytest.approx(figures["ttft_mean_ms"] + 4 * figures["tpot_mean_ms"], rel=1e-4)  # type: ignore
    assert figures["goodput_requests_per_s"] == pytest.approx(figures["requests_per_s"])
    profile = json.loads((tmp_path / "out" / row.directory / "profile_export.json").read_text())
    request = profile["experiments"][0]["requests"][0]
    assert len(request["response_timestamps"]) == 5
    assert all(isinstance(stamp, int) for stamp in (request["timestamp"], *request["response_timestamps"]))


def test_streaming_must_be_what_the_model_does(tmp_path: Path) -> None:
    with StreamingTriton(count_up) as fake, pytest.raises(ConfigError, match="streams its answers"):
        run(arguments(tmp_path, fake.url, streaming=False))
    with FakeTriton(count_up) as fake, pytest.raises(ConfigError, match="does not stream"):
        run(arguments(tmp_path, fake.url, streaming=True))


def test_failed_requests_are_counted_and_leave_the_figures_of_the_others(tmp_path: Path) -> None:
    seen = {"count": 0}

    def every_third_fails(tensors: Tensors) -> Tensors:
        seen["count"] += 1
        if seen["count"] % 3 == 0:
            raise RefusalError("no room, says the model")
        return slow(tensors)

    with FakeTriton(every_third_fails) as fake:
        (row,) = run(arguments(tmp_path, fake.url, concurrencies=(1,), requests=6, repeats=1))
    assert (row.requests, row.failed_requests, row.state) == (6, 2, "ok")
    assert "no room, says the model" in row.error
    assert row.figures["e2e_mean_ms"] >= DELAY_S * 1000  # type: ignore[operator]
    summary = json.loads((tmp_path / row.directory / "summary.json").read_text())
    assert (summary["completed"], summary["failed"]) == (4, 2)
    assert sum("no room" in error for error in summary["errors"]) == 2


def test_a_point_without_a_success_is_a_failed_row_with_empty_figures(tmp_path: Path) -> None:
    with FakeTriton(count_up) as fake:
        given = arguments(tmp_path, endpoint_of(fake, tmp_path / "e.json"), lengths=("3/2", "4/2"), concurrencies=(1,))

        def three_only(tensors: Tensors) -> Tensors:
            if tensors["input_ids"].shape[1] == 4:
                raise RefusalError("too long")
            return count_up(tensors)

        fake.answer = three_only
        run(given)
    with (tmp_path / "load.csv").open(newline="") as stream:
        first, second = csv.DictReader(stream)
    assert (first["state"], second["state"]) == ("ok", "failed")
    assert "too long" in second["error"]
    assert first["e2e_p99_ms"] != "" == second["e2e_p99_ms"]
    assert second["requests_per_s"] == ""


def test_nothing_is_measured_before_a_real_generation_came_back(tmp_path: Path) -> None:
    def wrong(tensors: Tensors) -> Tensors:
        outputs = count_up(tensors)
        return {**outputs, "output_ids": outputs["output_ids"] + 1}

    with FakeTriton(wrong) as fake, pytest.raises(ServerError, match="does not continue its prompt"):
        run(arguments(tmp_path, fake.url))
    assert len(fake.requests) == 5, "a few tries, and no more"
    assert not (tmp_path / "load.csv").exists()


def test_too_few_tokens_are_a_failure(tmp_path: Path) -> None:
    def short(tensors: Tensors) -> Tensors:
        outputs = count_up(tensors)
        return {**outputs, "sequence_length": outputs["sequence_length"] - 1}

    with FakeTriton(short) as fake, pytest.raises(ServerError, match="1 tokens were generated instead of 2"):
        run(arguments(tmp_path, fake.url))


def test_another_model_at_the_endpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    wanted = Manifest("model_repository", (FileRecord("a", 1, "sha256:a"),))
    wanted.write(tmp_path / "repo")
    with FakeTriton(count_up) as fake:
        given = arguments(tmp_path / "out", endpoint_of(fake, tmp_path / "e.json"), model_repository=tmp_path / "repo")
        with pytest.raises(ServerError, match=f"not {wanted.digest}"):
            run(given)
        assert not fake.requests
        endpoint_of(fake, tmp_path / "e.json", digest=wanted.digest)
        assert {row.model_digest for row in run(given)} == {wanted.digest}


def test_a_model_that_is_replaced_ends_the_sweep_without_the_point_in_work(tmp_path: Path) -> None:
    path = tmp_path / "e.json"

    def replaced_later(tensors: Tensors) -> Tensors:
        if len(fake.requests) == 6:
            endpoint_of(fake, path, digest="sha256:other")
        return count_up(tensors)

    with FakeTriton(replaced_later) as fake, pytest.raises(ServerError, match="not sha256:abc"):
        run(arguments(tmp_path / "out", endpoint_of(fake, path)))
    assert not (tmp_path / "out" / "load.csv").exists()


def test_finished_points_are_kept_and_failed_or_other_ones_measured(tmp_path: Path) -> None:
    with FakeTriton(count_up) as fake:
        given = arguments(tmp_path / "out", endpoint_of(fake, tmp_path / "e.json"))
        first = run(given)
        fake.requests.clear()
        more = run(dataclasses.replace(given, concurrencies=(1, 2, 3)))
        assert more[:2] == first, "rows are kept to the last digit"
        asked = len(fake.requests)
        fake.requests.clear()
        LOAD_TABLE.write(tmp_path / "out" / "load.csv", [first[0], dataclasses.replace(first[1], state="failed")])
        run(given)
        assert 0 < len(fake.requests) < 2 * asked
        fake.requests.clear()
        run(given)
        assert not fake.requests
        run(dataclasses.replace(given, seed=1))
        assert fake.requests


def test_a_dead_server_ends_the_sweep_and_keeps_what_was_measured(tmp_path: Path) -> None:
    def die_later(tensors: Tensors) -> Tensors:
        if tensors["input_ids"].shape[1] == 4:
            fake.server.stop(None)
            raise RefusalError("dying")
        return count_up(tensors)

    with FakeTriton(die_later) as fake, pytest.raises(ServerError, match="no server answers"):
        given = arguments(tmp_path, endpoint_of(fake, tmp_path / "e.json"), lengths=("3/2", "4/2"), timeout_s=5.0)
        run(dataclasses.replace(given, concurrencies=(1,)))
    assert [row.state for row in LOAD_TABLE.read(tmp_path / "load.csv")] == ["ok", "failed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrencies": ()}, "concurrencies or request rates"),
        ({"concurrencies": (0,)}, "concurrencies is .* holds 0"),
        ({"request_rates": (0.0,)}, "request_rates is .* 0.0"),
        ({"arrival": "posson"}, "did you mean 'poisson'"),
        ({"slos": (("tfft", 10.0),)}, "did you mean 'ttft'"),
        ({"lengths": ("60",)}, "no pair of lengths"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep.main(arguments(tmp_path, "127.0.0.1:1", **changes).to_argv())


def test_a_prompt_file_takes_the_place_of_lengths(tmp_path: Path) -> None:
    lines = [{"input_ids": list(range(1, 2 + n)), "output_length": 1 + n} for n in range(3)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with FakeTriton(count_up) as fake:
        given = arguments(tmp_path, fake.url, prompt_file=tmp_path / "talks.jsonl", concurrencies=(1,), vocab_size=None)
        (row,) = run(given)
        asked = {tuple(tensors["input_ids"][0]) for tensors in fake.requests}
    assert row.workload == "file:talks.jsonl"
    assert asked == {(1,), (1, 2), (1, 2, 3)}


def test_the_exports_have_the_fields_that_other_tools_read(tmp_path: Path) -> None:
    with FakeTriton(slow) as fake:
        (row,) = run(arguments(tmp_path, endpoint_of(fake, tmp_path / "e.json"), concurrencies=(2,)))
    directory = tmp_path / row.directory
    vllm = json.loads((directory / "summary.json").read_text())
    assert vllm["max_concurrency"] == 2
    assert vllm["request_rate"] == "inf"
    assert vllm["output_throughput"] == pytest.approx(vllm["total_output_tokens"] / vllm["duration"])
    assert vllm["mean_ttft_ms"] is None
    assert vllm["p99_e2el_ms"] >= vllm["median_e2el_ms"] >= DELAY_S * 1000
    assert len(vllm["input_lens"]) == len(vllm["output_lens"]) == vllm["num_prompts"]
    genai = json.loads((directory / "profile_export_genai_perf.json").read_text())
    assert genai["request_latency"]["unit"] == "ms"
    assert genai["request_throughput"] == {"unit": "requests/sec", "avg": vllm["request_throughput"]}
    assert "time_to_first_token" not in genai
    lines = (directory / "profile_export_genai_perf.csv").read_text().splitlines()
    assert lines[0] == "Metric,avg,min,max,p99,p95,p90,p75,p50,p25"
    assert lines[1].startswith("Request Latency (ms),")
    (point,) = json.loads((tmp_path / "summary.json").read_text())["points"]
    assert point["result"]["request_throughput"] == vllm["request_throughput"]
    assert "errors" not in point["result"]
    assert Manifest.read(tmp_path).problems(tmp_path) == []


METRICS = """# HELP nv_inference_count Number
nv_inference_request_success{model="fastertransformer",version="1"} %d
nv_inference_request_success{model="ensemble",version="1"} 999
nv_inference_request_failure{model="fastertransformer",reason="OTHER",version="1"} 0
nv_inference_request_failure{model="fastertransformer",reason="CANCELED",version="1"} %d
nv_inference_count{model="fastertransformer",version="1"} %d
nv_inference_exec_count{model="fastertransformer",version="1"} %d
nv_inference_request_duration_us{model="fastertransformer",version="1"} %d
nv_inference_queue_duration_us{model="fastertransformer",version="1"} %d
nv_inference_compute_input_duration_us{model="fastertransformer",version="1"} %d
nv_inference_compute_infer_duration_us{model="fastertransformer",version="1"} %d
nv_inference_compute_output_duration_us{model="fastertransformer",version="1"} %d
"""


def test_server_figures_are_differences_of_counters() -> None:
    before = parse_counters(METRICS % (10, 1, 10, 10, 1000, 500, 10, 400, 10), "fastertransformer")
    after = parse_counters(METRICS % (30, 2, 50, 20, 61_000, 20_500, 30, 40_400, 30), "fastertransformer")
    assert server_figures(before, after) == {
        "server_queue_mean_ms": 1.0,  # 20,000 us over 20 requests
        "server_compute_mean_ms": pytest.approx(2.002),  # 20 + 40,000 + 20 us over 20
        "server_request_mean_ms": 3.0,
        "server_mean_batch": 4.0,  # 40 inferences in 10 executions
        "server_requests": 20,
        "server_failures": 1,
    }
    assert set(server_figures({}, after).values()) == {None}
    assert server_figures(before, before)["server_queue_mean_ms"] is None


def test_the_engines_own_duration_counts_where_triton_sees_a_hand_over_alone() -> None:
    own = 'slipway_request_duration_us{model="fastertransformer",version="1"} %d\n'
    counts = ((10, 1, 10, 10, 1000, 500, 10, 400, 10), (30, 2, 50, 20, 61_000, 20_500, 30, 40_400, 30))
    before, after = (
        parse_counters(METRICS % count + own % duration, "fastertransformer")
        for count, duration in zip(counts, (7_000, 5_467_000), strict=True)
    )
    figures = server_figures(before, after)
    assert figures["server_request_mean_ms"] == 273.0  # 5,460,000 us over 20 requests
    assert figures["server_compute_mean_ms"] is figures["server_mean_batch"] is None
    assert figures["server_queue_mean_ms"] == 1.0


def test_the_servers_own_figures_stand_beside_the_clients(tmp_path: Path) -> None:
    class Page(JsonHandler):
        def answer(self, body: object) -> None:
            n = len(fake.requests)
            self.send(200, {}, (METRICS % (n, 0, 2 * n, n, 9000 * n, 1000 * n, 0, 8000 * n, 0)).encode())

    with listening(Page) as port, FakeTriton(slow) as fake:
        path = endpoint_of(fake, tmp_path / "e.json", metrics_port=port)
        (row,) = run(arguments(tmp_path / "out", path, concurrencies=(1,), requests=15))
    figures = row.figures
    assert figures["server_queue_mean_ms"] == pytest.approx(1)
    assert figures["server_compute_mean_ms"] == pytest.approx(8)
    assert figures["server_mean_batch"] == pytest.approx(2)
    assert row.requests / 2 < figures["server_requests"] <= row.requests + 2  # type: ignore[operator]


def test_a_trace_is_replayed_once_at_its_times(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 100 * number, "input_length": 3 + number, "output_length": 2, "hash_ids": [1, 50 + number]}
        for number in range(8)
    ]
    for line in lines[:2]:
        line["input_length"] = 5
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with FakeTriton(slow) as fake:
        given = arguments(tmp_path / "out", fake.url, trace=tmp_path / "trace.jsonl", trace_block_size=4)
        started_s = time.perf_counter()
        (row,) = run(dataclasses.replace(given, trace_speed=2.0, lengths=()))
        lasted_s = time.perf_counter() - started_s
        asked = [tensors["input_ids"][0] for tensors in fake.requests[1:]]  # the first is the probe
    assert row.point == ("trace:trace.jsonl", "open", 22.8571)  # 8 * 2 / 0.7
    assert (row.arrival, row.requests, row.is_stable, row.clipped_share) == ("trace", 8, True, 0.0)
    assert [len(ids) for ids in asked] == [line["input_length"] for line in lines]
    assert len({tuple(ids[:3]) for ids in asked}) == 1, "the first block is shared"
    assert lasted_s >= 0.35, "seven tenths of a second at twice the speed"
    assert row.duration_s == pytest.approx(0.36, abs=0.15)


def test_the_turns_of_a_conversation_follow_each_other(tmp_path: Path) -> None:
    with FakeTriton(slow) as fake:
        given = arguments(
            tmp_path / "out", fake.url, lengths=("agent:3:4/2",), concurrencies=(2,), request_rates=(60.0,)
        )
        closed, opened = run(dataclasses.replace(given, requests=12, repeats=1, arrival="constant"))
        asked = [tuple(tensors["input_ids"][0]) for tensors in fake.requests]
    assert closed.requests == opened.requests == 12
    assert {len(ids) for ids in asked} == {4, 10, 16}
    for ids in asked:
        if len(ids) > 4:
            assert asked.index(ids[: len(ids) - 6]) < asked.index(ids), "a turn is asked after the turn before"
    assert opened.figures["requests_per_s"] == pytest.approx(60, rel=0.4)


def test_hang_ups_are_counted_apart_and_leave_the_figures_of_the_others(tmp_path: Path) -> None:
    with StreamingTriton(count_up) as fake:
        given = arguments(tmp_path / "out", fake.url, lengths=("3/12",), concurrencies=(3,), cancel_share=0.4)
        (row,) = run(dataclasses.replace(given, cancel_after=2, requests=30, repeats=1))
    records = read_records(tmp_path / "out" / row.directory)
    assert records is not None
    cancelled = [record for record in records.records if record.is_cancelled]
    assert row.cancelled_requests == len(cancelled)
    assert 5 <= len(cancelled) <= 20, "four of ten"
    assert (row.requests, row.failed_requests, row.error) == (30, 0, "")
    assert {record.output_tokens for record in cancelled} == {2}
    assert {record.output_tokens for record in records.records if record.is_complete} == {12}
    figures = row.figures
    assert figures["e2e_mean_ms"] >= 12 * DELAY_S * 1000, "no latency of two tokens is in the mean"  # type: ignore[operator]
    assert figures["output_tokens_per_s"] == pytest.approx(12 * figures["requests_per_s"], rel=1e-4)  # type: ignore
    assert figures["requests_per_s"] == pytest.approx((30 - len(cancelled)) / row.duration_s, rel=1e-4)  # type: ignore
    assert figures.get("server_idle_s") is None, "there are no metrics here"


def test_hang_ups_need_a_stream(tmp_path: Path) -> None:
    with FakeTriton(count_up) as fake, pytest.raises(ConfigError, match="hang up in the middle of a stream"):
        run(arguments(tmp_path, fake.url, cancel_share=0.5))


BUSY = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="fastertransformer"} %d
vllm:num_requests_waiting{engine="0",model_name="fastertransformer"} %d
vllm:num_requests_running{engine="0",model_name="other"} 9
"""


def test_a_server_is_idle_when_nothing_of_the_model_runs_or_waits() -> None:
    assert count_busy(BUSY % (2, 3), "fastertransformer") == 5
    assert count_busy(BUSY % (0, 0), "fastertransformer") == 0
    assert count_busy(BUSY, "third") is None


def test_requests_that_a_server_keeps_after_the_hang_ups_are_said(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("evaluation.speed.tables.server_metrics.LONGEST_IDLE_WAIT_S", 0.2)

    class Page(JsonHandler):
        def answer(self, body: object) -> None:
            self.send(200, {}, (BUSY % (1, 1)).encode())

    with listening(Page) as port, StreamingTriton(count_up) as fake:
        path = endpoint_of(fake, tmp_path / "e.json", metrics_port=port)
        given = arguments(tmp_path / "out", path, lengths=("3/6",), concurrencies=(1,), cancel_share=0.5, repeats=1)
        (row,) = run(given)
    assert "2 requests were still in the server" in row.error
    assert (row.state, row.figures.get("server_idle_s")) == ("ok", None)


def test_a_request_that_waits_in_the_client_is_late_in_every_figure_and_in_every_file(tmp_path: Path) -> None:
    """One request in flight takes 10 ms; 300 a second are due, of which 100 can be answered."""
    with FakeTriton(slow) as fake:
        given = arguments(tmp_path / "run", fake.url, concurrencies=(), request_rates=(300.0,), slos=(("e2e", 50.0),))
        (row,) = run(dataclasses.replace(given, max_in_flight=1, requests=20, repeats=3, min_repeats=3))
    figures, limit_ms = row.figures, 50.0
    records = read_records(given.output / row.directory)
    assert records is not None
    due_ms = [(record.done_ns - record.scheduled_ns) / 1e6 for record in records.records]
    sent_ms = [(record.done_ns - record.sent_ns) / 1e6 for record in records.records]
    assert figures["e2e_p50_ms"] == pytest.approx(np.percentile(due_ms, 50), rel=1e-5)
    assert figures["e2e_from_send_p50_ms"] == pytest.approx(np.percentile(sent_ms, 50), rel=1e-5)
    assert figures["e2e_p50_ms"] > limit_ms > figures["e2e_from_send_p50_ms"] >= DELAY_S * 1000  # type: ignore
    good = sum(latency_ms <= limit_ms for latency_ms in due_ms)
    assert figures["goodput_requests_per_s"] == pytest.approx(good / row.duration_s, rel=1e-4)  # type: ignore
    assert figures["offered_requests_per_s"] == pytest.approx(300, rel=0.4)
    assert figures["backlog_at_end"] > 50  # type: ignore[operator]
    assert figures["client_lag_p99_ms"] < figures["client_queue_p50_ms"], "the wait is for room in flight"  # type: ignore
    assert row.validity == "INVALID" and "overloaded" in row.validity_reasons
    summary = json.loads((given.output / row.directory / "summary.json").read_text())
    assert summary["median_e2el_ms"] == pytest.approx(figures["e2e_p50_ms"], rel=1e-5)
    about = json.loads((given.output / row.directory / "requests.json").read_text())
    assert (about["latencies_count_from"], about["schema_version"]) == ("scheduled_ns", row.schema_version)
    assert (about["started_at"], about["model"]) == (row.started_at, row.model)
    started = datetime.fromisoformat(row.started_at).timestamp()
    assert 0 <= datetime.fromisoformat(row.timestamp).timestamp() - started + 1 < 60
