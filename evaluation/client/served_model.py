"""The model behind an endpoint: its interface, directory, dimensions and identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.arguments import ADAPTER
from evaluation.client.client import Client, ModelInterface
from evaluation.client.errors import RequestError
from evaluation.client.interface import Interface
from evaluation.client.openai_capabilities import Capabilities, find_capabilities
from evaluation.client.openai_client import OpenAIClient
from evaluation.client.openai_vocabulary import find_end_id, find_vocab_size
from evaluation.client.served_identity import check_identity, check_server, expected_digest, find_endpoint, identity_of
from evaluation.client.special_ids import first_id
from ft_format.config_ini import ConfigIni
from ft_format.location import HUGGINGFACE, first_checkpoint
from ft_format.served_config import read_served_config
from ft_format.values import COUNT, INDEX, Values
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ArtefactError
from handover.manifest import RANDOM_WEIGHTS, Manifest
from models.directory import CONFIG_FILE

_MODEL = "fastertransformer"


@dataclass(frozen=True)
class DeployedModel:
    """A deployment, with the directory and the dimensions of its model.

    Attributes:
        endpoint: address and identity of the running server.
        name: the name that the model was exported under; empty if unknown.
        directory: directory of the served FT checkpoint, ``fastertransformer/1/<T>-gpu``, or of Hugging Face's files;
            None where it is not on this machine.
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
        interface: what the model takes; of an OpenAI API, its ``Capabilities``.
        ids_model: Triton's name of the model that takes token ids: the same one or, of an ensemble, one of its steps;
            None where there is none.
        batch_size: rows of a request, at most what the model takes.
        lora_name: the model's LoRA adapter that answers; empty: none.
    """

    served: DeployedModel
    model: str
    interface: Interface
    ids_model: str | None
    batch_size: int
    lora_name: str = ""

    @property
    def url(self) -> str:
        """``host:port`` of gRPC, or the base URL of an OpenAI API."""
        return self.served.endpoint.address

    @property
    def is_openai(self) -> bool:
        """Whether it is asked by an OpenAI API."""
        return isinstance(self.interface, Capabilities)

    @property
    def capabilities(self) -> Capabilities | None:
        """What the OpenAI API can do; None for a server that is asked by gRPC."""
        return self.interface if isinstance(self.interface, Capabilities) else None

    @property
    def identity(self) -> dict[str, str]:
        """What identifies the model in results: its name, engine and digest, and the deployment's settings."""
        endpoint = self.served.endpoint
        known = {"model": self.model, "engine": endpoint.engine, "model_digest": endpoint.model_digest}
        return known | ({ADAPTER: self.lora_name} if self.lora_name else {}) | endpoint.settings


def open_target(
    source: str,
    model: str,
    model_digest: str | None = None,
    repository: Path | None = None,
    batch_size: int = 1,
    key_env: str | None = None,
    may_chat: bool = False,
) -> Target:
    """Find a deployment, check that it serves the right weights, and read what the model takes.

    Args:
        source: as for ``find_endpoint``.
        model: Triton's name of the model, or that of an OpenAI API.
        model_digest: digest of the model repository that must be served; see ``expected_digest``.
        repository: the model repository that must be served.
        batch_size: rows of a request.
        key_env: name of the environment variable with the bearer key of an OpenAI API.
        may_chat: whether an OpenAI API is of use that answers conversations alone.

    Raises:
        ServerError: no server answers, it has no such model, or it serves other weights.
        ConfigError: an OpenAI API has no such model, or completes no prompt.
        ArtefactError: the repository's manifest or the served model's config.ini is damaged.
    """
    endpoint = find_endpoint(source, key_env=key_env)
    check_identity(endpoint, expected_digest(model_digest, repository))
    if endpoint.is_openai:
        return _open_openai(endpoint, model, batch_size, may_chat)
    with Client(endpoint.grpc_url) as client:
        interface = client.describe(model)
        inside = (model, interface) if interface.takes_ids else model_inside(client, interface)
    # An ensemble has no checkpoint of its own; the model inside it has one.
    served = inspect_endpoint(endpoint, (inside[1] if inside else interface).parameters)
    rows = max(1, min(batch_size, interface.max_batch_size))
    return Target(served, model, interface, inside[0] if inside else None, rows)


def open_named(arguments: ScriptArguments, may_chat: bool = False) -> Target:
    """Find the deployment and the model that a program's arguments name; see ``open_target``."""
    given = vars(arguments)
    return open_target(
        given["endpoint"],
        given["model"],
        given.get("model_digest"),
        given.get("model_repository"),
        given.get("batch_size", 1),
        given.get("endpoint_key_env"),
        may_chat,
    )


def _open_openai(endpoint: Endpoint, model: str, batch_size: int, may_chat: bool) -> Target:
    """Ask an OpenAI API which model it serves and what it can do."""
    with OpenAIClient(endpoint) as client:
        card = client.find_model(model)
        found = find_capabilities(client, card, may_chat)
        vocab_size, end_id = find_vocab_size(client, endpoint, card), find_end_id(client, card)
    served = DeployedModel(
        identity_of(endpoint, card, found.version),
        card.id,
        _hugging_face_directory(endpoint),
        vocab_size=vocab_size,
        max_positions=card.max_positions,
        end_id=end_id,
    )
    rows = max(1, min(batch_size, found.max_batch_size))
    return Target(served, card.id, found, card.id if found.takes_ids else None, rows)


def _hugging_face_directory(endpoint: Endpoint) -> Path | None:
    """Return the directory that an engine of another project serves, where it is on this machine."""
    directory = Path(endpoint.model_repository)
    return directory if endpoint.model_repository and (directory / CONFIG_FILE).is_file() else None


def target_inside(target: Target) -> Target | None:
    """Return the model inside an ensemble that takes token ids, as a target of its own; None if there is none.

    Raises:
        ServerError: no server answers.
    """
    if target.ids_model is None or target.is_openai:
        return None
    with Client(target.url) as client:
        return replace(target, model=target.ids_model, interface=client.describe(target.ids_model))


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


def inspect_endpoint(endpoint: Endpoint, parameters: Mapping[str, str] | None = None) -> DeployedModel:
    """Find the served model's directory and read its dimensions.

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
    ini = read_served_config(directory, ArtefactError)
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
        start_id=first_id(ini, "start_id", "decoder_start_token_id"),
        end_id=first_id(ini, "end_id", "eos_token_id"),
        first_prompt_id=section.find("prompt_learning_start_id", INDEX) if section.get("num_tasks", INDEX, 0) else None,
    )


def _max_positions(ini: ConfigIni, section: Values) -> int | None:
    """Return the rows of the position table; None where positions have no limit or it is unknown."""
    if "structure" in ini and ini["structure"].get("position_embedding_type", str, "") == "absolute":
        return section.find("relative_attention_num_buckets_or_max_pos_seq_len", COUNT)
    return section.find("max_pos_seq_len", INDEX)


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
        candidates.append(version / HUGGINGFACE)
    if parameters.get("model_checkpoint_path"):
        candidates.append(Path(parameters["model_checkpoint_path"]))
    return first_checkpoint(candidates)
