"""One report over several engines: its figures against pandas, and who may be ranked with whom."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from support.measurements.results_maker import load_row, write_results

from evaluation import recommend, sweep_report
from evaluation.client.openai_client import ModelCard
from evaluation.client.served_identity import identity_of
from evaluation.client.served_model import DeployedModel
from evaluation.report.comparable import COMPARABLE, group_comparable
from evaluation.report.engine_plots import Line, front_of
from evaluation.report.engine_tables import MISSING, engine_tables
from evaluation.report.formatting import show_figure
from evaluation.report.plot_style import legend_above
from evaluation.report.ranking import DeploymentCandidate, rank, ranking_title
from evaluation.report.sweep_points import read_points, short_labels
from evaluation.speed.sweep import describe_deployment
from evaluation.speed.tables.derived import derive
from evaluation.speed.tables.table import Row
from handover.endpoint import Endpoint

PARITY = json.loads((Path(__file__).resolve().parents[2] / "results/reference/demo/parity.json").read_text())
SPEED = {"slipway": 1000.0, "vllm": 900.0, "sglang": 2000.0}
RATES = (2.0, 8.0, 32.0)


def run(root: Path, engine: str, verdict: str, **changes: Any) -> dict[str, str]:
    """One engine's run: three request rates, each request's times, and a parity evaluation if it has a verdict."""
    rows = []
    for rate in RATES:
        figures = {
            f"{name}_{p}_ms": rate * k for k, name in enumerate(("ttft", "itl", "e2e"), 1) for p in ("p50", "p99")
        }
        tokens = SPEED[engine] * rate
        figures |= {
            "output_tokens_per_s": tokens,
            "output_tokens_per_s_per_gpu": tokens,
            "total_tokens_per_s": 4 * tokens,
        }
        figures |= {"output_tokens_per_s_per_user": SPEED[engine] / rate, "gpu_power_mean_watts": 600.0}
        told = {"versions": f"{engine} 1.0", "flags": f"--of-{engine}", "gpu_hour_price": 2.0, "is_streaming": True}
        rows.append(
            derive(
                load_row(None, rate, engine=engine, commit="c0ffee" * 6 + "1234-dirty", **told, **figures, **changes)
            )
        )
    results = write_results(root / engine, load=rows, accuracy={"last_token_accuracy": (0.5, 0.01)})
    for row in rows:
        requests = [{"timestamp": 0, "response_timestamps": [5_000_000 * n, 9_000_000 * n]} for n in (1, 2, 3)]
        (results / "benchmark" / "load" / row.directory).mkdir()
        profile = {"experiments": [{"requests": requests}]}
        (results / "benchmark" / "load" / row.directory / "profile_export.json").write_text(json.dumps(profile))
    if verdict:
        (results / "evaluation" / "parity").mkdir()
        content = PARITY | {"verdict": verdict, "reasons": ["greedy_agreement 0.5, limit 0.99"]}
        (results / "evaluation" / "parity" / "metrics.json").write_text(json.dumps(content))
    return {"label": f"engine {engine}", "title": "llama", "results": str(results), "error": ""}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two engines whose parity holds, and a faster one whose parity fails."""
    points = [run(tmp_path, "slipway", "HOLDS"), run(tmp_path, "vllm", "HOLDS"), run(tmp_path, "sglang", "FAILS")]
    (tmp_path / "points.json").write_text(json.dumps(points))
    return tmp_path


def test_an_engine_that_serves_something_else_is_marked_and_ranked_apart(sweep: Path) -> None:
    sweep_report.main([f"--sweep={sweep}"])
    for shown in ((sweep / "report.html").read_text(), (sweep / "report.md").read_text()):
        assert "engine sglang (not comparable)" in shown and "engine vllm (not comparable)" not in shown
        assert "engine sglang is not comparable with other engines: its parity with the checkpoint fails" in shown
        assert "Most throughput: engine slipway, 32,000 tokens/s" in shown  # sglang has 64,000
        assert "(sglang alone: not comparable with the others)" in shown
    points = pandas.read_csv(sweep / "points.csv")
    assert points.groupby("point").is_comparable.first().to_dict() == {
        "engine slipway": True,
        "engine vllm": True,
        "engine sglang": False,
    }


def test_every_figure_of_the_engines_is_that_of_the_runs_own_table(sweep: Path) -> None:
    identity, *loads = engine_tables(read_points(sweep))
    assert identity.columns[1:] == ("engine slipway", "engine vllm", "engine sglang (not comparable)")
    cells = {row[0]: row[1:] for row in identity.rows}
    assert cells["Engine"] == tuple(SPEED) and cells["Flags"] == ("--of-slipway", "--of-vllm", "--of-sglang")
    assert cells["Commit that measured"] == ("c0ffeec0ffee-dirty",) * 3
    assert cells["Parity with the checkpoint"] == ("HOLDS", "HOLDS", "FAILS")
    assert cells["lambada last_token_accuracy"] == ("50.00%",) * 3
    tables = [pandas.read_csv(sweep / engine / "benchmark" / "load" / "load.csv") for engine in SPEED]
    assert [table.caption for table in loads] == [f"60/20 tokens (in/out), {rate:g} requests/s" for rate in RATES]
    for rate, table in zip(RATES, loads, strict=True):
        points = [each[each.request_rate_per_s == rate].iloc[0] for each in tables]
        shown = {row[0]: row[1:] for row in table.rows}
        assert shown["TTFT p99, ms"] == tuple(show_figure(float(each.ttft_p99_ms)) for each in points)
        assert shown["Output tokens/s/GPU"] == tuple(show_figure(float(each.output_tokens_per_s)) for each in points)
        costs = [2.0 / 3600 / each.output_tokens_per_s * 1e6 for each in points]
        assert shown["Cost of 1M output tokens"] == tuple(map(show_figure, costs))
        joules = [600.0 / each.output_tokens_per_s for each in points]
        assert shown["Energy of an output token, J"] == tuple(map(show_figure, joules))


def test_what_one_engine_did_not_measure_is_shown_as_missing(tmp_path: Path) -> None:
    points = [run(tmp_path, "slipway", "HOLDS"), run(tmp_path, "vllm", "HOLDS", workload="9/9")]
    (tmp_path / "points.json").write_text(json.dumps(points))
    _, first, *_ = engine_tables(read_points(tmp_path))
    assert first.caption == "60/20 tokens (in/out), 2 requests/s"
    assert {row[2] for row in first.rows} == {MISSING}
    assert "Goodput, requests/s" not in [row[0] for row in first.rows]  # no load had limits


def test_the_plots_have_a_line_for_each_engine(sweep: Path) -> None:
    sweep_report.main([f"--sweep={sweep}"])
    page = (sweep / "report.html").read_text()
    for title in ("Generated tokens/s for one user", "Latency of a request, ms (p99)", "Requests per second"):
        assert title in page
    figures = [part.partition("</figure>")[0] for part in page.split("<figure")[1:]]
    assert [f.count("engine sglang (not comparable)") for f in figures] == [1] * len(figures)
    captions = [f.partition("<figcaption>")[2].partition("</figcaption>")[0] for f in figures]
    assert [c for c in captions if "every request" in c] == [
        f"{name} at 60/20 tokens, 32 requests/s, every request. Further left is better."
        for name in ("Time to first token", "Inter-token latency", "End-to-end latency")
    ]


def test_a_line_joins_what_no_other_load_beats() -> None:
    line = Line("a", True, [(1, 10), (2, 8), (1.5, 7), (3, 9), (4, 1)])
    more = front_of(line, 1)
    assert sorted(more.points) == [(1, 10), (3, 9), (4, 1)] and sorted(more.loose) == [(1.5, 7), (2, 8)]
    assert front_of(line, -1).points == [(1, 10)]


def candidate(engine: str, parity: str, tokens: float) -> DeploymentCandidate:
    return DeploymentCandidate(
        engine, "b", "60/20", "l", {}, tokens, tokens, 1.0, None, {}, engine=engine, parity=parity
    )


@pytest.mark.parametrize("parity", ["FAILS", "INCONCLUSIVE", ""])
def test_only_engines_whose_parity_holds_compete(parity: str) -> None:
    found = [candidate("slipway", "HOLDS", 1), candidate("vllm", "HOLDS", 2), candidate("sglang", parity, 9)]
    together, alone = rank(found, "offline", {}, 95, 5)
    assert [c.engine for c in together.best] == ["vllm", "slipway"] and together.group == COMPARABLE
    assert [c.engine for c in alone.best] == ["sglang"] and alone.group == "sglang"
    assert "sglang alone: not comparable" in ranking_title(alone, None)


def test_points_of_one_engine_compete_without_parity() -> None:
    found = [candidate("slipway", "", 1), candidate("slipway", "FAILS", 2)]
    assert group_comparable(found) == {COMPARABLE: found}
    (ranking,) = rank(found, "offline", {}, 95, 5)
    assert [c.tokens_per_s for c in ranking.best] == [2, 1]
    assert ranking_title(ranking, None) == "Offline, 60/20 tokens: most tokens per second"


def test_the_recommendation_of_several_engines_names_the_engine(sweep: Path) -> None:
    recommend.main([str(sweep), f"--output={sweep / 'out'}"])
    files = {file.stem: file.read_text() for file in (sweep / "out" / "recommended").glob("*.yaml")}
    assert set(files) == {"offline", "offline_sglang"}
    assert "deployment:\n  engine: slipway\n" in files["offline"]
    assert "deployment:\n  engine: sglang\n" in files["offline_sglang"]


def test_points_of_an_engine_that_was_started_again_are_kept_and_those_with_other_flags_are_not() -> None:
    def fingerprint(port: int, flags: str) -> str:
        settings = {"address": f"http://h:{port}/v1", "flags": flags}
        endpoint = Endpoint("h", openai_url=f"http://h:{port}/v1", engine="vllm", settings=settings)
        return describe_deployment(DeployedModel(endpoint), Row(triton_model="m"), ()).settings_fingerprint

    assert fingerprint(8000, "--dtype=half") == fingerprint(9000, "--dtype=half")
    assert fingerprint(8000, "--dtype=half") != fingerprint(8000, "--dtype=bfloat16")


def test_an_engine_that_this_project_has_started_keeps_its_name() -> None:
    card = ModelCard("llama", owned_by="tensorrt_llm")
    assert identity_of(Endpoint("h", engine="trtllm_serve"), card, "1.0").engine == "trtllm_serve"
    assert identity_of(Endpoint("h"), card, "1.0").engine == "tensorrt_llm"


def test_a_legend_of_addresses_stays_within_its_plot() -> None:
    figure = Figure(figsize=(7.2, 3.6))
    axes = FigureCanvasAgg(figure).figure.subplots()
    names = [f"endpoint results/mine/export_tp1_pp1_fp16_fp16_{engine}/deployment" for engine in ("a", "b", "c")]
    for name in names:
        axes.plot([1, 2], [1, 2], label=name)
    legend_above(axes, "Time to first token, ms", names)
    figure.canvas.draw()
    legend = axes.get_legend()
    assert legend is not None and legend.get_window_extent().x1 <= figure.bbox.x1


def test_columns_are_headed_by_what_differs_between_paths_and_by_given_names() -> None:
    long = ["endpoint http://a:8000/v1, TP 1", "endpoint http://b:8000/v1, TP 2"]
    assert short_labels(long) == ["endpoint a:8000, TP 1", "endpoint b:8000, TP 2"]
    files = [f"endpoint /home/me/runs/{name}/endpoint.json" for name in ("slipway", "vllm")]
    assert short_labels(files) == ["endpoint slipway", "endpoint vllm"]
    assert short_labels(["endpoint /home/me/one.json"]) == ["endpoint one.json"]
    assert short_labels(["TP 1", "TP 2, int8_mode 1"]) == ["TP 1", "TP 2, int8_mode 1"]


def test_a_sweep_says_how_many_of_its_measured_points_failed_in_part(sweep: Path) -> None:
    points = json.loads((sweep / "points.json").read_text())
    points[1]["error"] = "benchmark load: 3 requests failed"
    (sweep / "points.json").write_text(json.dumps(points))
    sweep_report.main([f"--sweep={sweep}"])
    page = (sweep / "report.html").read_text()
    assert "3 of 3 points are measured, 1 of them failed in part." in page
    assert page.index("<figure") < page.index("requests/s</caption>"), "the first plot comes before the loads' tables"


def test_each_cell_says_its_column_where_rows_become_lists(sweep: Path) -> None:
    sweep_report.main([f"--sweep={sweep}"])
    page = (sweep / "report.html").read_text()
    rows = re.findall(r"<tr>\n?(.*?)</tr>", page.partition("<tbody>")[2], re.DOTALL)
    cells = [cell for row in rows for cell in re.findall(r"<td[^>]*>", row)]
    assert cells and all(re.search('data-head="[^"]+"', cell) for cell in cells)
