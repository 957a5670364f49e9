"""Ports, command line and ranks of a deployment, without a server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.parallel.rank import LAUNCHER_VARIABLES, read_ranks, refuse_unassigned_rank
from deployment.arguments import ServeArguments
from deployment.doors import ports
from deployment.doors.doors import Doors
from deployment.doors.ports import Ports, choose_ports
from deployment.proof.served_models import ServedModel
from deployment.ranks.ranks import Rank, arguments_of, check_world_size, engine_environment, find_rank
from deployment.triton import installation
from deployment.triton.installation import Installation, assemble_backends, build_argv, link_repository, locate
from handover.errors import ServerError

DOORS = Doors("127.0.0.1", Ports(1, 2, 3), False)
ARGUMENTS = ServeArguments(Path("/repo with space"), Path("/run/endpoint.json"), Path("/run/server.log"))


def test_the_command_line_binds_every_service_to_the_given_address() -> None:
    argv = build_argv(
        Path("/t/tritonserver"),
        ARGUMENTS,
        Path("/tmp/x/repository"),
        DOORS,
        "slipway-0-",
        Path("/tmp/x/backends"),
    )
    assert argv == (
        "/t/tritonserver",
        "--model-repository=/tmp/x/repository",
        "--backend-directory=/tmp/x/backends",
        "--allow-gpu-metrics=false",
        "--http-address=127.0.0.1",
        "--http-port=1",
        "--grpc-address=127.0.0.1",
        "--grpc-port=2",
        "--metrics-address=127.0.0.1",
        "--metrics-port=3",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=10",
        "--backend-config=python,shm-region-prefix-name=slipway-0-",
    )


def test_the_containers_server_keeps_its_own_backends() -> None:
    arguments = ServeArguments(
        Path("/repo"), Path("/e"), Path("/l"), engine="fastertransformer", server_args=("--log-verbose=1", "a; b")
    )
    argv = build_argv(Path("tritonserver"), arguments, Path("/r"), DOORS, "slipway-0-", None)
    assert not any(flag.startswith(("--backend-directory", "--allow-gpu-metrics")) for flag in argv)
    assert argv[-2:] == ("--log-verbose=1", "a; b")


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
        ({"RANK": "1"}, Rank()),
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
    ],
)
def test_the_rank_is_mpis_or_slurms(environment: dict[str, str], rank: Rank) -> None:
    assert find_rank(environment) == rank


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "2"},
            "SLURM_PROCID and SLURM_NTASKS say 1 of 2, RANK and WORLD_SIZE say 0 of 2",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE say 2 of 2"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is 1, and nothing says of how many"),
    ],
)
def test_variables_that_contradict_each_other_are_refused_by_name(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ServerError) as refused:
        find_rank(environment)
    assert refused.value.problem.endswith(said) and "unset the variables" in refused.value.hint


def test_the_engine_knows_every_variable_by_which_several_processes_are_told(tmp_path: Path) -> None:
    """A tritonserver that a person starts several times by hand; deployment.serve has its own, longer rule."""
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


def test_fastertransformers_backend_takes_no_ranks_but_mpis() -> None:
    torchs = find_rank({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ServerError, match="RANK and WORLD_SIZE say 0 of 2, but FasterTransformer's backend"):
        check_world_size(torchs, [served("2", "1")], "fastertransformer")
    check_world_size(find_rank({"PMI_RANK": "0", "PMI_SIZE": "2"}), [served("2", "1")], "fastertransformer")


def test_only_the_first_rank_opens_ports_and_owns_the_endpoint() -> None:
    files = (Path("/repo"), Path("/e/endpoint.json"), Path("/e/s.log"))
    arguments = ServeArguments(*files, http_port=1, grpc_port=2, metrics_port=3, engine="fastertransformer")
    assert arguments_of(0, arguments) == arguments
    second = arguments_of(1, arguments)
    assert (second.endpoint, second.log) == (Path("/e/endpoint.rank1.json"), Path("/e/s.rank1.log"))
    assert {"--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"} <= set(second.server_args)


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


def test_free_ports_differ_and_can_be_taken() -> None:
    chosen = choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0})
    assert len({chosen.http, chosen.grpc, chosen.metrics}) == 3
    for port in (chosen.http, chosen.grpc, chosen.metrics):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_named_with_its_key(taken: int) -> None:
    with pytest.raises(ServerError) as refused:
        choose_ports("127.0.0.1", {"http": 0, "grpc": taken, "metrics": 0})
    assert f"port {taken} on 127.0.0.1 cannot be used for grpc: Address already in use" in refused.value.problem
    assert "deployment.grpc_port" in refused.value.hint


def test_one_port_cannot_serve_twice() -> None:
    free = choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0}).http
    with pytest.raises(ServerError, match=f"port {free}"):
        choose_ports("127.0.0.1", {"http": free, "grpc": free, "metrics": 0})


@pytest.mark.parametrize(
    ("says", "free"), [("10005\t60999\n", set(range(10_000, 10_005))), ("1024 65535", None), ("", None)]
)
def test_free_ports_are_none_that_the_kernel_gives_to_others(
    says: str, free: set[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server opens its ports seconds after they are chosen."""
    kernels_first = int(ports._KERNELS_RANGE.read_text().split()[0])
    (tmp_path / "range").write_text(says)
    monkeypatch.setattr(ports, "_KERNELS_RANGE", tmp_path / "range")
    chosen = set(vars(choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0, "openai": 0})).values())
    assert len(chosen) == 4
    assert chosen < free if free else min(chosen) >= kernels_first


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 99999), ("no such host", 0)])
def test_an_address_that_is_not_ours_is_refused(host: str, port: int) -> None:
    with pytest.raises(ServerError, match=r"cannot (listen|be used)"):
        choose_ports(host, {"http": port, "grpc": 0, "metrics": 0})


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(ServerError) as refused:
        locate("slipways")
    assert "did you mean 'slipway'" in refused.value.hint


def test_a_container_without_server_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_CONTAINER_BINARY", tmp_path / "tritonserver")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="there is no tritonserver"):
        locate("fastertransformer")
    binary = tmp_path / "tritonserver"
    binary.touch()
    assert locate("fastertransformer") == Installation(binary, None, None, {})


def test_a_stub_that_cannot_load_is_found_before_the_start(tmp_path: Path) -> None:
    # Oracle: the loader itself. A program that needs a library which is not there, made from the real stub.
    stub = locate("slipway").stub
    assert stub is not None
    broken = tmp_path / "triton_python_backend_stub"
    broken.write_bytes(stub.read_bytes().replace(b"libpython3.", b"libnopyth3."))
    broken.chmod(0o755)
    with pytest.raises(ServerError) as refused:
        installation._stub_environment(broken, {**os.environ, "LD_LIBRARY_PATH": str(_shipped_libraries(stub))})
    assert "libnopyth3" in refused.value.problem
    assert "apt-get install libpython3" in refused.value.hint


def test_the_stub_runs_with_the_libpython_of_the_interpreter_whose_packages_it_sees() -> None:
    """Oracle: the loader lists what the stub gets; this interpreter's own library, where it was built with one."""
    installation = locate("slipway")
    assert installation.stub is not None
    listed = subprocess.run(
        ["ldd", installation.stub], env={**os.environ, **installation.environment}, capture_output=True, text=True
    ).stdout
    found = Path(next(line.split(" => ")[1].split(" ")[0] for line in listed.splitlines() if "libpython3." in line))
    own = Path(str(sysconfig.get_config_var("LIBDIR"))) / str(sysconfig.get_config_var("INSTSONAME"))
    assert found.samefile(own) if own.is_file() else found.is_file()


def _shipped_libraries(stub: Path) -> Path:
    """What the wheel's stub needs besides libpython; a copy does not find it through its RPATH."""
    return next(parent for parent in stub.parents if parent.name == "site-packages") / "nvidia_pytriton.libs"


def test_the_backend_directory_satisfies_triton(tmp_path: Path) -> None:
    installation = locate("slipway")
    backends = assemble_backends(installation, tmp_path)
    assert backends is not None
    library = backends / "python" / "libtriton_python.so"
    assert library.is_file() and not library.is_symlink()
    assert (backends / "python" / "triton_python_backend_stub").samefile(installation.stub or "")
    assert (backends / "fastertransformer" / "model.py").is_file()
    assert not list(backends.rglob("__pycache__"))


def test_what_python_caches_never_reaches_the_published_repository(tmp_path: Path) -> None:
    """Oracle: Python itself imports the model from the link, and caches what it imports."""
    published = tmp_path / "published $(x)"
    for name in ("private", "watched"):
        (tmp_path / name).mkdir()
    for name in ("preprocessing/1/model.py", "preprocessing/config.pbtxt", "fastertransformer/1/1-gpu/a.bin"):
        (published / name).parent.mkdir(parents=True, exist_ok=True)
        (published / name).write_text("import words\n" if name.endswith(".py") else name)
    (published / "preprocessing/1/words.py").write_text("")
    before = sorted(published.rglob("*"))
    served = link_repository(published, tmp_path / "private")
    version = served / "preprocessing" / "1"
    imports = f"import sys; sys.dont_write_bytecode = False; sys.path.append({str(version)!r}); import model"
    subprocess.run([sys.executable, "-c", imports], check=True)
    assert len(list(version.glob("__pycache__/*.pyc"))) == 2 and sorted(published.rglob("*")) == before
    for path in published.rglob("*.*"):
        assert (served / path.relative_to(published)).read_text() == path.read_text()
    watched = link_repository(published, tmp_path / "watched", is_watched=True)
    (published / "new").mkdir()
    assert (watched / "new").is_dir(), "a model that comes later is seen"


def test_an_engine_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"no model\.py"):
        assemble_backends(locate("slipway"), tmp_path, engine_source=tmp_path)
