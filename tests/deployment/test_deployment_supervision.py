"""A server under supervision: its log, its end and its supervisor's, shown by programs that stand in for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployment.life.leftovers import processes_of
from deployment.processes import stopped
from deployment.processes.linux import look_up
from deployment.processes.supervised import ServerDiedError, last_lines
from deployment.triton.server import Server
from handover.errors import ServerError

PROJECT = Path(__file__).resolve().parents[2]


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
    failure = "failed to load 'a' version 1: Internal: ValueError: why in /tmp/x/a\\n  first"
    line = f'E1120 1 model_lifecycle.cc:642] "{failure}"'
    server = start(f"import time; print({line!r}); time.sleep(60)", tmp_path)
    try:
        assert "a model could not be loaded: ValueError: why in /repo/a\n    first" in first_error(server).problem
    finally:
        server.stop(0)


def test_an_exit_is_reported_with_the_last_lines(tmp_path: Path) -> None:
    server = start("print('bind: Address already in use'); raise SystemExit(3)", tmp_path)
    error = first_error(server)
    assert "tritonserver ended with exit status 3" in error.problem
    assert "bind: Address already in use" in error.problem
    assert server.stop(0) == 3


def test_stubs_end_before_the_server_is_waited_for(tmp_path: Path) -> None:
    """A stub that no longer finds its server, as Triton's looks for it, would end by a crash of its own."""
    stub = "import os, time\nserver = os.getppid()\nwhile True: os.kill(server, 0); time.sleep(0.01)"
    argv = ["triton_python_backend_stub", "-c", stub, "slipway-0123456789ab-"]
    program = (
        f"import subprocess, sys, time; p = subprocess.Popen({argv}, executable=sys.executable); print(p.pid);"
        " time.sleep(60)"
    )
    server = start(program, tmp_path)
    try:
        while len(running := processes_of("slipway-0123456789ab-")) < 1:
            time.sleep(0.02)
        time.sleep(0.5)  # the stub has read its program
        os.kill(server.pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in first_error(server).problem
        assert not running[0].is_running
        time.sleep(0.2)
    finally:
        assert server.stop(0) == -signal.SIGKILL
    assert "ProcessLookupError" not in (tmp_path / "server.log").read_text()
    assert server.find_crash() == ""


def test_a_child_that_ended_while_the_server_goes_on_is_noticed(tmp_path: Path) -> None:
    program = "import subprocess, time; p = subprocess.Popen(['true']); print(p.pid); time.sleep(60)"
    server = start(program, tmp_path)
    try:
        error = first_error(server)
        pid = (tmp_path / "server.log").read_text().strip()
        assert f"died (pid {pid})" in error.problem
    finally:
        server.stop(0)


def test_a_server_that_is_stopped_for_long_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "STOPPED_S", 0.5)
    server = start("import time; time.sleep(60)", tmp_path)
    try:
        os.kill(server.pid, signal.SIGSTOP)
        started = time.monotonic()
        error = first_error(server)
        assert isinstance(error, ServerDiedError) and f"(pid {server.pid}) has been stopped" in error.problem
        assert time.monotonic() - started > 0.5
    finally:
        assert server.stop(None) == -signal.SIGKILL


def test_a_server_that_goes_on_soon_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops do not add up; time in which the supervisor was stopped too, as in a suspended job, does not count."""
    monkeypatch.setattr(stopped, "STOPPED_S", 1.5)
    server = start("import time; time.sleep(60)", tmp_path)
    try:
        for signals in ((signal.SIGSTOP, signal.SIGCONT), (signal.SIGSTOP, signal.SIGCONT)):
            os.kill(server.pid, signals[0])
            server.check()
            time.sleep(1.6)
            server.check()
            os.kill(server.pid, signals[1])
            wait_until_running(server.pid)
            server.check()
    finally:
        server.stop(None)


def wait_until_running(pid: int) -> None:
    deadline = time.monotonic() + 240
    while (process := look_up(pid)) is None or process.state == "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    server = start(program, tmp_path)
    while not (tmp_path / "server.log").read_text():
        time.sleep(0.02)
    started = time.monotonic()
    assert server.stop(0) == -signal.SIGKILL
    assert time.monotonic() - started < 30


def test_a_server_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from deployment.triton.server import Server\n"
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
    deadline = time.monotonic() + 240
    while server.is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.is_running
