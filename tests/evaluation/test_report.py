"""The report over what a run left: complete, failed, damaged and hostile."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evaluation.benchmark import with_latencies
from evaluation.report import write as report
from evaluation.report.measurements import read_report
from evaluation.speed.tables.table import STATIC_TABLE, Row
from evaluation.tasks.lambada.score import SampleScore, summarise
from handover.manifest import FileRecord, Manifest, record_files

ADDED = ("int8_mode", "versions")  # columns that Slipway 0.1.0 did not write
HOSTILE = 'x"><script>alert(1)</script> | `a` [b](c) *d* & €'


def make_row(batch_size: int, **changes: object) -> Row:
    row = Row(
        "demo", "fastertransformer", "slipway", "2", "1", "fp16", "fp32", "60/20",
        batch_size=batch_size, warmup_requests=1, repeats=3,
        model_digest="sha256:m", commit="c0ffee", cpu="CPU", cores=2, memory_bytes=8_000_000_000,
        timestamp="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    if "error" not in changes:
        row = with_latencies(row, [batch_size * 10_000_000] * 3)
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


class Run:
    """A results directory and what the runner wrote about its stages."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.stages = results / "logs" / "stages.json"
        self.output = results / "report.partial"
        self.stages.parent.mkdir(parents=True)

    def evaluate(
        self, directory: str = "lambada", failed: bool = False, digest: str = "sha256:m", **model: str
    ) -> None:
        scores = [SampleScore(i, "word", 9, 1, 0, True, i % 2 == 0, i % 4 == 0, -1.0) for i in range(8)]
        if failed:
            scores[0] = SampleScore(0, "word", 9, 1, 0, error="refused")
        content = {
            "task": "lambada",
            "metrics": [metric.to_json() for metric in summarise(scores)],
            "samples": 8,
            "failed": int(failed),
            "cut_contexts": 0,
            "data": {"file": "d.jsonl", "sha256": "5" * 64, "known_as": "a known file"},
            "model": {"model": "fastertransformer", "engine": "slipway", "model_digest": digest, "data_type": "fp32"}
            | model,
            "commit": "c0ffee",
            "timestamp": "2026-01-01T00:00:00+00:00",
        }
        (self.results / "evaluation" / directory).mkdir(parents=True)
        (self.results / "evaluation" / directory / "metrics.json").write_text(json.dumps(content))

    def benchmark(self, *rows: Row, directory: str = "static") -> None:
        (self.results / "benchmark" / directory).mkdir(parents=True)
        STATIC_TABLE.write(self.results / "benchmark" / directory / "benchmark.csv", rows)

    def record(self, **states: str) -> None:
        entries = [
            {
                "stage": stage,
                "name": f"{stage}_demo",
                "state": state,
                "elapsed_s": 3.0,
                "error": f"{stage}: it broke\n  hint: mend it" if state == "failed" else "",
                "log": str(self.results / "logs" / f"{stage}.log"),
            }
            for stage, state in states.items()
        ]
        self.stages.write_text(json.dumps(entries))

    def report(self, title: str = "demo") -> tuple[str, str]:
        report.main(
            [f"--results={self.results}", f"--output={self.output}", f"--title={title}", f"--stages={self.stages}"]
        )
        return (self.output / "report.md").read_text(), (self.output / "report.html").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "results")


class Page(HTMLParser):
    """Collects tags, visible text, and every address that the page refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_complete_run_is_reported_by_name_with_every_figure(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.evaluate()
    run.benchmark(*(make_row(size) for size in (1, 2, 4)))
    run.record(convert="skipped", deploy="done", evaluate="done", benchmark="done", report="running")
    markdown, html = run.report()
    printed = capsys.readouterr().out
    # 8 hits of 8; 4 of 8; 2 of 8; log probability -1 each; batch 4 takes 40 ms: 100 sequences and 2000 tokens a second
    figures = ("last_token_accuracy", "100.00%", "last_word_accuracy_greedy", "50.00%", "lambada_openai_accuracy")
    for text in (*figures, "25.00%", "lambada_openai_perplexity", "2.72", "40.0", "100.0", "2,000"):
        for where in (markdown, Page(html).text, printed):
            assert text in where, text
    assert "What to know first" not in html
    assert "running" not in html, "the report does not report on itself"
    for text in ("c0ffee", "a known file", "fp16 weights", "tensor parallelism 2", "2 cores"):
        assert text in Page(html).text


def test_adapters_stand_beside_their_model_by_name(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.evaluate()
    run.evaluate("lambada_sql", failed=True, adapter="sql")
    markdown, _ = run.report()
    rows = [line.split(" | ")[:3] for line in markdown.splitlines() if line.startswith("| last_token_accuracy")]
    assert rows == [["| last_token_accuracy", "demo", "100.00%"], ["| last_token_accuracy", "sql", "100.00%"]]
    assert markdown.count("## Accuracy: lambada") == 1 and "On lambada with adapter sql: " in markdown
    assert "lambada with adapter sql: demo" in capsys.readouterr().out
    figures = read_report(run.results).figures
    assert figures["lambada.last_token_accuracy"].doubt == ""
    assert figures["lambada_sql.last_token_accuracy"].doubt == "1 of 8 samples have no score"


def test_the_last_line_is_the_path_that_the_page_will_have(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.evaluate()
    run.report()
    assert capsys.readouterr().out.splitlines()[-1] == str(run.results / "report" / "report.html")


def test_the_page_is_one_file_that_asks_for_nothing(run: Run) -> None:
    run.benchmark(make_row(1), make_row(2))
    run.benchmark(make_row(1), make_row(2), directory="second")
    _, html = run.report()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert re.findall(r"url\((?!#)", html) == []
    assert "@import" not in html
    assert len(page.ids) == len(set(page.ids)), "ids must be unique over all plots"
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert page.tags.count("svg") == 4


def test_plots_follow_the_pages_colours(run: Run) -> None:
    run.benchmark(make_row(1), make_row(2))
    _, html = run.report()
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ElementTree.fromstring(svg)
        assert "var(--series-1)" in svg
        assert "#010a" not in svg
        assert "Latency of a request, ms" in svg
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_a_failed_evaluation_is_said_first_with_its_log(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.benchmark(make_row(1))
    run.record(deploy="done", evaluate="failed", benchmark="done")
    markdown, html = run.report()
    printed = capsys.readouterr().out
    text = Page(html).text
    for where in (markdown, text, printed):
        assert "There are no accuracy figures" in where
        assert "logs/evaluate.log" in where
    for where in (markdown, text):
        assert "evaluate: it broke" in where
        assert "hint: mend it" in where


def test_of_several_evaluations_each_failed_one_has_its_name_and_reason(run: Run) -> None:
    run.evaluate()
    entry = {"stage": "evaluate", "name": "n", "elapsed_s": 1.0}
    states = {"lambada": "done", "squad": "failed", "parity": "failed"}
    entries = [
        entry | {"state": state, "error": f"{name} broke" if state == "failed" else "", "log": f"evaluate_{name}.log"}
        for name, state in states.items()
    ]
    run.stages.write_text(json.dumps(entries))
    for shown in run.report():
        assert "Stage evaluate squad: failed. Stage evaluate parity: failed." in shown
        assert "squad broke" in shown and "parity broke" in shown
        assert "evaluate lambada" in shown and "lambada broke" not in shown


def test_a_run_that_failed_at_once_still_has_a_report(run: Run) -> None:
    run.record(convert="failed", export="not run", deploy="not run", evaluate="interrupted", benchmark="not run")
    markdown, html = run.report()
    for where in (markdown, Page(html).text):
        assert "There are no accuracy figures" in where
        assert "There are no latency figures" in where
        assert "Stage benchmark: not run" in where
        assert "Stage evaluate: interrupted" in where


def test_nothing_at_all_still_gives_a_report(run: Run) -> None:
    markdown, _ = run.report()
    assert "the runner left no record" in markdown


def test_failed_points_are_listed_with_their_reason(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.benchmark(make_row(1), make_row(256, error="out of memory", failed_requests=1))
    markdown, html = run.report()
    for where in (markdown, Page(html).text, capsys.readouterr().out):
        assert "out of memory" in where
        assert "1 of 2 points of benchmark static failed" in where
    assert "| 256 |" not in markdown


def test_a_benchmark_without_any_figure_has_no_plot(run: Run) -> None:
    run.benchmark(make_row(1, error="refused", failed_requests=1))
    _, html = run.report()
    assert "svg" not in Page(html).tags


def test_missing_samples_are_said(run: Run) -> None:
    run.evaluate("lambada.partial", failed=True)
    markdown, _ = run.report()
    assert "1 of 8 samples of lambada have no score" in markdown
    assert "did not finish: its figures are not final" in markdown
    assert "7 (1 failed)" in markdown


@pytest.mark.parametrize("is_later", [True, False])
def test_an_evaluation_that_failed_later_hides_what_was_published_before(run: Run, is_later: bool) -> None:
    run.evaluate()
    run.evaluate("lambada.partial", failed=True)
    file = run.results / "evaluation" / "lambada.partial" / "metrics.json"
    os.utime(file, ns=(0, (run.results / "evaluation" / "lambada" / "metrics.json").stat().st_mtime_ns + is_later))
    markdown, _ = run.report()
    assert ("have no score" in markdown) == is_later


def test_a_benchmark_that_is_under_way_does_not_hide_a_published_one(run: Run) -> None:
    run.benchmark(make_row(1), make_row(8))
    table = run.results / "benchmark" / "static" / "benchmark.csv"
    (table.parent.parent / "static.partial").mkdir()
    STATIC_TABLE.write(table.parent.parent / "static.partial" / "benchmark.csv", [make_row(1)])
    markdown, _ = run.report()
    assert "did not finish" not in markdown and "| 8 |" in markdown


def test_what_was_replaced_is_not_reported(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in ("lambada", "lambada.replaced-20260101-000000"):
        run.evaluate(directory)
    run.benchmark(make_row(1))
    run.benchmark(make_row(77), directory="static.replaced-20260101-000000x")
    markdown, page = run.report()
    assert markdown.count("## Accuracy") == 1 and "77" not in markdown.split("## Stages")[0]
    assert page.count("Accuracy: lambada") == 1 and "replaced" not in page


def test_a_table_of_slipway_0_1_is_still_read(run: Run) -> None:
    run.evaluate()
    run.benchmark(make_row(1), make_row(2))
    path = run.results / "benchmark" / "static" / "benchmark.csv"
    with path.open(newline="") as stream:
        rows = [{name: cell for name, cell in row.items() if name not in ADDED} for row in csv.DictReader(stream)]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert [(row.batch_size, row.versions) for row in STATIC_TABLE.read(path)] == [(1, ""), (2, "")]
    assert "is damaged" not in run.report()[0]


def test_figures_of_different_models_are_told_apart(run: Run) -> None:
    run.evaluate(digest="sha256:other")
    run.benchmark(make_row(1))
    markdown, _ = run.report()
    assert "not all of one model" in markdown


@pytest.mark.parametrize("damage", ["changed", "emptied", "nul-filled", "unlisted", "manifest"])
def test_figures_that_were_changed_after_they_were_published_are_left_out_by_name(run: Run, damage: str) -> None:
    run.evaluate()
    run.benchmark(make_row(1))
    directory = run.results / "evaluation" / "lambada"
    file = directory / "metrics.json"
    Manifest("evaluation", record_files(directory)).write(directory)
    assert "12.50%" in run.report()[0] or "50.00%" in run.report()[0]
    if damage == "changed":
        file.write_text(file.read_text().replace("0.5", "0.9"))
    elif damage in ("emptied", "nul-filled"):
        file.write_bytes(bytes(file.stat().st_size if damage == "nul-filled" else 0))
    elif damage == "unlisted":
        Manifest("evaluation", ()).write(directory)
    else:
        (directory / "manifest.json").write_text("null")
    for text in run.report():
        assert "The figures of lambada are not those that were measured, and left out" in text
        assert "last_token_accuracy" not in text
        assert "10.00" in text, "the benchmark's figures stay"


def test_figures_of_another_model_than_the_repositorys_are_told_apart(run: Run) -> None:
    run.benchmark(make_row(1))
    (run.results / "model_repo").mkdir()
    made_from = {"ft_checkpoint": {"digest": "sha256:ft"}}
    Manifest("model_repository", (FileRecord("a", 1, "sha256:a"),), made_from).write(run.results / "model_repo")
    markdown, _ = run.report()
    assert "not all of one model" in markdown
    assert "sha256:ft" in markdown


@pytest.mark.parametrize("name", ["metrics.json", "benchmark.csv", "stages.json"])
def test_damaged_results_are_left_out_and_said(run: Run, name: str) -> None:
    run.evaluate()
    run.benchmark(make_row(1))
    run.record(deploy="done")
    (path,) = run.results.rglob(name)
    path.write_text("{ damaged")
    markdown, _ = run.report()
    assert "damaged" in markdown


def test_hostile_text_stays_text(run: Run) -> None:
    run.benchmark(make_row(1, model=HOSTILE), make_row(2, error=HOSTILE, failed_requests=1))
    run.record(evaluate="failed")
    entries = json.loads(run.stages.read_text())
    entries[0].update(error=HOSTILE, log=HOSTILE)
    run.stages.write_text(json.dumps(entries))
    markdown, html = run.report(title=HOSTILE)
    page = Page(html)
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) >= 4
    outside_code = "\n".join(line for line in markdown.splitlines() if not line.startswith("    "))
    assert "<script" not in outside_code
    assert r"\[b\](c)" in outside_code
    for line in outside_code.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 5, 6, 9), line


def test_the_report_has_a_manifest(run: Run) -> None:
    run.evaluate()
    run.report()
    manifest = Manifest.read(run.output)
    assert manifest.kind == "report"
    assert {record.path for record in manifest.files} == {"report.md", "report.html", "results.yml"}
