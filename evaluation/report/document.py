"""The report as data for its templates: the same for the page and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from evaluation.report.benchmarks import Benchmark
from evaluation.report.data import Evaluation, Findings
from evaluation.report.formatting import TextTable
from evaluation.report.judgement import GO, Judgement
from evaluation.report.page import Plot
from evaluation.report.ranking import (
    RANKING_COLUMNS,
    Budget,
    DeploymentCandidate,
    find_candidates,
    pareto_front,
    rank_all,
    ranking_table,
)
from evaluation.report.tables import NUMERIC, benchmark_tables, failed_points, group_by_workload
from evaluation.report.text import (
    ACCURACY_COLUMNS,
    ANSWERED,
    BASELINE_COLUMNS,
    GATE_COLUMNS,
    STAGE_COLUMNS,
    accuracy_cells,
    describe_provenance,
    relative_path,
    stage_cells,
    summarise_findings,
    verdict_sentence,
)
from evaluation.speed.tables.figures import DISTRIBUTIONS
from evaluation.speed.tables.table import CLOSED, OPEN

_NUMERIC = NUMERIC | {*RANKING_COLUMNS[1:-1], *BASELINE_COLUMNS, "Value", "95% interval", "Samples", "Time"}
_LOADS = ((CLOSED, "requests in flight"), (OPEN, "requests per second"))
_SHOWN = tuple(each for each in DISTRIBUTIONS if each.name in ("ttft", "itl", "e2e"))


def describe_report(findings: Findings, results: Path, judgement: Judgement | None = None) -> dict[str, Any]:
    """Describe the whole report by the names that the templates ``report.html`` and ``report.md`` use."""
    checks = judgement.worst_first if judgement is not None else ()
    gate = tuple((check.figure, check.rule, check.verdict, check.reason) for check in checks)
    stages = tuple(stage_cells(outcome, results) for outcome in findings.stages)
    bad = [outcome for outcome in findings.stages if outcome.is_bad]
    return {
        "title": findings.title,
        "summary": summarise_findings(findings, judgement),
        "remarks": [*findings.remarks, *(judgement.remarks if judgement else ())],
        "bad_stages": [replace(outcome, log=relative_path(outcome.log, results)) for outcome in bad],
        "gate": TextTable("", GATE_COLUMNS, gate),
        "gate_verdict": judgement.verdict if judgement is not None else "",
        "gate_failed": [check for check in gate if check[2] != GO],
        "judged": [(evaluation.title, evaluation.verdict) for evaluation in findings.evaluations if evaluation.verdict],
        "evaluations": [_accuracy(each, findings.title, judgement) for each in _by_task(findings.evaluations)],
        "benchmarks": [_benchmark(each, f"benchmark{number}") for number, each in enumerate(findings.benchmarks)],
        **_recommendation(findings, results),
        "stages": TextTable("", STAGE_COLUMNS, stages),
        "facts": describe_provenance(findings),
        "numeric": _NUMERIC,
    }


def _drawing() -> ModuleType:
    """Import what draws: matplotlib takes half of the time of a report that has no plot."""
    from evaluation.report import plots

    return plots


def pareto_plots(candidates: Sequence[DeploymentCandidate], name: str) -> list[Plot]:
    """Draw the Pareto front of each workload with more than one measured point; ids begin with the name."""
    plots = []
    for number, workload in enumerate(dict.fromkeys(candidate.workload for candidate in candidates)):
        known = [each for each in candidates if each.tokens_per_s_per_gpu is not None]
        same = [candidate for candidate in known if candidate.workload == workload]
        if len(same) > 1:
            is_any = bool(pareto_front(same))
            best = "No point beats those on the line; faint ones are beaten." if is_any else "No point is valid."
            caption = f"{workload} tokens: what a GPU gives over what a user gets. {best}"
            plots.append(Plot(_drawing().draw_pareto(same, f"{name}-{number}"), caption))
    return plots


def _by_task(evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Put what a model's adapters reach in a task behind what the model alone does."""
    found: list[list[Evaluation]] = []
    for evaluation in evaluations:
        same = [each for each in found if evaluation.adapter and each[0].task == evaluation.task]
        same[0].append(evaluation) if same else found.append([evaluation])
    return found


def _accuracy(evaluations: Sequence[Evaluation], model: str, judgement: Judgement | None) -> Mapping[str, Any]:
    """Describe the figures of one task; ``verdicts`` has that of each change, None without a baseline.

    Where adapters answered, each figure has a row for each of them beside that of the model.
    """
    baseline = judgement if judgement is not None and judgement.baseline is not None else None
    has_adapters = any(evaluation.adapter for evaluation in evaluations)
    names = list(dict.fromkeys(metric.name for evaluation in evaluations for metric in evaluation.metrics))
    found = [(evaluation, metric) for evaluation in evaluations for metric in evaluation.metrics]
    rows, verdicts = [], []
    for evaluation, metric in sorted(found, key=lambda pair: names.index(pair[1].name)):
        name, *cells, definition = accuracy_cells(metric)
        verdict = None
        if baseline is not None:
            before, change, verdict = baseline.against_baseline(f"{evaluation.name}.{metric.name}")
            cells += [before, change]
        rows.append((name, *([evaluation.adapter or model] if has_adapters else []), *cells, definition))
        verdicts.append(verdict)
    columns = (*(ANSWERED if has_adapters else ()), *ACCURACY_COLUMNS[1:-1], *(BASELINE_COLUMNS if baseline else ()))
    return {
        "task": evaluations[0].task,
        "sentence": " ".join(filter(None, map(verdict_sentence, evaluations))),
        "table": TextTable("", (ACCURACY_COLUMNS[0], *columns, ACCURACY_COLUMNS[-1]), tuple(rows)),
        "verdicts": verdicts,
    }


def _benchmark(benchmark: Benchmark, name: str) -> Mapping[str, Any]:
    return {
        "heading": f"{'Under load' if benchmark.is_load else 'Latency and throughput'}: {benchmark.name}",
        "plots": _load_plots(benchmark, name) if benchmark.is_load else _static_plots(benchmark, name),
        "tables": benchmark_tables(benchmark, benchmark.rows),
        "failures": failed_points(benchmark),
    }


def _static_plots(benchmark: Benchmark, name: str) -> list[Plot]:
    rows = benchmark.measured
    if not rows:
        return []
    latency, throughput = (
        _drawing().draw_latency(rows, f"{name}-latency"),
        _drawing().draw_throughput_over_latency(rows, f"{name}-throughput"),
    )
    return [
        Plot(latency, "Latency over batch size. Points are means, whiskers reach from p50 to p99."),
        Plot(throughput, "Throughput over latency. The numbers at the points are batch sizes; up and left is better."),
    ]


def _load_plots(load: Benchmark, name: str) -> list[Plot]:
    plots = []
    for mode, what in _LOADS:
        rows = [row for row in load.measured if row.mode == mode]
        if len({row.level for row in rows}) > 1:
            caption = f"Throughput over {what}. Bars are 95% intervals over the repeats, at most 100%."
            plots.append(Plot(_drawing().draw_throughput(rows, f"{name}-{mode}-throughput"), caption))
            caption = f"Latency over {what}. Points are medians, bars reach to p99."
            plots.append(Plot(_drawing().draw_latency(rows, f"{name}-{mode}-latency"), caption))
    for number, (workload, points) in enumerate(group_by_workload(load.measured).items()):
        # TTFT and ITL where answers were streamed, end-to-end latency where they were not.
        is_streaming = any(row.is_streaming for row in points)
        for shown in (each for each in _SHOWN if (each.name == "e2e") != is_streaming):
            samples = _drawing().read_samples(load.directory, points, shown.name)
            if samples:
                svg = _drawing().draw_distribution(samples, f"{name}-{number}-{shown.name}", shown.title)
                plots.append(Plot(svg, f"{shown.title} at {workload} tokens, every request. Further left is better."))
    return plots


def _recommendation(findings: Findings, results: Path) -> Mapping[str, Any]:
    """Show what to run for throughput alone, and what each point is worth to a user and to the operator."""
    candidates = find_candidates(findings, str(results))
    loads = [benchmark for benchmark in findings.benchmarks if benchmark.is_load]
    if len(candidates) < 2 or not loads:
        return {"fronts": [], "rankings": []}
    budget = Budget({name: limit for load in loads for name, limit in load.slos.items()})
    rankings = [ranking_table(ranking, budget) for ranking in rank_all(candidates, budget)]
    return {"fronts": pareto_plots(candidates, "pareto"), "rankings": rankings}
