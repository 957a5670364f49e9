"""The model behind an endpoint: its interface, directory, dimensions and identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evaluation.client.client import Client, ModelInterface, RequestError
from ft_format.config_ini import FILE_NAME as CONFIG_INI
from ft_format.config_ini import ConfigIni
from ft_format.values import COUNT, INDEX, Values
from handover.endpoint import FILE_NAME, WEIGHTS_DIGEST, Endpoint
from handover.errors import ArtefactError, ServerError
from handover.manifest import FILE_NAME as MANIFEST_NAME
from handover.manifest import RANDOM_WEIGHTS, Manifest

DEFAULT_RESULTS = Path("results")
DEFAULT_URL = "localhost:8001"
_MODEL = "fastertransformer"


@dataclass(frozen=True)
class DeployedModel:
    """A deployment, with the directory and the dimensions of its model.

    Attributes:
        endpoint: address and identity of the running server.
        name: the name that the model was exported under; empty if unknown.
        directory: directory of the served FT checkpoint, ``fastertransformer/1/<T>-gpu``; None where it is
            not on this machine.
        vocab_size: number of tokens with padding; None if unknown.
        max_positions: input and output tokens of one sequence; None if unknown, or if there is no limit.
        weight_data_type: data type of the shards according to config.ini; empty if unknown.
        start_id, end_id: ids of the tokens that start and end a text; None if unknown.
        first_prompt_id: first id that stands for a learnt vector of a p-tuned prompt; None without such prompts.
    """

    endpoint: Endpoint
    name: str = ""
    directory: Path | None = None
    vocab_size: int | None = None
    max_positions: int | None = None
    weight_data_type: str = ""
    start_id: int | None = None
    end_id: int | None = None
    first_prompt_id: int | None = None


@dataclass(frozen=True)
class Target:
    """A served model that requests are sent to.

    Attributes:
        served: the deployment behind it.
        model: Triton's name of the model.
        interface: what the model takes.
        ids_model: Triton's name of the model that takes token ids: the same one or, of an ensemble, one of its steps;
            None where there is none.
        batch_size: rows of a request, at most what the model takes.
    """

    served: DeployedModel
    model: str
    interface: ModelInterface
    ids_model: str | None
    batch_size: int

    @property
    def url(self) -> str:
        """``host:port`` of gRPC."""
        return self.served.endpoint.grpc_url

    @property
    def identity(self) -> dict[str, str]:
        """What identifies the model in results: its name, engine and digest, and the deployment's settings."""
        endpoint = self.served.endpoint
        known = {"model": self.model, "engine": endpoint.engine, "model_digest": endpoint.model_digest}
        return known | endpoint.settings


def open_target(
    source: str, model: str, model_digest: str | None = None, repository: Path | None = None, batch_size: int = 1
) -> Target:
    """Find a deployment, check that it serves the right weights, and read what the model takes.

    Args:
        source: as for ``find_endpoint``.
        model: Triton's name of the model.
        model_digest: digest of the model repository that must be served; see ``expected_digest``.
        repository: the model repository that must be served.
        batch_size: rows of a request.

    Raises:
        ServerError: no server answers, it has no such model, or it serves other weights.
        ArtefactError: the repository's manifest or the served model's config.ini is damaged.
    """
    endpoint = find_endpoint(source)
    check_identity(endpoint, expected_digest(model_digest, repository))
    with Client(endpoint.grpc_url) as client:
        interface = client.describe(model)
        inside = (model, interface) if interface.takes_ids else model_inside(client, interface)
    # An ensemble has no checkpoint of its own; the model inside it has one.
    served = inspect_endpoint(endpoint, (inside[1] if inside else interface).parameters)
    rows = max(1, min(batch_size, interface.max_batch_size))
    return Target(served, model, interface, inside[0] if inside else None, rows)


def model_inside(client: Client, ensemble: ModelInterface) -> tuple[str, ModelInterface] | None:
    """Find the step of an ensemble that takes token ids, if the server also serves that model by itself."""
    for name in ensemble.steps:
        try:
            interface = client.describe(name)
        except RequestError:
            continue
        if interface.takes_ids:
            return name, interface
    return None


def find_endpoint(source: str | Path | None, results: Path = DEFAULT_RESULTS) -> Endpoint:
    """Read the named endpoint, or the newest ``endpoint.json`` below the results, or take localhost:8001.

    Raises:
        ServerError: the source names no deployment.
    """
    if source is not None:
        return Endpoint.read(source)
    newest = max(results.rglob(FILE_NAME), key=lambda path: path.stat().st_mtime, default=None)
    return Endpoint.read(newest if newest is not None else DEFAULT_URL)


def inspect_endpoint(endpoint: Endpoint, parameters: Mapping[str, str] | None = None) -> DeployedModel:
    """Find the served model's directory and read its dimensions from ``config.ini``.

    Args:
        endpoint: address and identity of the running server.
        parameters: parameters of the model's config.pbtxt as the server returns them.

    Raises:
        ServerError: another server answers at the endpoint's address; see ``check_server``.
        ArtefactError: config.ini cannot be read, or a value in it is not legal.
    """
    check_server(endpoint, parameters or {})
    directory = _model_directory(endpoint, parameters or {})
    name = _exported_name(endpoint)
    if directory is None:
        return DeployedModel(endpoint, name)
    ini = ConfigIni.read(directory, ArtefactError)
    section = ini.with_key("vocab_size")
    if section is None:
        return DeployedModel(endpoint, name, directory)
    return DeployedModel(
        endpoint,
        name,
        directory,
        vocab_size=section.get("vocab_size", COUNT),
        max_positions=_max_positions(ini, section),
        weight_data_type=section.get("weight_data_type", str, ""),
        start_id=_first(ini, "start_id", "decoder_start_token_id"),
        end_id=_first(ini, "end_id", "eos_token_id"),
        first_prompt_id=section.find("prompt_learning_start_id", INDEX) if section.get("num_tasks", INDEX, 0) else None,
    )


def _max_positions(ini: ConfigIni, section: Values) -> int | None:
    """Return the rows of the position table; None where positions have no limit or it is unknown."""
    if "structure" in ini and ini["structure"].get("position_embedding_type", str, "") == "absolute":
        return section.find("relative_attention_num_buckets_or_max_pos_seq_len", COUNT)
    return section.find("max_pos_seq_len", INDEX)


def _first(ini: ConfigIni, *keys: str) -> int | None:
    """Return the token id under the first of the keys that exists in any section; None without one."""
    found = ((key, section) for key in keys if (section := ini.with_key(key)))
    return next((section.get(key, INDEX) for key, section in found), None)


def check_identity(endpoint: Endpoint, model_digest: str | None) -> None:
    """Refuse a deployment that serves another model than that of the digest; None accepts any.

    Raises:
        ServerError: the endpoint has another digest, or its repository was replaced after it started.
    """
    if model_digest is not None and endpoint.model_digest != model_digest:
        raise ServerError(
            f"the endpoint serves model {endpoint.model_digest or 'of unknown digest'}, not {model_digest}",
            "stop that deployment, or deploy the model that you want to measure",
        )
    if not endpoint.model_digest or not endpoint.model_repository:
        return
    try:
        current = Manifest.read(Path(endpoint.model_repository)).digest
    except ArtefactError:
        return  # the repository is on another machine, so that its digest cannot be read
    if current != endpoint.model_digest:
        raise ServerError(
            f"the endpoint serves model {endpoint.model_digest}, but {endpoint.model_repository} now holds {current}",
            "restart the deployment",
        )


def check_server(endpoint: Endpoint, parameters: Mapping[str, str]) -> None:
    """Refuse a server whose model has other weights than the endpoint file says.

    The file may be outdated: its server has exited, and another one listens on the same port.

    Raises:
        ServerError: both have a digest of the weights, and the digests differ.
    """
    said, found = endpoint.settings.get(WEIGHTS_DIGEST), parameters.get(WEIGHTS_DIGEST)
    if said and found and said != found:
        raise ServerError(
            f"the server at {endpoint.grpc_url} serves weights {found}, but the endpoint file says {said}",
            "that deployment is gone, and another has its port: start it again, or give the other one's endpoint file",
        )


def check_unchanged(source: str | Path | None, began: Endpoint, model: str) -> None:
    """Refuse to continue a measurement if the deployment serves another model than when it began.

    The endpoint is read again from the source that ``find_endpoint`` read it from.

    Raises:
        ServerError: the deployment serves another model, or is gone.
    """
    check_identity(find_endpoint(source), began.model_digest or None)
    check_still_served(began, model)


def check_still_served(began: Endpoint, model: str) -> None:
    """Refuse the answers of a deployment whose repository or server was replaced in the meantime.

    Raises:
        ServerError: one of them was replaced, or no server answers any more.
    """
    check_identity(began, None)
    with Client(began.grpc_url) as client:
        check_server(began, client.describe(model).parameters)


def expected_digest(model_digest: str | None, model_repository: Path | None) -> str | None:
    """Return the digest that an endpoint must serve: the given one, or the given repository's; None for any.

    Raises:
        ArtefactError: the repository's manifest is damaged.
    """
    if model_digest is not None or model_repository is None or not (model_repository / MANIFEST_NAME).is_file():
        return model_digest
    return Manifest.read(model_repository).digest


def has_random_weights(endpoint: Endpoint) -> bool:
    """Return whether the deployment, or the manifest of its repository, says that the weights are random."""
    if endpoint.settings.get(RANDOM_WEIGHTS):
        return True
    if not endpoint.model_repository or not Path(endpoint.model_repository).is_dir():
        return False
    return bool(Manifest.read(Path(endpoint.model_repository)).made_from.get(RANDOM_WEIGHTS))


def _exported_name(endpoint: Endpoint) -> str:
    try:
        made_from = Manifest.read(Path(endpoint.model_repository)).made_from
    except ArtefactError:
        return ""
    return str(made_from.get("model_name", ""))


def _model_directory(endpoint: Endpoint, parameters: Mapping[str, str]) -> Path | None:
    candidates = []
    if endpoint.model_repository:
        version = Path(endpoint.model_repository) / _MODEL / "1"
        size = endpoint.settings.get("tensor_para_size")
        candidates += [version / f"{size}-gpu"] if size else sorted(version.glob("*-gpu"))
    if parameters.get("model_checkpoint_path"):
        candidates.append(Path(parameters["model_checkpoint_path"]))
    return next((path for path in candidates if (path / CONFIG_INI).is_file()), None)
