"""Serve a model repository with tritonserver until stopped: ``python3 -m deployment.serve --help``.

The order: take the endpoint file's lock, sweep what a killed run left, prove the weights, choose ports, start the
server, wait for a real generation through the ensemble, publish the endpoint file, watch. SIGTERM, SIGUSR1, Ctrl-C or
the end of the parent process stop the server; nothing stays in the process table, in /dev/shm or as a temporary file.

Started several times by srun, mpirun or torchrun, the first process serves and the others take part; see ``ranks``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from deployment.arguments import ServeArguments
from deployment.beside.openai_process import check_packages
from deployment.doors.address import with_address
from deployment.doors.doors import is_guarded
from deployment.life.kill_wait import within_kill_wait
from deployment.life.leftovers import rendezvous_file, sweep_earlier, sweep_node
from deployment.life.lock import lock
from deployment.life.stop_request import StopRequest
from deployment.proof.files import prove_files
from deployment.proof.served_models import ServedModel, find_served_models
from deployment.proof.weights import prove_weights
from deployment.ranks.gpus import visible_devices
from deployment.ranks.launchers import Rank, find_rank
from deployment.ranks.ranks import arguments_of, check_world_size, engine_environment, ranks_of_node
from deployment.ranks.workers import take_part, workers
from deployment.triton.fitness import check_engine
from deployment.triton.installation import SLIPWAY, locate
from deployment.triton.running import Deployment, find_ports
from handover.errors import ConfigError, exit_status
from handover.progress import say
from handover.signatures.hashed import FileDigests
from handover.signatures.trust import verify


def main(argv: Sequence[str]) -> None:
    """Serve until stopped; a server that dies is an error."""
    given = within_kill_wait(with_address(ServeArguments.from_argv(argv, __doc__), os.environ), os.environ)
    rank, *others = find_ranks(given)
    arguments = arguments_of(rank.rank, given)
    os.environ.update(visible_devices(given.cuda_devices, given.engine, os.environ))
    stop = StopRequest()
    if arguments.engine == SLIPWAY and rank.rank:
        with stop.listening():
            take_part(given, [rank, *others], stop.came)
        return
    arguments.endpoint.parent.mkdir(parents=True, exist_ok=True)
    with lock(arguments.endpoint), workers(given, others):
        serve(arguments, given, rank, stop)


def find_ranks(given: ServeArguments) -> list[Rank]:
    """Return the ranks that this process stands for: one, unless it is a node's.

    Raises:
        ServerError: which they are is not clear, or the model has another number.
    """
    rank = find_rank(os.environ)
    if rank.world_size == 1:
        return [rank]
    models = find_served_models(given.model_repository, follows_moves=given.engine == SLIPWAY)
    ranks = ranks_of_node(rank, models, given.engine)
    check_world_size(ranks[0], models, given.engine)
    return ranks


def serve(arguments: ServeArguments, given: ServeArguments, rank: Rank, stop: StopRequest) -> None:
    """Prove the weights and serve; the lock is held."""
    rendezvous = rendezvous_file(given.endpoint)
    if rank.rank == 0:
        rendezvous.unlink(missing_ok=True)  # a killed run's: no rank shall read it
    models, edited = prepare(arguments)
    is_alone = rank.world_size == 1
    if not is_alone:  # the others end with this one, and whoever has started them must start them again
        arguments = replace(arguments, restart=0)
    is_ours = arguments.engine == SLIPWAY
    environment = engine_environment(rank, given.endpoint, given.start_timeout_s) if is_ours else {}

    def may_join() -> bool:
        return is_alone or is_ours and not rendezvous.exists()  # the others have not been told where this one is

    try:
        with stop.listening():
            Deployment(arguments, models, stop, rank.rank == 0, environment, edited, may_join).run()
    finally:
        if rank.rank == 0:
            rendezvous.unlink(missing_ok=True)


def prepare(arguments: ServeArguments) -> tuple[list[ServedModel], list[str]]:
    """Do everything that can be done without a server; nothing is left when this is cut off.

    Returns:
        What is to be served, and which files of the repository were edited.

    Raises:
        ArtefactError: the weights or other files are not what they must be, or not signed as they must be.
        ConfigError: signatures are required, and adapters without them could be loaded later.
        ServerError: a port is in use, or a deployment with the same endpoint file is running.
    """
    if sweep_earlier(arguments.endpoint):
        say("swept      what a killed deployment had left")
    if count := sweep_node():
        say(f"swept      what {count} killed deployments of other results had left on this node")
    locate(arguments.engine, arguments.tritonserver)
    is_guarded(arguments)  # flags that would open a way around the guard are refused at once
    if arguments.openai_port is not None:
        check_packages()
    find_ports(arguments)  # before the long part: a port in use is said at once
    if arguments.signing_require and arguments.openai_adapter_keys_file:
        raise ConfigError(
            "signing.require=true with deployment.openai_adapter_keys_file: adapters that are loaded are unsigned",
            "export signed adapters beside the model (export.adapters), or leave one of the two out",
        )
    if signed := verify(arguments.model_repository, arguments, FileDigests()):
        say(f"signature  {signed}")
    models = find_served_models(arguments.model_repository, follows_moves=arguments.engine == SLIPWAY)
    for model in models:
        check_engine(model, arguments.engine)
        vouched = prove_weights(model, arguments.model_repository)
        say(f"weights    proved, {vouched} shards by digest" if vouched else "weights    proved by name and size only")
    proved, edited = prove_files(arguments.model_repository, models, arguments.edited_files)
    if proved or edited:
        say(f"files      {proved} are as they were exported")
    for name in edited:
        say(f"edited     {name}")
    return models, edited


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "deploy"))
