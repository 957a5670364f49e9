"""Which of several processes this is, by what each launcher tells; what does not fit together is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.parallel.rank import LAUNCHER_VARIABLES, read_ranks, refuse_unassigned_rank
from deployment.proof.served_models import ServedModel
from deployment.ranks.launchers import LAUNCHERS, Rank, find_rank, first_host
from deployment.ranks.ranks import check_world_size, engine_environment, ranks_of_node
from handover.errors import ServerError

LWS = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "m-0.m.default"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
LEPTON = {
    **{"LEPTON_JOB_WORKER_INDEX": "1", "LEPTON_JOB_TOTAL_WORKERS": "2"},
    **{"LEPTON_JOB_WORKER_PREFIX": "worker", "LEPTON_SUBDOMAIN": "my-job-svc"},
}
TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "10.0.0.9", "TORCHELASTIC_RUN_ID": "none"},
}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
"""What torchrun says in a pod where it was told of no other."""


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, Rank()),
        ({"SLURM_PROCID": "0"}, Rank()),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, Rank(3, 8)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"},
            Rank(1, 2),
        ),  # mpirun in a task
        ({"PMIX_RANK": "none"}, Rank()),
        # What srun 22.05 --mpi=pmix --nodes=2 --ntasks-per-node=2 sets, in part; then a batch script's.
        (
            {
                **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "PMIX_RANK": "3", "SLURM_PROCID": "3"},
                **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            },
            Rank(3, 4, 1, 2),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, Rank()),
        # torchrun, and what else sets torch's variables: each alone, below srun, left over beside srun.
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Rank(1, 2, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Rank(3, 4, 1, 1)),
        ({"RANK": "0"}, Rank()),
        (
            {
                **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
                **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
                "TORCHELASTIC_RUN_ID": "none",
            },
            Rank(5, 8, 1, 4),
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, Rank(1, 2)),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "1", "WORLD_SIZE": "2"}, Rank(1, 2)),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "1", "WORLD_SIZE": "2"}, Rank(1, 2)),
        # MPICH's and Intel's, and srun --mpi=pmi2.
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, Rank(1, 4, 1, 2)),
        (
            {
                **{"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"},
                **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            },
            Rank(3, 4, 1, 2),
        ),
        # Pods and nodes, each by itself; then with processes that mpirun or torchrun have started in two of them.
        (LWS | {"LWS_WORKER_INDEX": "0"}, Rank(0, 2)),
        (LWS, Rank(1, 2)),
        ({"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "1"}, Rank()),
        ({"JOB_COMPLETION_INDEX": "3", "SLIPWAY_NODES": "4"}, Rank(3, 4)),
        ({"JOB_COMPLETION_INDEX": "0"}, Rank()),
        (SKY, Rank(1, 2)),
        (LEPTON, Rank(1, 2)),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "JOB_COMPLETION_INDEX": "1"}, Rank(1, 2)),
        (LWS | TORCHRUN, Rank(5, 8, 1, 4)),
        (LWS | {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}, Rank(5, 8)),
        (LWS | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Rank(1, 2)),
        (LWS | {"RANK": "0", "WORLD_SIZE": "1"}, Rank(1, 2)),
        (LWS | {"WORLD_SIZE": "8"}, Rank(1, 2)),
    ],
)
def test_the_rank_is_the_innermost_launchers(environment: dict[str, str], rank: Rank) -> None:
    assert find_rank(environment) == rank


@pytest.mark.parametrize(
    ("environment", "head"),
    [
        ({}, ""),
        (LWS, "m-0.m.default"),
        (SKY, "10.0.0.1"),
        (LEPTON, "worker-0.my-job-svc"),
        (LWS | TORCHRUN, "10.0.0.9"),
        ({"JOB_COMPLETION_INDEX": "1", "SLIPWAY_NODES": "2"}, ""),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "gpu-[07-08,11]"},
            "gpu-07",
        ),
    ],
)
def test_the_first_ones_host_is_known_where_a_variable_says(environment: dict[str, str], head: str) -> None:
    assert find_rank(environment).head == head


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("rack[03,05]-n[1-4],x", "rack03-n1"),
        ("a,b[1-2]", "a"),
        ("10.0.0.1\n10.0.0.2", "10.0.0.1"),
        ("fe80::1", "fe80::1"),
        ("[2001:db8::1],b", "[2001:db8::1]"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_is_read_as_slurm_writes_it(hosts: str, first: str) -> None:
    """The forms of ``scontrol show hostnames``."""
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "2"},
            "SLURM_PROCID and SLURM_NTASKS say 1 of 2, RANK and WORLD_SIZE say 0 of 2",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE say 2 of 2"),
        (
            {"PMIX_RANK": "1"},
            "PMIX_RANK is 1, and nothing says of how many (SLURM_STEP_NUM_TASKS or SLURM_NTASKS would)",
        ),
        ({"RANK": "1"}, "RANK is 1, and nothing says of how many (WORLD_SIZE would)"),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            "JOB_COMPLETION_INDEX is 1, and nothing says of how many (SLIPWAY_NODES would)",
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "RANK": "0", "WORLD_SIZE": "1"},
            "JOB_COMPLETION_INDEX is 1, and nothing says of how many (SLIPWAY_NODES would)",
        ),
        (
            {"LWS_GROUP_SIZE": "2"},
            "LWS_GROUP_SIZE is 2, and nothing says which of them this is (LWS_WORKER_INDEX would)",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and nothing says which of them this is (RANK would)"),
        ({"SLURM_NTASKS": "2"}, "nothing says which of them this is (PMIX_RANK or SLURM_PROCID would)"),
        (
            {"PET_NNODES": "1:2", "PET_NODE_RANK": "1"},
            "PET_NODE_RANK is 1, and nothing says of how many (PET_NNODES would)",
        ),
        (
            LWS | {"RANK": "3", "WORLD_SIZE": "4"},
            "LWS_WORKER_INDEX and LWS_GROUP_SIZE say 1 of 2, RANK and WORLD_SIZE say 3 of 4",
        ),
        (
            LWS | SKY | {"SKYPILOT_NUM_NODES": "4"},
            "SKYPILOT_NUM_NODES say 1 of 4, LWS_WORKER_INDEX and LWS_GROUP_SIZE say 1 of 2",
        ),
        # A group of its own in each pod, or task: each would be a whole server.
        (LWS | ALONE, "LWS_WORKER_INDEX and LWS_GROUP_SIZE say 1 of 2, RANK and WORLD_SIZE say 0 of 1"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", **ALONE},
            "SLURM_PROCID and SLURM_NTASKS say 1 of 2, RANK and WORLD_SIZE say 0 of 1",
        ),
        (
            LWS | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "say 1 of 2, OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE say 0 of 2",
        ),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "1",
            },
            "OMPI_COMM_WORLD_SIZE say 0 of 1",
        ),
    ],
)
def test_variables_that_contradict_each_other_are_refused_by_name(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ServerError) as refused:
        find_rank(environment)
    assert refused.value.problem.endswith(said) and "unset the variables" in refused.value.hint


def test_the_engine_knows_every_variable_by_which_several_processes_are_told(tmp_path: Path) -> None:
    """A tritonserver that a person starts several times by hand; deployment.serve has its own, longer rule."""
    assert {launcher.rank[-1] for launcher in LAUNCHERS} == {rank for rank, _ in LAUNCHER_VARIABLES}
    for rank, count in LAUNCHER_VARIABLES:
        words = {rank: "0", count: "2", "SLURM_STEP_ID": "0"}
        assert find_rank(words) == Rank(0, 2)
        with pytest.raises(EngineError, match=rf"process 0 of 2 \({rank}, {count}\).*2 ranks.*deployment.serve"):
            refuse_unassigned_rank(words, 2)
        refuse_unassigned_rank(words, 1)
        refuse_unassigned_rank({**words, count: "1"}, 2)
        refuse_unassigned_rank({**words, **engine_environment(Rank(), tmp_path, 1)}, 2)
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    refuse_unassigned_rank(batch_script, 2)
    assert read_ranks(engine_environment(Rank(), tmp_path, 1)) is None


def test_a_pod_has_a_rank_for_each_of_its_gpus() -> None:
    second = find_rank(LWS)
    assert ranks_of_node(second, [served("4", "2")], "slipway") == [Rank(4 + i, 8, i, 4) for i in range(4)]
    assert ranks_of_node(second, [served("2", "1")], "slipway") == [second]
    assert ranks_of_node(second, [served("3", "1")], "slipway") == [second], "which is refused"
    assert ranks_of_node(second, [served("4", "2")], "fastertransformer") == [second]
    assert ranks_of_node(second, [served("4", "2")] * 2, "slipway") == [second]
    task = find_rank({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert ranks_of_node(task, [served("4", "1")], "slipway") == [task], "srun starts a task a rank"


def test_pods_meet_although_each_has_a_runner_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(rank: Rank, runner: str) -> str:
        monkeypatch.setenv("SLIPWAY_RUN", runner)
        return str(json.loads(engine_environment(rank, Path("/e/endpoint.json"), 30)["SLIPWAY_RANKS"])["run"])

    assert said(find_rank(LWS), "a") == said(find_rank(LWS), "b")
    step = find_rank({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert said(step, "a") != said(step, "b")


def test_fastertransformers_backend_takes_no_ranks_but_mpis() -> None:
    torchs = find_rank({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ServerError, match="RANK and WORLD_SIZE say 0 of 2, but FasterTransformer's backend"):
        check_world_size(torchs, [served("2", "1")], "fastertransformer")
    check_world_size(find_rank({"PMI_RANK": "0", "PMI_SIZE": "2"}), [served("2", "1")], "fastertransformer")


def served(tensor: str, pipeline: str) -> ServedModel:
    parameters = {"tensor_para_size": tensor, "pipeline_para_size": pipeline, "data_type": "fp32", "cpu_threads": "3"}
    return ServedModel("gpt", Path("/repo/gpt"), Path("/repo/gpt/1/2-gpu"), parameters, 1, {}, {})


def test_as_many_processes_as_ranks_or_one() -> None:
    for rank, models in (
        (Rank(), [served("8", "2")]),
        (Rank(), [served("1", "1")] * 2),
        (Rank(1, 4), [served("2", "2")]),
    ):
        check_world_size(rank, models, "slipway")
    with pytest.raises(ServerError) as error:
        check_world_size(Rank(3, 4), [served("1", "1")], "slipway")
    assert error.value.problem == (
        "world_size (4) should equal to tensor_para_size_ * pipeline_para_size_ (1 * 1 here)"
    )
    assert error.value.hint.startswith("start a single process")
    with pytest.raises(ServerError, match="one model together"):
        check_world_size(Rank(0, 2), [served("2", "1")] * 2, "slipway")


def test_every_rank_is_told_the_same_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first, second = (
        json.loads(engine_environment(Rank(rank, 2, rank, 2), Path("/e/endpoint.json"), 30)["SLIPWAY_RANKS"])
        for rank in (0, 1)
    )
    assert first | {"rank": 1, "local_rank": 1} == second
    assert second["rendezvous"] == "/e/.endpoint.json.ranks" and "7" in second["run"]
