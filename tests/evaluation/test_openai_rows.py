"""Report, recommendation, comparison and gate over rows of an OpenAI API: what is not known of it is missing."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.measurements.results_maker import load_row, static_row, write_results

from evaluation import compare, gate, recommend
from evaluation.report.data import collect_findings
from evaluation.report.document import pareto_plots
from evaluation.report.engine_tables import speed_figure
from evaluation.report.ranking import find_candidates
from evaluation.speed.tables.table import Row

FOREIGN: dict[str, Any] = {
    **{"engine": "vllm", "tensor_para_size": "", "pipeline_para_size": "", "weight_data_type": "", "data_type": ""},
    **{"model": "org/m", "triton_model": "org/m", "endpoint_kind": "openai", "model_digest": "", "gpu": ""},
}


def foreign_load(concurrency: int, rate: float, **changes: Any) -> Row:
    figures = {
        **{
            "output_tokens_per_s": rate,
            "output_tokens_per_s_per_user": rate / concurrency,
            "requests_per_s": rate / 20,
        },
        **{"e2e_p95_ms": 100.0 * concurrency, "ttft_p95_ms": 10.0, "output_tokens_per_s_per_gpu": None},
    }
    return load_row(concurrency, **{**FOREIGN, **figures, **changes})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    static = [static_row(1, [10.0, 11.0, 12.0], **FOREIGN), static_row(4, [20.0, 21.0, 22.0], **FOREIGN)]
    return write_results(tmp_path / "run", static=static, load=[foreign_load(1, 200.0), foreign_load(4, 600.0)])


def test_what_follows_from_the_number_of_gpus_is_missing(results: Path) -> None:
    rows = [row for found in findings(results).benchmarks for row in found.measured]
    assert len(rows) == 4
    assert {row.gpus for row in rows} == {None}
    assert {speed_figure(row, "output_tokens_per_s_per_gpu") for row in rows} == {None}
    assert static_row(1, [10.0]).gpus == 1


def findings(results: Path) -> Any:
    return collect_findings(results, "run", results / "logs" / "stages.json")


def test_a_recommendation_ranks_them_without_settings_that_nothing_is_known_of(results: Path, tmp_path: Path) -> None:
    (tmp_path / "slos.yaml").write_text("slos: {e2e_ms: 200}\n")
    recommend.main([str(results), f"--slos={tmp_path / 'slos.yaml'}", f"--output={tmp_path / 'advice'}"])
    content = json.loads((tmp_path / "advice" / "recommendation.json").read_text())
    goals = {ranking["goal"]: ranking for ranking in content["rankings"]}
    assert goals["offline"]["best"][0]["load"] == "batch 4"  # 80 tokens in 21 ms
    assert [best["load"] for best in goals["online"]["best"]] == ["batch 4", "batch 1", "concurrency 1"]
    assert content["pareto_front"] == []
    assert {str(best["tokens_per_s_per_gpu"]) for best in goals["offline"]["best"]} == {"None"}
    assert {json.dumps(best["settings"]) for best in goals["offline"]["best"]} == {"{}"}
    text = (tmp_path / "advice" / "recommendation.md").read_text()
    assert "org/m, vllm" in text and "batch 16" not in text
    assert list((tmp_path / "advice" / "recommended").iterdir()) == [], "no command deploys a server of somebody else"


def test_a_server_of_somebody_else_is_not_deployed_and_an_engine_of_ours_is_named(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recommend.main([str(results), f"--output={tmp_path / 'advice'}"])
    printed = capsys.readouterr().out
    assert "main.py" not in printed
    assert "offline: org/m, vllm was not deployed from here: no file deploys it" in printed
    ours = [load_row(4, engine="vllm", endpoint_kind="openai", output_tokens_per_s=9.0, e2e_p95_ms=1.0)]
    figures = {"output_tokens_per_s_per_user": 9.0}
    write_results(tmp_path / "ours", load=[dataclasses.replace(ours[0], figures={**ours[0].figures, **figures})])
    recommend.main([str(tmp_path / "ours"), f"--output={tmp_path / 'of_ours'}"])
    override = yaml.safe_load((tmp_path / "of_ours" / "recommended" / "offline.yaml").read_text())
    assert override["deployment"] == {"engine": "vllm"}


def test_a_report_without_a_title_has_the_name_of_what_was_measured(results: Path, tmp_path: Path) -> None:
    assert collect_findings(results, "", results / "stages.json").title == "org/m"
    named = write_results(tmp_path / "named", load=[foreign_load(1, 200.0, deployment_label="the new one")])
    assert collect_findings(named, "", named / "stages.json").title == "the new one"
    (said,) = [remark for remark in findings(named).remarks if "GPUs" in remark]
    assert "How many GPUs serve benchmark load is not known" in said and "benchmark.gpus" in said


def test_no_front_is_drawn_without_gpus(results: Path) -> None:
    candidates = find_candidates(findings(results), "run")
    assert len(candidates) == 4
    assert pareto_plots(candidates, "pareto") == []


def test_the_gate_judges_what_is_there_and_does_not_pass_what_is_missing(results: Path, tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("thresholds:\n  load.60-20_concurrency1.e2e_p95_ms: {at_most: 150}\n")
    gate.main([str(results), f"--thresholds={tmp_path / 'gate.yaml'}"])
    limits = "thresholds:\n  load.60-20_concurrency1.output_tokens_per_s_per_gpu: {at_least: 1}\n"
    (tmp_path / "gate.yaml").write_text(limits)
    with pytest.raises(SystemExit) as ended:
        gate.main([str(results), f"--thresholds={tmp_path / 'gate.yaml'}"])
    assert ended.value.code != 0


def test_a_comparison_has_the_figures_that_both_have(results: Path, tmp_path: Path) -> None:
    ours = [
        load_row(4, output_tokens_per_s=500.0, e2e_p95_ms=380.0, output_tokens_per_s_per_gpu=500.0, requests_per_s=25.0)
    ]
    other = write_results(tmp_path / "ours", load=ours)
    compare.main([str(other), str(results), f"--output={tmp_path / 'compared'}"])
    with next((tmp_path / "compared").glob("*.csv")).open(newline="") as stream:
        rows = {cells[0]: cells for cells in csv.reader(stream)}
    assert rows["load.60-20_concurrency4.output_tokens_per_s"][1:].count("600") == 1
    assert "600" not in rows.get("load.60-20_concurrency4.output_tokens_per_s_per_gpu", [])
