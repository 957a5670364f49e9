"""A deployment while it runs: started, watched, started again if it has died, ended."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deployment.address import own_address
from deployment.arguments import ServeArguments
from deployment.leftovers import State, Sweeper, create_state, remove_files, sweep, withdraw
from deployment.openai_process import OpenAIProcess
from deployment.ports import Ports, choose_ports
from deployment.probe import Probe
from deployment.publishing import publish
from deployment.restriction import Restriction
from deployment.served_models import ServedModel
from deployment.stop_request import StopRequest
from deployment.supervise import ModelVersion, Server, ServerDiedError
from deployment.tritonserver import Installation, assemble_backends, build_argv, link_repository, locate
from handover.errors import ServerError
from handover.progress import human_time, say

_POLL_S = 0.2
_SAY_EVERY_S = 15.0
_QUESTION_TIMEOUT_S = 5.0


def find_ports(arguments: ServeArguments) -> Ports:
    """Check the given ports and choose the free ones."""
    given = {"http": arguments.http_port, "grpc": arguments.grpc_port, "metrics": arguments.metrics_port}
    if arguments.openai_port is not None:
        given["openai"] = arguments.openai_port
    return choose_ports(arguments.host, given)


class Deployment:
    """One server at a time, and what is left of it swept away.

    Args:
        arguments: of this process.
        models: that are served; the first one is probed and described.
        stop: ends the deployment.
        takes_requests: False for a rank that only computes: nothing is probed or published.
        environment: variables for the server.
        edited: files of the repository that were edited after the export.
    """

    def __init__(
        self,
        arguments: ServeArguments,
        models: Sequence[ServedModel],
        stop: StopRequest,
        takes_requests: bool,
        environment: Mapping[str, str],
        edited: Sequence[str],
    ) -> None:
        self._arguments, self._model, self._stop = arguments, models[0], stop
        self._takes_requests, self._environment = takes_requests, environment
        self._edited = edited
        self._is_serving = False
        self._openai: OpenAIProcess | None = None

    def run(self) -> None:
        """Bring the server up and watch it until it is asked to stop.

        Raises:
            ServerError: the server did not start in time, or it or a stub died more often than it may be restarted.
        """
        if self._stop.came(0):
            return
        state = create_state(self._arguments.endpoint)
        sweeper = Sweeper(state)
        try:
            self._run(state, find_ports(self._arguments))
        finally:
            sweep(state)
            remove_files(self._arguments.endpoint, state.prefix)
            sweeper.dismiss()

    def _run(self, state: State, ports: Ports) -> None:
        start = self._prepare_start(state, ports)
        for restarts in range(self._arguments.restart + 1):
            started = time.monotonic()
            server = start(restarts > 0)
            try:
                return self._watch(server, state, ports, started)
            except ServerDiedError as error:
                if not self._is_serving or restarts == self._arguments.restart:
                    raise
                say(f"restarting {restarts + 1} of {self._arguments.restart}: {error.problem}")
            finally:
                self._end(server, state)

    def _prepare_start(self, state: State, ports: Ports) -> Callable[[bool], Server]:
        """Lay out what the server reads; give what starts it, for the first time or again."""
        arguments, directory = self._arguments, Path(state.directory)
        installation = locate(arguments.engine)
        backends = assemble_backends(installation, directory)
        repository = link_repository(arguments.model_repository, directory, _is_watched(arguments))
        closed = self._restrict(installation)
        binary, prefix = installation.binary, state.prefix
        command = build_argv(binary, arguments, repository, ports, prefix, backends, closed.flags)
        variables = {**installation.environment, **self._environment}
        shown_paths = {repository: arguments.model_repository}

        def start(is_again: bool) -> Server:
            directory = self._model.directory
            return Server(command, variables, directory, arguments.log, prefix, shown_paths, is_again, closed.secret)

        return start

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

    def _watch(self, server: Server, state: State, ports: Ports, started: float) -> None:
        if self._takes_requests and not self._wait_until_it_generates(server, ports):
            return
        server.remember_stubs(self._asking_whether_served(ports))
        if self._takes_requests:
            if ports.openai is not None:
                self._openai = OpenAIProcess(self._arguments, ports)
                self._openai.wait_until_up(self._stop.came)
                say(f"openai     {self._openai.url}/v1")
            publish(self._arguments, state, ports, self._model, time.monotonic() - started, self._edited)
            numbers = f"http {ports.http}  grpc {ports.grpc}  metrics {ports.metrics}"
            say(f"serving    {numbers}  {self._arguments.endpoint}")
        self._is_serving = True
        while not self._stop.came(_POLL_S):
            server.check()
            if self._openai is not None and (event := self._openai.watch()):
                say(f"openai     {event}")

    def _end(self, server: Server, state: State) -> None:
        """Stop the server; requests in flight are waited for where it was asked to stop, and no other time."""
        # First of all: no client shall find a server that is stopping.
        was_published = withdraw(self._arguments.endpoint, state.prefix)
        if self._stop.reason:
            say(f"stopping   {self._stop.reason}")
        exit_timeout_s = self._end_openai(self._arguments.exit_timeout_s)
        if not self._is_serving:  # there is no request to wait for, and a server that loads does not listen to SIGTERM
            server.stop(min(0, exit_timeout_s))
        elif not self._stop.reason:
            server.stop(None)
        elif word := server.word_of_crash(server.stop(exit_timeout_s if was_published else min(0, exit_timeout_s))):
            say(f"stopped    {word}")

    def _end_openai(self, exit_timeout_s: float) -> float:
        """Stop the OpenAI endpoint, whose requests the server still answers; returns the seconds that are left."""
        if self._openai is None:
            return exit_timeout_s
        started, endpoint, self._openai = time.monotonic(), self._openai, None
        endpoint.stop(exit_timeout_s if self._stop.reason else -1)
        return exit_timeout_s - (time.monotonic() - started)

    def _wait_until_it_generates(self, server: Server, ports: Ports) -> bool:
        """Wait for the probe's generation and say now and then for how long; False if asked to stop before."""
        timeout_s = self._arguments.start_timeout_s
        started = said = time.monotonic()
        url = f"{own_address(self._arguments.host)}:{ports.grpc}"
        probe = Probe(url, self._arguments.model_repository, self._model, timeout_s)
        while not self._stop.came(_POLL_S):
            server.check()
            try:
                if probe.is_done():
                    say(f"ready      a generation came back after {time.monotonic() - started:.1f} s")
                    return True
            except ServerError as error:
                raise server.explain(error.problem) from error
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                waited, most = human_time(said - started), human_time(timeout_s)
                say(f"starting   for {waited}, at most {most} (deployment.start_timeout_s)")
            if time.monotonic() - started > timeout_s:
                raise server.explain(f"no generation came back within {timeout_s:g} s")
        return False

    def _asking_whether_served(self, ports: Ports) -> Callable[[ModelVersion], bool] | None:
        """Give a question for the server, where models come and go through Triton's model control API; else None."""
        if not _is_watched(self._arguments):
            return None

        def is_served(model: ModelVersion) -> bool:
            name, version = map(urllib.parse.quote, model)
            address = f"{own_address(self._arguments.host)}:{ports.http}"
            url = f"http://{address}/v2/models/{name}/versions/{version}/ready"
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
