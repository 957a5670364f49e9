"""What the gate and the comparison conclude at the edges: exact limits, doubtful rows, other samples, perplexities."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.measurements.results_maker import load_row, static_row, write_results

from evaluation.report import differences, judgement
from evaluation.report.benchmarks import Benchmark
from evaluation.report.data import collect_findings
from evaluation.report.measurements import Measurement, Report, read_report
from evaluation.report.tables import brief_tables, speed_sentences
from evaluation.report.text import describe_provenance
from evaluation.speed.tables import formulas
from evaluation.speed.tables.table import LOAD_TABLE
from evaluation.tasks.metric import PERPLEXITY, Metric
from handover.manifest import Manifest, record_files

NAME = "lambada.last_token_accuracy"
POINT = "load.60-20_concurrency4"


def report_of(*figures: Measurement) -> Report:
    return Report("run", {figure.name: figure for figure in figures}, (), (), ())


def check(rule: str, number: float, value: float, base: float) -> judgement.Check:
    now, before = (report_of(Measurement("a.b", each, 0.0, "higher")) for each in (value, base))
    (found,) = judgement.decide(now, {"a.b": {rule: number}}, before)
    return found


def test_every_limit_that_is_met_exactly_in_three_digits_passes() -> None:
    for base in range(1000, 0, -37):
        for part in range(0, base, 41):
            low, high = (base - part) / 1000, (base + part) / 1000
            assert check("max_drop", part / 1000, low, base / 1000).verdict == "GO"
            assert check("max_rise", part / 1000, high, base / 1000).verdict == "GO"
    assert check("max_drop", 0.1, 0.7, 0.8).verdict == "GO"
    assert check("max_drop", 0.1, 0.6999, 0.8).verdict == "NO-GO"
    assert check("max_drop_percent", 10, 0.72, 0.8).verdict == check("max_rise_percent", 10, 0.77, 0.7).verdict == "GO"


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["max_drop", "max_drop_percent", "max_rise", "max_rise_percent"])
def test_a_baseline_that_is_no_number_is_inconclusive(broken: float, rule: str) -> None:
    found = check(rule, 1.0, 0.5, broken)
    assert found.verdict == "INCONCLUSIVE" and "the baseline is in doubt: it is not a number" in found.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_random_weights": True}, "the weights are random"),
        ({"is_stable": False}, "the repeats did not agree"),
        ({"failed_requests": 2}, "2 requests failed"),
        ({"rate": 30.0, "requests_per_s": 15.0, "duration_s": 60.0}, "overloaded: 15 requests/s were answered of 30"),
        ({"rate": 8.0, "slo_verdict": "undecided"}, "undecided whether the SLOs hold"),
        ({"rate": 8.0, "slo_verdict": "exceeded", "slo_limit": "e2e"}, "the SLOs are exceeded (e2e)"),
        ({"e2e_p99_ms": -3.0}, "it is negative"),
    ],
)
def test_a_row_that_is_not_valid_never_passes(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    row = load_row(**{"e2e_p99_ms": 100.0, "e2e_mean_ms": 50.0, **changes})
    report = read_report(write_results(tmp_path / "now", load=[row]))
    (found,) = judgement.decide(report, {"load.*.e2e_p99_ms": {"at_most": 800}}, None)
    assert found.verdict == "INCONCLUSIVE" and reason in found.reason
    valid = read_report(write_results(tmp_path / "valid", load=[load_row(e2e_p99_ms=100.0)]))
    assert judgement.verdict(list(judgement.decide(valid, {"load.*.e2e_p99_ms": {"at_most": 800}}, None))) == "GO"


def test_a_static_sweep_of_random_weights_never_passes(tmp_path: Path) -> None:
    row = static_row(1, [10.0, 11.0], is_random_weights=True)
    report = read_report(write_results(tmp_path / "now", static=[row]))
    (found,) = judgement.decide(report, {"static.*.latency_mean_ms": {"at_most": 800}}, None)
    assert found.verdict == "INCONCLUSIVE" and "the weights are random" in found.reason


def test_a_benchmark_that_did_not_finish_never_passes(tmp_path: Path) -> None:
    results = write_results(tmp_path / "now", load=[load_row(e2e_p99_ms=100.0)])
    (results / "benchmark" / "load").rename(results / "benchmark" / "load.partial")
    (found,) = judgement.decide(read_report(results), {"load.*.e2e_p99_ms": {"at_most": 800}}, None)
    assert found.verdict == "INCONCLUSIVE" and "did not finish" in found.reason


@pytest.mark.parametrize(
    ("column", "limit", "changes", "verdict"),
    [
        ("failed_requests", {"at_most": 0}, {}, "GO"),
        ("failed_requests", {"at_most": 0}, {"failed_requests": 3}, "NO-GO"),
        ("cancelled_requests", {"at_most": 1}, {"cancelled_requests": 2}, "NO-GO"),
        ("cancelled_requests", {"at_most": 2}, {"cancelled_requests": 2}, "GO"),
        ("is_stable", {"at_least": 1}, {"is_stable": False}, "NO-GO"),
        ("validity", {"at_least": 1}, {"is_random_weights": True}, "NO-GO"),
        ("validity", {"at_least": 1}, {}, "GO"),
    ],
)
def test_what_a_row_counts_can_be_limited(
    column: str, limit: dict[str, float], changes: dict[str, Any], verdict: str, tmp_path: Path
) -> None:
    report = read_report(write_results(tmp_path / "now", load=[load_row(e2e_p99_ms=100.0, **changes)]))
    (found,) = judgement.decide(report, {f"load.*.{column}": limit}, None)
    assert found.verdict == verdict and found.figure == f"{POINT}.{column}"


def write_search(results: Path, rate: float | None, exceeded: float | None, **more: Any) -> Path:
    write_results(results, load=[load_row(rate=8.0, slo_verdict="holds", e2e_p99_ms=9.0)])
    found = {"workload": "60/20", "rate_per_s": rate, "exceeded_at_per_s": exceeded, "failed": 0, "undecided": 0}
    content = {"found": [found | more], "probes": []}
    (results / "benchmark" / "load" / "search.json").write_text(json.dumps(content))
    return results


def test_the_highest_rate_of_a_search_is_gated_and_compared(tmp_path: Path) -> None:
    name = "load.60-20_search.rate_per_s"
    before = read_report(write_search(tmp_path / "before", 30.0, 31.0))
    now = read_report(write_search(tmp_path / "now", 20.0, 21.0))
    near = read_report(write_search(tmp_path / "near", 29.5, 30.9))
    none = read_report(write_search(tmp_path / "none", None, 1.0))
    torn = read_report(write_search(tmp_path / "torn", None, 1.0, failed=1))
    verdicts = {
        report.name: [each.verdict for each in judgement.decide(report, {name: {"at_least": 25}}, None)]
        for report in (before, now, none, torn)
    }
    assert verdicts == {"before": ["GO"], "now": ["NO-GO"], "none": ["NO-GO"], "torn": ["INCONCLUSIVE"]}
    (_, worse, noise) = differences.compare([before, now, near], [name])[name]
    assert (worse.verdict, noise.verdict) == ("worse", "noise")


def sampled(path: Path, value: float, n: int, unit: str = "fraction", stderr: float = 0.001) -> Report:
    results = write_results(path, accuracy={"last_token_accuracy": (value, stderr)})
    metrics = results / "evaluation" / "lambada" / "metrics.json"
    content = json.loads(metrics.read_text())
    content["metrics"][0] |= {"n": n, "unit": unit, "better": "lower" if unit == PERPLEXITY else "higher"}
    metrics.write_text(json.dumps(content))
    return read_report(results)


def test_other_samples_of_one_file_are_not_compared(tmp_path: Path) -> None:
    before, now = sampled(tmp_path / "before", 0.38, 200), sampled(tmp_path / "now", 0.9, 40)
    (found,) = judgement.decide(now, {NAME: {"max_drop": 0.005}}, before)
    assert found.verdict == "INCONCLUSIVE" and "other samples: 40 of" in found.reason and "200 of" in found.reason
    assert differences.compare([before, now], [NAME])[NAME][1].verdict == "other samples"
    shown = judgement.Judgement(now, before).against_baseline(NAME)
    assert shown[1].endswith(", other samples") and shown[2] == "other samples"
    (absolute,) = judgement.decide(now, {NAME: {"at_least": 0.5}}, before)
    assert absolute.verdict == "GO", "a limit of its own needs no baseline"


def test_a_figure_in_doubt_is_neither_better_nor_worse(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"failed_requests": 9}, {"is_random_weights": True}]
    rows = [load_row(e2e_mean_ms=9.0 - n, ci95_e2e_mean_ms=0.1, **more) for n, more in enumerate(changes)]
    reports = [read_report(write_results(tmp_path / str(n), load=[row])) for n, row in enumerate(rows)]
    name = f"{POINT}.e2e_mean_ms"
    assert [each.verdict for each in differences.compare(reports, [name])[name]] == ["", "in doubt", "better"]
    for baseline, reason in ((reports[1], "9 requests failed"), (reports[2], "the weights are random")):
        (found,) = judgement.decide(reports[0], {name: {"max_rise_percent": 90}}, baseline)
        assert found.verdict == "INCONCLUSIVE" and f"the baseline is in doubt: {reason}" in found.reason


def test_the_interval_of_a_perplexity_is_exp_of_the_mean_log_probability_s() -> None:
    log_probs = [-9.0 - (number % 7) for number in range(40)]
    value, stderr = formulas.perplexity(log_probs), formulas.perplexity_standard_error(log_probs)
    found = Metric("perplexity", value, PERPLEXITY, stderr, 40, 0, "d", "lower").interval
    centre, error = -sum(log_probs) / 40, formulas.standard_error(log_probs)
    assert error is not None and found is not None
    assert found == pytest.approx((math.exp(centre - 1.96 * error), math.exp(centre + 1.96 * error)))
    accuracy = Metric("f1", 0.5, "fraction", 0.1, 40, 0, "d", "higher")
    assert accuracy.interval == pytest.approx((0.304, 0.696))
    assert dataclasses.replace(accuracy, value=0.1).interval == pytest.approx((0.0, 0.296))


def test_perplexities_are_compared_by_their_logarithms(tmp_path: Path) -> None:
    # ln 24000 - ln 11000 = 0.78; by standard errors of 0.26 and 0.3 of the values, sqrt(0.51^2 + 0.59^2) = 0.778:
    # more. On the values' own scale 13,000 was within sqrt(5606^2 + 14112^2) = 15,184.
    before = sampled(tmp_path / "before", 11_000.0, 40, PERPLEXITY, 11_000 * 0.26)
    now = sampled(tmp_path / "now", 24_000.0, 40, PERPLEXITY, 24_000 * 0.3)
    (_, found) = differences.compare([before, now], [NAME])[NAME]
    assert found.verdict == "worse" and found.noise is None
    assert differences.cell(NAME, found)[0] == "24,000 (13,330 to 43,209)"
    (absolute,) = judgement.decide(now, {NAME: {"at_most": 14_000}}, None)
    assert absolute.verdict == "INCONCLUSIVE", "ln 24000 - ln 14000 = 0.54 is within 0.59"
    (absolute,) = judgement.decide(now, {NAME: {"at_most": 13_000}}, None)
    assert absolute.verdict == "NO-GO"


def test_figures_that_were_changed_or_damaged_are_inconclusive_and_the_gate_says_why(tmp_path: Path) -> None:
    results = write_results(tmp_path / "now", load=[load_row(e2e_p99_ms=900.0)])
    directory = results / "benchmark" / "load"
    Manifest("benchmark", record_files(directory)).write(directory)
    table = directory / "load.csv"
    table.write_text(table.read_text().replace("900", "100"))
    rules = {"load.*.e2e_p99_ms": {"at_most": 800.0}}
    (found,) = judgement.decide(read_report(results), rules, None)
    assert found.verdict == "INCONCLUSIVE" and "load.csv was changed after it was written" in found.reason
    good = read_report(write_results(tmp_path / "good", load=[load_row(e2e_p99_ms=100.0)]))
    (found,) = judgement.decide(good, {"load.*.e2e_p99_ms": {"max_rise": 1.0}}, read_report(results))
    assert found.verdict == "INCONCLUSIVE" and "load.csv was changed" in found.reason
    damaged = write_results(tmp_path / "damaged", accuracy={"last_token_accuracy": (0.5, 0.1)})
    (damaged / "evaluation" / "lambada" / "metrics.json").write_text("{")
    (found,) = judgement.decide(read_report(damaged), {NAME: {"at_least": 0.1}}, None)
    assert found.verdict == "INCONCLUSIVE" and "the file is damaged" in found.reason


def test_provenance_names_the_samples_that_were_taken(tmp_path: Path) -> None:
    results = write_results(tmp_path / "now", accuracy={"last_token_accuracy": (0.4, 0.1)})
    metrics = results / "evaluation" / "lambada" / "metrics.json"
    content = json.loads(metrics.read_text())
    content |= {"samples": 40, "data": {"file": "t.jsonl", "sha256": "5" * 64, "known_as": "LAMBADA's first 200 texts"}}
    metrics.write_text(json.dumps(content))
    facts = describe_provenance(collect_findings(results, "demo", results / "none.json")).rows
    (data,) = (fact[1] for fact in facts if fact[0] == "Data of lambada")
    assert data.endswith("(LAMBADA's first 200 texts), 40 samples were taken")


def test_the_headline_comes_from_a_valid_point_and_the_terminal_shows_goodput() -> None:
    rows = [
        load_row(4, output_tokens_per_s=90.0, goodput_requests_per_s=3.5, e2e_p50_ms=7.0),
        load_row(64, output_tokens_per_s=900.0, goodput_requests_per_s=4.5, e2e_p50_ms=9.0, failed_requests=5),
    ]
    load = Benchmark("load", Path(), LOAD_TABLE, tuple(rows), True)
    (sentence,) = speed_sentences([load])
    assert "up to 90.00 tokens/s (concurrency 4" in sentence
    (sentence,) = speed_sentences([dataclasses.replace(load, rows=(rows[1],))])
    assert "no point is VALID, this one: 5 requests failed" in sentence
    (table,) = brief_tables(load)
    column = table.columns.index("Goodput, requests/s")
    assert [row[column] for row in table.rows] == ["3.50", "4.50"]
