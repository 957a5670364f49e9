"""The requests beside a table: what is written is read again, and gives every figure of the table."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up
from support.servers.streaming_triton import StreamingTriton

from evaluation import benchmark, load, recompute
from evaluation.arguments import BenchmarkArguments
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables import recomputation
from evaluation.speed.tables.raw_records import PointRecords, read_records, write_records
from evaluation.speed.tables.recomputation import compare
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.tables.table import LOAD_TABLE, STATIC_TABLE, Row
from handover.endpoint import Endpoint
from handover.errors import ArtefactError
from handover.manifest import Manifest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "latency.md"
BEGAN_NS = 7_000_000_000_123_456_789  # a clock's reading that is no exact floating point number
STREAMED = RequestRecord(-5, 0, 90, 3, (40, 70, 90), (1, 3, 1), is_streamed=True)
UNARY = RequestRecord(10, 12, 95, 4, (95,), (5,))
FAILED = RequestRecord(60, 60, 99, 4, error="=1+1 is refused,\nsays the server")


def moved(record: RequestRecord) -> RequestRecord:
    """The record as a clock that began long ago would have it."""
    chunks = tuple(time_ns + BEGAN_NS for time_ns in record.chunk_ns)
    times = (record.scheduled_ns + BEGAN_NS, record.sent_ns + BEGAN_NS, record.done_ns + BEGAN_NS)
    return dataclasses.replace(record, scheduled_ns=times[0], sent_ns=times[1], done_ns=times[2], chunk_ns=chunks)


def point_of(*records: RequestRecord) -> PointRecords:
    windows = [Window((moved(records[0]),), BEGAN_NS, BEGAN_NS + 90)]
    windows += [Window(tuple(map(moved, records[1:])), BEGAN_NS + 90, BEGAN_NS + 99)]
    return PointRecords(tuple(windows), (moved(STREAMED),), {"ttft": 50.0}, ({}, {"request_success": 3.0}))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_records(tmp_path, point_of(STREAMED, UNARY, FAILED))
    found = read_records(tmp_path)
    assert found is not None
    assert found.windows == (Window((STREAMED,), 0, 90), Window((UNARY, FAILED), 90, 99))
    assert found.warmups == (STREAMED,)
    assert (found.slos, found.counters) == ({"ttft": 50.0}, ({}, {"request_success": 3.0}))
    assert (found.requests_left_out, found.token_times_left_out) == (0, 0)


def test_equal_records_give_equal_files_and_no_cell_is_a_formula(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_records(tmp_path / name, point_of(STREAMED, UNARY, FAILED))
    one, two = ((tmp_path / name / "requests.csv.gz").read_bytes() for name in ("one", "two"))
    assert one == two
    rows = list(csv.DictReader(io.StringIO(gzip.decompress(one).decode())))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "failed"]
    assert rows[-1]["error"] == "'" + FAILED.error


def test_token_times_above_the_limit_are_counted_and_leave_out_only_what_needs_them(tmp_path: Path) -> None:
    write_records(tmp_path, dataclasses.replace(point_of(STREAMED, STREAMED), warmups=()), most_token_times=4)
    found = read_records(tmp_path)
    assert found is not None
    assert found.token_times_left_out == 3
    assert found.records[0] == STREAMED
    assert found.records[1] == dataclasses.replace(STREAMED, chunk_ns=(40, 90), chunk_tokens=(1, 4))
    compared = compare(LOAD_TABLE, Row(mode="closed", state="ok"), found)
    assert {name for name in compared.unknown if not name.startswith("itl_")} == set()
    assert "itl_p99_ms" in compared.unknown
    assert compared.different["ttft_p50_ms"] == ("", "4e-05")


def test_requests_above_the_limit_are_counted_and_leave_all_figures_unknown(tmp_path: Path) -> None:
    write_records(tmp_path, point_of(STREAMED, UNARY, FAILED), most_requests=2)
    found = read_records(tmp_path)
    assert found is not None
    assert found.requests_left_out == 2
    compared = compare(LOAD_TABLE, Row(mode="closed", state="ok"), found)
    assert not compared.equal and not compared.different
    assert {"requests_per_s", "e2e_p50_ms", "server_requests"} <= set(compared.unknown)


def test_the_share_that_keeps_a_limit_is_recomputed_where_a_search_judged_it(tmp_path: Path) -> None:
    write_records(tmp_path, point_of(STREAMED, UNARY, FAILED))  # the first keeps 50 ms, the others have no first token
    found = read_records(tmp_path)
    assert found is not None
    row = Row(mode="open", state="ok", slo_verdict="exceeded", figures={"slo_kept_share": 1 / 3})
    compared = compare(LOAD_TABLE, row, found)
    assert "slo_kept_share" in compared.equal
    assert compared.different["slo_kept_low"][0] == ""
    assert {"slo_kept_share", "slo_kept_low"} <= set(compare(LOAD_TABLE, Row(mode="open", state="ok"), found).equal)


@pytest.mark.parametrize("damage", ["cut", "no json", "no csv", "a repeat too many"])
def test_damaged_records_are_an_error_that_says_where(tmp_path: Path, damage: str) -> None:
    write_records(tmp_path, point_of(STREAMED, UNARY))
    packed, about = tmp_path / "requests.csv.gz", tmp_path / "requests.json"
    if damage == "cut":
        packed.write_bytes(packed.read_bytes()[:-20])
    elif damage == "a repeat too many":
        about.write_text(about.read_text().replace("[90, 99]", "[90, 99], [99, 120]").replace("[[0, 90], ", "["))
        packed.write_bytes(gzip.compress(gzip.decompress(packed.read_bytes()).replace(b"\n2,", b"\n7,")))
    else:
        (about if damage == "no json" else packed).unlink()
    with pytest.raises(ArtefactError, match=re.escape(str(tmp_path))):
        read_records(tmp_path)


def test_a_directory_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    assert read_records(tmp_path) is None


def published(fake: FakeTriton, path: Path) -> str:
    Endpoint("127.0.0.1", grpc_port=fake.port, engine="slipway", model_digest="sha256:abc").write(path)
    return str(path)


def load_arguments(fake: FakeTriton, tmp_path: Path, **changes: Any) -> LoadArguments:
    base = LoadArguments(
        endpoint=published(fake, tmp_path / "e.json"),
        output=tmp_path / "run" / "benchmark" / "load",
        lengths=("3/5",),
        concurrencies=(1, 2),
        requests=4,
        repeats=3,
        vocab_size=100,
        slos=(("ttft", 12.0), ("e2e", 1000.0)),
        gpu_hour_price=2.49,
    )
    return dataclasses.replace(base, **changes)


def recomputed(output: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    try:
        recompute.main([f"--output={output}"])
    except SystemExit as ended:
        return int(str(ended.code)), capsys.readouterr().out
    return 0, capsys.readouterr().out


def documented_lines() -> str:
    """The ten lines of pandas in the page about latency."""
    (block,) = re.findall(r"```python\n(import json.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return str(block)


def test_every_figure_of_a_load_follows_from_its_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {"count": 0}

    def every_fifth_fails(tensors: Tensors) -> Tensors:
        seen["count"] += 1
        if seen["count"] % 5 == 0:
            raise RefusalError("no room, says the model")
        if seen["count"] % 3 == 0:
            time.sleep(0.01)  # so that some keep the limit on the first token and others do not
        return count_up(tensors)

    with StreamingTriton(every_fifth_fails) as fake:
        given = load_arguments(fake, tmp_path, request_rates=(20.0,))
        load.main(given.to_argv())
    status, text = recomputed(tmp_path / "run", capsys)
    assert (status, text.count("81 of 81 cells are equal")) == (0, 3), text
    rows = LOAD_TABLE.read(given.output / "load.csv")
    assert any(row.failed_requests for row in rows)
    for row in rows:
        check_documented_lines(given.output / row.directory, row)


def check_documented_lines(directory: Path, row: Row) -> None:
    """Run the page's lines on a point, and compare what they print with the table."""
    lines, printed = [line for line in documented_lines().splitlines() if line], io.StringIO()
    assert len(lines) == 10
    assert lines[1].startswith("point = ")
    with contextlib.redirect_stdout(printed):
        exec("\n".join([lines[0], f"point = {str(directory)!r}", *lines[2:]]), {})  # noqa: S102
    found = [float(word) for word in re.findall(r"(?<![\w.])\d+\.\d+\S*", printed.getvalue())]
    names = ("ttft_p50_ms", "ttft_p99_ms", "requests_per_s", "output_tokens_per_s", "goodput_requests_per_s")
    assert found == pytest.approx([row.figures[name] for name in names], rel=1e-5)


def test_every_figure_of_a_static_sweep_follows_from_its_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_nine(tensors: Tensors) -> Tensors:
        if tensors["input_ids"].shape[1] == 9:
            raise RefusalError("nine is too long")
        return count_up(tensors)

    with FakeTriton(not_nine) as fake:
        given = BenchmarkArguments(published(fake, tmp_path / "e.json"), tmp_path / "out", vocab_size=100, repeats=3)
        benchmark.main(dataclasses.replace(given, batch_sizes=(1, 4), lengths=((3, 2), (9, 2))).to_argv())
    status, text = recomputed(tmp_path / "out", capsys)
    assert (status, text.count("11 of 11 cells are equal")) == (0, 4), text
    assert Manifest.read(tmp_path / "out").problems(tmp_path / "out") == []
    (row, *_) = STATIC_TABLE.read(tmp_path / "out" / "benchmark.csv")
    found = read_records(tmp_path / "out" / row.directory)
    assert found is not None
    assert [(record.input_tokens, record.output_tokens) for record in found.records] == [(3, 2)] * 3
    assert len(found.warmups) == 1


def test_what_was_altered_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(count_up) as fake:
        given = load_arguments(fake, tmp_path, concurrencies=(1,), slos=())
        load.main(given.to_argv())
    (row,) = LOAD_TABLE.read(given.output / "load.csv")
    rate = row.figures["output_tokens_per_s"]
    assert rate is not None
    better = dataclasses.replace(row, figures={**row.figures, "output_tokens_per_s": 1.01 * rate})
    LOAD_TABLE.write(given.output / "load.csv", [better])
    status, text = recomputed(tmp_path / "run", capsys)
    assert status == 1
    assert f"output_tokens_per_s: the table says {1.01 * rate:.6g}, the records give {rate:.6g}" in text
    assert "load.csv  " in text  # the manifest finds it too
    LOAD_TABLE.write(given.output / "load.csv", [row])
    assert recomputed(tmp_path / "run", capsys)[0] == 0
    (given.output / row.directory / "requests.csv.gz").unlink()
    (given.output / row.directory / "requests.json").unlink()
    with pytest.raises(ArtefactError, match="has records"):
        recompute.main([f"--output={tmp_path / 'run'}"])


def test_a_resumed_run_keeps_the_records_of_finished_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(count_up) as fake:
        given = load_arguments(fake, tmp_path, concurrencies=(1,), slos=())
        load.main(given.to_argv())
        (first,) = LOAD_TABLE.read(given.output / "load.csv")
        packed = given.output / first.directory / "requests.csv.gz"
        before = packed.read_bytes()
        load.main(dataclasses.replace(given, concurrencies=(1, 2)).to_argv())
    assert packed.read_bytes() == before
    status, text = recomputed(given.output, capsys)
    assert status == 0
    assert text.count("cells are equal") == 2
    manifest = json.loads((given.output / "manifest.json").read_text())
    listed = {record["path"] for record in manifest["files"]}
    assert {"3-5_concurrency1/requests.csv.gz", "3-5_concurrency2/requests.csv.gz"} <= listed


def test_results_without_a_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"holds no benchmark.csv or load.csv"):
        recompute.main([f"--output={tmp_path}"])


def test_a_request_whose_client_hung_up_is_kept_as_such(tmp_path: Path) -> None:
    hung_up = dataclasses.replace(STREAMED, chunk_ns=(80, 85), chunk_tokens=(1, 1), is_cancelled=True)
    write_records(tmp_path, PointRecords((Window((STREAMED, hung_up), 0, 100),)))
    found = read_records(tmp_path)
    assert found is not None
    assert [record.is_cancelled for record in found.records] == [False, True]
    counted = recomputation.recompute(Row(mode="closed", state="ok", cancelled_requests=1), found)
    assert (counted["cancelled_requests"], counted["failed_requests"], counted["requests"]) == (1, 0, 2)
    assert counted["ttft_mean_ms"] == 40 / 1e6, "of the complete request alone"
    assert counted["requests_per_s"] == 1e9 / 100
