"""What clients and results are told of a running server: its endpoint file."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deployment.arguments import EngineArguments, ServeArguments
from deployment.doors.address import ANY_ADDRESS, slurm_job
from deployment.life.leftovers import State
from handover.digests import file_digest
from handover.endpoint import EDITED, RUN_VARIABLE, Endpoint, deployment_of
from handover.errors import ServerError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import Manifest


def served_manifest(directory: Path) -> Manifest | None:
    """Read the manifest of what is served, where it has one."""
    return Manifest.read(directory) if (directory / MANIFEST_NAME).is_file() else None


def clients_host(arguments: ServeArguments | EngineArguments) -> str:
    """Return the address that clients use."""
    return socket.gethostname() if arguments.host in ANY_ADDRESS else arguments.host


def publish(
    arguments: ServeArguments | EngineArguments,
    state: State,
    start_s: float,
    settings: Mapping[str, str],
    edited: Sequence[str],
    hint: str = "",
    **more: Any,
) -> None:
    """Write the endpoint file.

    Args:
        arguments: of this deployment.
        state: names it.
        start_s: seconds from starting the server to its first generation.
        settings: of the deployment, as text.
        edited: files of what is served that were edited after they were written.
        hint: what else helps where another deployment serves.
        more: ports and other fields of the file.

    Raises:
        ServerError: there is an endpoint file again since this deployment has begun: another one serves. A lock forbids
            that, but not every file system that two nodes share has locks.
    """
    if arguments.endpoint.exists() and deployment_of(arguments.endpoint) != state.prefix:
        raise ServerError(
            f"another deployment has published {arguments.endpoint} meanwhile",
            f"stop one of them, or choose another results directory{hint}",
        )
    directory = arguments.model_repository
    manifest = served_manifest(directory)
    told = ", ".join(f"{name} {file_digest(directory / name)[:19]}" for name in edited)
    Endpoint(
        host=clients_host(arguments),
        engine=arguments.engine,
        model_repository=str(directory.absolute()),
        model_digest=manifest.digest if manifest is not None else "",
        pid=os.getpid(),
        run=os.environ.get(RUN_VARIABLE, ""),
        deployment=state.prefix,
        start_s=round(start_s, 3),
        settings={**settings, **({EDITED: told} if told else {})},
        **{**slurm_job(os.environ), **more},
    ).write(arguments.endpoint)
