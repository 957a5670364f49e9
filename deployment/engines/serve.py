"""Serve a Hugging Face directory with another project's server: ``python3 -m deployment.engines.serve --help``.

The order: take the endpoint file's lock, sweep what a killed run left, prove the files, choose a port, start the
program, wait for a real generation of one token, publish the endpoint file, watch. SIGTERM, SIGUSR1, Ctrl-C or the end
of the parent process stop the server; nothing stays in the process table, in /dev/shm or as a temporary file.

With ``--nodes`` above 1 it is started several times, as srun and mpirun do: the first process leads, see ``leading``.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from deployment.arguments import EngineArguments
from deployment.doors.address import LOOPBACK, with_address
from deployment.engines.following import Following
from deployment.engines.leading import LeadingDeployment, check_count, ranks_of
from deployment.engines.ray_nodes import RAY, check_ray
from deployment.engines.running import EngineDeployment, find_port
from deployment.engines.table import PROGRAMS, build_argv
from deployment.life.kill_wait import within_kill_wait
from deployment.life.leftovers import sweep_earlier, sweep_node
from deployment.life.lock import lock
from deployment.life.publishing import served_manifest
from deployment.life.stop_request import StopRequest
from deployment.proof.files import prove_files
from deployment.ranks.gathered import Gathered, join
from deployment.ranks.gpus import visible_devices
from deployment.ranks.launchers import Rank, find_rank
from deployment.ranks.ranks import file_of
from handover.errors import ArtefactError, ServerError, SlipwayError, exit_status, nearest
from handover.progress import say
from handover.signatures.hashed import FileDigests
from handover.signatures.trust import verify

_CONFIG = "config.json"


def main(argv: Sequence[str]) -> None:
    """Serve until stopped; a server that dies is an error."""
    given = within_kill_wait(with_address(EngineArguments.from_argv(argv, __doc__), os.environ), os.environ)
    os.environ.update(visible_devices(given.cuda_devices, given.engine, os.environ))
    stop = StopRequest()
    given.endpoint.parent.mkdir(parents=True, exist_ok=True)
    rank = find_rank(os.environ) if (given.nodes or 1) > 1 else Rank()
    if (given.nodes or 1) > 1:
        check_count(rank, given)
    if rank.rank:
        with stop.listening():
            return _follow(given, rank, stop)
    with lock(given.endpoint):
        _sweep(given)
        if rank.world_size > 1:
            return _lead(given, rank, stop)
        edited = prepare(given)
        with stop.listening():
            EngineDeployment(given, stop, edited).run()


def _lead(arguments: EngineArguments, rank: Rank, stop: StopRequest) -> None:
    """Serve as the first of several processes; the lock is held."""
    gathered = Gathered(ranks_of(rank, arguments), os.environ, _digest(arguments))
    try:
        edited = prepare(arguments)
        with stop.listening():
            if gathered.wait_until_ready(stop.came):
                LeadingDeployment(arguments, stop, edited, gathered, rank.world_size).run()
    finally:
        gathered.end()


def _follow(given: EngineArguments, rank: Rank, stop: StopRequest) -> None:
    """Take part as another process, with files, address and port of its own."""
    endpoint, log = file_of(rank.rank, given.endpoint), file_of(rank.rank, given.log)
    arguments = replace(given, endpoint=endpoint, log=log, host=LOOPBACK, http_port=0)
    channel = join(ranks_of(rank, given), stop.came)
    if channel is None:
        return
    host = socket.gethostname()
    with closing(channel), lock(arguments.endpoint):
        try:
            _sweep(arguments)
            prepare(arguments)
        except SlipwayError as error:
            channel.send(problem=error.problem, is_over=True, host=host)
            raise
        channel.send(digest=_digest(arguments), host=host)
        Following(arguments, stop, rank, channel).run()


def _digest(arguments: EngineArguments) -> str:
    """Return what identifies the model; empty where it has no manifest."""
    manifest = served_manifest(arguments.model_repository)
    return manifest.digest if manifest is not None else ""


def _sweep(arguments: EngineArguments) -> None:
    """Sweep what killed deployments have left; ServerError: one with the same endpoint file is running."""
    if sweep_earlier(arguments.endpoint):
        say("swept      what a killed deployment had left")
    if count := sweep_node():
        say(f"swept      what {count} killed deployments of other results had left on this node")


def prepare(arguments: EngineArguments) -> list[str]:
    """Do everything that can be done without a server; nothing is left when this is cut off.

    Returns:
        Which files of the directory were edited.

    Raises:
        ArtefactError: the directory's files are not what they must be, or not signed as they must be.
        ServerError: there is no such engine or program, or a port is in use.
    """
    if arguments.engine not in PROGRAMS:
        raise ServerError(f"unknown engine '{arguments.engine}'", nearest(arguments.engine, PROGRAMS))
    check_program(build_argv(PROGRAMS[arguments.engine], arguments, 0)[0], PROGRAMS[arguments.engine].title)
    if arguments.distributed_executor == RAY:
        check_ray(arguments)
    find_port(arguments)  # before the long part: a port in use is said at once
    if not (arguments.model_repository / _CONFIG).is_file():
        raise ArtefactError(
            f"{arguments.model_repository} is no directory of Hugging Face: it has no {_CONFIG}",
            "give the directory that stages=[export] with this engine made",
        )
    if signed := verify(arguments.model_repository, arguments, FileDigests()):
        say(f"signature  {signed}")
    proved, edited = prove_files(arguments.model_repository, (), arguments.edited_files)
    if proved or edited:
        say(f"files      {proved} are as they were written, the weights too")
    for name in edited:
        say(f"edited     {name}")
    return edited


def check_program(program: str, title: str) -> None:
    """Look for an engine's program; ServerError: there is none."""
    if shutil.which(program) is None:
        where = "" if Path(program).is_absolute() else " on PATH"
        raise ServerError(
            f"{title} is not here: there is no program '{program}'{where}",
            "give it in deployment.command, such as /path/to/venv/bin/vllm serve, or a container that has it in "
            "deployment.container",
        )


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "deploy"))
