"""What became of the stages, on disk: a stage may have several results, one for each evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.jobs import status
from launcher.results import StageResult, write_results


def test_each_evaluation_keeps_its_result(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    results = [
        StageResult("evaluate", f"e_{name}", log=str(logs / f"evaluate_{name}.log")) for name in ("lambada", "squad")
    ]
    report = StageResult("report", "r", log=str(logs / "report.log"))
    write_results(logs / "stages.json", [report])
    write_results(logs / "stages.json", results)
    results[1].state, results[1].error = "failed", "no model\n  hint: start one"
    write_results(logs / "stages.json", results)
    entries = json.loads((logs / "stages.json").read_text())
    assert [(entry["stage"], entry["state"]) for entry in entries] == [
        *(("evaluate", "not run"), ("evaluate", "failed"), ("report", "not run")),
    ]
    words = [line.split() for line in status(tmp_path)[1:]]
    assert [line[0] for line in words] == ["evaluate_lambada", "evaluate_squad", "report"]
    assert words[1][1:] == ["failed", "no", "model"]
