"""What is refused before sbatch is asked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.slurm.fake_slurm import FakeSlurm

from handover.errors import ConfigError
from launcher.clusters.bcm import check_options
from launcher.clusters.table import detect_cluster
from launcher.config.choices import ContainerRuntime
from launcher.config.cluster import ClusterConfig
from launcher.config.schema import PROJECT_DIR
from launcher.doctor import check_node
from launcher.plan.plan import Command, Resources, StagePlan
from launcher.run.results import StageResult, write_results
from launcher.submit import Job, jobs
from launcher.submit.jobs import read_jobs
from launcher.submit.order import Order
from launcher.submit.slurm import SlurmExecutor


def job_in(container: str | None, root: Path) -> Job:
    plan = StagePlan(
        stage="convert",
        name="convert",
        commands=(Command(("true",)),),
        resources=Resources(container=container),
        inputs=(),
        output=root / "out",
        log=root / "logs" / "convert.log",
    )
    return Job("convert", (plan,), root / "logs" / "stages.json")


@pytest.fixture
def slurm_without_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FAKE Slurm: srun knows no container option, sbatch refuses whatever it gets."""
    for name, script in {"srun": "echo ' --mpi=type'", "sbatch": "echo sbatch: error: fake >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A FAKE Slurm: its programs say what a test wants."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake = FakeSlurm(tmp_path)
    for program in ("srun", "sinfo", "squeue", "sacct"):
        fake.says(program, "true")
    return fake


def refusal(cluster: ClusterConfig, container: str | None, root: Path) -> ConfigError:
    executor, jobs = SlurmExecutor(cluster, None, root, [root]), [job_in(container, root)]
    with pytest.raises(ConfigError) as refused:
        executor.check(jobs)
        executor.submit(jobs, ())
    return refused.value


def test_a_slurm_without_pyxis_is_named_before_anything_is_submitted(slurm_without_pyxis: Path) -> None:
    error = refusal(ClusterConfig(), "image", slurm_without_pyxis)
    assert "has no pyxis" in error.problem and "container_runtime" in error.hint


@pytest.mark.parametrize("container", [None, "image"])
def test_other_ways_to_run_do_not_need_pyxis(slurm_without_pyxis: Path, container: str | None) -> None:
    error = refusal(ClusterConfig(container_runtime=ContainerRuntime.docker), container, slurm_without_pyxis)
    assert "sbatch refused convert: fake" in error.problem


def test_where_there_is_no_sbatch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no sbatch" in refusal(ClusterConfig(), None, tmp_path).problem


@pytest.mark.parametrize("word", ["back\\slash", "%job", "%task"])
def test_what_would_be_read_as_something_else_in_a_path_is_refused(slurm_without_pyxis: Path, word: str) -> None:
    error = refusal(ClusterConfig(), None, slurm_without_pyxis / word)
    assert "means something else to Slurm" in error.problem and word in error.problem


def test_a_percent_sign_in_a_path_is_kept(tmp_path: Path) -> None:
    job = job_in(None, tmp_path / "p%u_x")
    text = SlurmExecutor(ClusterConfig(), None, tmp_path, []).render(job, (), Order(""))
    assert f"#SBATCH --output={tmp_path}/p%%u_x/logs/convert/%j_0_log.out\n" in text
    assert "wckey" not in text, "submitit's own"


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("INFO: last job 4711 of this project used 10%\nSubmitted batch job 12", "12"),
        ("Submitted batch job 12\nINFO: job 4711 waits too", "12"),
        ("Submitted batch job 12 on cluster beta", "12"),
        ("project 4711\n12;beta", "12"),
        ("12", "12"),
    ],
)
def test_the_id_is_what_sbatch_says_and_no_other_jobs(slurm: FakeSlurm, printed: str, job: str) -> None:
    slurm.says("sbatch", f"echo '{printed}'")
    SlurmExecutor(ClusterConfig(), None, slurm.directory, []).submit([job_in(None, slurm.directory)], ())
    assert [each.job_id for each in read_jobs(slurm.directory / "logs")] == [job]


def test_a_controller_that_is_away_is_no_matter_of_keys(slurm: FakeSlurm) -> None:
    said = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    slurm.says("sbatch", f"echo '{said}' >&2; exit 1")
    assert "scontrol ping" in refusal(ClusterConfig(), None, slurm.directory).hint


def test_an_sbatch_that_names_no_job_is_one_error(slurm: FakeSlurm) -> None:
    slurm.says("sbatch", "echo 'INFO: job 4711 used 10%'")
    error = refusal(ClusterConfig(), None, slurm.directory)
    assert "sbatch named no job: INFO: job 4711 used 10%" in error.problem and "squeue" in error.hint


@pytest.mark.parametrize(
    ("option", "shown", "why"),
    [
        *((name, name, "the cluster of this host alone") for name in ("clusters", "cluster", "M")),
        *(("array", "array", "same stages"), ("a", "a", "same stages"), ("arr", "arr (array)", "same stages")),
        *(("dependency", "dependency", "export.run.dependency"), ("wait", "wait", "status")),
        *(("output", "output", "base_results_dir"), ("open_mode", "open_mode", "base_results_dir")),
        *(
            ("parsable", "parsable", "the job's id"),
            ("test-only", "test-only", "the job's id"),
            ("wrap", "wrap", "stages"),
        ),
    ],
)
def test_options_that_would_lose_jobs_are_refused_by_name(option: str, shown: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options({"qos": "high", option: "x"})
    assert refused.value.problem.endswith(f"cannot have {shown}") and why in refused.value.hint


def test_other_options_pass() -> None:
    names = (
        "account comment constraint exclude export hold licenses mail-user nice no_requeue partition prefer power qos"
    )
    check_options(dict.fromkeys([*names.split(), "requeue", "signal", "time", "wait-all-nodes", "wckey"], "x"))


SESSION = {
    **{"SLURM_JOB_ID": "1", "SLURM_CLUSTERS": "beta", "SLURM_EXPORT_ENV": "NONE", "SBATCH_ARRAY_INX": "0-1"},
    **{"SBATCH_CLUSTERS": "beta", "SQUEUE_PARTITION": "x", "SCANCEL_STATE": "PENDING", "SINFO_FORMAT": "%n"},
    **{"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "3"},
    **{"LWS_WORKER_INDEX": "1", "JOB_COMPLETION_INDEX": "1", "SKYPILOT_NODE_RANK": "1"},
}


def test_no_program_of_slurm_is_started_with_variables_of_the_session(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SESSION, "SLURM_CONF": "/etc/slurm.conf", "OF_THE_SHELL": "kept"}.items():
        monkeypatch.setenv(name, value)
    root = slurm.directory
    answers = {"sbatch": "echo Submitted batch job 7", "squeue": "echo '7|RUNNING|0:05|None'", "scancel": "true"}
    answers |= {
        "sinfo": "echo 'gpu|infinite|1-infinite|gpu*'",
        "sacct": "true",
        "scontrol": "echo head is UP",
        "srun": "true",
    }
    for program, script in answers.items():
        slurm.says(program, f"env > {root}/{program}.env; {script}")
    SlurmExecutor(ClusterConfig(), None, root, []).submit([job_in(None, root)], ())
    write_results(root / "logs" / "stages.json", [StageResult("convert", "convert")])
    jobs.cancel(root)
    detect_cluster()
    check_node(root, [])
    for program in answers:
        lines = (root / f"{program}.env").read_text().splitlines()
        assert {"OF_THE_SHELL=kept", "SLURM_CONF=/etc/slurm.conf"} <= set(lines), program
        assert not [line for line in lines if line.partition("=")[0] in SESSION], program


def test_a_users_defaults_for_account_and_partition_are_lines_of_the_job_unless_a_key_says_otherwise(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"ACCOUNT": "mine", "PARTITION": "low", "QOS": "night", "WCKEY": "w", "TIMELIMIT": "1", "MEM_PER_CPU": "9"}
    for name, value in given.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    slurm.says("sbatch", "echo Submitted batch job 7")
    executor = SlurmExecutor(
        ClusterConfig(partition="gpu", additional_parameters={"qos": "high"}), None, slurm.directory, []
    )
    executor.submit([job_in(None, slurm.directory)], ())
    text = next(slurm.directory.glob("logs/convert/7_submission.sh")).read_text()
    for line in ("--account=mine", "--partition=gpu", "--qos=high", "--wckey=w", "--time=2:00:00"):
        assert f"#SBATCH {line}\n" in text
    assert "mem-per-cpu" not in text
    assert "SBATCH_MEM_PER_CPU, SBATCH_TIMELIMIT are not read" in capsys.readouterr().err


SINFO = "gpu|4:00:00|1-infinite|gpu*\nsmall|30:00|1-1|small\nlow|2-00:00:00|infinite|low"


@pytest.mark.parametrize(
    ("partition", "limit", "nodes", "said"),
    [
        (None, "4:00:01", 1, "its time limit 4:00:01 is above the 4:00:00 of partition gpu"),
        (None, "4:00:00", 9, ""),
        ("small", "31", 1, "its time limit 31 is above the 30:00 of partition small"),
        ("small", "30", 2, "its 2 nodes are more than the 1 of partition small"),
        ("small,low", "1-00:00:00", 1, ""),
        ("small,gpu", "1-00:00:00", 1, "partition gpu; its time limit"),
        ("unknown", "9-0", 1, ""),
    ],
)
def test_what_slurm_would_accept_and_never_run_is_said(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], partition: str | None, limit: str, nodes: int, said: str
) -> None:
    slurm.says("sbatch", "echo Submitted batch job 7")
    slurm.says("sinfo", f"printf '{SINFO}'")
    plan = replace(job_in(None, slurm.directory).plans[0], resources=Resources(nodes=nodes, time_limit=limit))
    job = Job("convert", (plan,), slurm.directory / "logs" / "stages.json")
    SlurmExecutor(ClusterConfig(partition=partition), None, slurm.directory, []).submit([job], ())
    err = capsys.readouterr().err
    assert said in err and ("convert would wait for ever" in err) == bool(said)


def test_a_checkout_that_nodes_have_elsewhere_is_where_a_job_runs(tmp_path: Path) -> None:
    text = SlurmExecutor(ClusterConfig(), None, Path("/else where"), []).script(job_in(None, tmp_path), ())
    inside = next(path for path in Path(sys.executable).parents if path.resolve() == PROJECT_DIR)
    interpreter = Path("/else where") / Path(sys.executable).relative_to(inside)
    assert text.startswith(f"cd '/else where'\nexec '{interpreter}' -m launcher.runner ")
    here = SlurmExecutor(ClusterConfig(), None, PROJECT_DIR, []).script(job_in(None, tmp_path), ())
    assert here.startswith(f"cd {PROJECT_DIR}\nexec ") and " -m launcher.runner " in here


def test_gpus_per_task_comes_with_the_number_of_tasks_and_on_jobs_with_gpus_alone(tmp_path: Path) -> None:
    executor = SlurmExecutor(ClusterConfig(gpus_per_task=1), None, tmp_path, [])
    assert "--gpus" not in executor.render(job_in(None, tmp_path), (), Order(""))
    plan = job_in(None, tmp_path).plans[0]
    served = replace(plan, commands=(Command(("x",), tasks_per_node=2),), resources=Resources(2, gpus_per_node=2))
    text = executor.render(Job("deploy", (served,), tmp_path / "logs" / "stages.json"), (), Order(""))
    for line in ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gpus-per-task=1", "--gpus-per-node=2"):
        assert f"#SBATCH {line}\n" in text


def limited(stage: str, limit: str, root: Path, always: bool = False) -> StagePlan:
    plan = job_in(None, root).plans[0]
    return replace(plan, stage=stage, resources=Resources(time_limit=limit), always=always)


def test_a_job_has_the_time_of_all_its_stages_and_the_report_adds_none(tmp_path: Path) -> None:
    limits = (("deploy", "0:01:00"), ("evaluate", "0:02:00"), ("evaluate", "0:02:00"), ("benchmark", "0:04:00"))
    plans = [limited(stage, limit, tmp_path) for stage, limit in limits]
    report = limited("report", "0:10:00", tmp_path, always=True)
    executor = SlurmExecutor(ClusterConfig(exclusive=False), None, tmp_path, [])
    parameters = executor.parameters(Job("deploy", (*plans, report), tmp_path / "logs" / "stages.json"), None)
    assert parameters["additional_parameters"]["time"] == "0:07:00"
    assert parameters["cpus_per_task"] == 4, "a job that shares its nodes would get one"
