"""The running tritonserver: started, watched, stopped, with nothing left of it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deployment.life.leftovers import processes_of, remove_shared_memory
from deployment.processes.linux import (
    Process,
    awaited,
    blank_argument,
    command_line,
    kill_all,
    list_processes,
    look_up,
    read_ending,
)
from deployment.processes.stopped import STOPPED_S
from deployment.processes.supervised import CRASH_SIGNALS, GRACE_S, ServerDiedError, Supervised, describe
from handover.errors import ServerError

_RANDOM_WEIGHTS = "cannot be opened, loading model fails!"
"""FasterTransformer's warning before it serves random numbers in place of a shard."""

_LOAD_FAILURE = re.compile(r"failed to load '.*' version \d+: (?:Internal: )?(.*)")
_STUB_FAILED = "Failed to initialize Python stub"
"""A stub prints it before it ends by a model's error."""
_LOG_LINE = re.compile(r"[IWE]\d{4} ")
"""Begins what Triton itself prints."""
_STUB_NAME = "triton_python_backend_stub"
_TAIL_CHARACTERS = 240
_POLL_S = 0.02
_LOOK_S = 0.25
"""While models load, between looks at all processes: a host has thousands, and a server waits a second for a stub."""
_ZOMBIE_S = 3.0
"""A stub that ended while its server goes on is dead; the server itself waits for one within this time."""


ModelVersion = tuple[str, str]
"""A model's name and its version."""


class Server(Supervised):
    """One tritonserver.

    Args:
        argv: its command line.
        environment: variables added to ours.
        directory: working directory, which FasterTransformer's backend resolves relative paths against.
        log: file that receives what it prints.
        prefix: unique prefix of its shared-memory regions.
        shown_paths: paths that it knows by another name, and how to quote them.
        is_again: it is started in place of one that has died, whose log is continued.
        secret: in its command line; blanked there once the server has read it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        prefix: str,
        shown_paths: Mapping[Path, Path] | None = None,
        is_again: bool = False,
        secret: str = "",
    ) -> None:
        super().__init__("tritonserver", argv, {**os.environ, **environment}, directory, log, is_again)
        self._prefix = prefix
        self._shown_paths = shown_paths or {}
        self._stubs: dict[Process, ModelVersion] = {}
        self._is_served: Callable[[ModelVersion], bool] | None = None
        self._zombie_since: float | None = None
        self._looks_again = 0.0
        self._ended_stubs: dict[int, int] = {}
        self._killed_stubs = set[int]()
        self._given_up, self._has_stub_failed = "", False
        self._secret = secret

    def remember_stubs(self, is_served: Callable[[ModelVersion], bool] | None = None) -> int:
        """Note the stubs that serve; from now on each must live. Returns their number.

        Args:
            is_served: of a server whose models may be loaded and unloaded: whether it serves a model's version. A stub
                may go with its model then, others come, and a model that cannot be loaded is its client's affair.
        """
        self._stubs, self._is_served = self._find_stubs(list_processes()), is_served
        return len(self._stubs)

    def check(self) -> None:
        """Look once.

        Raises:
            ServerDiedError: the server or one of its stubs died, or was stopped for 20 s.
            ServerError: a model could not be loaded, or the engine would serve random weights.
        """
        abandoned, dead = "", list[Process]()
        if not self._stubs and time.monotonic() >= self._looks_again:
            processes = list_processes()
            self._looks_again = time.monotonic() + _LOOK_S
            self._note_ended_stubs(processes)
            abandoned, dead = self._find_abandoned_stub(processes), self._long_ended_stubs(processes)
        status = self._poll()
        if status is not None:
            raise ServerDiedError(f"tritonserver {describe(status)}{self._quoted_log()}")
        self._scan_log()
        if abandoned and not self._has_stub_failed:
            self._given_up = f"tritonserver gave up the Python stub of {abandoned}, which had no core for a second,"
            raise ServerDiedError(f"{self._given_up} and waits for its end{self._quoted_log()}")
        if self._stubs:
            dead = self._dead_stubs()
        if dead:
            raise ServerDiedError(
                f"a Python stub of tritonserver died (pid {', '.join(str(stub.pid) for stub in dead)}); "
                f"Triton does not restart it{self._quoted_log()}"
            )
        for pid in self._stopped.find(filter(None, map(look_up, (self.pid, *(stub.pid for stub in self._stubs))))):
            name = "tritonserver" if pid == self.pid else "a Python stub of tritonserver"
            raise ServerDiedError(f"{name} (pid {pid}) has been stopped (SIGSTOP) for {STOPPED_S:g} s")

    def stop(self, exit_timeout_s: float | None) -> int:
        """End the server with its stubs and shared-memory regions."""
        if exit_timeout_s is not None and self._poll() is None:
            self._process.terminate()
            deadline = time.monotonic() + max(0.0, exit_timeout_s + GRACE_S)
            while self._poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        self._process.kill()
        kill_all(processes_of(self._prefix))
        status = self._wait_killed()
        remove_shared_memory(self._prefix)
        return status

    def _poll(self) -> int | None:
        """Return the server's exit status, and end its stubs before it is waited for; None: it runs.

        A stub looks three times a second whether the server's pid exists. Once it does not, the stub frees the memory
        that it shares with the server while its own threads still write there, and ends by SIGSEGV.
        """
        if self._process.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            stubs = processes_of(self._prefix)
            self._killed_stubs |= {stub.pid for stub in stubs}
            kill_all(stubs)
        return self._process.poll()

    def find_crash(self) -> str:
        """Return which program crashed, the stub before the server that ends with it."""
        if self._given_up:
            return self._given_up
        self._note_ended_stubs(list_processes())
        signals = self._ended_stubs.values()
        if crashed := next((number for number in signals if number in CRASH_SIGNALS), 0):
            return f"a Python stub of tritonserver ended by {signal.Signals(crashed).name}"
        if signal.SIGKILL in signals:
            return ""
        self._poll()  # ends the stubs before the server is waited for
        return super().find_crash()

    def _find_stubs(self, processes: Sequence[Process]) -> dict[Process, ModelVersion]:
        """The stubs that run; each has its model's file, ``<model>/<version>/model.py``, as its first argument."""
        found = {}
        for child in (process for process in processes if process.parent == self.pid):
            argv = command_line(child.pid)
            if len(argv) > 1 and Path(argv[0]).name == _STUB_NAME:
                path = Path(argv[1])
                found[child] = (path.parent.parent.name, path.parent.name)
        return found

    def _find_abandoned_stub(self, processes: Sequence[Process]) -> str:
        """While models load: the name of a model whose stub lives and is given up by the server, or empty.

        A stub has a thread that says three times a second that it lives. While a stub imports and initializes its
        model the server looks once a second, and takes one that did not say so for dead: on busy cores that is one
        that got no core in time. The server frees what it has sent to it, then waits for an end that does not come: a
        stub that has yet to read that ends by SIGBUS or SIGSEGV with the lock that both share, at which the server
        aborts; any other waits for the server for ever.
        """
        if self._is_served is not None:  # models come and go, and their stubs are waited for in good order
            return ""
        pids = awaited(self.pid)
        stubs = self._find_stubs(processes).items() if pids else ()
        return next((model for stub, (model, _) in stubs if stub.pid in pids and stub.is_running), "")

    def _dead_stubs(self) -> list[Process]:
        ended = [stub for stub in self._stubs if not stub.is_running]
        if self._is_served is None:
            return ended
        running = {stub: model for stub, model in self._find_stubs(list_processes()).items() if stub.is_running}
        known = {(stub.pid, stub.started) for stub in self._stubs}
        replaced = {model for stub, model in running.items() if (stub.pid, stub.started) not in known}
        dead = [stub for stub in ended if self._stubs[stub] not in replaced and self._is_served(self._stubs[stub])]
        if not dead:
            self._stubs = running or self._stubs
        return dead

    def _long_ended_stubs(self, processes: Sequence[Process]) -> list[Process]:
        """While models load: children that have ended and that the server does not wait for."""
        ended = [process for process in processes if process.parent == self.pid and process.state in "ZX"]
        if not ended:
            self._zombie_since = None
            return []
        self._zombie_since = self._zombie_since or time.monotonic()
        return ended if time.monotonic() - self._zombie_since > _ZOMBIE_S else []

    def _note_ended_stubs(self, processes: Sequence[Process]) -> None:
        """While models load: note by which signal stubs ended. The server waits a second before it reaps such a one."""
        for process in processes:
            is_ended = process.session == self.pid and process.state == "Z" and process.pid not in self._killed_stubs
            if is_ended and (ending := read_ending(process.pid)) and ending[0] == _STUB_NAME[:15]:
                self._ended_stubs[process.pid] = os.WTERMSIG(ending[1])

    def _scan_log(self) -> None:
        with self._log.open("rb") as stream:
            stream.seek(self._log_read_bytes)
            new = stream.read()
        whole_lines = new[: new.rfind(b"\n") + 1]
        self._log_read_bytes += len(whole_lines)
        lines = whole_lines.decode(errors="replace").splitlines()
        if self._secret and any(map(_LOG_LINE.match, lines)):  # it speaks when it has read its command line
            blank_argument(self.pid, self._secret)
            self._secret = ""
        self._has_stub_failed |= any(_STUB_FAILED in line for line in lines)
        random = [line.strip() for line in lines if _RANDOM_WEIGHTS in line]
        if random:
            raise ServerError(
                f"the engine could not open {len(random)} weight files and would serve random numbers"
                + "".join(f"\n  {self._shown(line)}" for line in random[:10]),
                "the server was stopped; redo the stages that make the weights: force=[convert,export]",
            )
        failures = [found.group(1) for line in lines if (found := _LOAD_FAILURE.search(line))]
        if (
            failures and self._is_served is None
        ):  # Triton itself would first load the other models and unload them again
            problem = "\n  ".join(map(self._shown, failures[0].split("\\n")))  # Triton logs all its lines as one
            raise ServerError(f"a model could not be loaded: {problem}{self._quoted_log()}")

    def _shown(self, line: str) -> str:
        for path, name in self._shown_paths.items():
            line = line.replace(str(path), str(name))
        return line[:_TAIL_CHARACTERS]
