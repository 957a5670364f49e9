"""Where the servers of a deployment are: children of this process, or Slurm jobs beside the router's."""

from __future__ import annotations

import os
from dataclasses import replace

from deployment.arguments import EngineArguments, ReplicasArguments, ServeArguments
from deployment.doors.doors import ALWAYS, AUTO, is_loopback
from deployment.replicas.job_replica import JobReplica
from deployment.replicas.replica import ChildReplica, Replica, parts_of_cores
from deployment.replicas.slurm_jobs import SlurmJobs
from handover.endpoint import REPLICA_JOBS_VARIABLE
from handover.errors import ServerError


def find_replicas(given: ReplicasArguments, arguments: ServeArguments | EngineArguments) -> list[Replica]:
    """Return the servers, none of which has been started.

    Raises:
        ServerError: they are jobs, and this process is not told which.
    """
    numbers = range(given.replicas)
    if given.job_logs is not None:
        ids = os.environ.get(REPLICA_JOBS_VARIABLE, "").split(",")
        if len(ids) != given.replicas or not all(ids):
            raise ServerError(
                f"{REPLICA_JOBS_VARIABLE} names {len(list(filter(None, ids)))} jobs of {given.replicas} servers",
                "a router whose servers are jobs runs in the job that main.py submits",
            )
        jobs = SlurmJobs(ids)
        return [JobReplica(number, arguments.endpoint.parent, given.job_logs, jobs) for number in numbers]
    cores = [] if given.gpus else parts_of_cores(given.replicas, os.sched_getaffinity(0))
    own = _guarded(arguments)
    return [ChildReplica(number, given.program, own, given.gpus, cores[number] if cores else ()) for number in numbers]


def _guarded(arguments: ServeArguments | EngineArguments) -> ServeArguments | EngineArguments:
    """Put the guard before each replica where others than this host reach the router."""
    if isinstance(arguments, ServeArguments) and arguments.guard == AUTO and not is_loopback(arguments.host):
        return replace(arguments, guard=ALWAYS)
    return arguments
