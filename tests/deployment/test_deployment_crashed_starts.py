"""Servers that crash before they serve, shown by programs that stand in for them: which are started a second time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deployment.arguments import ServeArguments
from deployment.life.leftovers import State
from deployment.life.lifecycle import Lifecycle
from deployment.life.stop_request import StopRequest
from deployment.processes.supervised import ServerDiedError
from deployment.triton.server import Server
from handover.errors import ServerError

STUB_ENDS = """
import os, signal, time
if os.fork() == 0:
    open("/proc/self/comm", "w").write("triton_python_backend_stub")
    os.kill(os.getpid(), signal.{stub})
time.sleep(1)
os.kill(os.getpid(), signal.{server})
"""


class Stand(Lifecycle[Server]):
    """A deployment of Python programs, one for each start; one that prints "up" has served."""

    def __init__(
        self, place: Path, programs: list[str], restart: int = 0, may_join: Callable[[], bool] = lambda: True
    ) -> None:
        self.log, self.stop, self.starts, self.programs = place / "server.log", StopRequest(), 0, programs
        self.may_stop = True
        arguments = ServeArguments(place, place / "endpoint.json", self.log, restart=restart)
        super().__init__(arguments, self.stop, may_join)

    def _prepare_start(self, state: State) -> Callable[[bool], Server]:
        def start(is_again: bool) -> Server:
            program, region = self.programs[self.starts], Path(f"/dev/shm/{state.prefix}{self.starts}")
            assert not list(Path("/dev/shm").glob(f"{state.prefix}*")), "a region of the crashed server is still there"
            self.starts += 1
            program = f"open({str(region)!r}, 'w')\n{program}"
            return Server([sys.executable, "-uc", program], {}, self.log.parent, self.log, state.prefix, None, is_again)

        return start

    def _open(self, server: Server, state: State, started: float) -> bool:
        deadline = time.monotonic() + 240
        while "up" not in self.log.read_text():
            assert time.monotonic() < deadline
            server.check()
            time.sleep(0.02)
        if self.may_stop:
            self.stop.reason = "the test has seen enough"
        return True


def ending(signal_name: str) -> str:
    return f"import os, signal; os.kill(os.getpid(), signal.{signal_name})"


UP = "import time; print('up'); time.sleep(60)"


# Which signal ends it counts before there is a second start.
@pytest.mark.in_ci(when=lambda at: at.restart == 0 or at.name == "SIGBUS")
@pytest.mark.parametrize("name", ["SIGBUS", "SIGSEGV", "SIGABRT"])
@pytest.mark.parametrize("restart", [0, 2])
def test_a_server_that_crashes_once_is_started_again(
    name: str, restart: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = Stand(tmp_path, [ending(name), UP], restart)
    stand.run()
    assert stand.starts == 2
    said = capsys.readouterr().out
    assert f"starting again: tritonserver ended by {name} before it served\n" in said and "restarting" not in said


@pytest.mark.parametrize(
    ("programs", "problem"),
    [
        ([ending("SIGBUS"), ending("SIGSEGV"), UP], "tritonserver was killed by SIGSEGV"),
        ([ending("SIGKILL"), UP], "tritonserver was killed by SIGKILL"),
        (["raise SystemExit(134)", UP], "tritonserver ended with exit status 134"),
        ([STUB_ENDS.format(stub="SIGKILL", server="SIGABRT"), UP], "tritonserver was killed by SIGABRT"),
        (["print(\"failed to load 'a' version 1: no such shard\"); import time; time.sleep(60)", UP], "no such shard"),
    ],
    ids=["twice", "killed", "status", "stub killed", "model"],
)
def test_what_ends_twice_or_otherwise_is_an_error(
    programs: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = Stand(tmp_path, programs, restart=2)
    with pytest.raises(ServerError) as caught:
        stand.run()
    assert problem in caught.value.problem and stand.starts == len(programs) - 1
    assert capsys.readouterr().out.count("starting again") == len(programs) - 2


def test_the_stub_that_crashed_is_said_and_not_the_server_that_ended_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = Stand(tmp_path, [STUB_ENDS.format(stub="SIGBUS", server="SIGABRT"), UP])
    stand.run()
    assert "starting again: a Python stub of tritonserver ended by SIGBUS before it served\n" in capsys.readouterr().out


def test_one_of_several_is_started_again_unless_the_others_have_been_told_where_it_is(tmp_path: Path) -> None:
    told = tmp_path / "told"
    stand = Stand(tmp_path, [ending("SIGBUS"), UP], may_join=lambda: not told.exists())
    stand.run()
    assert stand.starts == 2
    programs = [f"open({str(told)!r}, 'w'); {ending('SIGBUS')}", UP]
    stand = Stand(tmp_path, programs, may_join=lambda: not told.exists())
    with pytest.raises(ServerDiedError, match="tritonserver was killed by SIGBUS"):
        stand.run()
    assert stand.starts == 1


@pytest.mark.parametrize(("said", "starts"), [("", 2), ("Failed to initialize Python stub: no such shard", 1)])
def test_a_stub_that_lives_and_is_waited_for_was_given_up_unless_its_model_failed(
    said: str, starts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "triton_python_backend_stub"
    stub.symlink_to("/bin/sh")
    model = tmp_path / "engine" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("sleep 1")
    waiting = f"import subprocess; print({said!r}); subprocess.run([{str(stub)!r}, {str(model)!r}])"
    failed = "; print(\"failed to load 'a' version 1: no such shard\"); import time; time.sleep(60)"
    stand = Stand(tmp_path, [waiting + failed, UP])
    if said:
        with pytest.raises(ServerError, match="a model could not be loaded: no such shard"):
            stand.run()
    else:
        stand.run()
    assert stand.starts == starts
    again = "starting again: tritonserver gave up the Python stub of engine, which had no core for a second, before"
    assert capsys.readouterr().out.count(again) == starts - 1


def test_a_server_that_has_served_is_started_again_by_deployment_restart_alone(tmp_path: Path) -> None:
    stand = Stand(tmp_path, [f"print('up'); import time; time.sleep(1); {ending('SIGBUS')}", UP])
    stand.may_stop = False
    with pytest.raises(ServerDiedError, match="tritonserver was killed by SIGBUS"):
        stand.run()
    assert stand.starts == 1
