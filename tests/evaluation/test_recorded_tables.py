"""Tables that people read keep their columns: compared with headers and files that an earlier version wrote."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.servers.fake_triton import FakeTriton, count_up

from evaluation import benchmark, compare, load, sweep_report
from evaluation.arguments import BenchmarkArguments
from evaluation.parity.comparison import Position
from evaluation.report.measurements import read_report
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.table import FIGURES, LOAD_TABLE, NEWER_COLUMNS, STATIC_TABLE, Table
from evaluation.tasks import outcome
from evaluation.tasks.lambada.score import SampleScore as LambadaScore
from evaluation.tasks.metric import Metric
from evaluation.tasks.squad.score import QuestionScore as SquadScore
from evaluation.tasks.texts.run import TextSample

PROJECT = Path(__file__).resolve().parents[2]
REFERENCE = PROJECT / "results" / "reference"
RECORDED: dict[str, str] = json.loads((PROJECT / "tests" / "data" / "table_headers.json").read_text())
RUNS = ("demo", "h200/served")


def header(path: Path) -> str:
    return path.read_text().partition("\n")[0].rstrip("\r")


def test_the_benchmarks_tables_have_the_recorded_columns(tmp_path: Path) -> None:
    with FakeTriton(count_up) as fake:
        common: dict[str, Any] = {"endpoint": fake.url, "vocab_size": 100, "warmup": 1}
        static = BenchmarkArguments(
            output=tmp_path / "static", batch_sizes=(1,), lengths=((3, 2),), repeats=1, **common
        )
        benchmark.main(static.to_argv())
        under_load = LoadArguments(
            output=tmp_path / "load", concurrencies=(1,), lengths=("3/2",), requests=1, repeats=1, **common
        )
        load.main(under_load.to_argv())
    assert header(tmp_path / "static" / "benchmark.csv") == RECORDED["benchmark.csv"]
    assert header(tmp_path / "load" / "load.csv") == RECORDED["load.csv"]
    (point,) = (tmp_path / "load").glob("*/profile_export_genai_perf.csv")
    assert header(point) == RECORDED["profile_export_genai_perf.csv"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("table", [STATIC_TABLE, LOAD_TABLE], ids=lambda table: table.file_name)
def test_a_recorded_table_is_read_and_written_again_as_it_was(run: str, table: Table, tmp_path: Path) -> None:
    recorded_file, written_file = REFERENCE / run / table.file_name, tmp_path / table.file_name
    rows = table.read(recorded_file)
    table.write(written_file, rows)
    before, after = (list(csv.DictReader(path.open(newline=""))) for path in (recorded_file, written_file))
    assert len(rows) == len(before) == len(after)
    for recorded, written in zip(before, after, strict=True):
        newer = {name: written.pop(name, "") for name in NEWER_COLUMNS if name not in recorded}
        computed = {name: newer.pop(name) for name in ("validity", "validity_reasons", "gpus")}
        assert computed["validity"] == ("INVALID" if computed["validity_reasons"] else "VALID")
        assert set(newer.values()) <= {""}
        assert [(name, number(cell)) for name, cell in written.items()] == [(n, number(c)) for n, c in recorded.items()]


@pytest.mark.parametrize("missing", [("int8_mode",), ("versions",), ("int8_mode", "versions"), ("added_ms",)])
def test_a_table_of_an_earlier_version_is_read(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {**LOAD_TABLE.columns, "added_ms": "added_ms"}
    newer = dataclasses.replace(LOAD_TABLE, columns=columns)
    monkeypatch.setattr("evaluation.speed.tables.table.NEWER_COLUMNS", (*NEWER_COLUMNS, "added_ms"))
    monkeypatch.setattr("evaluation.speed.tables.table.FIGURES", {*FIGURES, "added_ms"})
    with (REFERENCE / "demo" / "load.csv").open(newline="") as stream:
        rows = [row | {"added_ms": "3.5"} for row in csv.DictReader(stream)]
    kept = [name for name in columns if name not in missing]
    with (tmp_path / "load.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    read = newer.read(tmp_path / "load.csv")
    assert [row.figures["added_ms"] for row in read] == [None if "added_ms" in missing else 3.5] * len(rows)
    (tmp_path / "load.csv").write_text(",".join(name for name in kept if name != "commit") + "\n")
    with pytest.raises(ValueError, match="does not have the columns of a load sweep"):
        newer.read(tmp_path / "load.csv")


def number(cell: str) -> object:
    """A number to the six digits of a table; a text as it is."""
    try:
        return float(f"{float(cell):.6g}")
    except ValueError:
        return cell


@pytest.mark.parametrize("run", RUNS)
def test_every_recorded_figure_is_found_by_its_name(run: str, tmp_path: Path) -> None:
    """Names and values that limits of the gate and comparisons go by."""
    expected: dict[str, float] = {}
    for name in ("benchmark.csv", "load.csv"):
        (tmp_path / "benchmark" / name).mkdir(parents=True)
        shutil.copy(REFERENCE / run / name, tmp_path / "benchmark" / name / name)
        with (REFERENCE / run / name).open(newline="") as stream:
            for cells in csv.DictReader(stream):
                columns = [
                    column
                    for column in cells
                    if column.startswith(("latency_", "throughput_", "e2e_", "ttft_", "requests_per_s", "server_"))
                ]
                if name == "load.csv":
                    lengths = "".join(letter if letter.isalnum() else "-" for letter in cells["workload"])
                    place = f"{lengths}_concurrency{cells['concurrency']}"
                else:
                    place = f"{cells['input_length']}-{cells['output_length']}_batch{cells['batch_size']}"
                expected |= {f"{name}.{place}.{column}": float(cells[column]) for column in columns if cells[column]}
    figures = read_report(tmp_path).figures
    assert expected
    assert {name: figures[name].value for name in expected} == expected


def test_the_sweeps_and_the_comparisons_tables_have_the_recorded_columns(tmp_path: Path) -> None:
    points = []
    for run in RUNS:
        for name in ("benchmark.csv", "load.csv"):
            (tmp_path / run / "benchmark" / name).mkdir(parents=True)
            shutil.copy(REFERENCE / run / name, tmp_path / run / "benchmark" / name)
        points.append({"label": run, "title": run, "results": str(tmp_path / run), "error": ""})
    (tmp_path / "points.json").write_text(json.dumps(points))
    sweep_report.main([f"--sweep={tmp_path}"])
    assert header(tmp_path / "points.csv") == RECORDED["points.csv"]
    compare.main([str(tmp_path / "demo"), str(tmp_path / "h200/served"), f"--output={tmp_path}", "--all"])
    assert header(tmp_path / "compare.csv") == RECORDED["compare.csv"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("metrics.csv", Metric),
        ("lambada/samples.csv", LambadaScore),
        ("squad/samples.csv", SquadScore),
        ("text/samples.csv", TextSample),
        ("parity/positions.csv", Position),
    ],
)
def test_the_tasks_tables_have_the_recorded_columns(name: str, row: Any) -> None:
    columns = (*(column.name for column in dataclasses.fields(row)), *outcome.ORIGIN_COLUMNS)
    assert ",".join(columns) == RECORDED[name]


def test_every_row_of_a_tasks_tables_says_where_it_is_from(tmp_path: Path) -> None:
    model = {"model_digest": "sha256:m", "tensor_para_size": "2", "pipeline_para_size": "3"}
    metric = Metric("f1", 0.5, "fraction", 0.1, 2, 0, "d", "higher")
    content = outcome.describe_results("squad", [metric], 2, 0, {"model": model})
    content["machine"]["gpu"] = "8 x H100"
    rows = [{"index": 0, "hit": True}, {"index": 1, "hit": False}]
    outcome.write_results(tmp_path, {"metrics.csv": [metric], "samples.csv": rows}, {}, content, {})
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["model_digest"], row["gpus"], row["gpu"], row["schema_version"]) == ("sha256:m", "6", "8 x H100", "2")
    assert row["commit"] == content["commit"] and row["started_at"] <= row["timestamp"] and row["cpu"]
    with (tmp_path / "samples.csv").open(newline="") as stream:
        for each in csv.DictReader(stream):
            assert [each[column] for column in outcome.ORIGIN_COLUMNS] == [row[c] for c in outcome.ORIGIN_COLUMNS]
