"""The gate over accuracy, latency and parity together: what is sound goes, what was planted does not."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from support.measurements.results_maker import load_row, static_row, write_results

from evaluation import gate
from evaluation.report.data import collect_findings
from evaluation.report.document import describe_report
from evaluation.report.formatting import show_percent, show_with_noise
from evaluation.report.judgement import judge
from evaluation.report.measurements import read_report
from evaluation.report.page import render_page

SOUND = {"last_token_accuracy": (0.46, 0.01)}
LATENCIES = [100.0, 101.0, 99.0, 100.0]
RULES = {
    "lambada.last_token_accuracy": {"at_least": 0.4, "max_drop": 0.005},
    "static.60-20_batch*.latency_mean_ms": {"at_most": 150, "max_rise_percent": 10},
}


def write_parity(results: Path, verdict: str = "HOLDS", state: str = "", **changes: Any) -> None:
    """What ``parity`` leaves; a failed stage leaves it unpublished."""
    directory = results / "evaluation" / f"parity{state}"
    directory.mkdir(parents=True)
    figure = {"name": "max_log_prob_difference", "value": 0.5, "unit": "nats", "stderr": None, "n": 9, "failed": 0}
    content = {
        "task": "parity", "metrics": [figure | {"definition": "d"}], "samples": 3, "failed": 0, "data": {},
        "model": {"model_digest": "sha256:m"}, "verdict": verdict,
        "reasons": ["max_log_prob_difference 0.5, limit 0.1"],
        "source": {"computed_by": "Hugging Face transformers"}, "first_difference": {"prompt": 1, "token": 4},
    }  # fmt: skip
    (directory / "metrics.json").write_text(json.dumps(content | changes))


def run_of(
    root: Path, name: str, accuracy: dict[str, tuple[float, float]] | None = None, latencies: list[float] | None = None
) -> Path:
    rows = [static_row(1, latencies or LATENCIES), static_row(8, [140.0, 141.0, 139.0, 140.0])]
    return write_results(root / name, static=rows, accuracy=accuracy or SOUND)


def decide(results: Path, baseline: Path | None, rules: dict[str, Any] | None = None) -> tuple[str, dict[str, str]]:
    """The verdict, by the program itself, and the reason of everything that is not GO."""
    file, output = results / "gate.yaml", results / "gate.json"
    file.write_text(yaml.safe_dump({"thresholds": rules or RULES}))
    argv = [str(results), f"--thresholds={file}", f"--output={output}"]
    argv += [f"--baseline={baseline}"] if baseline else []
    status = 0
    try:
        gate.main(argv)
    except SystemExit as ended:
        status = int(str(ended.code))
    content = json.loads(output.read_text())
    assert status == {"GO": 0, "NO-GO": 1, "INCONCLUSIVE": 3}[content["verdict"]]
    reasons = {f"{check['figure']} {check['rule']}": check["reason"] for check in content["checks"]
               if check["verdict"] != "GO"}  # fmt: skip
    return content["verdict"], reasons


def test_a_sound_deployment_goes_by_absolute_limits_and_against_its_baseline(tmp_path: Path) -> None:
    current = run_of(tmp_path, "new")
    write_parity(current)
    assert decide(current, run_of(tmp_path, "old")) == ("GO", {})


@pytest.mark.parametrize(
    ("accuracy", "latencies", "broken"),
    [
        ({"last_token_accuracy": (0.45, 0.0)}, None, "lambada.last_token_accuracy max_drop 0.005"),
        (None, [115.0, 116.0, 114.0, 115.0], "static.60-20_batch1.latency_mean_ms max_rise_percent 10"),
    ],
)
def test_a_planted_loss_in_accuracy_or_latency_alone_is_no_go(
    accuracy: dict[str, tuple[float, float]] | None, latencies: list[float] | None, broken: str, tmp_path: Path
) -> None:
    current = run_of(tmp_path, "new", accuracy, latencies)
    verdict, reasons = decide(current, run_of(tmp_path, "old"))
    assert verdict == "NO-GO" and set(reasons) == {broken} and "baseline" in reasons[broken]


@pytest.mark.parametrize("state", ["", ".partial"])
def test_a_model_that_is_not_its_source_is_no_go_whatever_else_is_fine(state: str, tmp_path: Path) -> None:
    """The stage that finds it fails, so that what it wrote is not published."""
    current = run_of(tmp_path, "new")
    write_parity(current, "FAILS", state)
    verdict, reasons = decide(current, run_of(tmp_path, "old"))
    assert verdict == "NO-GO"
    assert reasons == {"parity verdict": "fails: max_log_prob_difference 0.5, limit 0.1"}


def test_parity_that_could_not_tell_is_inconclusive(tmp_path: Path) -> None:
    current = run_of(tmp_path, "new")
    write_parity(current, "INCONCLUSIVE")
    assert decide(current, run_of(tmp_path, "old"))[0] == "INCONCLUSIVE"


def test_parity_that_was_asked_for_and_is_missing_is_inconclusive(tmp_path: Path) -> None:
    rules = RULES | {"parity.greedy_agreement": {"at_least": 1.0}}
    verdict, reasons = decide(run_of(tmp_path, "new"), run_of(tmp_path, "old"), rules)
    assert verdict == "INCONCLUSIVE" and "no such figure" in reasons["parity.greedy_agreement at_least 1"]


def test_a_point_that_failed_or_is_gone_is_inconclusive_though_its_neighbours_are_fine(tmp_path: Path) -> None:
    failed = dataclasses.replace(static_row(8, LATENCIES), state="failed", figures={}, error="out of memory")
    current = write_results(tmp_path / "new", static=[static_row(1, LATENCIES), failed], accuracy=SOUND)
    verdict, reasons = decide(current, None, {"static.60-20_batch*.latency_mean_ms": {"at_most": 150}})
    assert verdict == "INCONCLUSIVE"
    assert reasons == {"static.60-20_batch8.latency_mean_ms at_most 150": "the point failed: out of memory"}

    short = write_results(tmp_path / "short", static=[static_row(1, LATENCIES)], accuracy=SOUND)
    verdict, reasons = decide(short, run_of(tmp_path, "old"))
    assert verdict == "INCONCLUSIVE"
    assert set(reasons.values()) == {"the baseline has it, the report has not"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failed": 3}, "3 of 100 samples have no score"),
        ({"model": {"model_digest": "sha256:m", "random_weights": "1"}}, "the weights are random"),
        ({"unfinished": True}, "the evaluation did not finish"),
    ],
)
def test_figures_that_are_not_to_be_relied_on_are_inconclusive(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    current = run_of(tmp_path, "new")
    path = current / "evaluation" / "lambada" / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if changes.get("unfinished"):
        path.parent.rename(path.parent.with_name("lambada.partial"))
    verdict, reasons = decide(current, run_of(tmp_path, "old"))
    assert verdict == "INCONCLUSIVE"
    assert all(reason in said for said in reasons.values()) and len(reasons) == 2


def test_latencies_of_a_load_whose_requests_failed_are_inconclusive(tmp_path: Path) -> None:
    row = load_row(e2e_p99_ms=500.0, failed_requests=2)
    current = write_results(tmp_path / "new", load=[row])
    verdict, reasons = decide(current, None, {"load.*.e2e_p99_ms": {"at_most": 800}})
    assert verdict == "INCONCLUSIVE" and "2 requests failed" in next(iter(reasons.values()))


def test_accuracy_of_one_model_and_latency_of_another_are_inconclusive(tmp_path: Path) -> None:
    rows = [static_row(1, LATENCIES), dataclasses.replace(static_row(8, LATENCIES), model_digest="sha256:x")]
    current = write_results(tmp_path / "new", static=rows, accuracy=SOUND)
    verdict, reasons = decide(current, None, {"lambada.last_token_accuracy": {"at_least": 0.4}})
    assert verdict == "INCONCLUSIVE" and "belong to 2 models" in reasons["model_digest one model"]


def test_two_runs_over_other_samples_of_one_file_differ_by_chance(tmp_path: Path) -> None:
    before, now = (
        run_of(tmp_path, name, {"last_token_accuracy": (value, 0.01)}) for name, value in (("a", 0.46), ("b", 0.45))
    )
    rules = {"lambada.last_token_accuracy": {"max_drop": 0.005}}
    assert decide(now, before, rules)[0] == "NO-GO", "the same samples: the drop is real"
    metrics = before / "evaluation" / "lambada" / "metrics.json"
    content = json.loads(metrics.read_text())
    content["metrics"][0]["n"] = 50
    metrics.write_text(json.dumps(content))
    assert decide(now, before, rules)[0] == "INCONCLUSIVE", "within the noise of two samples of the file"


def test_a_figure_that_is_no_number_never_goes(tmp_path: Path) -> None:
    current = run_of(tmp_path, "new", {"last_token_accuracy": (float("nan"), 0.0)})
    verdict, reasons = decide(current, None, {"lambada.last_token_accuracy": {"at_least": 0.4}})
    assert verdict == "INCONCLUSIVE" and "not a number" in next(iter(reasons.values()))


def test_the_report_says_what_parity_found(tmp_path: Path) -> None:
    results = run_of(tmp_path, "new")
    write_parity(results, "FAILS", ".partial")
    findings = collect_findings(results, "demo", results / "stages.json")
    sentence = "Parity fails against Hugging Face transformers: max_log_prob_difference 0.5, limit 0.1."
    assert any("The evaluation parity fails" in remark for remark in findings.remarks)
    assert not any("did not finish" in remark for remark in findings.remarks)
    for page in (render_page(f"report.{kind}", **describe_report(findings, results)) for kind in ("html", "md")):
        assert sentence in page and "The first difference: prompt 1, generated token 4." in page
    assert read_report(results).figures["parity.max_log_prob_difference"].better == "lower"


def test_the_report_begins_with_the_verdict_in_words_colour_and_sign_and_the_failed_rules(tmp_path: Path) -> None:
    current, before = run_of(tmp_path, "new", {"last_token_accuracy": (0.4, 0.0)}), run_of(tmp_path, "old")
    rules = tmp_path / "gate.yaml"
    rules.write_text(yaml.safe_dump({"thresholds": RULES | {"static.none": {"at_most": 1}}}))
    judgement = judge(current, before, rules)
    findings = collect_findings(current, "demo", current / "stages.json")
    page, text = (render_page(f"report.{k}", **describe_report(findings, current, judgement)) for k in ("html", "md"))
    first = page.partition("What to know first")[2].partition("</section>")[0]
    assert '<strong class="verdict worse">✗ NO-GO</strong>' in first
    assert "40%, limit 45.5% (baseline 46%)" in first, "in the unit of the figure below"
    listed = re.findall(r'<strong class="verdict \w+">. (NO-GO|INCONCLUSIVE|GO)</strong>\s', first)
    assert listed == ["NO-GO", "INCONCLUSIVE"], "what passes is not listed here"
    whole = page.partition("<h2>Gate: NO-GO</h2>")[2]
    verdicts = re.findall(r"<strong class=.verdict \w+.>(.) (NO-GO|INCONCLUSIVE|GO)<", whole)
    assert verdicts == [("✗", "NO-GO"), ("?", "INCONCLUSIVE"), *[("✓", "GO")] * 5]
    assert text.index("**The gate says NO-GO.**") < text.index("## Gate")


def test_every_plot_says_what_it_shows_to_who_does_not_see_it(tmp_path: Path) -> None:
    current = run_of(tmp_path, "new")
    findings = collect_findings(current, "demo", current / "stages.json")
    page = render_page("report.html", **describe_report(findings, current))
    images = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(images) == 2
    for image in images:
        root = ElementTree.fromstring(image)
        title, desc = root[0], root[1]
        assert root.get("role") == "img" and title.text and root.get("aria-label", "").startswith(title.text)
        assert title.tag.endswith("title") and desc.tag.endswith("desc") and "tables of this section" in str(desc.text)
    assert "Batch size, sequences (logarithmic)" in page


def test_small_shares_keep_their_digits_and_wide_intervals_are_said_in_words() -> None:
    assert [show_percent(share) for share in (0.000021, 0.0, 0.5, 0.00099)] == ["0.0021%", "0.00%", "50.00%", "0.099%"]
    assert show_with_noise(10.0, 15.0) == "10.00 ±over 100%"
