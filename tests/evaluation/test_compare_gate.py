"""Reports side by side, and the gate: differences, noise, reasons and exit status."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.measurements.results_maker import load_row, static_row, write_results

from evaluation import compare
from evaluation.report import differences, judgement
from evaluation.report.directions import direction, direction_of_metric
from evaluation.report.measurements import COUNTED, read_report
from evaluation.report.thresholds import read_thresholds
from evaluation.speed.tables.table import TABLES
from handover.errors import ArtefactError, ConfigError

PROJECT = Path(__file__).resolve().parents[2]
POINT = "load.60-20_concurrency4"


def load_results(path: Path, e2e_ms: float, noise_ms: float | None = 2.0) -> Path:
    return write_results(path, load=[load_row(e2e_mean_ms=e2e_ms, ci95_e2e_mean_ms=noise_ms, requests_per_s=10.0)])


def test_figures_are_named_by_where_they_were_measured(tmp_path: Path) -> None:
    results = write_results(
        tmp_path / "run",
        static=[static_row(8, [10.0, 14.0])],
        load=[load_row(ttft_p99_ms=7.0), load_row(rate=2.5, e2e_p50_ms=9.0), load_row(1, state="failed", x=1.0)],
        accuracy={"last_token_accuracy": (0.5, 0.05)},
    )
    report = read_report(results)
    assert report.figures["static.60-20_batch8.latency_mean_ms"].value == 12.0
    assert report.figures["static.60-20_batch8.latency_mean_ms"].noise == pytest.approx(12.706 * 2, rel=1e-5)
    assert report.figures[f"{POINT}.ttft_p99_ms"].value == 7.0
    assert report.figures["load.60-20_rate2.5.e2e_p50_ms"].value == 9.0
    assert report.figures["lambada.last_token_accuracy"].noise == pytest.approx(1.96 * 0.05)
    assert not any("concurrency1" in name or "ci95" in name for name in report.figures)
    assert report.digests == ("sha256:m",)


def test_every_figure_of_every_table_has_a_declared_direction() -> None:
    assert direction("e2e_p50_ms") == direction("cancelled_requests") == "lower"
    assert direction("server_memory_peak_bytes") == direction("server_start_s") == "lower"
    assert direction("requests_per_s") == direction("output_tokens_per_s_per_gpu") == "higher"
    assert direction("server_mean_batch") == direction("server_cpu_cores") == direction("clipped_share") == ""
    columns = [column for table in TABLES for column in table.figures if not column.startswith("ci95_")]
    assert {direction(column) for column in (*columns, *COUNTED)} == {"lower", "higher", ""}
    with pytest.raises(KeyError, match="no direction is declared"):
        direction("a_new_figure")


def test_figures_of_earlier_metrics_have_directions() -> None:
    assert direction_of_metric("passage_rounding") == direction_of_metric("norm_scale_resolution") == "lower"
    assert direction_of_metric("lambada_openai_perplexity") == "lower"
    assert direction_of_metric("2-gram_accuracy") == direction_of_metric("HasAns_f1") == "higher"
    assert direction_of_metric("something_else") == ""


@pytest.mark.parametrize(
    ("e2e_ms", "noise_ms", "verdict"),
    # sqrt(2^2 + 2^2) = 2.83 around 100
    [(102.8, 2.0, "noise"), (102.9, 2.0, "worse"), (97.1, 2.0, "better"), (200.0, None, ""), (100.0, None, "equal")],
)
def test_a_difference_within_both_intervals_is_noise(
    tmp_path: Path, e2e_ms: float, noise_ms: float | None, verdict: str
) -> None:
    reports = [
        read_report(load_results(tmp_path / "a", 100.0)),
        read_report(load_results(tmp_path / "b", e2e_ms, noise_ms)),
    ]
    first, second = differences.compare(reports, ["*.e2e_mean_ms"])[f"{POINT}.e2e_mean_ms"]
    assert (first.value, first.verdict) == (100.0, "")
    assert second.verdict == verdict
    assert second.change == pytest.approx(e2e_ms / 100 - 1)


def test_what_only_some_reports_have_stays_empty(tmp_path: Path) -> None:
    paths = [
        write_results(tmp_path / "a", accuracy={"last_token_accuracy": (0.5, 0.01)}),
        write_results(tmp_path / "b", load=[load_row(e2e_p50_ms=9.0)]),
        write_results(tmp_path / "c", load=[load_row(e2e_p50_ms=18.0)], accuracy={"last_token_accuracy": (0.9, 0.01)}),
    ]
    rows = differences.compare([read_report(path) for path in paths], ["*"])
    assert [d.value for d in rows["lambada.last_token_accuracy"]] == [0.5, None, 0.9]
    assert [d.change for d in rows[f"{POINT}.e2e_p50_ms"]] == [None, None, None], "the baseline has no such figure"


def test_the_comparison_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [load_results(tmp_path / name / "run", value) for name, value in (("a", 100.0), ("b<b>", 50.0))]
    compare.main([*map(str, paths), f"--output={tmp_path / 'out'}", "--all"])
    assert "-50.0% better" in capsys.readouterr().out
    with (tmp_path / "out" / "compare.csv").open(newline="") as stream:
        row = next(row for row in csv.DictReader(stream) if row["figure"].endswith("e2e_mean_ms"))
    assert (row["a value"], row["b<b> change_percent"], row["b<b> verdict"]) == ("100", "-50", "better")
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "b&lt;b&gt;" in page
    assert "<b>" not in page
    table = (tmp_path / "out" / "compare.md").read_text()
    assert "| Figure | a |" in table
    assert "<b>" not in table


def test_shares_are_shown_in_percent_and_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_results(tmp_path / "a", accuracy={"2-gram_accuracy": (0.0738, 0.001)})
    two = write_results(tmp_path / "b", accuracy={"2-gram_accuracy": (0.0773, 0.001)})
    compare.main([str(one), str(two)])
    printed = capsys.readouterr().out
    assert "7.38% ±0.20" in printed and "7.73% ±0.20  +0.35 points better" in printed


def test_reports_are_named_by_what_differs_between_their_paths(tmp_path: Path) -> None:
    def names(*paths: str) -> list[str]:
        return compare.labels([tmp_path / path for path in paths])

    assert names("x/tp1/run", "y/tp1/run") == ["x", "y"]
    assert names("m/export_tp1", "m/export_tp2", "m/export_tp4") == ["export_tp1", "export_tp2", "export_tp4"]
    assert names("run", "run/old/run") == ["run", "old/run"]
    assert names("run", "run") == ["1: run", "2: run"]


def test_different_models_and_machines_are_said(tmp_path: Path) -> None:
    one = write_results(tmp_path / "a", load=[load_row(e2e_p50_ms=1.0)])
    other = write_results(tmp_path / "b", load=[load_row(e2e_p50_ms=1.0, model_digest="sha256:x", cpu="Other")])
    said = " ".join(compare.remarks(["a", "b"], [read_report(one), read_report(other)]))
    assert "different models" in said
    assert "different machines" in said


def test_a_comparison_needs_two_reports_with_figures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two results"):
        compare.main([str(load_results(tmp_path / "a", 1.0))])
    with pytest.raises(ArtefactError, match="no figures"):
        compare.main([str(tmp_path / "a"), str(tmp_path)])


def thresholds(path: Path, text: str) -> str:
    path.write_text(text)
    return f"--thresholds={path}"


def decide(
    tmp_path: Path, rules: dict[str, float], value: float, base: float | None = None, stderr: float = 0.01
) -> Any:
    current = write_results(tmp_path / "now", accuracy={"f1": (value, stderr)})
    baseline = None
    if base is not None:
        baseline = read_report(write_results(tmp_path / "base", accuracy={"f1": (base, stderr)}))
    (check,) = judgement.decide(read_report(current), {"lambada.f1": rules}, baseline)
    return check.verdict


@pytest.mark.parametrize(
    ("rules", "value", "base", "verdict"),
    [
        ({"at_least": 0.5}, 0.5, None, "GO"),
        ({"at_least": 0.5}, 0.49, None, "INCONCLUSIVE"),  # short by 0.01, noise 1.96 * 0.01
        ({"at_least": 0.5}, 0.48, None, "NO-GO"),
        ({"at_most": 0.5}, 0.53, None, "NO-GO"),
        ({"max_drop": 0.02}, 0.49, 0.5, "GO"),
        # The same samples: what they share is no noise.
        ({"max_drop": 0.02}, 0.475, 0.5, "NO-GO"),
        ({"max_drop_percent": 10}, 0.46, 0.5, "GO"),
        ({"max_drop_percent": 10}, 0.44, 0.5, "NO-GO"),
        ({"max_rise_percent": 10}, 0.56, 0.5, "NO-GO"),
        ({"max_rise": 0.1}, 0.56, 0.5, "GO"),
        ({"max_drop": 0.02}, 0.49, None, "INCONCLUSIVE"),
    ],
)
def test_each_rule_decides_by_hand_arithmetic(
    tmp_path: Path, rules: dict[str, float], value: float, base: float | None, verdict: str
) -> None:
    assert decide(tmp_path, rules, value, base) == verdict


def test_latency_against_a_baseline_allows_for_both_intervals(tmp_path: Path) -> None:
    base = read_report(load_results(tmp_path / "base", 100.0))
    for e2e_ms, verdict in ((110.0, "GO"), (112.0, "INCONCLUSIVE"), (113.0, "NO-GO")):  # 110 + sqrt(8) = 112.83
        now = read_report(load_results(tmp_path / str(e2e_ms), e2e_ms))
        (check,) = judgement.decide(now, {"load.*.e2e_mean_ms": {"max_rise_percent": 10}}, base)
        assert check.verdict == verdict
        assert math.isclose(float(check.reason.split()[0].rstrip(",")), e2e_ms)


def test_a_missing_figure_is_inconclusive_not_passed(tmp_path: Path) -> None:
    report = read_report(load_results(tmp_path / "now", 1.0))
    (check,) = judgement.decide(report, {"load.*.ttft_p99_ms": {"at_most": 5}}, None)
    assert check.verdict == "INCONCLUSIVE"
    assert judgement.verdict([]) == "INCONCLUSIVE"


@pytest.mark.parametrize(("limit", "status", "word"), [(20, 0, "GO"), (11, 3, "INCONCLUSIVE"), (5, 1, "NO-GO")])
def test_the_exit_status_follows_the_verdict(tmp_path: Path, limit: float, status: int, word: str) -> None:
    results = load_results(tmp_path / "now", 12.0)
    flag = thresholds(tmp_path / "t.yaml", f"thresholds:\n  {POINT}.e2e_mean_ms: {{at_most: {limit}}}\n")
    argv = [sys.executable, "-m", "evaluation.gate", str(results), flag, f"--output={tmp_path / 'gate.json'}"]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.splitlines()[-1] == word
    content = json.loads((tmp_path / "gate.json").read_text())
    assert (content["verdict"], len(content["checks"])) == (word, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thresholds: {a: {at_lest: 1}}", "did you mean 'at_least'"),
        ("thresholds: {a: {at_least: x}}", "it is a number"),
        ("thresholds: {a: {at_least: true}}", "it is a number"),
        ("thresholds: {a: 3}", "has no rule"),
        ("thresholds: {}", "has no thresholds"),
        ("{", "cannot be read"),
    ],
)
def test_damaged_thresholds_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_thresholds(path)
    assert message in str(raised.value)
