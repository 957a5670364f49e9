"""A deployment of another project's server while it runs; see deployment/life/lifecycle.py for what every one has."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deployment.arguments import EngineArguments
from deployment.doors.address import own_address, place_of
from deployment.doors.ports import choose_ports
from deployment.engines.process import EngineServer, environment_of
from deployment.engines.questions import CompletionProbe, ask_version
from deployment.engines.table import PROGRAMS, build_argv, lasting_argv, without_secrets
from deployment.life.leftovers import State
from deployment.life.lifecycle import Lifecycle
from deployment.life.publishing import clients_host, publish, served_manifest
from deployment.life.stop_request import StopRequest
from handover.endpoint import FLAGS, VERSIONS
from handover.progress import say
from handover.provenance import VERSION

_MODEL = "model"
"""Key of the endpoint's ``settings``: the name by which the server knows the model."""


def find_port(arguments: EngineArguments) -> int:
    """Check the given port, or choose a free one; ServerError."""
    given = {"http": arguments.http_port, "grpc": 0, "metrics": 0}
    return choose_ports(arguments.host, given).http


class EngineDeployment(Lifecycle[EngineServer]):
    """The server of another project.

    Args:
        arguments: of this process.
        stop: ends the deployment.
        edited: files of the directory that were edited after they were written.
        may_join: see Lifecycle.
    """

    def __init__(
        self,
        arguments: EngineArguments,
        stop: StopRequest,
        edited: Sequence[str],
        may_join: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(arguments, stop, may_join)
        self._arguments, self._edited = arguments, edited
        self._program = PROGRAMS[arguments.engine]

    def _prepare_start(self, state: State) -> Callable[[bool], EngineServer]:
        directory, log = Path(state.directory), self._arguments.log
        self._port = find_port(self._arguments)
        argv = build_argv(self._program, self._arguments, self._port)
        say(f"starting   {self._program.title}: {argv[0]}, log {log}")

        def start(is_again: bool) -> EngineServer:
            return self._start(directory, is_again)

        return start

    def _start(self, directory: Path, is_again: bool) -> EngineServer:
        argv = build_argv(self._program, self._arguments, self._port)
        return EngineServer(
            self._program.title, argv, environment_of(directory), directory, self._arguments.log, is_again
        )

    def _open(self, server: EngineServer, state: State, started: float) -> bool:
        base = f"http://{place_of(own_address(self._arguments.host), self._port)}"
        probe = CompletionProbe(base, self._program, self._arguments.start_timeout_s)
        if not self._wait_until_it_generates(server, probe):
            return False
        version, start_s = ask_version(base, self._program), time.monotonic() - started
        settings = self._settings(probe.model, version)
        url = f"http://{place_of(clients_host(self._arguments), self._port)}/v1"
        ports: dict[str, Any] = {"http_port": self._port, "openai_port": self._port}
        publish(self._arguments, state, start_s, settings, self._edited, **ports, openai_url=url)
        say(f"serving    {self._program.title} {version}  {base}/v1  {self._arguments.endpoint}")
        return True

    def _settings(self, model: str, version: str) -> dict[str, str]:
        """Return what results are told: the command line is that without what differs from start to start."""
        arguments, manifest = self._arguments, served_manifest(self._arguments.model_repository)
        weights = manifest.made_from.get("weight_data_type") if manifest is not None else None
        return {
            "tensor_para_size": str(arguments.tensor_para_size),
            "pipeline_para_size": str(arguments.pipeline_para_size),
            **{name: str(value) for name in ("data_parallel_size", "nodes") if (value := getattr(arguments, name))},
            "data_type": arguments.data_type,
            **({"weight_data_type": str(weights)} if weights else {}),
            VERSIONS: ", ".join(filter(None, (f"slipway {VERSION}", version and f"{arguments.engine} {version}"))),
            FLAGS: shlex.join(without_secrets(lasting_argv(self._program, arguments))),
            _MODEL: model,
        }
