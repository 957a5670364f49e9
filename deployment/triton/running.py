"""A deployment of tritonserver while it runs; see deployment/life/lifecycle.py for what every deployment has."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deployment.arguments import ServeArguments
from deployment.beside.guard_process import LAST_ANSWERS_S, GuardProcess
from deployment.beside.openai_process import OpenAIProcess
from deployment.doors.doors import Doors, find_doors
from deployment.doors.known_faults import describe, find_version
from deployment.doors.ports import Ports, choose_ports
from deployment.doors.restriction import Restriction
from deployment.life.leftovers import State
from deployment.life.lifecycle import Lifecycle
from deployment.life.publishing import publish, served_manifest
from deployment.life.stop_request import StopRequest
from deployment.proof.served_models import PUBLISHED_PARAMETERS, ServedModel
from deployment.triton.installation import SLIPWAY, Installation, assemble_backends, build_argv, link_repository, locate
from deployment.triton.probe import Probe
from deployment.triton.server import ModelVersion, Server
from deployment.triton.versions import describe_versions, triton_version
from ft_format.socket_messages import DIRECTORY_VARIABLE
from handover.endpoint import FLAGS, VERSIONS
from handover.manifest import RANDOM_WEIGHTS
from handover.progress import say

_QUESTION_TIMEOUT_S = 5.0
_UNTOLD = (*PUBLISHED_PARAMETERS, "model_type", "model_checkpoint_path")
"""Parameters that are no flags of the engine: they are published by name, or say which model it is."""
_RANKS = "; processes that are to serve one model together must be told which each is, as srun, mpirun and torchrun do"


def find_ports(arguments: ServeArguments) -> Ports:
    """Check the given ports and choose the free ones."""
    given = {"http": arguments.http_port, "grpc": arguments.grpc_port, "metrics": arguments.metrics_port}
    if arguments.openai_port is not None:
        given["openai"] = arguments.openai_port
    return choose_ports(arguments.host, given)


class Deployment(Lifecycle[Server]):
    """A tritonserver.

    Args:
        arguments: of this process.
        models: that are served; the first one is probed and described.
        stop: ends the deployment.
        takes_requests: False for a rank that only computes: nothing is probed or published.
        environment: variables for the server.
        edited: files of the repository that were edited after the export.
        may_join: see Lifecycle.
    """

    def __init__(
        self,
        arguments: ServeArguments,
        models: Sequence[ServedModel],
        stop: StopRequest,
        takes_requests: bool,
        environment: Mapping[str, str],
        edited: Sequence[str],
        may_join: Callable[[], bool],
    ) -> None:
        super().__init__(arguments, stop, may_join)
        self._arguments, self._model = arguments, models[0]
        self._takes_requests, self._environment = takes_requests, environment
        self._edited = edited
        self._openai: OpenAIProcess | None = None
        self._guard: GuardProcess | None = None
        self._sockets: Path | None = None

    def _prepare_start(self, state: State) -> Callable[[bool], Server]:
        arguments, directory = self._arguments, Path(state.directory)
        self._ports = find_ports(arguments)
        self._doors = find_doors(arguments, self._ports)
        installation = locate(arguments.engine, arguments.tritonserver)
        self._version = find_version(installation.binary)
        backends = assemble_backends(installation, directory)
        repository = link_repository(arguments.model_repository, directory, _is_watched(arguments))
        closed = self._restrict(installation)
        binary, prefix = installation.binary, state.prefix
        command = build_argv(binary, arguments, repository, self._doors, prefix, backends, closed.flags)
        variables = {**installation.environment, **self._environment, **self._make_sockets(directory)}
        shown_paths = {repository: arguments.model_repository}

        def start(is_again: bool) -> Server:
            directory = self._model.directory
            return Server(command, variables, directory, arguments.log, prefix, shown_paths, is_again, closed.secret)

        return start

    def _make_sockets(self, directory: Path) -> dict[str, str]:
        """Make a place for the sockets by which an OpenAI endpoint asks the engine; returns the server's variables."""
        if self._arguments.engine != SLIPWAY or not self._takes_requests:
            return {}
        self._sockets = directory / "sockets"
        self._sockets.mkdir(mode=0o700, exist_ok=True)
        return {DIRECTORY_VARIABLE: str(self._sockets)}

    def _restrict(self, installation: Installation) -> Restriction:
        """Close the APIs that clients need not have, and say where that cannot be done."""
        arguments = self._arguments
        given = (arguments.open_apis, arguments.server_args)
        closed = Restriction(installation.binary, installation.environment, *given)
        if self._takes_requests:
            closed.write(arguments.endpoint)
            if closed.unknown:
                say(f"open       {', '.join(closed.closed)}: this tritonserver does not know --{closed.unknown[0]}")
        return closed

    def _open(self, server: Server, state: State, started: float) -> bool:
        ports, doors = self._ports, self._doors
        url = f"{doors.address}:{doors.ports.grpc}"
        if self._takes_requests:
            if doors.is_guarded:
                self._guard = GuardProcess(self._arguments, ports, doors, self._version)
                self._guard.wait_until_up(self._stop.came, f"does not listen on port {ports.http}")
            repository, timeout_s = self._arguments.model_repository, self._arguments.start_timeout_s
            if not self._wait_until_it_generates(server, Probe(url, repository, self._model, timeout_s)):
                return False
        server.remember_stubs(self._asking_whether_served(doors))
        if self._takes_requests:
            if ports.openai is not None:
                self._openai = OpenAIProcess(self._arguments, ports, doors, self._sockets)
                self._openai.wait_until_up(self._stop.came, f"does not answer at {self._openai.url}")
                say(f"openai     {self._openai.url}/v1")
            start_s = time.monotonic() - started
            publish(
                *(self._arguments, state, start_s, self._settings(url), self._edited),
                hint=f"{_RANKS} (docs/serving.md)",
                **{f"{name}_port": port for name, port in vars(ports).items()},
                sockets=str(self._sockets or ""),
            )
            version = triton_version(url) or self._version
            say(f"triton     {version or 'of unknown version'}: {describe(version, doors.is_guarded)}")
            numbers = f"http {ports.http}  grpc {ports.grpc}  metrics {ports.metrics}"
            say(f"serving    {numbers}  {self._arguments.endpoint}")
        return True

    def _settings(self, url: str) -> dict[str, str]:
        """Return what results are told of the model and of the server, whose gRPC is at ``url``."""
        parameters = self._model.parameters
        manifest = served_manifest(self._arguments.model_repository)
        is_random = manifest is not None and manifest.made_from.get(RANDOM_WEIGHTS)
        return {
            **{name: parameters[name] for name in PUBLISHED_PARAMETERS if name in parameters},
            "weight_data_type": self._model.config.get("weight_data_type", "fp32"),
            "max_batch_size": str(self._model.max_batch_size),
            VERSIONS: describe_versions(url, self._arguments.engine == SLIPWAY),
            FLAGS: " ".join(f"{name}={value}" for name, value in parameters.items() if name not in _UNTOLD),
            **({RANDOM_WEIGHTS: "1"} if is_random else {}),
        }

    def _look(self) -> None:
        if self._guard is not None and (event := self._guard.watch()):
            say(f"guard      {event}")
        if self._openai is not None and (event := self._openai.watch()):
            say(f"openai     {event}")

    def _end_beside(self, exit_timeout_s: float) -> float:
        """Stop the OpenAI endpoint, whose requests the server still answers; returns the seconds that are left."""
        if self._openai is None:
            return exit_timeout_s
        started, endpoint, self._openai = time.monotonic(), self._openai, None
        endpoint.stop(exit_timeout_s if self._stop.reason else -1)
        return exit_timeout_s - (time.monotonic() - started)

    def _end(self, server: Server, state: State) -> None:
        """Stop the guard after the server, whose last answers pass through it."""
        try:
            super()._end(server, state)
        finally:
            if self._guard is not None:
                self._guard.stop(LAST_ANSWERS_S)
                self._guard = None

    def _asking_whether_served(self, doors: Doors) -> Callable[[ModelVersion], bool] | None:
        """Return a question for the server, where models come and go through Triton's model control API; else None."""
        if not _is_watched(self._arguments):
            return None

        def is_served(model: ModelVersion) -> bool:
            name, version = map(urllib.parse.quote, model)
            url = f"http://{doors.address}:{doors.ports.http}/v2/models/{name}/versions/{version}/ready"
            try:
                with urllib.request.urlopen(url, timeout=_QUESTION_TIMEOUT_S):
                    return True
            except urllib.error.HTTPError:
                return False  # unloaded, or on its way
            except OSError:
                return True  # a server that does not answer has not unloaded anything in good order

        return is_served


def _is_watched(arguments: ServeArguments) -> bool:
    """Whether models come and go through Triton's model control API or its polling."""
    return any(re.fullmatch("--model-control-mode=(explicit|poll)", given) for given in arguments.server_args)
