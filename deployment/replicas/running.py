"""A deployment of several servers while it runs: replicas, the router before them, their metrics as one page."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

from deployment.arguments import EngineArguments, ReplicasArguments, ServeArguments
from deployment.doors.address import LOOPBACK, own_address
from deployment.doors.ports import Ports, choose_ports
from deployment.engines.questions import CompletionProbe
from deployment.engines.table import PROGRAMS
from deployment.life.background_probe import BackgroundProbe
from deployment.life.leftovers import State, Sweeper, create_state, remove_files, sweep, withdraw
from deployment.life.publishing import clients_host, publish
from deployment.life.restart_request import RestartRequest
from deployment.life.stop_request import StopRequest
from deployment.processes.supervised import GRACE_S, ServerDiedError
from deployment.proof.served_models import find_served_models
from deployment.replicas.health import Health
from deployment.replicas.page import PageArguments, PageProcess
from deployment.replicas.places import find_replicas
from deployment.replicas.replica import NotNowError, Place, Replica
from deployment.replicas.rolling import RollingRestart
from deployment.replicas.router import Front
from deployment.replicas.router_process import RouterProcess
from deployment.replicas.table import ROUTERS
from deployment.triton.installation import SLIPWAY
from deployment.triton.probe import Probe
from handover.endpoint import REPLICAS, ROUTER, Endpoint
from handover.errors import ServerError
from handover.progress import human_time, say

_POLL_S, _STARTING_POLL_S, _HEALTH_EVERY_S = 0.2, 0.05, 1.0
_AGAIN_S = 10.0
"""After a replica that has ended could not be started again for now."""
_SWEEPING_S = 10.0
"""What a replica gets for its end beyond its own time for requests in flight, on a busy machine."""


def find_ports(arguments: ServeArguments | EngineArguments) -> Ports:
    """Check the given ports and choose free ones; of a program with an API of its own, gRPC's is not used."""
    names = ("http_port", "grpc_port", "metrics_port", "openai_port")
    given = {name.removesuffix("_port"): getattr(arguments, name, None) for name in names}
    wanted = {name: port or 0 for name, port in given.items() if name != "openai" or port is not None}
    return choose_ports(arguments.host, wanted)


class ReplicatedDeployment:
    """Several servers and their router.

    Args:
        given: how many, and which router.
        arguments: of a server; host and ports are the router's.
        stop: ends the deployment.
    """

    def __init__(
        self, given: ReplicasArguments, arguments: ServeArguments | EngineArguments, stop: StopRequest
    ) -> None:
        self._given, self._arguments, self._stop = given, arguments, stop
        self._request = RestartRequest(arguments.endpoint)
        self._replicas = find_replicas(given, arguments)
        self._health: dict[int, Health] = {}
        self._looked_at_health = 0.0
        self._given_up, self._refused = set[int](), dict[int, float]()
        self._rolling: RollingRestart | None = None
        self._router: RouterProcess | None = None
        self._page: PageProcess | None = None

    def run(self) -> None:
        """Bring the servers up and watch them until the deployment is asked to stop.

        Raises:
            ServerError: they did not start, or one died more often than it may be started again.
        """
        if self._stop.came(0):
            return
        state = create_state(self._arguments.endpoint)
        sweeper = Sweeper(state)
        try:
            self._request.forget()
            self._serve(state)
        finally:
            self._end(state)
            sweep(state)
            remove_files(self._arguments.endpoint, state.prefix)
            sweeper.dismiss()

    def _serve(self, state: State) -> None:
        arguments, given, started = self._arguments, self._given, time.monotonic()
        self._ports = find_ports(arguments)
        kind = ROUTERS[given.router]
        page = self._ports.metrics if kind.is_for_openai else choose_ports(LOOPBACK, dict.fromkeys(_NAMES, 0)).http
        front = Front(
            arguments.host, self._services(), self._ports.metrics, page, given.replicas, given.affinity_header
        )
        directory = Path(state.directory)
        self._program = kind(front, given.router_command, directory)
        self._router = RouterProcess(self._program, directory, arguments.log.with_name("router.log"), self._stop.came)
        for replica in self._replicas:
            replica.start()
        say(f"starting   {given.replicas} replicas behind {kind.title}, logs {arguments.endpoint.parent}/replica-*")
        if not self._wait_until_all_serve():
            return
        files = tuple(str(replica.endpoint_file) for replica in self._replicas)
        host = arguments.host if kind.is_for_openai else LOOPBACK
        self._page = PageProcess(PageArguments(host, files, page), arguments.log.with_name("metrics.log"))
        self._page.wait_until_up(self._stop.came, f"does not listen on port {page}")
        if not self._prove(time.monotonic() + arguments.start_timeout_s):
            return
        self._publish(state, time.monotonic() - started)
        while not self._stop.came(_POLL_S):
            self._look()

    def _services(self) -> dict[str, int]:
        """Return the ports that the router listens on, by service."""
        if isinstance(self._arguments, EngineArguments):
            return {"http": self._ports.http}
        ports = {"http": self._ports.http, "grpc": self._ports.grpc}
        return ports if self._ports.openai is None else {**ports, "openai": self._ports.openai}

    def _wait_until_all_serve(self) -> bool:
        """Wait for the generation with which each replica begins; False if asked to stop before."""
        started = time.monotonic()
        while not self._stop.came(_STARTING_POLL_S):
            assert self._router is not None
            self._router.watch()
            for replica in self._replicas:
                if replica.look() is Place.ENDED:
                    raise ServerError(replica.reason())
                if self._router.follow(replica, replica.place is Place.SERVING):
                    self._begin_health(replica)
                    say(f"ready      replica {replica.number} after {human_time(time.monotonic() - started)}")
            if len(self._health) == len(self._replicas):
                return True
        return False

    def _prove(self, deadline: float) -> bool:
        """Wait for a generation that comes through the router; False if asked to stop before."""
        probe = self._probe(own_address(self._arguments.host), self._ports.http, self._ports.grpc)
        while not self._stop.came(_STARTING_POLL_S):
            if probe.is_done():
                return True
            if time.monotonic() > deadline:
                raise ServerError("no generation came back through the router in time")
        return False

    def _probe(self, host: str, http_port: int, grpc_port: int) -> BackgroundProbe:
        """Ask for a generation of one token."""
        arguments, place = self._arguments, f"[{host}]" if ":" in host else host
        if isinstance(arguments, EngineArguments):
            base = f"http://{place}:{http_port}"
            return CompletionProbe(base, PROGRAMS[arguments.engine], arguments.start_timeout_s)
        repository = arguments.model_repository
        model = find_served_models(repository, follows_moves=arguments.engine == SLIPWAY)[0]
        return Probe(f"{place}:{grpc_port}", repository, model, arguments.start_timeout_s)

    def _publish(self, state: State, start_s: float) -> None:
        """Publish the router's address, with what the first replica says of the model."""
        ports, first = self._ports, self._replicas[0].endpoint()
        settings = {**first.settings, REPLICAS: str(len(self._replicas)), ROUTER: self._given.router}
        told: dict[str, Any] = {"http_port": ports.http, "metrics_port": ports.metrics}
        if isinstance(self._arguments, EngineArguments):
            host = clients_host(self._arguments)
            url = f"http://{f'[{host}]' if ':' in host else host}:{ports.http}/v1"
            told |= {"openai_port": ports.http, "openai_url": url}
        else:
            told |= {"grpc_port": ports.grpc, "openai_port": ports.openai}
        publish(self._arguments, state, start_s, settings, (), **told)
        numbers = "  ".join(f"{name} {port}" for name, port in {**self._services(), "metrics": ports.metrics}.items())
        say(f"serving    {numbers}  {self._arguments.endpoint}")

    def _look(self) -> None:
        """Look after everything once."""
        assert self._router is not None and self._page is not None
        for name, event in (("router", self._router.watch()), ("metrics", self._page.watch())):
            if event:
                say(f"{name:<10} {event}")
        for replica in self._replicas:
            if replica.number not in self._given_up:
                self._look_at(replica, self._router)
        self._look_at_health(self._router)
        if self._rolling is None and self._request.is_made():
            self._begin_restart()
        if self._rolling is not None and self._rolling.step():
            problem, self._rolling = self._rolling.problem, None
            if problem:
                self._request.fail(problem)
            else:
                self._request.forget()
            say(problem or "restarted  every replica")

    def _begin_restart(self) -> None:
        """Begin to restart the replicas that have not been given up; refuse it of one that is left alone."""
        left = [replica for replica in self._replicas if replica.number not in self._given_up]
        if len(left) == 1:
            problem = f"replica {left[0].number} alone is left, which nothing could stand in for: deploy again"
            self._request.fail(problem)
            return say(f"restart    refused: {problem}")
        say("restarting every replica, one after another")
        self._rolling = RollingRestart(left, self._given_up, self._program, self._given.drain_timeout_s)

    def _look_at(self, replica: Replica, router: RouterProcess) -> None:
        before, place = replica.place, replica.look()
        is_leaving = self._rolling is not None and self._rolling.is_taking_away(replica)
        if router.follow(replica, place is Place.SERVING and not is_leaving):
            if place is Place.SERVING and not is_leaving:
                self._begin_health(replica)
                say(f"ready      replica {replica.number}")
            else:
                self._health.pop(replica.number, None)
        if before is Place.SERVING and place is Place.AWAY and not is_leaving:
            say(f"away       replica {replica.number}: its server died, or is ending ({replica.log})")
        if place is Place.ENDED and not is_leaving:
            self._replace(replica)

    def _replace(self, replica: Replica) -> None:
        """Start a replica again whose supervisor was killed, as often as it may be; else go on without it, or end."""
        reason = replica.reason()
        if self._rolling is not None and self._rolling.leaving is replica:
            self._rolling = None
            self._request.fail(f"{reason}; the other replicas were not restarted")
        if replica.was_killed and replica.restarts < self._arguments.restart:
            if time.monotonic() - self._refused.get(replica.number, -_AGAIN_S) < _AGAIN_S:
                return
            try:
                replica.start()
            except NotNowError as error:
                self._refused[replica.number] = time.monotonic()
                return say(f"waiting    {reason}: {error.problem}")
            replica.restarts += 1
            return say(f"replacing  {reason}: {replica.restarts} of {self._arguments.restart}")
        self._given_up.add(replica.number)
        left = len(self._replicas) - len(self._given_up)
        if not (self._given.lasting and left):
            raise ServerDiedError(reason)
        say(f"given up   {reason}; {left} of {len(self._replicas)} replicas go on")

    def _begin_health(self, replica: Replica) -> None:
        with contextlib.suppress(ServerError):  # it has just gone: the next look tells
            self._health[replica.number] = Health(partial(self._probe, *_address(replica.endpoint())))

    def _look_at_health(self, router: RouterProcess) -> None:
        """Kill a replica that does not compute: it is replaced as one that has died."""
        now = time.monotonic()
        if now - self._looked_at_health < _HEALTH_EVERY_S:
            return
        self._looked_at_health = now
        for replica in self._replicas:
            health = self._health.get(replica.number)
            if health is not None and (problem := health.find_problem(router.sent_bytes(replica))):
                say(f"sick       replica {replica.number}: {problem}")
                with contextlib.suppress(NotNowError):  # it is asked again for a generation
                    replica.kill()
                    del self._health[replica.number]

    def _end(self, state: State) -> None:
        """End the replicas, whose last answers pass through the router, then that."""
        withdraw(self._arguments.endpoint, state.prefix)
        if self._stop.reason:
            say(f"stopping   {self._stop.reason}")
        if self._request.is_made():
            self._request.fail("the deployment has ended")
        for replica in self._replicas:
            replica.ask_to_stop()
        deadline = time.monotonic() + max(0.0, self._arguments.exit_timeout_s) + GRACE_S + _SWEEPING_S
        for replica in self._replicas:
            replica.wait(deadline - time.monotonic())
        if self._page is not None:
            self._page.stop(0)
        if self._router is not None:
            self._router.stop()


_NAMES = ("http", "grpc", "metrics")


def _address(endpoint: Endpoint) -> tuple[str, int, int]:
    return endpoint.host, endpoint.http_port or 0, endpoint.grpc_port or 0
