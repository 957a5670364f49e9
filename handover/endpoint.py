"""The endpoint file: where a deployment listens and what it serves."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from handover.durable import write_atomically
from handover.errors import ConfigError, ServerError
from handover.regular_file import SETTINGS_BYTES, read_text

WEIGHTS_DIGEST = "weights_digest"
"""Parameter of a served model's config.pbtxt, and key of ``settings``: the digest of the FT checkpoint's manifest."""
MODEL_DIGEST = "model_digest"
"""Key of ``settings`` where an OpenAI API tells it: the digest of the served repository's manifest."""
VERSIONS = "versions"
"""Key of ``settings``: of the programs that serve, ``python 3.11.2, torch 2.13.0, triton 2.51.0``."""
FLAGS = "flags"
"""Key of ``settings``: further settings of the engine, ``prefill_chunk_tokens=256`` or ``--max-model-len=4096``."""
EDITED = "edited_files"
"""Key of ``settings``: files of the repository that were edited after the export, with the beginning of each digest."""
REPLICAS = "replicas"
"""Key of ``settings``: how many servers stand behind the address; left out: one."""
ROUTER = "router"
"""Key of ``settings``: what stands before them."""
FILE_NAME = "endpoint.json"
RUN_VARIABLE = "SLIPWAY_RUN"
"""Environment variable with a token that the server copies into its endpoint file."""
REPLICA_JOBS_VARIABLE = "SLIPWAY_REPLICA_JOBS"
"""Environment variable with the ids of the jobs that are the servers behind a router, with commas."""
_PORTS = {"http": 80, "https": 443}
_BASE = "/v1"
_LEGAL = "give an endpoint.json, its directory, host:port of Triton's gRPC, or http://host:port/v1 of an OpenAI API"


@dataclass(frozen=True)
class Endpoint:
    """A running deployment. It is published only once a real generation came back.

    Attributes:
        host: address that clients use.
        http_port, grpc_port, metrics_port, openai_port: TCP ports; None where unknown or off.
        engine: ``slipway`` (the drop-in) or ``fastertransformer``; empty for a foreign server.
        model_repository: path of the served repository; empty for a foreign server.
        sockets: directory, on the serving host, of the sockets by which an OpenAI endpoint may ask the drop-in engine;
            empty where there are none.
        model_digest: digest of the repository's manifest; empty for a foreign server.
        pid: process that stops the deployment on SIGTERM; None for a foreign server.
        run: what SLIPWAY_RUN was for the server: the runner knows its own server by it.
        deployment: unique name of this start of a server: only the deployment that has it removes the file.
        job_id: Slurm job that serves; empty elsewhere.
        nodes: of that job, in Slurm's notation.
        start_s: seconds from starting the server to its first generation; None where unknown.
        settings: tensor_para_size, pipeline_para_size, weight_data_type, data_type, ... as text.
        openai_url: base URL of an OpenAI API, ``http://host:port/v1``, through which the model is asked; empty where
            it is asked by gRPC.
        openai_key_env: name of the environment variable with the API's bearer key; empty where it needs none. The key
            itself is written nowhere.
    """

    host: str
    http_port: int | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None
    engine: str = ""
    model_repository: str = ""
    sockets: str = ""
    model_digest: str = ""
    pid: int | None = None
    run: str = ""
    deployment: str = ""
    job_id: str = ""
    nodes: str = ""
    start_s: float | None = None
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    openai_port: int | None = None
    openai_url: str = ""
    openai_key_env: str = ""

    @property
    def is_openai(self) -> bool:
        """Whether the model is asked through an OpenAI API."""
        return bool(self.openai_url)

    @property
    def address(self) -> str:
        """Where the model is asked: the base URL of an OpenAI API, or ``host:port`` of gRPC."""
        return self.openai_url or self.grpc_url

    @property
    def server_url(self) -> str:
        """Base URL of the server that has the OpenAI API: its other paths lie below it, too."""
        return self.openai_url.removesuffix(_BASE)

    @property
    def grpc_url(self) -> str:
        """``host:port`` for tritonclient.grpc."""
        if self.is_openai:
            raise ServerError(
                f"{self.openai_url} is an OpenAI API, and this needs Triton's gRPC", "give host:port of a Triton server"
            )
        if self.grpc_port is None:
            raise ServerError(f"the deployment at {self.host} has no gRPC port")
        return f"{self.host}:{self.grpc_port}"

    def write(self, path: Path) -> None:
        """Publish atomically."""
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, source: str | Path, key_env: str | None = None) -> Endpoint:
        """Read an endpoint file, a directory that holds one, ``host:grpc_port``, or the base URL of an OpenAI API.

        Args:
            source: where the endpoint is.
            key_env: name of the environment variable with the bearer key of an OpenAI API; None for a file's own.

        Raises:
            ServerError: the source names no deployment.
            ConfigError: the URL is not the base URL of an OpenAI API, or a key is given for something else.
        """
        endpoint = cls._read(source)
        if not key_env:
            return endpoint
        if not endpoint.is_openai:
            raise ConfigError(
                f"endpoint_key_env={key_env} is given, and '{source}' is no OpenAI API, which alone takes a key",
                "leave endpoint_key_env out, or give http://host:port/v1",
            )
        return dataclasses.replace(endpoint, openai_key_env=check_key_env(key_env))

    @classmethod
    def _read(cls, source: str | Path) -> Endpoint:
        if "://" in str(source):
            return _of_url(str(source))
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
        raise ServerError(f"no deployment at '{source}'", _LEGAL)


def check_key_env(name: str) -> str:
    """Return the name of an environment variable; refuse what cannot be one, such as the key itself.

    Raises:
        ConfigError: it is no name of a variable; the message does not repeat it.
    """
    if not (name.isascii() and name.isidentifier()):
        raise ConfigError(
            "endpoint_key_env is not the name of an environment variable",
            "export the key, and give the variable's name: export API_KEY=...; endpoint_key_env=API_KEY",
        )
    return name


def _of_url(url: str) -> Endpoint:
    """Read the base URL of an OpenAI API.

    Raises:
        ConfigError: it is not one.
    """
    shown = _without_user(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"the endpoint '{shown}' is not a URL: {error}", _LEGAL) from None
    if parts.scheme not in _PORTS:
        raise ConfigError(f"the endpoint '{shown}' has the scheme '{parts.scheme}'", f"legal: http, https; {_LEGAL}")
    if "@" in parts.netloc:
        raise ConfigError(
            f"the endpoint '{shown}' has a user or a password in it",
            "leave it out, and name an environment variable with the bearer key: endpoint_key_env=NAME",
        )
    if not host or parts.query or parts.fragment:
        raise ConfigError(f"the endpoint '{shown}' is not http://host:port/v1", _LEGAL)
    path = parts.path.rstrip("/")
    if not path.endswith(_BASE):
        before = path[: path.index(f"{_BASE}/")] if f"{_BASE}/" in path else path
        raise ConfigError(
            f"the endpoint '{shown}' does not end with {_BASE}, as the base URL of an OpenAI API does",
            f"give {parts.scheme}://{parts.netloc}{before}{_BASE}; Triton's gRPC is given as host:port",
        )
    base = f"{parts.scheme}://{parts.netloc}{path}"
    return Endpoint(host, http_port=port or _PORTS[parts.scheme], openai_url=base)


def _without_user(url: str) -> str:
    """Return a URL without a user and a password, which no message may show."""
    scheme, _, rest = url.partition("://")
    netloc, slash, path = rest.partition("/")
    return f"{scheme}://{netloc.rpartition('@')[2]}{slash}{path}"


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
