"""One engine over several processes: the first one's deployment, which leads those of ``following.py``.

It publishes the endpoint, decides when all servers start and stop, and ends or starts all of them again when one dies.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from backends.fastertransformer.engine.parallel.rank import Ranks
from deployment.arguments import EngineArguments
from deployment.doors.ports import find_neighbours
from deployment.engines.launched import LaunchedServer
from deployment.engines.leading_servers import LeadingServer, RayHead
from deployment.engines.nodes import PORTS, Meeting
from deployment.engines.process import EngineServer, environment_of
from deployment.engines.ray_nodes import RAY, head_of, node_address, ray_environment
from deployment.engines.running import EngineDeployment
from deployment.engines.table import PROGRAMS, build_argv
from deployment.life.leftovers import State
from deployment.life.stop_request import StopRequest
from deployment.ranks.gathered import Gathered
from deployment.ranks.launchers import Rank
from deployment.ranks.ranks import ENGINE_VARIABLE, engine_environment
from handover.errors import ServerError


def check_count(rank: Rank, arguments: EngineArguments) -> None:
    """Make sure that the processes are as many as the deployment was planned for.

    Raises:
        ServerError: they are not, or MPI must join them and has not started them.
    """
    program = PROGRAMS[arguments.engine]
    is_mpis = program.over_nodes.is_mpis
    expected = arguments.tensor_para_size * arguments.pipeline_para_size if is_mpis else arguments.nodes
    if rank.world_size != expected:
        said = (
            f"{rank.said_by} say {rank.rank} of {rank.world_size}" if rank.said_by else "no variable says which it is"
        )
        raise ServerError(
            f"{program.title} over {arguments.nodes} nodes takes {expected} processes, one a "
            f"{'GPU' if is_mpis else 'node'}; of this one {said}",
            f"start it {expected} times: srun --mpi=pmix and mpirun tell each which it is",
        )
    if is_mpis and not rank.is_mpis:
        raise ServerError(
            f"{program.title} joins its processes through MPI alone, and {rank.said_by} are not MPI's",
            "start them with srun --mpi=pmix or mpirun",
        )


def ranks_of(rank: Rank, arguments: EngineArguments) -> Ranks:
    """Return this process's place among all, with the file by which they find each other."""
    told = engine_environment(rank, arguments.endpoint, arguments.start_timeout_s)
    return Ranks(**json.loads(told[ENGINE_VARIABLE]))


def environment_over_nodes(arguments: EngineArguments, directory: Path, address: str) -> dict[str, str]:
    """Return the server's variables, with the address of this host by which the others reach it, unless one is set."""
    name = PROGRAMS[arguments.engine].over_nodes.address_variable
    return {**({name: address} if name else {}), **environment_of(directory)}


class LeadingDeployment(EngineDeployment):
    """The deployment of the first process.

    Args:
        arguments, stop, edited: see ``EngineDeployment``.
        gathered: the others, which are ready.
        count: of all processes.
    """

    def __init__(
        self, arguments: EngineArguments, stop: StopRequest, edited: Sequence[str], gathered: Gathered, count: int
    ) -> None:
        is_mpis = PROGRAMS[arguments.engine].over_nodes.is_mpis
        if is_mpis:  # no process can join MPI's others again
            arguments = dataclasses.replace(arguments, restart=0)
        super().__init__(arguments, stop, edited, lambda: not is_mpis)
        self._gathered, self._count = gathered, count

    def _watch(self, server: EngineServer, state: State, started: float) -> None:
        """Watch it until a request to stop comes, which is the reason for the end unless another process is lost."""
        super()._watch(server, state, started)
        self._gathered.check_channels()

    def _start(self, directory: Path, is_again: bool) -> EngineServer:
        if self._arguments.distributed_executor == RAY:
            return self._start_ray(directory, is_again)
        address = self._gathered.address
        meeting = Meeting(0, self._count, address, find_neighbours(address, PORTS))
        argv = build_argv(self._program, self._arguments, self._port, meeting)
        environment = environment_over_nodes(self._arguments, directory, address)
        self._gathered.order_start(meeting.port)
        title, log = self._program.title, self._arguments.log
        given = (self._gathered, title, argv, environment, directory, log, is_again)
        if starter := self._program.over_nodes.starter:
            return LaunchedServer(starter, *given)
        return LeadingServer(*given)

    def _start_ray(self, directory: Path, is_again: bool) -> RayHead:
        arguments, gathered, token = self._arguments, self._gathered, secrets.token_hex(32)
        address, log = node_address(gathered.address, 0), arguments.log
        meeting = Meeting(0, self._count, gathered.address, find_neighbours(address, PORTS))
        environment = ray_environment(environment_over_nodes(arguments, directory, address), token)

        def order_start() -> None:
            gathered.order_start(meeting.port, token)

        def start_engine() -> LeadingServer:
            argv = build_argv(self._program, arguments, self._port, meeting)
            told = {**environment, "RAY_ADDRESS": head_of(meeting)}
            return LeadingServer(gathered, self._program.title, argv, told, directory, log, is_again)

        rays = log.with_name(f"{log.stem}.ray{log.suffix}")
        return RayHead(
            gathered, order_start, start_engine, arguments, meeting, address, environment, directory, rays, is_again
        )
