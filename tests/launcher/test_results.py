"""What became of the stages, on disk: a stage may have several results, one for each evaluation."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.run.results import StageResult, write_results
from launcher.submit.jobs import SubmittedJob, logs, read_jobs, status, write_jobs


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


def test_the_jobs_of_the_original_are_not_those_of_a_copy(tmp_path: Path) -> None:
    logs, copy = tmp_path / "run" / "logs", tmp_path / "copy" / "logs"
    (logs / "convert").mkdir(parents=True)
    job = SubmittedJob("7", ("convert",), "", str(logs / "convert" / "7_0_log.out"))
    write_jobs(logs, [job])
    shutil.copytree(logs, copy)
    assert read_jobs(logs) == [job] and read_jobs(copy) == [], "cancel in a copy would end the original's"
    shutil.rmtree(logs)
    assert read_jobs(copy) == [job], "results that were moved keep theirs"


def test_a_copy_shows_its_own_logs(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run" / "logs", tmp_path / "copy" / "logs"
    write_results(folder / "stages.json", [StageResult("convert", "c", log=str(folder / "convert.log"))])
    (folder / "convert.log").write_text("the first run")
    shutil.copytree(folder, copy)
    (folder / "convert.log").write_text("a later run of the original")
    assert logs(copy.parent) == [f"==> {copy / 'convert.log'}", "  the first run"]


def test_a_damaged_record_of_the_stages_is_written_anew(tmp_path: Path) -> None:
    for content in ("null", "7", "{}", "[1]", '[{"stage": 1}]', "\0\0"):
        (tmp_path / "stages.json").write_text(content)
        write_results(tmp_path / "stages.json", [StageResult("convert", "c")])
        assert [entry["stage"] for entry in json.loads((tmp_path / "stages.json").read_text())] == ["convert"]


def test_jobs_that_begin_at_once_forget_nothing_of_one_another(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "stages.json"
    stages = [*(f"replica-{number}" for number in range(6)), "deploy"]

    def note(stage: str) -> None:
        for state in ("not run", "running", "done"):
            write_results(file, [StageResult(stage, stage, state, log=f"{stage}.log")])

    with ThreadPoolExecutor(len(stages)) as pool:
        list(pool.map(note, stages))
    assert [(entry["stage"], entry["state"]) for entry in json.loads(file.read_text())] == [
        (stage, "done") for stage in stages
    ]
