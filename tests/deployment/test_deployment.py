"""Ports, command line and files of a deployment, without a server."""

from __future__ import annotations

import os
import py_compile
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from deployment.arguments import ServeArguments
from deployment.doors import ports
from deployment.doors.doors import Doors
from deployment.doors.ports import Ports, choose_ports
from deployment.ranks.ranks import arguments_of
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


def test_only_the_first_rank_opens_ports_and_owns_the_endpoint() -> None:
    files = (Path("/repo"), Path("/e/endpoint.json"), Path("/e/s.log"))
    arguments = ServeArguments(*files, http_port=1, grpc_port=2, metrics_port=3, engine="fastertransformer")
    assert arguments_of(0, arguments) == arguments
    second = arguments_of(1, arguments)
    assert (second.endpoint, second.log) == (Path("/e/endpoint.rank1.json"), Path("/e/s.rank1.log"))
    assert {"--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"} <= set(second.server_args)


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


def test_what_this_python_has_compiled_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: Python's own loader takes the code without its compiler."""
    source, private = tmp_path / "engine", tmp_path / "private"
    for directory in (source, private):
        directory.mkdir()
    (source / "model.py").write_text("x = 1\n")
    compiled = Path(py_compile.compile(str(source / "model.py"), doraise=True) or "")
    for other in (f"{compiled.name}.140234", "model.cpython-27.pyc"):  # one that is being written; another Python's
        (compiled.parent / other).write_bytes(b"")
    backends = assemble_backends(locate("slipway"), private, engine_source=source)
    assert backends is not None
    copy = backends / "fastertransformer" / "model.py"
    assert [path.name for path in (copy.parent / "__pycache__").iterdir()] == [compiled.name]
    monkeypatch.setattr(SourceFileLoader, "source_to_code", None)
    code = SourceFileLoader("model", str(copy)).get_code("model")
    assert code is not None and code.co_filename == str(copy)


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
