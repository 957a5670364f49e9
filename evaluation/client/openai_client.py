"""A client of servers that have OpenAI's API: Slipway's own endpoint, vLLM, SGLang, TensorRT-LLM, NIM.

Only what is asked for is sent, because many servers refuse fields that they do not know; ``openai_capabilities`` finds
out what a server takes. A client belongs to one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evaluation.client.errors import RequestError
from evaluation.client.http_connection import HttpConnection
from handover.endpoint import Endpoint
from handover.errors import ConfigError, nearest, shortened

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MODELS = "/v1/models"
UNCHOSEN_MODELS = ("", "fastertransformer", "ensemble")
"""Names of Triton's models, which the tasks ask by default: at an OpenAI API they mean the one model that it serves."""
_UNUSED = {"sglang": 7}
"""Positions of ``max_model_len`` that no prompt may fill. SGLang ends an answer without a word before the last two."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class ModelCard:
    """A model as ``/v1/models`` lists it.

    Attributes:
        id: the name to give as ``model``.
        root: what it was loaded from, or ``id``.
        owned_by: who serves it: "vllm", "sglang", "slipway"; empty if unknown.
        max_positions: prompt and answer together, in tokens (of ``max_model_len`` what can be used); None if unknown.
        is_encoder_decoder: whether a prompt is an encoder's input, as Slipway's own endpoint says.
        settings: of the deployment, as Slipway's own endpoint says: number formats, parallelism, digests.
    """

    id: str
    root: str = ""
    owned_by: str = ""
    max_positions: int | None = None
    is_encoder_decoder: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """One answer of ``/v1/completions``.

    Attributes:
        text: with the prompt where it was echoed.
        finish_reason: "stop" or "length"; empty if unknown.
        token_ids, prompt_token_ids: with ``return_token_ids``; None if the server does not return them.
        tokens: names of the tokens of ``logprobs``, those of an echoed prompt first; None without log probabilities.
        log_probs: of these tokens, natural logarithm; None for a prompt's first token.
        top: the most probable tokens at each of these places by name, and the token itself; None as above.
    """

    text: str
    finish_reason: str = ""
    token_ids: Ids | None = None
    prompt_token_ids: Ids | None = None
    tokens: tuple[str, ...] | None = None
    log_probs: tuple[float | None, ...] | None = None
    top: tuple[Mapping[str, float] | None, ...] | None = None


@dataclass(frozen=True)
class Completed:
    """The answer to one request.

    Attributes:
        choices: one for each prompt, in their order.
        prompt_tokens, completion_tokens: of all together (``usage``); None if the server does not count.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int | None
    completion_tokens: int | None


class OpenAIClient:
    """One connection to an OpenAI API.

    Args:
        endpoint: base URL, and the environment variable with the bearer key.
        timeout_s: limit of one request in seconds.
        retries: how often a request is sent again; see ``HttpConnection``, which also says what is raised.

    Raises:
        ConfigError: the variable with the key is not set, or holds no key.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float = 600.0, retries: int = 3) -> None:
        self.url = endpoint.openai_url
        key = read_key(endpoint)
        self._http = HttpConnection(
            endpoint.server_url, key, endpoint.openai_key_env, timeout_s=timeout_s, retries=retries
        )

    def __enter__(self) -> OpenAIClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def get(self, path: str) -> Any:
        """Return the JSON at a path below the server's root, such as ``/version``."""
        return self._http.ask("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of the answer to a body."""
        return self._http.ask("POST", path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer as they arrive; a stream without its last event is an error."""
        yield from self._http.stream(path, {**body, "stream": True})

    def models(self) -> tuple[ModelCard, ...]:
        """List the models.

        Raises:
            RequestError: the answer is not a list of models.
        """
        found = self.get(_MODELS)
        cards = found.get("data") if isinstance(found, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and card.get("id") for card in cards):
            raise RequestError(
                f"{self.url}/models lists no models: {shortened(str(found))}", "give the base URL of an OpenAI API"
            )
        return tuple(_card(card) for card in cards)

    def find_model(self, wanted: str) -> ModelCard:
        """Return the model of a name, or the only one where the name is one of ``UNCHOSEN_MODELS``.

        Raises:
            ConfigError: there is no such model, or there are several and none was chosen.
        """
        cards = self.models()
        names = [card.id for card in cards]
        for card in cards:
            if card.id == wanted:
                return card
        if wanted in UNCHOSEN_MODELS:
            if len({card.root for card in cards}) == 1:  # one model may have several names
                return cards[0]
            raise ConfigError(f"{self.url} serves {len(cards)} models", f"choose one by model=: {', '.join(names)}")
        raise ConfigError(f"{self.url} serves no model '{wanted}'", nearest(wanted, names))

    def version(self) -> str:
        """Return the server's version; empty where it does not tell it."""
        try:
            found = self.get("/version")
        except RequestError:
            return ""
        return str(found.get("version", "")) if isinstance(found, dict) else ""

    def complete(self, model: str, prompts: Sequence[Sequence[int]] | Sequence[str], **fields: Any) -> Completed:
        """Complete prompts, given as texts or as token ids, in one request.

        Args:
            model: the name that the server gives it.
            prompts: at least one.
            fields: of the request's body, such as ``max_tokens``.

        Raises:
            RequestError: the answer does not have a choice for each prompt.
        """
        given: list[Any] = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        found = self.post(COMPLETIONS, {"model": model, "prompt": given if len(given) > 1 else given[0], **fields})
        try:
            choices = sorted(found["choices"], key=lambda choice: int(choice["index"]))
            usage = found.get("usage") or {}
            answer = Completed(tuple(map(_choice, choices)), usage.get("prompt_tokens"), usage.get("completion_tokens"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"{self.url}/completions answered with no choices: {shortened(str(found))}") from error
        if len(answer.choices) != len(given):
            raise RequestError(f"{self.url}/completions gave {len(answer.choices)} answers to {len(given)} prompts")
        return answer


def read_key(endpoint: Endpoint) -> str:
    """Return the bearer key of an endpoint; empty where it needs none.

    Raises:
        ConfigError: the environment has no such variable, or what it holds is no key; no message shows it.
    """
    name = endpoint.openai_key_env
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        problem = "holds characters that no key has" if key else "is not set in this environment"
        raise ConfigError(f"${name}, which should hold the key of {endpoint.openai_url}, {problem}", f"export {name}")
    return key


def _card(card: Mapping[str, Any]) -> ModelCard:
    limit, owner = card.get("max_model_len"), str(card.get("owned_by") or "")
    name, settings = str(card["id"]), card.get("settings")
    return ModelCard(
        name,
        str(card.get("root") or name),
        owner,
        max(1, limit - _UNUSED.get(owner, 0)) if isinstance(limit, int) and limit > 0 else None,
        card.get("is_encoder_decoder") is True,
        {str(key): str(value) for key, value in settings.items()} if isinstance(settings, dict) else {},
    )


def _choice(choice: Mapping[str, Any]) -> Choice:
    scores = choice.get("logprobs") or {}
    tokens, log_probs, top = (scores.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    return Choice(
        str(choice["text"]),
        str(choice.get("finish_reason") or ""),
        _ids(choice.get("token_ids")),
        _ids(choice.get("prompt_token_ids")),
        None if tokens is None else tuple(map(str, tokens)),
        None if log_probs is None else tuple(None if each is None else float(each) for each in log_probs),
        None if top is None else tuple(top),
    )


def _ids(given: Any) -> Ids | None:
    return None if given is None else tuple(map(int, given))
