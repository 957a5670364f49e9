"""The benchmark against a fake server: which points, honest rows, and what a killed run leaves."""

from __future__ import annotations

import csv
import dataclasses
import os
import resource
import time
from pathlib import Path

import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up

from evaluation import benchmark, recompute
from evaluation.arguments import BenchmarkArguments
from evaluation.speed import sweep
from evaluation.speed.tables.table import STATIC_TABLE, Row
from ft_format.tensors import NO_TOKEN
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError
from handover.manifest import Manifest

DELAY_S = 0.02


PUBLISHED = ((60, 20), (225, 20), (200, 200))


@pytest.mark.parametrize(
    ("positions", "expected"),
    [(None, PUBLISHED), (400, PUBLISHED), (399, PUBLISHED[:2]), (80, PUBLISHED[:1]), (32, ((24, 8),))],
)
def test_usual_lengths_are_the_published_ones_that_fit_the_model(
    positions: int | None, expected: tuple[tuple[int, int], ...]
) -> None:
    assert sweep.usual_lengths(positions) == expected


def slow_count_up(tensors: Tensors) -> Tensors:
    time.sleep(DELAY_S)
    return count_up(tensors)


def arguments(output: Path, endpoint: Path | str, **changes: object) -> BenchmarkArguments:
    base = BenchmarkArguments(
        endpoint=str(endpoint),
        output=output,
        batch_sizes=(1, 4),
        lengths=((3, 2), (5, 4)),
        warmup=1,
        repeats=3,
        vocab_size=100,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def endpoint_of(fake: FakeTriton, path: Path, digest: str = "sha256:abc") -> Path:
    settings = {"tensor_para_size": "2", "pipeline_para_size": "1", "weight_data_type": "fp16", "data_type": "fp32"}
    Endpoint("127.0.0.1", grpc_port=fake.port, engine="slipway", model_digest=digest, settings=settings).write(path)
    return path


def run(given: BenchmarkArguments) -> list[Row]:
    benchmark.main(given.to_argv())
    return STATIC_TABLE.read(given.output / "benchmark.csv")


def point(row: Row) -> tuple[int, int, int]:
    return row.batch_size, row.input_length, row.output_length


def latencies(row: Row) -> list[float]:
    return [row.figures[f"e2e_{statistic}_ms"] or 0.0 for statistic in ("mean", "p50", "p90", "p95", "p99")]


def test_every_point_has_a_row_with_figures_that_fit_the_servers_delay(tmp_path: Path) -> None:
    with FakeTriton(slow_count_up) as fake:
        rows = run(arguments(tmp_path / "out", endpoint_of(fake, tmp_path / "endpoint.json")))
    assert list(map(point, rows)) == [(1, 3, 2), (4, 3, 2), (1, 5, 4), (4, 5, 4)]
    for row in rows:
        assert row.state == "ok"
        assert row.failed_requests == 0
        mean_ms, *percentiles_ms = latencies(row)
        assert mean_ms >= DELAY_S * 1000
        assert percentiles_ms == sorted(percentiles_ms)
        # One request at a time: sequences/s is the batch size over the mean latency.
        expected = row.batch_size * 1000 / mean_ms
        assert row.figures["sequences_per_s"] == pytest.approx(expected, rel=1e-4)
        assert row.figures["output_tokens_per_s"] == pytest.approx(expected * row.output_length, rel=1e-4)
    assert {(row.engine, row.tensor_para_size, row.weight_data_type, row.model_digest) for row in rows} == {
        ("slipway", "2", "fp16", "sha256:abc")
    }


def test_requests_ask_for_exactly_what_the_point_says(tmp_path: Path) -> None:
    given = arguments(tmp_path / "out", "", batch_sizes=(4,), lengths=((5, 3),))
    with FakeTriton(count_up) as fake:
        run(dataclasses.replace(given, endpoint=str(endpoint_of(fake, tmp_path / "endpoint.json"))))
    assert len(fake.requests) == given.warmup + given.repeats
    for tensors in fake.requests:
        assert tensors["input_ids"].shape == (4, 5)
        assert tensors["input_ids"].max() < 100
        assert set(tensors["request_output_len"].flat) == {3}
        assert set(tensors["end_id"].flat) == {NO_TOKEN}
    assert len({tensors["input_ids"].tobytes() for tensors in fake.requests}) == len(fake.requests)


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others(tmp_path: Path) -> None:
    def prompts(seed: int) -> list[object]:
        given = arguments(tmp_path, "", seed=seed)
        return list(benchmark.draw_prompts(given, (2, 4, 1), 100))

    assert prompts(0) == prompts(0)
    assert prompts(0) != prompts(1)


def test_a_request_that_fails_once_is_sent_again_and_counted(tmp_path: Path) -> None:
    def second_fails(tensors: Tensors) -> Tensors:
        if len(fake.requests) == 2:
            raise RefusalError("not now")
        return count_up(tensors)

    with FakeTriton(second_fails) as fake:
        run(arguments(tmp_path, endpoint_of(fake, tmp_path / "e.json"), lengths=((3, 2),), batch_sizes=(1,)))
    (row,) = STATIC_TABLE.read(tmp_path / "benchmark.csv")
    assert (row.state, row.failed_requests, row.validity_reasons) == ("ok", 1, "1 request failed")
    assert row.figures["e2e_mean_ms"] is not None
    recompute.main([f"--output={tmp_path}"])


def test_a_failed_point_has_a_row_that_says_so_with_empty_figures(tmp_path: Path) -> None:
    def small_only(tensors: Tensors) -> Tensors:
        if len(tensors["input_ids"]) > 1:
            raise RefusalError("out of memory, says the model")
        return count_up(tensors)

    with FakeTriton(small_only) as fake:
        run(arguments(tmp_path, endpoint_of(fake, tmp_path / "e.json"), lengths=((3, 2),)))
    with (tmp_path / "benchmark.csv").open(newline="") as stream:
        first, second = csv.DictReader(stream)
    assert first["state"] == "ok"
    assert (second["state"], second["errors"]) == ("failed", "3"), "it was sent again twice"
    assert (second["validity"], first["validity"]) == ("INVALID", "VALID")
    assert "out of memory, says the model" in second["error"]
    figures = [
        name for name in second if name.startswith(("latency", "throughput", "ci95", "FT latency", "Throughput"))
    ]
    assert len(figures) == 10
    assert all(second[name] == "" and first[name] != "" for name in figures)


def test_too_few_generated_tokens_fail_the_point(tmp_path: Path) -> None:
    def stop_early(tensors: Tensors) -> Tensors:
        outputs = count_up(tensors)
        return {**outputs, "sequence_length": outputs["sequence_length"] - 1}

    with FakeTriton(stop_early) as fake, pytest.raises(ServerError, match="none of 1 points"):
        run(arguments(tmp_path, fake.url, batch_sizes=(1,), lengths=((3, 2),)))
    (row,) = STATIC_TABLE.read(tmp_path / "benchmark.csv")
    assert row.error == "[1] tokens were generated instead of 2"


def test_a_dead_server_ends_the_sweep_and_keeps_what_was_measured(tmp_path: Path) -> None:
    fake = FakeTriton(count_up)

    def die_at_batch_4(tensors: Tensors) -> Tensors:
        if len(tensors["input_ids"]) == 4:
            fake.server.stop(None)
            raise RefusalError("dying")
        return count_up(tensors)

    fake.answer = die_at_batch_4
    given = arguments(tmp_path, endpoint_of(fake, tmp_path / "e.json"), lengths=((3, 2),), batch_sizes=(1, 4, 8))
    with fake, pytest.raises(ServerError, match="no server answers"):
        run(given)
    assert list(map(point, STATIC_TABLE.read(tmp_path / "benchmark.csv"))) == [(1, 3, 2)]
    assert not (tmp_path / "manifest.json").exists()

    with FakeTriton(count_up) as again:
        rows = run(dataclasses.replace(given, endpoint=str(endpoint_of(again, tmp_path / "e.json"))))
        assert [row.state for row in rows] == ["ok", "ok", "ok"]
        assert {len(tensors["input_ids"]) for tensors in again.requests} == {4, 8}, "batch 1 was measured already"


def test_a_deployment_that_is_replaced_during_the_sweep_ends_it_without_its_point(tmp_path: Path) -> None:
    with FakeTriton(count_up) as fake:
        endpoint = endpoint_of(fake, tmp_path / "e.json")

        def replace_at_batch_4(tensors: Tensors) -> Tensors:
            if len(tensors["input_ids"]) == 4:
                endpoint_of(fake, endpoint, "sha256:other")
            return count_up(tensors)

        fake.answer = replace_at_batch_4
        with pytest.raises(ServerError, match="serves model sha256:other, not sha256:abc"):
            run(arguments(tmp_path / "out", endpoint, lengths=((3, 2),), batch_sizes=(1, 4, 8)))
    assert list(map(point, STATIC_TABLE.read(tmp_path / "out" / "benchmark.csv"))) == [(1, 3, 2)]


@pytest.mark.parametrize("answers", [0, 3])
def test_another_server_on_the_endpoints_port_is_refused(answers: int, tmp_path: Path) -> None:
    """The endpoint's file is left from a server that is gone; or it is replaced during the sweep."""
    with FakeTriton(count_up, parameters={"weights_digest": "sha256:a"}) as fake:
        endpoint = Endpoint("127.0.0.1", grpc_port=fake.port, settings={"weights_digest": "sha256:a"})
        endpoint.write(tmp_path / "e.json")

        def take_over(tensors: Tensors) -> Tensors:
            if len(fake.requests) == answers:
                fake.parameters["weights_digest"] = "sha256:b"
            return count_up(tensors)

        fake.answer = take_over
        if not answers:
            fake.parameters["weights_digest"] = "sha256:b"
        with pytest.raises(ServerError, match="serves weights sha256:b, but the endpoint file says sha256:a"):
            run(arguments(tmp_path / "out", tmp_path / "e.json", lengths=((3, 2),), batch_sizes=(1,)))
        assert bool(fake.requests) == bool(answers)
    assert not (tmp_path / "out" / "benchmark.csv").exists()


@pytest.mark.parametrize("changes", [{"repeats": 4}, {"seed": 5}])
def test_other_settings_start_anew(tmp_path: Path, changes: dict[str, object]) -> None:
    with FakeTriton(count_up) as fake:
        given = arguments(tmp_path, endpoint_of(fake, tmp_path / "e.json"), lengths=((3, 2),), batch_sizes=(1,))
        run(given)
        fake.requests.clear()
        run(dataclasses.replace(given, **changes))  # type: ignore[arg-type]
        assert fake.requests


@pytest.mark.parametrize("digest", ["sha256:other", ""])
def test_another_or_an_unknown_model_starts_anew(tmp_path: Path, digest: str) -> None:
    with FakeTriton(count_up) as fake:
        path = endpoint_of(fake, tmp_path / "e.json", digest="" if not digest else "sha256:abc")
        given = arguments(tmp_path, path, lengths=((3, 2),), batch_sizes=(1,))
        run(given)
        fake.requests.clear()
        endpoint_of(fake, path, digest=digest)
        run(given)
        assert fake.requests


def test_failed_points_of_an_earlier_run_are_measured_again(tmp_path: Path) -> None:
    fake = FakeTriton(count_up)
    given = arguments(tmp_path, "", lengths=((3, 2),))
    with fake:
        path = endpoint_of(fake, tmp_path / "e.json")
        given = dataclasses.replace(given, endpoint=str(path))
        rows = run(given)
        STATIC_TABLE.write(
            tmp_path / "benchmark.csv", [rows[0], dataclasses.replace(rows[1], state="failed", failed_requests=1)]
        )
        fake.requests.clear()
        assert [row.state for row in run(given)] == ["ok", "ok"]
        assert {len(tensors["input_ids"]) for tensors in fake.requests} == {4}


def test_batch_sizes_above_the_limit_are_left_out(tmp_path: Path) -> None:
    given = arguments(tmp_path, "", batch_sizes=(8, 1, 2, 16), lengths=((3, 2),), max_batch_size=8)
    assert [point[0] for point in benchmark.plan_points(given)] == [1, 2, 8]
    assert benchmark.plan_points(dataclasses.replace(given, batch_sizes=(16,))) == [(8, 3, 2)]


@pytest.mark.parametrize("changes", [{"batch_sizes": ()}, {"lengths": ()}, {"repeats": 0}, {"lengths": ((0, 1),)}])
def test_nothing_to_measure_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        benchmark.plan_points(arguments(tmp_path, "", **changes))


def test_a_model_that_takes_text_or_has_no_known_vocabulary_is_refused(tmp_path: Path) -> None:
    with FakeTriton(count_up, inputs=("INPUT_0",)) as fake, pytest.raises(ConfigError, match="takes no token ids"):
        run(arguments(tmp_path, fake.url))
    with FakeTriton(count_up) as fake, pytest.raises(ConfigError, match="vocabulary size"):
        run(arguments(tmp_path, fake.url, vocab_size=None))


def test_the_table_round_trips_and_the_manifest_proves_it(tmp_path: Path) -> None:
    with FakeTriton(count_up) as fake:
        rows = run(arguments(tmp_path / "out", endpoint_of(fake, tmp_path / "e.json")))
    STATIC_TABLE.write(tmp_path / "copy.csv", rows)
    assert (tmp_path / "copy.csv").read_text() == (tmp_path / "out" / "benchmark.csv").read_text()
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.kind == "benchmark"
    assert manifest.problems(tmp_path / "out") == []


def test_percentiles_of_a_row_by_hand() -> None:
    # 10, 20, 30, 40 and 50 ms: h = 4 * percent / 100
    row = Row("m", "t", "e", "1", "1", "fp32", "fp32", "3/4", batch_size=2)
    row = benchmark.with_latencies(row, [50_000_000, 10_000_000, 30_000_000, 20_000_000, 40_000_000])
    assert latencies(row) == pytest.approx((30.0, 30.0, 46.0, 48.0, 49.6))
    # deviations 20, 10, 0, 10, 20: sample deviation sqrt(250), / sqrt(5); t(0.975, 4) = 2.776
    assert row.figures["ci95_e2e_mean_ms"] == pytest.approx(2.776 * 50**0.5)
    # 5 requests of 2 sequences in 150 ms
    assert row.figures["sequences_per_s"] == pytest.approx(10 / 0.15)
    assert row.figures["output_tokens_per_s"] == pytest.approx(40 / 0.15)


def test_throughput_by_hand() -> None:
    # 3 requests of 8 sequences with 20 tokens each in 0.5 + 1 + 1.5 s
    row = benchmark.with_latencies(Row(workload="60/20", batch_size=8), [500_000_000, 1_000_000_000, 1_500_000_000])
    assert row.figures["sequences_per_s"] == 8.0
    assert row.figures["output_tokens_per_s"] == 160.0
    assert benchmark.with_latencies(Row(workload="60/20"), []).figures["output_tokens_per_s"] is None


def test_the_columns_that_users_of_the_ancestors_know_stand_beside_ours(tmp_path: Path) -> None:
    row = Row("m", "t", "e", "2", "4", "fp32", "fp32", "60/20", batch_size=16)
    row = benchmark.with_latencies(row, [500_000_000])
    STATIC_TABLE.write(tmp_path / "benchmark.csv", [row])
    with (tmp_path / "benchmark.csv").open(newline="") as stream:
        (cells,) = csv.DictReader(stream)
    # 16 sequences in 0.5 s on 8 GPUs
    assert {name: float(cells[name]) for name in STATIC_TABLE.aliases} == {
        "Batch Size": 16,
        "Tensor Parallel": 2,
        "Pipeline Parallel": 4,
        "Input length": 60,
        "Output length": 20,
        "FT latency (ms)": 500,
        "Throughput per GPU (sentence/s)": 4,
    }


def test_what_the_deployment_cost_stands_in_its_rows(tmp_path: Path) -> None:
    with FakeTriton(count_up) as fake:
        path = tmp_path / "endpoint.json"
        Endpoint("127.0.0.1", grpc_port=fake.port, pid=os.getpid(), start_s=2.5).write(path)
        (row,) = run(arguments(tmp_path / "out", path, batch_sizes=(1,), lengths=((3, 2),)))
    assert row.figures["server_start_s"] == 2.5
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert row.figures["server_memory_peak_bytes"] >= 0.5 * peak  # type: ignore[operator]
    assert row.figures["server_load_s"] is None, "there is no log"
