"""status, logs and cancel against a FAKE Slurm that says what the test wants; tests/slurm has the real one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.slurm.fake_slurm import NO_ACCOUNTING, FakeSlurm

from handover import clients
from handover.errors import ConfigError, SlipwayError
from launcher.clusters.table import detect_cluster
from launcher.config.choices import ClusterType
from launcher.doctor import check_node
from launcher.run.results import StageResult, write_results
from launcher.submit import jobs
from launcher.submit.jobs import SubmittedJob
from launcher.submit.slurm_states import slurm_states

DOWN = "echo 'Slurmctld(primary) at head is DOWN'"
DEAD = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return FakeSlurm(tmp_path / "bin")


def run_of(results: Path, job: str, state: str = "not run", errors: str | None = None) -> Path:
    """A run of one stage, convert, as one job; returns its results directory."""
    logs = results / "logs"
    write_results(logs / "stages.json", [StageResult("convert", "convert", state, log=str(logs / "convert.log"))])
    output = logs / "convert" / f"{job}_0_log.out"
    jobs.write_jobs(logs, [SubmittedJob(job, ("convert",), "singleton", str(output))])
    if errors is not None:
        output.parent.mkdir(exist_ok=True)
        output.with_suffix(".err").write_text(errors)
    return results


@pytest.mark.parametrize(
    ("queue", "accounts", "state"),
    [
        ("7|RUNNING|0:05|None", "7|PENDING|0:0|00:00:00", "RUNNING"),  # accounting hears of it later
        ("7|PENDING|0:00|BeginTime", "7|NODE_FAIL|1:0|00:00:09", "PENDING"),  # requeued
        ("7|COMPLETED|0:05|None", "7|RUNNING|0:0|00:00:05", "COMPLETED"),
        ("7|COMPLETED|0:05|None", "7|COMPLETED|0:0|00:00:05", "COMPLETED"),
        ("", "7|FAILED|1:0|00:00:05", "FAILED"),
        ("", "7|RUNNING|0:0|00:00:05", "ended"),
        ("", "", "ended"),
    ],
)
def test_the_queue_is_right_about_what_has_not_ended(slurm: FakeSlurm, queue: str, accounts: str, state: str) -> None:
    slurm.knows(queue, accounts)
    assert slurm_states(["7"])["7"].state == state


def test_without_accounting_what_has_left_the_queue_is_over(slurm: FakeSlurm, tmp_path: Path) -> None:
    results = run_of(tmp_path / "run", "7", state="running")
    slurm.knows()
    assert "lost" in jobs.status(results)[1] and "job 7 ended" in jobs.status(results)[1]
    assert jobs.cancel(results) == ["  nothing to cancel"] and slurm.cancelled == []


def test_a_job_that_is_ending_is_not_cancelled_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    """squeue says COMPLETING until the nodes are cleared; accounting has the final state before that."""
    results = run_of(tmp_path / "run", "7", state="running")
    slurm.knows("7|COMPLETING|0:05|None", "7|CANCELLED by 0|0:15|00:00:05")
    assert jobs.cancel(results) == ["  nothing to cancel"] and slurm.cancelled == []
    assert not slurm_states(["7"])["7"].has_ended, "its server may still hold its memory"


def test_cancel_says_that_slurm_does_not_answer(slurm: FakeSlurm, tmp_path: Path) -> None:
    results = run_of(tmp_path / "run", "7", state="running")
    for program in ("squeue", "sacct", "scancel"):
        slurm.says(program, DEAD)
    assert "running" in jobs.status(results)[1] and "job 7 unknown" in jobs.status(results)[1]
    with pytest.raises(SlipwayError, match="Unable to contact slurm controller"):
        jobs.cancel(results)


def test_cancel_of_anothers_job_names_whose_it_is(slurm: FakeSlurm, tmp_path: Path) -> None:
    """In the words of Slurm 22.05."""
    results = run_of(tmp_path / "run", "7", state="running")
    slurm.says("squeue", 'case "$*" in *%u*) echo "7|alice";; *) echo "7|RUNNING|0:05|None";; esac')
    slurm.says("sacct", NO_ACCOUNTING)
    slurm.says("scancel", "echo 'scancel: error: Kill job error on job id 7: Access/permission denied' >&2; exit 1")
    with pytest.raises(SlipwayError, match="permission denied .*job 7 is alice's") as refused:
        jobs.cancel(results)
    assert "user who submitted it" in refused.value.hint and "SLURM_CONF" not in refused.value.hint


@pytest.mark.parametrize(
    ("hangs", "state"), [(["sacct"], "RUNNING"), (["squeue"], "COMPLETED"), (["sacct", "squeue"], "unknown")]
)
def test_programs_that_hang_are_waited_for_together_and_not_long(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, hangs: list[str], state: str
) -> None:
    """As where slurmdbd or the controller hangs; the time is cut here, and what the program has started is ended."""
    monkeypatch.setattr(clients, "_QUESTION_S", 0.5)
    slurm.knows("7|RUNNING|0:05|None", "7|COMPLETED|0:0|00:00:05")
    for program in hangs:
        slurm.says(program, "sleep 60 & wait")
    started = time.monotonic()
    assert slurm_states(["7"])["7"].state == state
    assert time.monotonic() - started < 5


def test_cancel_after_a_sweep_cancels_all_of_it_and_no_other_run(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_of(tmp_path / "standing_server", "5")
    points = [run_of(tmp_path / name, job) for name, job in (("tp1", "6"), ("tp2", "7"))]
    sweep = tmp_path / "sweeps" / "2026"
    sweep.mkdir(parents=True)
    listed = [{"label": path.name, "title": "x", "results": str(path), "error": ""} for path in points]
    (sweep / "points.json").write_text(
        json.dumps([*listed, {"label": "tp3", "title": "", "results": "", "error": "x"}])
    )
    slurm.says("squeue", 'for job in 5 6 7; do echo "$job|PENDING|0:00|Dependency"; done')
    slurm.says("sacct", NO_ACCOUNTING)
    assert len(jobs.cancel(tmp_path)) == 2 and slurm.cancelled == ["6", "7"]
    assert len(jobs.cancel(sweep)) == 2, "the sweep's own directory"
    assert "PENDING (Dependency)" in jobs.status(points[0])[1]


def test_a_job_that_died_before_its_runner_says_why(slurm: FakeSlurm, tmp_path: Path) -> None:
    said = "/var/spool/job7/slurm_script: line 21: module: command not found\n"
    results = run_of(tmp_path / "run", "7", errors=said)
    slurm.knows(accounts="7|FAILED|3:0|00:00:01")
    line = jobs.status(results)[1]
    assert "module: command not found" in line and "7_0_log.err" in line
    assert "  " + said.strip() in jobs.logs(results)


@pytest.mark.parametrize("code", ["0:53", "1:0"])  # before Slurm 24.11, and since then
def test_storage_that_the_node_does_not_see_is_named(slurm: FakeSlurm, tmp_path: Path, code: str) -> None:
    results = run_of(tmp_path / "run", "7")
    slurm.knows(accounts=f"7|FAILED|{code}|00:00:00")
    assert "must be on storage that the nodes share" in jobs.status(results)[1]


def test_a_refused_submission_leaves_what_is_known_of_the_run_before(slurm: FakeSlurm, tmp_path: Path) -> None:
    logs = run_of(tmp_path / "run", "7", state="done") / "logs"
    before = {file: file.read_text() for file in (logs / "jobs.json", logs / "stages.json")}
    slurm.knows(accounts="7|COMPLETED|0:0|00:00:05")
    with pytest.raises(ConfigError), jobs.kept_if_refused(logs):
        jobs.forget_ended(logs)
        assert not (logs / "stages.json").exists()
        raise ConfigError("sbatch refused it")
    assert {file: file.read_text() for file in before} == before


BUSY = """srun: job 705273 queued and waiting for resources
srun: error: Unable to allocate resources: Requested nodes are busy"""
NO_PARTITION = "srun: error: Unable to allocate resources: No partition specified or system default partition"


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [(BUSY, "note", "no node was free"), (NO_PARTITION, "bad", "srun refuses: Unable to allocate resources: No part")],
)
def test_doctor_does_not_blame_the_storage_for_what_srun_refuses(
    slurm: FakeSlurm, tmp_path: Path, said: str, state: str, words: str
) -> None:
    """In the words of Slurm 22.05."""
    slurm.says("srun", f"echo '{said}' >&2; exit 1")
    slurm.says("sinfo", "echo gpu; echo cpu")
    (finding,) = check_node(tmp_path, ["--account=mine"])
    assert (finding.check, finding.state) == ("nodes", state) and words in finding.text
    assert state == "note" or "--partition (cpu, gpu)" in finding.mend


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("echo 'Slurmctld(primary) at head is UP'", ClusterType.bcm),
        ("echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1", ClusterType.interactive),
        ("echo 'Slurmctld(primary) at head is DOWN'; exit 1", None),
        (f"printf '{'*' * 41}\\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\\n{'*' * 41}\\n' >&2; {DOWN}", None),
        (f"{DOWN}; printf '{'*' * 41}\\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\\n{'*' * 41}\\n'; exit 1", None),
    ],
)
def test_a_dead_controller_is_no_reason_to_run_on_the_login_node(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, said: str, expected: ClusterType | None
) -> None:
    monkeypatch.delenv("NGC_ARRAY_SIZE", raising=False)
    slurm.says("sbatch", "exit 1")
    slurm.says("scontrol", said)
    if expected:
        assert detect_cluster() is expected
        return
    with pytest.raises(ConfigError, match=r"controller does not answer .*ping: Slurmctld.* head is DOWN\)") as refused:
        detect_cluster()
    assert "cluster_type=interactive" in refused.value.hint and "doctor" in refused.value.hint
