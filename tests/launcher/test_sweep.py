"""A sweep's points and their one report, by hand-made results."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from support.measurements.results_maker import static_row, write_results

from evaluation import sweep_report
from evaluation.report.page import render_page
from evaluation.report.sweep_points import read_points
from handover.errors import ArtefactError
from handover.manifest import FileRecord, Manifest
from launcher.config.schema import PROJECT_DIR
from launcher.sweep import name_setting, swept_keys


def point(root: Path, label: str, latencies_ms: dict[int, float], shapes: list[tuple[int, ...]]) -> dict[str, str]:
    """One measured point: mean latency by batch size, and the shapes of its shards."""
    results = root / label.replace(" ", "")
    rows = [static_row(batch, [latency, latency + 2]) for batch, latency in latencies_ms.items()]
    write_results(results, static=rows, accuracy={"last_token_accuracy": (0.5, 0.01)})
    (results / "model_repo").mkdir()
    records = tuple(FileRecord(f"{n}.bin", 1, "d", shape, "fp16") for n, shape in enumerate(shapes))
    Manifest("model_repository", (*records, FileRecord("config.pbtxt", 1, "d"))).write(results / "model_repo")
    return {"label": label, "title": label, "results": str(results), "error": ""}


def sweep(root: Path, *points: dict[str, str]) -> Path:
    (root / "points.json").write_text(json.dumps(points))
    return root


def test_all_points_meet_in_one_report_and_what_failed_is_in_it(tmp_path: Path) -> None:
    failed = {"label": "TP 3", "title": "", "results": "", "error": "3 does not divide the 8 heads"}
    waiting = {"label": "TP 4", "title": "m", "results": str(tmp_path / "none"), "error": ""}
    small = point(tmp_path, "TP 1", {1: 10.0, 8: 40.0}, [(4, 5)])
    large = point(tmp_path, "TP 2", {1: 6.0, 8: 50.0}, [(40, 50), (7,)])
    directory = sweep(tmp_path, small, large, failed, waiting)
    sweep_report.main([f"--sweep={directory}"])
    page, text = (directory / "report.html").read_text(), (directory / "report.md").read_text()
    for shown in (page, text):
        assert "2 of 4 points are measured" in shown
        assert "TP 3 failed: 3 does not divide the 8 heads" in shown
        assert "Not measured yet: TP 4" in shown
        assert "Shortest latency: TP 2, 7.00 ms" in shown  # the median of 6 and 8
        assert "Most throughput: TP 1, 3,902 tokens/s" in shown  # 8 sequences x 20 tokens / 41 ms
    assert "Latency by model size" in page and "2.01K" in page
    with (directory / "points.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["point"], row["load"], row["parameters"]) for row in rows] == [
        *(("TP 1", "batch 1", "20"), ("TP 1", "batch 8", "20")),
        *(("TP 2", "batch 1", "2007"), ("TP 2", "batch 8", "2007")),
        *(("TP 3", "", ""), ("TP 4", "", "")),
    ]
    assert math.isclose(float(rows[0]["tokens_per_s"]), 20 / 0.011, rel_tol=1e-5)
    assert rows[4]["error"] and not rows[4]["tokens_per_s"]


def test_one_size_alone_draws_no_picture_of_sizes(tmp_path: Path) -> None:
    points = [point(tmp_path, label, {1: 10.0}, [(4, 5)]) for label in ("TP 1", "TP 2")]
    described = sweep_report.describe_sweep(read_points(sweep(tmp_path, *points)))
    assert "Latency by model size" not in render_page("sweep.html", **described)


def test_a_point_with_figures_and_a_failed_evaluation_shows_both(tmp_path: Path) -> None:
    measured = point(tmp_path, "TP 1", {1: 10.0}, [(4, 5)])
    stage = {"stage": "evaluate", "name": "n", "state": "failed", "elapsed_s": 1.0, "error": "no file"}
    logs = Path(measured["results"]) / "logs"
    logs.mkdir()
    (logs / "stages.json").write_text(json.dumps([{**stage, "log": "evaluate_squad.log"}]))
    sweep_report.main([f"--sweep={sweep(tmp_path, measured)}"])
    page = (tmp_path / "report.html").read_text()
    assert "TP 1 failed: evaluate squad: no file" in page
    assert ">11.00</td>" in page and 'class="failed"' not in page


def test_a_point_whose_stage_failed_says_why(tmp_path: Path) -> None:
    entry = point(tmp_path, "TP 1", {1: 10.0}, [(2,)])
    logs = Path(entry["results"]) / "logs"
    logs.mkdir()
    stage = {
        "stage": "benchmark",
        "name": "n",
        "state": "failed",
        "elapsed_s": 1.0,
        "error": "exit status 1\n    no memory\n      hint: buy",
    }
    (logs / "stages.json").write_text(json.dumps([{**stage, "log": ""}]))
    (found,) = read_points(sweep(tmp_path, entry))
    assert found.error == "benchmark: no memory"
    assert len(found.candidates) == 1


def test_a_directory_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"points\.json cannot be read"):
        read_points(tmp_path)
    (tmp_path / "points.json").write_text('[{"label": "a"}]')
    with pytest.raises(ArtefactError, match="title"):
        read_points(tmp_path)


def test_only_keys_with_several_values_are_swept() -> None:
    line = ["-m", "stages=[export,deploy]", "export.model.tensor_model_parallel_size=1,2", "a=x", "b=range(1,3)"]
    assert swept_keys(line) == ["export.model.tensor_model_parallel_size", "b"]


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("max_batch_size", "16", "max_batch_size=16"),
        ("engine", "vllm", ""),  # the path has _vllm already
        ("engine", "slipway", ""),  # where a run without a sweep has its results
        ("engine", "fastertransformer", "fastertransformer"),  # it would share the path with the drop-in engine
        ("engine", "vlm", "engine=vlm"),  # is refused later
    ],
)
def test_results_are_kept_apart_where_their_path_does_not(key: str, value: str, name: str) -> None:
    assert name_setting(key, value) == name


def test_every_point_is_announced(tmp_path: Path) -> None:
    line = ["-m", "stages=[convert]", "dry_run=true", "cluster_type=interactive", f"base_results_dir={tmp_path}"]
    points = ["export.model.tensor_model_parallel_size=1,2", "export.model.weight_data_type=fp32"]
    command = [sys.executable, str(PROJECT_DIR / "main.py"), *line, *points]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [each for each in ended.stdout.splitlines() if "#" in each] == ["#0 TP 1", "#1 TP 2"]
