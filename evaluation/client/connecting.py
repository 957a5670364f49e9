"""Connect to a served model through the API that it has."""

from __future__ import annotations

from evaluation.client.client import Client, ModelInterface
from evaluation.client.errors import RequestError
from evaluation.client.model_connection import ModelConnection, ModelFiles
from evaluation.client.openai_capabilities import Capabilities
from evaluation.client.openai_client import OpenAIClient
from evaluation.client.openai_connection import OpenAIConnection
from evaluation.client.served_model import Target
from evaluation.client.tokenizer import Tokenizer
from evaluation.client.triton_connection import TritonConnection
from handover.errors import ConfigError

_SAMPLE = "The quick brown fox doesn't jump over 13 lazy dogs."


def connect(target: Target, timeout_s: float, files: ModelFiles) -> ModelConnection:
    """Open a connection to a target, for one thread.

    Args:
        target: the served model.
        timeout_s: limit of one request in seconds.
        files: the model's tokenizer, end token and learnt prompt.
    """
    endpoint, interface = target.served.endpoint, target.interface
    if isinstance(interface, Capabilities):
        return OpenAIConnection(OpenAIClient(endpoint, timeout_s), interface, files)
    assert isinstance(interface, ModelInterface), "there are two APIs"
    client = Client(endpoint.grpc_url, timeout_s, lora_name=target.lora_name)
    return TritonConnection(client, target.model, interface, files)


def check_tokenizer(target: Target, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the one of an OpenAI API, where the API says how it encodes (``/tokenize``).

    Raises:
        ConfigError: the two encode a text differently.
    """
    if target.capabilities is None:
        return
    with OpenAIClient(target.served.endpoint) as client:
        try:
            found = client.post("/tokenize", {"model": target.model, "prompt": _SAMPLE})
        except RequestError:
            return  # OpenAI's own API has no such path
    theirs = found.get("tokens") if isinstance(found, dict) else None
    ending = (target.served.end_id,) if target.interface.is_encoder_decoder else ()
    ours = [*tokenizer.encode(_SAMPLE), *ending]  # an encoder's input ends with it
    if theirs is not None and list(theirs) != ours:
        raise ConfigError(
            f"the tokenizer is not that of {target.url}: it encodes {_SAMPLE!r} to {ours}, the endpoint to {theirs}",
            "name the directory of the served model's own tokenizer files: main.py's deployment.endpoint_tokenizer, or"
            " --tokenizer of this program",
        )
