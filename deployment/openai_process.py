"""The OpenAI endpoint of a deployment: a child process that is started, watched and stopped with the server."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployment.address import own_address
from deployment.arguments import ServeArguments
from deployment.doors import Doors
from deployment.heartbeat import Heartbeat, ending
from deployment.openai.arguments import OpenAIArguments
from deployment.ports import Ports
from deployment.processes import die_with_parent
from deployment.restarts import MOST_RESTARTS, Restarts
from deployment.supervise import ServerDiedError, describe, last_lines
from handover.errors import ServerError

_PROJECT = Path(__file__).resolve().parent.parent
_PACKAGES = ("aiohttp", "jinja2", "tokenizers", "sentencepiece")
_PATIENCE_S = 60.0
_QUESTION_S = 5.0
_GRACE_S = 2.0
"""For what is cut to be told so, and for its own processes."""


def check_packages() -> None:
    """Refuse to begin where the endpoint cannot run; ServerError."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerError(
            f"deployment.openai_port is given, and this Python has no {', '.join(missing)}",
            f"pip install {' '.join(missing)}, or leave deployment.openai_port at null",
        )


class OpenAIProcess:
    """The endpoint's process.

    Args:
        arguments: of the deployment.
        ports: that the endpoint listens on, among others.
        doors: where Triton listens.
        sockets: directory of the drop-in engine's sockets; None: the server has none.
    """

    def __init__(self, arguments: ServeArguments, ports: Ports, doors: Doors, sockets: Path | None) -> None:
        assert ports.openai is not None
        address = own_address(arguments.host)
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{ports.openai}"
        self._log = arguments.log.with_name("openai.log")
        self._restarts = Restarts()
        self._arguments = OpenAIArguments(
            endpoint=f"{doors.address}:{doors.ports.grpc}",
            host=arguments.host,
            port=ports.openai,
            model_repository=arguments.model_repository.absolute(),
            sockets=sockets,
            api_keys_file=arguments.api_keys_file and arguments.api_keys_file.absolute(),
            processes=arguments.openai_processes or 1,
            metrics_url=f"http://{doors.address}:{doors.ports.metrics}/metrics",
            exit_timeout_s=max(0.0, arguments.exit_timeout_s),
            **_settings(arguments),
        )
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._heartbeat = Heartbeat()
        with self._log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployment.openai", *self._arguments.to_argv()],
                cwd=_PROJECT,
                env={**os.environ, **self._heartbeat.variables},
                pass_fds=self._heartbeat.files,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops this one in good order
                preexec_fn=die_with_parent,
            )
        self._heartbeat.has_begun()
        return process

    def watch(self) -> str:
        """Start it again if it has died or stands still; the server and its other clients go on meanwhile.

        Returns:
            What happened, for the operator; empty: it runs.

        Raises:
            ServerDiedError: it has died too often.
        """
        ended = ending(self._process, self._heartbeat)
        if not ended:
            return ""
        number = self._restarts.take()
        if number is None:
            problem = f"the OpenAI endpoint {ended}, for the fourth time within ten minutes"
            raise ServerDiedError(problem + self._quoted_log())
        self._heartbeat.close()
        self._process = self._start()
        return f"the endpoint {ended}; started again, {number} of {MOST_RESTARTS} within ten minutes"

    def wait_until_up(self, is_stopped: Callable[[float], bool]) -> None:
        """Wait until it answers, or the deployment is asked to stop.

        Raises:
            ServerDiedError: it ended.
            ServerError: it does not answer in time.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not is_stopped(0.1):
            self._check()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=_QUESTION_S):
                return
            if time.monotonic() > deadline:
                raise ServerError(f"the OpenAI endpoint does not answer at {self.url}{self._quoted_log()}")

    def _check(self) -> None:
        """Look whether it runs; ServerDiedError: it ended."""
        status = self._process.poll()
        if status is not None:
            raise ServerDiedError(f"the OpenAI endpoint {describe(status)}{self._quoted_log()}")

    def stop(self, exit_timeout_s: float) -> None:
        """End it; requests in flight have that many seconds, and none where it is below 0."""
        if exit_timeout_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(exit_timeout_s + _GRACE_S)
        self._process.kill()
        self._process.wait()

    def _quoted_log(self) -> str:
        return "".join(f"\n    {line}" for line in last_lines(self._log))


def _settings(arguments: ServeArguments) -> dict[str, Any]:
    """Return what the deployment sets of the endpoint; what it leaves out has the endpoint's own default."""
    files = {"access_log": arguments.openai_access_log, "chat_template": arguments.openai_chat_template}
    limits = {
        "max_body_bytes": arguments.openai_max_body_bytes,
        "max_sequences": arguments.openai_max_sequences,
        "max_requests": arguments.openai_max_requests,
    }
    found = {name: path.absolute() for name, path in files.items() if path is not None}
    return found | {name: limit for name, limit in limits.items() if limit is not None}
