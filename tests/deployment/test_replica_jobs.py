"""A server of several that is a Slurm job: where it is, by a FAKE Slurm whose programs say what a test wants."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.servers.served import wait_for
from support.slurm.fake_slurm import NO_SUCH_JOB, FakeSlurm

from deployment.arguments import ReplicasArguments, ServeArguments
from deployment.life.stop_request import StopRequest
from deployment.replicas import running, slurm_jobs
from deployment.replicas.job_replica import JobReplica
from deployment.replicas.places import find_replicas
from deployment.replicas.replica import NotNowError, Place
from deployment.replicas.slurm_jobs import GONE, SlurmJobs
from handover.endpoint import REPLICA_JOBS_VARIABLE, Endpoint
from handover.errors import ServerError


class Slurm(FakeSlurm):
    """One that has a state for job 8, and runs it again when it is asked to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.says("squeue", f"cat {directory}/states")
        self.says(
            "scontrol", f'echo "$@" >> {directory}/told; test "$1" = update || echo "8|PENDING" > {directory}/states'
        )
        self.has("RUNNING")

    def has(self, state: str) -> None:
        (self.directory / "states").write_text(f"8|{state}\n")

    @property
    def told(self) -> list[str]:
        return (self.directory / "told").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_jobs, "_EVERY_S", 0.02)
    return Slurm(tmp_path)


def replica_in(place: Path) -> JobReplica:
    replica = JobReplica(0, place / "deployment", place / "logs", SlurmJobs(["8"]))
    replica.directory.mkdir(parents=True)
    replica.start()
    return replica


def publish(replica: JobReplica, name: str, job: str = "8") -> None:
    Endpoint("node1", grpc_port=8001, deployment=name, job_id=job).write(replica.endpoint_file)


def test_a_job_serves_once_it_has_published_and_runs_again_after_its_end(slurm: Slurm, tmp_path: Path) -> None:
    replica = replica_in(tmp_path)
    publish(replica, "of an earlier run", job="7")
    wait_for(lambda: replica.look() is Place.STARTING and slurm_says(replica, "RUNNING"))
    publish(replica, "first")
    wait_for(lambda: replica.look() is Place.SERVING)
    publish(replica, "second")  # the runner has started the server again between two looks
    assert [replica.look(), replica.look()] == [Place.AWAY, Place.SERVING]
    slurm.has("FAILED")
    wait_for(lambda: replica.look() is Place.ENDED)
    assert "its job 8 is FAILED" in replica.reason() and replica.was_killed
    replica.start()
    assert slurm.told == ["requeue 8", "update JobId=8 StartTime=now"]
    slurm.has("RUNNING")
    wait_for(lambda: slurm_says(replica, "RUNNING"))
    assert replica.look() is Place.STARTING, "the file is that of the start before"
    publish(replica, "third")
    assert replica.look() is Place.SERVING


def test_a_job_that_slurm_takes_off_its_node_is_away_until_it_publishes_again(slurm: Slurm, tmp_path: Path) -> None:
    replica = replica_in(tmp_path)
    publish(replica, "first")
    wait_for(lambda: replica.look() is Place.SERVING)
    slurm.has("PENDING")
    wait_for(lambda: replica.look() is Place.AWAY)
    slurm.has("RUNNING")
    wait_for(lambda: slurm_says(replica, "RUNNING"))
    assert replica.look() is Place.AWAY
    publish(replica, "second")
    assert replica.look() is Place.SERVING


def test_it_is_told_by_signals_to_its_runner_and_a_job_that_waits_is_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    replica = replica_in(tmp_path)
    wait_for(lambda: slurm_says(replica, "RUNNING"))
    replica.leave()
    replica.ask_to_stop()
    slurm.has("PENDING")
    wait_for(lambda: slurm_says(replica, "PENDING"))
    replica.ask_to_stop()
    replica.wait(0)
    assert slurm.cancelled == [
        *("--quiet", "--batch", "--signal=HUP", "8", "--quiet", "--batch", "--signal=TERM", "8"),
        *("--quiet", "8", "--quiet", "8"),
    ]


def test_what_slurm_has_forgotten_has_ended_and_while_it_is_silent_its_last_word_counts(
    slurm: Slurm, tmp_path: Path
) -> None:
    replica = replica_in(tmp_path)
    publish(replica, "first")
    wait_for(lambda: replica.look() is Place.SERVING)
    slurm.says("squeue", f"echo x >> {tmp_path}/silent; echo 'Unable to contact slurm controller' >&2; exit 1")
    wait_for((tmp_path / "silent").exists)
    assert replica.look() is Place.SERVING
    slurm.says("squeue", NO_SUCH_JOB)
    wait_for(lambda: slurm_says(replica, GONE))
    assert replica.look() is Place.ENDED


def test_a_controller_that_is_away_costs_neither_a_restart_nor_the_deployment(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "_AGAIN_S", 0.0)
    monkeypatch.setenv(REPLICA_JOBS_VARIABLE, "7,8")
    server = ServeArguments(tmp_path, tmp_path / "endpoint.json", tmp_path / "server.log", restart=1)
    given = ReplicasArguments("deployment.serve", (), job_logs=tmp_path)
    deployment, replica = running.ReplicatedDeployment(given, server, StopRequest()), replica_in(tmp_path)
    slurm.has("FAILED")
    wait_for(lambda: replica.look() is Place.ENDED)
    slurm.says(
        "scontrol", "echo 'slurm_requeue error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    )
    deployment._replace(replica)
    assert (replica.place, replica.restarts) == (Place.ENDED, 0)
    slurm.says("scontrol", f'echo "$@" >> {tmp_path}/told')
    deployment._replace(replica)
    assert (replica.place, replica.restarts) == (Place.STARTING, 1) and slurm.told[0] == "requeue 8"
    said = capsys.readouterr().out.splitlines()
    assert "Unable to contact slurm controller" in said[0] and "replacing" in said[1]
    slurm.says("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    with pytest.raises(ServerError) as refused:
        replica.start()
    assert not isinstance(refused.value, NotNowError)


def test_a_router_that_is_not_told_its_jobs_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ReplicasArguments("deployment.serve", (), job_logs=tmp_path)
    server = ServeArguments(tmp_path, tmp_path / "endpoint.json", tmp_path / "server.log")
    monkeypatch.setenv(REPLICA_JOBS_VARIABLE, "8")
    with pytest.raises(ServerError, match="names 1 jobs of 2 servers"):
        find_replicas(given, server)


def slurm_says(replica: JobReplica, state: str) -> bool:
    return replica._jobs.state("8") == state
