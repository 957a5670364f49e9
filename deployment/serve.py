"""Serve a model repository with tritonserver until stopped: ``python3 -m deployment.serve --help``.

The order: sweep what a killed run left, prove the weights, choose ports, start the server, wait for a
real generation through the ensemble, publish the endpoint file, watch. SIGTERM, SIGUSR1, Ctrl-C or the end of
the parent process stop the server; nothing stays in the process table, in /dev/shm or as a temporary file.

Started several times by srun or mpirun, the first of the processes serves and the others take part; see ``ranks``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType

from deployment.address import slurm_job, with_address
from deployment.arguments import ServeArguments
from deployment.gpus import visible_devices
from deployment.leftovers import State, Sweeper, create_state, sweep, sweep_earlier
from deployment.ports import Ports, choose_ports
from deployment.probe import Probe
from deployment.ranks import arguments_of, check_world_size, engine_environment, find_rank, rendezvous_file
from deployment.served_models import ServedModel, find_served_models
from deployment.supervise import ModelVersion, Server
from deployment.tritonserver import SLIPWAY, assemble_backends, build_argv, link_repository, locate
from deployment.versions import describe_versions
from deployment.weights import prove_weights
from deployment.workers import take_part
from handover.endpoint import RUN_VARIABLE, VERSIONS, WEIGHTS_DIGEST, Endpoint
from handover.errors import ServerError, exit_status
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import RANDOM_WEIGHTS, Manifest
from handover.progress import human_time

_POLL_S = 0.2
_SAY_EVERY_S = 15.0
_QUESTION_TIMEOUT_S = 5.0
_ANY_ADDRESS = ("0.0.0.0", "::")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what srun passes on in good order
_PUBLISHED_SETTINGS = ("tensor_para_size", "pipeline_para_size", "data_type", "int8_mode", WEIGHTS_DIGEST)


class StopRequest:
    """Whether and why the deployment shall end."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._signal = threading.Event()
        self.reason = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take the signals as requests instead of dying of them."""
        previous = {number: signal.signal(number, self._receive) for number in _STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        self._signal.set()

    def came(self, timeout_s: float) -> bool:
        """Wait for a request for at most that long."""
        if self._signal.wait(timeout_s):
            return True
        if os.getppid() != self._parent:
            self.reason = "the parent process ended"
        return bool(self.reason)


def main(argv: Sequence[str]) -> None:
    """Serve until stopped; a server that dies is an error."""
    rank = find_rank(os.environ)
    given = with_address(ServeArguments.from_argv(argv, __doc__), os.environ)
    arguments = arguments_of(rank.rank, given)
    os.environ.update(visible_devices(given.cuda_devices, given.engine, os.environ))
    stop = StopRequest()
    is_spread = arguments.engine == SLIPWAY and rank.world_size > 1
    if is_spread:
        check_world_size(rank, find_served_models(arguments.model_repository))
    if is_spread and rank.rank:
        with stop.listening():
            take_part(arguments, rank, given.endpoint, stop.came)
        return
    rendezvous_file(given.endpoint).unlink(missing_ok=True)  # a killed run's: nobody shall look for that
    models = prepare(arguments)
    environment = engine_environment(rank, given.endpoint, given.start_timeout_s) if is_spread else {}
    with stop.listening():
        try:
            serve(arguments, models, stop, takes_requests=rank.rank == 0, environment=environment)
        finally:
            rendezvous_file(given.endpoint).unlink(missing_ok=True)


def prepare(arguments: ServeArguments) -> list[ServedModel]:
    """Do everything that can be done without a server; nothing is left when this is cut off.

    Raises:
        ArtefactError: the weights are not what they must be.
        ServerError: a port is in use, or a deployment with the same endpoint file is running.
    """
    arguments.endpoint.parent.mkdir(parents=True, exist_ok=True)
    if sweep_earlier(arguments.endpoint):
        _say("swept      what a killed deployment had left")
    locate(arguments.engine)
    _choose_ports(arguments)  # before the long part: a port in use is said at once
    models = find_served_models(arguments.model_repository, follows_moves=arguments.engine == SLIPWAY)
    for model in models:
        vouched = prove_weights(model, arguments.model_repository)
        _say(f"weights    proved, {vouched} shards by digest" if vouched else "weights    proved by name and size only")
    return models


def serve(
    arguments: ServeArguments,
    models: Sequence[ServedModel],
    stop: StopRequest,
    takes_requests: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Bring the server up and watch it until it is asked to stop.

    Args:
        arguments: of this process.
        models: as ``prepare`` gave them.
        stop: ends the deployment.
        takes_requests: False for a rank that only computes: nothing is probed or published.
        environment: variables for the server.

    Raises:
        ServerError: the server did not start in time, or it or a stub died.
    """
    if stop.came(0):
        return
    state = create_state(arguments.endpoint)
    sweeper = Sweeper(state)
    try:
        ports = _choose_ports(arguments)
        started = time.monotonic()
        server = _start(arguments, ports, state, models[0].directory, environment)
        try:
            if not takes_requests or _wait_until_it_generates(arguments, server, ports, models[0], stop):
                server.remember_stubs(_asking_whether_served(arguments, ports))
                if takes_requests:
                    _publish(arguments, ports, models[0], time.monotonic() - started)
                while not stop.came(_POLL_S):
                    server.check()
        finally:
            _stop(arguments, server, stop)
    finally:
        sweep(state)
        sweeper.dismiss()


def _start(
    arguments: ServeArguments, ports: Ports, state: State, directory: Path, environment: Mapping[str, str]
) -> Server:
    installation = locate(arguments.engine)
    backends = assemble_backends(installation, Path(state.directory))
    repository = link_repository(arguments.model_repository, Path(state.directory))
    command = build_argv(installation.binary, arguments, repository, ports, state.prefix, backends)
    shown_paths = {repository: arguments.model_repository}
    # Without bytecode: the tokenizer models are imported from the published repository, where nothing is added.
    variables = {"PYTHONDONTWRITEBYTECODE": "1", **installation.environment, **environment}
    return Server(command, variables, directory, arguments.log, state.prefix, shown_paths)


def _choose_ports(arguments: ServeArguments) -> Ports:
    given = {"http": arguments.http_port, "grpc": arguments.grpc_port, "metrics": arguments.metrics_port}
    return choose_ports(arguments.host, given)


def _own_address(arguments: ServeArguments) -> str:
    """Where this host itself reaches the server."""
    return "127.0.0.1" if arguments.host in _ANY_ADDRESS else arguments.host


def _wait_until_it_generates(
    arguments: ServeArguments, server: Server, ports: Ports, model: ServedModel, stop: StopRequest
) -> bool:
    """Wait for the probe's generation and say now and then for how long; False if asked to stop before."""
    started = said = time.monotonic()
    probe = Probe(
        f"{_own_address(arguments)}:{ports.grpc}", arguments.model_repository, model, arguments.start_timeout_s
    )
    while not stop.came(_POLL_S):
        server.check()
        try:
            if probe.is_done():
                _say(f"ready      a generation came back after {time.monotonic() - started:.1f} s")
                return True
        except ServerError as error:
            raise server.explain(error.problem) from error
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            waited, most = human_time(said - started), human_time(arguments.start_timeout_s)
            _say(f"starting   for {waited}, at most {most} (deployment.start_timeout_s)")
        if time.monotonic() - started > arguments.start_timeout_s:
            raise server.explain(f"no generation came back within {arguments.start_timeout_s:g} s")
    return False


def _asking_whether_served(arguments: ServeArguments, ports: Ports) -> Callable[[ModelVersion], bool] | None:
    """Give a question for the server, where models come and go through Triton's model control API; else None."""
    if not any(re.fullmatch("--model-control-mode=(explicit|poll)", given) for given in arguments.server_args):
        return None

    def is_served(model: ModelVersion) -> bool:
        name, version = map(urllib.parse.quote, model)
        url = f"http://{_own_address(arguments)}:{ports.http}/v2/models/{name}/versions/{version}/ready"
        try:
            with urllib.request.urlopen(url, timeout=_QUESTION_TIMEOUT_S):
                return True
        except urllib.error.HTTPError:
            return False  # unloaded, or on its way
        except OSError:
            return True  # a server that does not answer has not unloaded anything in good order

    return is_served


def _publish(arguments: ServeArguments, ports: Ports, model: ServedModel, start_s: float) -> None:
    repository = arguments.model_repository
    manifest = Manifest.read(repository) if (repository / MANIFEST_NAME).is_file() else None
    settings = {name: model.parameters[name] for name in _PUBLISHED_SETTINGS if name in model.parameters}
    settings["weight_data_type"] = model.config.get("weight_data_type", "fp32")
    settings["max_batch_size"] = str(model.max_batch_size)
    settings[VERSIONS] = describe_versions(f"{_own_address(arguments)}:{ports.grpc}", arguments.engine == SLIPWAY)
    if manifest is not None and manifest.made_from.get(RANDOM_WEIGHTS):
        settings[RANDOM_WEIGHTS] = "1"
    Endpoint(
        host=socket.gethostname() if arguments.host in _ANY_ADDRESS else arguments.host,
        http_port=ports.http,
        grpc_port=ports.grpc,
        metrics_port=ports.metrics,
        engine=arguments.engine,
        model_repository=str(repository.absolute()),
        model_digest=manifest.digest if manifest is not None else "",
        pid=os.getpid(),
        run=os.environ.get(RUN_VARIABLE, ""),
        start_s=round(start_s, 3),
        settings=settings,
        **slurm_job(os.environ),
    ).write(arguments.endpoint)
    _say(f"serving    http {ports.http}  grpc {ports.grpc}  metrics {ports.metrics}  {arguments.endpoint}")


def _stop(arguments: ServeArguments, server: Server, stop: StopRequest) -> None:
    was_published = arguments.endpoint.exists()
    arguments.endpoint.unlink(missing_ok=True)  # first: nobody shall find a server that is going away
    if stop.reason:
        _say(f"stopping   {stop.reason}")
    # Before that there is no request to wait for, and a server that still loads does not listen to SIGTERM.
    server.stop(arguments.exit_timeout_s if was_published else 0)


def _say(line: str) -> None:
    print(f"      {line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "deploy"))
