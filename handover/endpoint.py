"""The endpoint file: where a deployment listens and what it serves."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from handover.durable import write_atomically
from handover.errors import ServerError
from handover.regular_file import SETTINGS_BYTES, read_text

WEIGHTS_DIGEST = "weights_digest"
"""Parameter of a served model's config.pbtxt, and key of ``settings``: the digest of the FT checkpoint's manifest."""
VERSIONS = "versions"
"""Key of ``settings``: of the programs that serve, ``python 3.11.2, torch 2.13.0, triton 2.51.0``."""
FLAGS = "flags"
"""Key of ``settings``: further settings of the engine, ``prefill_chunk_tokens=256`` or ``--max-model-len=4096``."""
EDITED = "edited_files"
"""Key of ``settings``: files of the repository that were edited after the export, with the beginning of each digest."""
FILE_NAME = "endpoint.json"
RUN_VARIABLE = "SLIPWAY_RUN"
"""Environment variable with a token that the server copies into its endpoint file."""


@dataclass(frozen=True)
class Endpoint:
    """A running deployment. It is published only once a real generation came back.

    Attributes:
        host: address that clients use.
        http_port, grpc_port, metrics_port, openai_port: TCP ports; None where unknown or off.
        engine: ``slipway`` (the drop-in) or ``fastertransformer``; empty for a foreign server.
        model_repository: path of the served repository; empty for a foreign server.
        model_digest: digest of the repository's manifest; empty for a foreign server.
        pid: process that stops the deployment on SIGTERM; None for a foreign server.
        run: what SLIPWAY_RUN was for the server: the runner knows its own server by it.
        deployment: unique name of this start of a server: only the deployment that has it removes the file.
        job_id: Slurm job that serves; empty elsewhere.
        nodes: of that job, in Slurm's notation.
        start_s: seconds from starting the server to its first generation; None where unknown.
        settings: tensor_para_size, pipeline_para_size, weight_data_type, data_type, ... as text.
    """

    host: str
    http_port: int | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None
    engine: str = ""
    model_repository: str = ""
    model_digest: str = ""
    pid: int | None = None
    run: str = ""
    deployment: str = ""
    job_id: str = ""
    nodes: str = ""
    start_s: float | None = None
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    openai_port: int | None = None

    @property
    def grpc_url(self) -> str:
        """``host:port`` for tritonclient.grpc."""
        if self.grpc_port is None:
            raise ServerError(f"the deployment at {self.host} has no gRPC port")
        return f"{self.host}:{self.grpc_port}"

    def write(self, path: Path) -> None:
        """Publish atomically."""
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, source: str | Path) -> Endpoint:
        """Read an endpoint file, a directory that holds one, or ``host:grpc_port``."""
        path = Path(source)
        if path.is_dir():
            path = path / FILE_NAME
        if path.is_file():
            try:
                return cls(**json.loads(read_text(path, SETTINGS_BYTES)))
            except (ValueError, TypeError) as error:
                raise ServerError(f"{path} is not an endpoint file: {error}") from error
        host, colon, port = str(source).rpartition(":")
        if colon and host and port.isdigit():
            return cls(host=host, grpc_port=int(port))
        raise ServerError(
            f"no deployment at '{source}'",
            "give an endpoint.json, its directory, or host:port of a gRPC endpoint",
        )


def is_published(path: Path, run: str) -> bool:
    """Whether the endpoint file is that of the server of this run, not of an earlier one.

    A pid would not tell: under srun the server is no child of the runner.
    """
    return _field(path, "run") == run


def deployment_of(path: Path) -> str:
    """Name the deployment that has written an endpoint file; empty where there is none, or it does not say."""
    return _field(path, "deployment") or ""


def _field(path: Path, name: str) -> str | None:
    try:
        return str(json.loads(path.read_text())[name])
    except (OSError, ValueError, KeyError, TypeError):
        return None
