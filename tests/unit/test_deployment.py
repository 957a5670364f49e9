"""Ports, command line, log and leftovers of a deployment, without a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment import leftovers, tritonserver
from deployment.arguments import ServeArguments
from deployment.leftovers import create_state, read_state, state_file, sweep_earlier
from deployment.ports import Ports, choose_ports
from deployment.processes import command_line, descendants, look_up
from deployment.ranks import Rank, arguments_of, check_world_size, engine_environment, find_rank
from deployment.served_models import ServedModel
from deployment.supervise import Server, last_lines
from deployment.tritonserver import Installation, assemble_backends, build_argv, locate
from handover.errors import ServerError

ARGUMENTS = ServeArguments(Path("/repo with space"), Path("/run/endpoint.json"), Path("/run/server.log"))
PROJECT = Path(__file__).resolve().parents[2]


def test_the_command_line_binds_every_service_to_the_given_address() -> None:
    argv = build_argv(
        Path("/t/tritonserver"),
        ARGUMENTS,
        Path("/tmp/x/repository"),
        Ports(1, 2, 3),
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
    argv = build_argv(Path("tritonserver"), arguments, Path("/r"), Ports(1, 2, 3), "slipway-0-", None)
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
    ],
)
def test_the_rank_is_mpis_or_slurms(environment: dict[str, str], rank: Rank) -> None:
    assert find_rank(environment) == rank


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
        check_world_size(rank, models)
    with pytest.raises(ServerError) as error:
        check_world_size(Rank(3, 4), [served("1", "1")])
    assert error.value.problem == (
        "world_size (4) should equal to tensor_para_size_ * pipeline_para_size_ (1 * 1 here)"
    )
    assert error.value.hint.startswith("start 1 processes")
    with pytest.raises(ServerError, match="one model together"):
        check_world_size(Rank(0, 2), [served("2", "1")] * 2)


def test_every_rank_is_told_the_same_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first, second = (
        json.loads(engine_environment(Rank(rank, 2, rank, 2), Path("/e/endpoint.json"), 30)["SLIPWAY_RANKS"])
        for rank in (0, 1)
    )
    assert first | {"rank": 1, "local_rank": 1} == second
    assert second["rendezvous"] == "/e/.endpoint.json.ranks" and "7" in second["run"]


def test_free_ports_differ_and_can_be_taken() -> None:
    ports = choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0})
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    for port in (ports.http, ports.grpc, ports.metrics):
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


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 99999), ("no such host", 0)])
def test_an_address_that_is_not_ours_is_refused(host: str, port: int) -> None:
    with pytest.raises(ServerError, match=r"cannot (listen|be used)"):
        choose_ports(host, {"http": port, "grpc": 0, "metrics": 0})


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(ServerError) as refused:
        locate("slipways")
    assert "did you mean 'slipway'" in refused.value.hint


def test_a_container_without_server_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tritonserver, "_CONTAINER_BINARY", tmp_path / "tritonserver")
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
        tritonserver._stub_environment(broken, {**os.environ, "LD_LIBRARY_PATH": str(_shipped_libraries(stub))})
    assert "libnopyth3" in refused.value.problem
    assert "apt-get install libpython3" in refused.value.hint


def _shipped_libraries(stub: Path) -> Path:
    """What the wheel's stub needs besides libpython; a copy does not find it through its RPATH."""
    return next(parent for parent in stub.parents if parent.name == "site-packages") / "nvidia_pytriton.libs"


def test_the_backend_directory_satisfies_triton(tmp_path: Path) -> None:
    installation = locate("slipway")
    backends = assemble_backends(installation, tmp_path)
    assert backends is not None
    library = backends / "python" / "libtriton_python.so"
    assert library.is_file() and not library.is_symlink()
    assert (backends / "python" / "triton_python_backend_stub").resolve() == installation.stub
    assert (backends / "fastertransformer" / "model.py").is_file()
    assert not list(backends.rglob("__pycache__"))


def test_an_engine_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"no model\.py"):
        assemble_backends(locate("slipway"), tmp_path, engine_source=tmp_path)


def test_the_last_lines_leave_out_tables(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("first\n+----+----+\n| a  | b  |\n\n" + "x" * 1000 + "\nE1 reason\xff\n", encoding="latin-1")
    lines = last_lines(log)
    assert lines[0] == "first"
    assert lines[2].startswith("E1 reason")
    assert last_lines(tmp_path / "none") == []


def start(program: str, tmp_path: Path) -> Server:
    """A stand-in for the server: what it prints and how it ends is all that is watched here."""
    argv = [sys.executable, "-uc", program]
    return Server(argv, {}, tmp_path, tmp_path / "server.log", "slipway-0123456789ab-", {Path("/tmp/x"): Path("/repo")})


def first_error(server: Server, timeout_s: float = 10) -> ServerError:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            server.check()
        except ServerError as error:
            return error
        time.sleep(0.02)
    raise AssertionError("nothing was noticed")


WARNING = "[WARNING] file /tmp/x/m/1/1-gpu/model.wpe.bin cannot be opened, loading model fails!"


def test_fasterTransformers_warning_of_random_weights_is_an_error(tmp_path: Path) -> None:  # noqa: N802
    server = start(f"import time; print('fine'); print({WARNING!r}); time.sleep(60)", tmp_path)
    try:
        error = first_error(server)
        assert "/repo/m/1/1-gpu/model.wpe.bin cannot be opened" in error.problem
        assert "would serve random numbers" in error.problem
    finally:
        assert server.stop(0) == -signal.SIGTERM


def test_a_warning_that_comes_in_pieces_is_seen_once_it_is_whole(tmp_path: Path) -> None:
    half = len(WARNING) // 2
    program = (
        f"import sys, time; sys.stdout.write({WARNING[:half]!r}); sys.stdout.flush(); time.sleep(0.3); "
        f"print({WARNING[half:]!r}); time.sleep(60)"
    )
    server = start(program, tmp_path)
    try:
        assert "model.wpe.bin" in first_error(server).problem
    finally:
        server.stop(0)


def test_a_model_that_cannot_be_loaded_is_quoted_at_once(tmp_path: Path) -> None:
    line = "E1120 1 model_lifecycle.cc:642] \"failed to load 'a' version 1: Internal: ValueError: why in /tmp/x/a\""
    server = start(f"import time; print({line!r}); time.sleep(60)", tmp_path)
    try:
        assert "a model could not be loaded: ValueError: why in /repo/a" in first_error(server).problem
    finally:
        server.stop(0)


def test_an_exit_is_reported_with_the_last_lines(tmp_path: Path) -> None:
    server = start("print('bind: Address already in use'); raise SystemExit(3)", tmp_path)
    error = first_error(server)
    assert "tritonserver ended with exit status 3" in error.problem
    assert "bind: Address already in use" in error.problem
    assert server.stop(0) == 3


def test_a_child_that_ended_while_the_server_goes_on_is_noticed(tmp_path: Path) -> None:
    program = "import subprocess, time; p = subprocess.Popen(['true']); print(p.pid); time.sleep(60)"
    server = start(program, tmp_path)
    try:
        error = first_error(server)
        pid = (tmp_path / "server.log").read_text().strip()
        assert f"died (pid {pid})" in error.problem
    finally:
        server.stop(0)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    server = start(program, tmp_path)
    while not (tmp_path / "server.log").read_text():
        time.sleep(0.02)
    started = time.monotonic()
    assert server.stop(0) == -signal.SIGKILL
    assert time.monotonic() - started < 6


def test_a_server_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from deployment.supervise import Server\n"
        "path = Path(sys.argv[1]); program = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(Server(program, {}, path, path / 'log', 'slipway-0123456789ab-').pid, flush=True); time.sleep(60)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout
    server = look_up(int(supervisor.stdout.readline()))
    assert server and server.is_running
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 5
    while server.is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.is_running


@pytest.fixture
def endpoint(tmp_path: Path) -> Path:
    return tmp_path / "endpoint.json"


def _ended_pid() -> tuple[int, int]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = look_up(child.pid)
    assert process is not None
    child.communicate()
    return process.pid, process.started


def _rewrite(endpoint: Path, **changes: object) -> None:
    note = state_file(endpoint)
    note.write_text(json.dumps({**json.loads(note.read_text()), **changes}))


def test_a_running_deployment_with_the_same_endpoint_is_not_disturbed(endpoint: Path) -> None:
    state = create_state(endpoint)
    region = Path("/dev/shm") / f"{state.prefix}region"
    region.write_bytes(b"x")
    try:
        with pytest.raises(ServerError, match=f"running already, pid {os.getpid()}"):
            sweep_earlier(endpoint)
        assert region.exists()
    finally:
        leftovers.sweep(state)
    assert not region.exists() and not Path(state.directory).exists() and read_state(endpoint) is None


def test_what_a_killed_deployment_left_is_swept(endpoint: Path) -> None:
    state = create_state(endpoint)
    region = Path("/dev/shm") / f"{state.prefix}region"
    region.write_bytes(b"x")
    endpoint.write_text("{}")
    pid, started = _ended_pid()
    _rewrite(endpoint, pid=pid, started=started)
    assert sweep_earlier(endpoint)
    left = [path for path in (region, Path(state.directory), endpoint, state_file(endpoint)) if path.exists()]
    assert left == []
    assert not sweep_earlier(endpoint)


def test_a_reused_pid_is_not_taken_for_the_supervisor(endpoint: Path) -> None:
    state = create_state(endpoint)
    _rewrite(endpoint, started=state.started - 1)  # our own pid, but of a process that started earlier
    assert sweep_earlier(endpoint)
    assert not Path(state.directory).exists()


def test_a_note_of_another_boot_or_without_sense_is_left_alone(endpoint: Path, tmp_path: Path) -> None:
    state = create_state(endpoint)
    _rewrite(endpoint, place="another boot")
    assert not sweep_earlier(endpoint)
    assert Path(state.directory).is_dir()
    state_file(endpoint).write_text("not JSON")
    assert not sweep_earlier(endpoint)
    leftovers.sweep(state)


@pytest.mark.parametrize("prefix", ["", "slipway-", "triton_", "slipway-0123456789ab-/../"])
def test_only_names_with_our_unique_prefix_are_swept(endpoint: Path, tmp_path: Path, prefix: str) -> None:
    state = create_state(endpoint)
    foreign = Path("/dev/shm") / f"triton_test_{os.getpid()}"
    foreign.write_bytes(b"x")
    directory = tmp_path / "slipway-precious"
    directory.mkdir()
    pid, started = _ended_pid()
    _rewrite(endpoint, pid=pid, started=started, prefix=prefix, directory=str(directory))
    try:
        assert sweep_earlier(endpoint)
        assert foreign.exists() and directory.exists()
    finally:
        foreign.unlink()
        leftovers.sweep(state)


def _named_program(tmp_path: Path, name: str, argument: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(tmp_path / name), "-c", "import time; time.sleep(60)", argument], executable=sys.executable
    )


def test_processes_are_found_by_program_and_prefix_only(endpoint: Path, tmp_path: Path) -> None:
    state = create_state(endpoint)
    ours = _named_program(tmp_path, "tritonserver", f"--x={state.prefix}")
    bystanders = [
        _named_program(tmp_path, "less", f"--x={state.prefix}"),
        _named_program(tmp_path, "tritonserver", "--x=other"),
    ]
    try:
        deadline = time.monotonic() + 5
        while not command_line(ours.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert leftovers.sweep(state) == []
        assert ours.wait(5) == -signal.SIGKILL
        assert [process.poll() for process in bystanders] == [None, None]
    finally:
        for process in (ours, *bystanders):
            process.kill()
            process.wait()


def test_the_helper_sweeps_when_its_supervisor_is_killed(endpoint: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from deployment.leftovers import Sweeper, create_state\n"
        "state = create_state(Path(sys.argv[1])); Path('/dev/shm', state.prefix + 'region').write_bytes(b'x')\n"
        "sweeper = Sweeper(state); print(state.prefix, flush=True); time.sleep(60)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(endpoint)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout
    prefix = supervisor.stdout.readline().strip()
    helpers = [process for process in descendants([supervisor.pid]) if process.pid != supervisor.pid]
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 10
    while state_file(endpoint).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not state_file(endpoint).exists()
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert len(helpers) == 1
    while helpers[0].is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not helpers[0].is_running
