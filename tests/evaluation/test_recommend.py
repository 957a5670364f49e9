"""Which configuration to run, by hand-made points, and the override file in Hydra's own hands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import hydra
import pytest
from support.measurements.results_maker import load_row, static_row, write_results

from evaluation import recommend
from evaluation.report.document import pareto_plots
from evaluation.report.ranking import DeploymentCandidate, keeps_budget, pareto_front, rank
from evaluation.speed.tables.table import LOAD_TABLE
from handover.errors import ConfigError
from launcher.config.schema import PROJECT_DIR, register, to_typed


def point(tokens: float, user: float, e2e_p95_ms: float | None = 1.0, **changes: object) -> DeploymentCandidate:
    base = DeploymentCandidate("s", "b", "60/20", "l", {}, tokens, tokens, user, None, {"e2e_p95_ms": e2e_p95_ms})
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_the_pareto_front_keeps_what_nothing_beats_in_both() -> None:
    points = [point(10, 5), point(20, 4), point(15, 4), point(5, 5), point(30, 1), point(25, 1), point(20, 2)]
    front = [(c.tokens_per_s_per_gpu, c.tokens_per_s_per_user) for c in pareto_front(points)]
    assert front == [(30, 1), (20, 4), (10, 5)]
    assert pareto_front([]) == []


def test_points_of_which_none_is_valid_have_names_but_no_line() -> None:
    points = [point(10, 5, load="1 server", validity_reasons="noise"), point(20, 4, load="2 servers")]
    (plot,) = pareto_plots(points, "front")
    assert "No point beats those on the line" in plot.caption and ">1 server<" not in plot.svg
    (plot,) = pareto_plots([dataclasses.replace(each, validity_reasons="noise") for each in points], "front")
    assert "No point is valid." in plot.caption and ">1 server<" in plot.svg and ">2 servers<" in plot.svg


def test_offline_takes_the_highest_throughput_and_online_the_highest_within_the_budget() -> None:
    points = [
        point(10, 5, 100),
        point(40, 1, 900),
        point(20, 3, 400),
        point(30, 2, None),
        point(25, 2, 300, failed_requests=1),
    ]
    (offline,) = rank(points, "offline", {}, 95, 2)
    assert [c.tokens_per_s for c in offline.best] == [40, 30]
    assert offline.deviation(offline.best[1]) == pytest.approx(-0.25)
    (online,) = rank(points, "online", {"e2e": 500}, 95, 5)
    assert [c.tokens_per_s for c in online.best] == [20, 10]
    assert (online.considered, online.within_budget) == (5, 2)


def test_a_latency_that_was_not_observed_keeps_no_budget() -> None:
    assert keeps_budget(point(1, 1, 100), {"e2e": 100}, 95)
    assert not keeps_budget(point(1, 1, 100), {"e2e": 100}, 99)
    assert not keeps_budget(point(1, 1, 100), {"e2e": 100, "ttft": 1000}, 95)


def test_different_lengths_do_not_compete() -> None:
    rankings = rank([point(10, 5), point(99, 9, workload="8/8")], "offline", {}, 95, 5)
    assert [(r.workload, len(r.best)) for r in rankings] == [("60/20", 1), ("8/8", 1)]


def deployments(root: Path) -> None:
    """Two deployments of one sweep: two ranks are faster at once and slower per GPU."""
    figures = {"output_tokens_per_s_per_user": 50.0, "ttft_p95_ms": 90.0}
    one = {"output_tokens_per_s": 100.0, "output_tokens_per_s_per_gpu": 100.0, "e2e_p95_ms": 700.0, **figures}
    two = {"output_tokens_per_s": 150.0, "output_tokens_per_s_per_gpu": 75.0, "e2e_p95_ms": 300.0, **figures}
    write_results(root / "tp1", load=[load_row(4, **one)], static=[static_row(4, [1000.0])])
    write_results(
        root / "tp2",
        load=[load_row(8, tensor_para_size="2", max_batch_size=32, int8_mode="1", **two)],
    )


def test_results_of_several_deployments_meet_in_one_recommendation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployments(tmp_path / "sweep")
    (tmp_path / "slos.yaml").write_text("slos: {e2e_ms: 500, ttft_ms: 100}\n")
    recommend.main([str(tmp_path / "sweep"), f"--slos={tmp_path / 'slos.yaml'}", f"--output={tmp_path / 'out'}"])
    printed = capsys.readouterr().out
    assert "+recommended=online" in printed
    content = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    offline, online = content["rankings"]
    assert [c["tokens_per_s"] for c in offline["best"]] == [150.0, 100.0, 80.0]  # 4 x 20 tokens in 1 s
    assert [c["load"] for c in online["best"]] == ["concurrency 8"]
    assert offline["best"][1]["deviation"] == pytest.approx(-1 / 3)
    assert "| concurrency 8 | 150.0 |" in (tmp_path / "out" / "recommendation.md").read_text()


def test_the_override_file_is_ready_to_run(tmp_path: Path) -> None:
    deployments(tmp_path / "sweep")
    recommend.main([str(tmp_path / "sweep"), f"--output={tmp_path / 'out'}"])
    assert not (tmp_path / "out" / "recommended" / "online.yaml").exists()
    register()
    overrides = [f"hydra.searchpath=[file://{tmp_path / 'out'}]", "+recommended=offline"]
    with hydra.initialize_config_dir(str(PROJECT_DIR / "conf"), version_base="1.3"):
        config = to_typed(hydra.compose("config", overrides=overrides))
    assert config.export.model.tensor_model_parallel_size == 2
    assert config.export.triton_deployment.max_batch_size == 32
    assert str(config.export.triton_deployment.data_type) == "fp32"
    assert config.export.triton_deployment.int8_mode and not config.export.triton_deployment.decoupled
    assert config.export.run.model_train_name == "demo"
    assert "demo, TP 2" in (tmp_path / "out" / "recommendation.md").read_text()


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"requests_per_s": 15.0, "offered_requests_per_s": 30.0, "backlog_at_end": 90.0}, "overloaded: 15 requests/s"),
    ({"requests_per_s": 15.0}, "overloaded: 15 requests/s were answered of 30"),
    ({"slo_verdict": "exceeded", "slo_limit": "backlog"}, "the SLOs are exceeded (backlog)"),
    ({"slo_verdict": "undecided", "is_stable": False, "slo_limit": "e2e"}, "undecided whether the SLOs hold (e2e)"),
    ({"is_stable": False}, "the repeats did not agree"),
    ({"arrival": "trace", "is_stable": False}, "the trace was not replayed to its end"),
    ({"failed_requests": 2}, "2 requests failed"),
    ({"is_random_weights": True}, "the weights are random"),
]


@pytest.mark.parametrize(("changes", "reason"), UNFIT, ids=[reason for _, reason in UNFIT])
def test_a_row_whose_figures_are_not_to_be_relied_on_is_recommended_for_no_goal(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    good: dict[str, Any] = {"output_tokens_per_s_per_user": 5.0, "output_tokens_per_s_per_gpu": 5.0, "e2e_p95_ms": 50.0}
    unfit = load_row(rate=30.0, output_tokens_per_s=900.0, **(good | changes))
    fit = load_row(rate=8.0, output_tokens_per_s=100.0, requests_per_s=8.1, offered_requests_per_s=8.3, **good)
    write_results(tmp_path / "run", load=[fit, unfit])
    (tmp_path / "slos.yaml").write_text("slos: {e2e_ms: 300}\n")
    recommend.main([str(tmp_path / "run"), f"--slos={tmp_path / 'slos.yaml'}", f"--output={tmp_path / 'out'}"])
    content = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert [[c["load"] for c in ranking["best"]] for ranking in content["rankings"]] == [["8 requests/s"]] * 2
    assert [c["load"] for c in content["pareto_front"]] == ["8 requests/s"]
    assert "left out as not valid: 1" in (tmp_path / "out" / "recommendation.md").read_text()
    table = LOAD_TABLE.read(tmp_path / "run" / "benchmark" / "load" / "load.csv")
    assert [row.validity for row in table] == ["VALID", "INVALID"]
    assert reason in table[1].validity_reasons


def test_no_point_within_the_budget_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deployments(tmp_path / "sweep")
    (tmp_path / "slos.yaml").write_text("slos: {e2e_ms: 1}\npercentile: 50\n")
    recommend.main([str(tmp_path / "sweep"), f"--slos={tmp_path / 'slos.yaml'}", f"--output={tmp_path / 'out'}"])
    assert "None of 3 measured points keeps the budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slos: {tfft_ms: 1}", "did you mean 'ttft_ms'"),
        ("slos: {ttft_ms: -1}", "is no limit"),
        ("slos: {ttft_ms: 1}\npercentile: 42", "legal: 50, 90, 95, 99"),
        ("x: 1", "has no slos"),
    ],
)
def test_a_damaged_budget_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "slos.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        recommend.read_budget(tmp_path / "slos.yaml")
    assert message in str(raised.value)


def test_nothing_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measured point"):
        recommend.main([str(tmp_path), f"--output={tmp_path / 'out'}"])
