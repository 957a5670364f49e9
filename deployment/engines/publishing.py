"""What clients and results are told of a running engine: its endpoint file."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from deployment.address import ANY_ADDRESS, slurm_job
from deployment.arguments import EngineArguments
from deployment.engines.table import without_secrets
from deployment.leftovers import State
from handover.digests import file_digest
from handover.endpoint import EDITED, FLAGS, RUN_VARIABLE, VERSIONS, Endpoint, deployment_of
from handover.errors import ServerError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import Manifest
from handover.provenance import VERSION

MODEL = "model"
"""Key of the endpoint's ``settings``: the name by which the server knows the model."""


def publish(
    arguments: EngineArguments,
    state: State,
    port: int,
    argv: Sequence[str],
    model: str,
    version: str,
    start_s: float,
    edited: Sequence[str],
) -> None:
    """Write the endpoint file.

    Args:
        arguments: of this deployment.
        state: names it.
        port: of the OpenAI API.
        argv: the server's command line, without what differs from start to start.
        model: name by which the server knows the model.
        version: of the engine; empty where it does not say.
        start_s: seconds from starting the server to its first generation.
        edited: files of the directory that were edited after they were written.

    Raises:
        ServerError: there is an endpoint file again since this deployment has begun: another one serves.
    """
    if arguments.endpoint.exists() and deployment_of(arguments.endpoint) != state.prefix:
        raise ServerError(
            f"another deployment has published {arguments.endpoint} meanwhile",
            "stop one of them, or choose another results directory",
        )
    directory = arguments.model_repository
    manifest = Manifest.read(directory) if (directory / MANIFEST_NAME).is_file() else None
    host = socket.gethostname() if arguments.host in ANY_ADDRESS else arguments.host
    settings = {
        "tensor_para_size": str(arguments.tensor_para_size),
        "pipeline_para_size": str(arguments.pipeline_para_size),
        "data_type": arguments.data_type,
        **_weights(manifest),
        VERSIONS: ", ".join(filter(None, (f"slipway {VERSION}", version and f"{arguments.engine} {version}"))),
        FLAGS: shlex.join(without_secrets(argv)),
        MODEL: model,
    }
    if edited:
        settings[EDITED] = ", ".join(_edited(directory, name) for name in edited)
    job = slurm_job(os.environ)
    Endpoint(
        host=host,
        http_port=port,
        openai_port=port,
        openai_url=f"http://{f'[{host}]' if ':' in host else host}:{port}/v1",
        engine=arguments.engine,
        model_repository=str(directory.absolute()),
        model_digest=manifest.digest if manifest is not None else "",
        pid=os.getpid(),
        run=os.environ.get(RUN_VARIABLE, ""),
        deployment=state.prefix,
        start_s=round(start_s, 3),
        settings=settings,
        job_id=job["job_id"],
        nodes=job["nodes"],
    ).write(arguments.endpoint)


def _weights(manifest: Manifest | None) -> dict[str, str]:
    data_type = manifest.made_from.get("weight_data_type") if manifest is not None else None
    return {"weight_data_type": str(data_type)} if data_type else {}


def _edited(directory: Path, name: str) -> str:
    return f"{name} {file_digest(directory / name)[:19]}"
