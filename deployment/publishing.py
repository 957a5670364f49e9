"""What clients and results are told of a running server: its endpoint file."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from deployment.address import ANY_ADDRESS, slurm_job
from deployment.arguments import ServeArguments
from deployment.leftovers import State
from deployment.ports import Ports
from deployment.served_models import PUBLISHED_PARAMETERS, ServedModel
from deployment.tritonserver import SLIPWAY
from deployment.versions import describe_versions
from handover.digests import file_digest
from handover.endpoint import EDITED, FLAGS, RUN_VARIABLE, VERSIONS, Endpoint, deployment_of
from handover.errors import ServerError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import RANDOM_WEIGHTS, Manifest

_UNTOLD = (*PUBLISHED_PARAMETERS, "model_type", "model_checkpoint_path")
"""Parameters that are no flags of the engine: they are published by name, or say which model it is."""


def publish(
    arguments: ServeArguments,
    state: State,
    ports: Ports,
    model: ServedModel,
    start_s: float,
    edited: Sequence[str],
    triton: str,
    sockets: Path | None = None,
) -> None:
    """Write the endpoint file.

    Args:
        arguments: of this deployment.
        state: names it.
        ports: for clients.
        model: that is described.
        start_s: seconds from starting the server to its first generation.
        edited: files of the repository that were edited after the export.
        triton: ``host:port`` of Triton's own gRPC.
        sockets: directory of the drop-in engine's sockets; None: there are none.

    Raises:
        ServerError: there is an endpoint file again since this deployment has begun: another one serves. A lock forbids
            that, but not every file system that two nodes share has locks.
    """
    if arguments.endpoint.exists() and deployment_of(arguments.endpoint) != state.prefix:
        raise ServerError(
            f"another deployment has published {arguments.endpoint} meanwhile",
            "stop one of them, or choose another results directory; processes that are to serve one model together "
            "must be told which each is, as srun, mpirun and torchrun do (docs/serving.md)",
        )
    repository = arguments.model_repository
    manifest = Manifest.read(repository) if (repository / MANIFEST_NAME).is_file() else None
    settings = {name: model.parameters[name] for name in PUBLISHED_PARAMETERS if name in model.parameters}
    settings["weight_data_type"] = model.config.get("weight_data_type", "fp32")
    settings["max_batch_size"] = str(model.max_batch_size)
    settings[VERSIONS] = describe_versions(triton, arguments.engine == SLIPWAY)
    settings[FLAGS] = " ".join(f"{name}={value}" for name, value in model.parameters.items() if name not in _UNTOLD)
    if manifest is not None and manifest.made_from.get(RANDOM_WEIGHTS):
        settings[RANDOM_WEIGHTS] = "1"
    if edited:
        settings[EDITED] = ", ".join(f"{name} {file_digest(repository / name)[:19]}" for name in edited)
    Endpoint(
        host=socket.gethostname() if arguments.host in ANY_ADDRESS else arguments.host,
        http_port=ports.http,
        grpc_port=ports.grpc,
        metrics_port=ports.metrics,
        openai_port=ports.openai,
        engine=arguments.engine,
        model_repository=str(repository.absolute()),
        sockets=str(sockets or ""),
        model_digest=manifest.digest if manifest is not None else "",
        pid=os.getpid(),
        run=os.environ.get(RUN_VARIABLE, ""),
        deployment=state.prefix,
        start_s=round(start_s, 3),
        settings=settings,
        **slurm_job(os.environ),
    ).write(arguments.endpoint)
