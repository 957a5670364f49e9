"""A small OpenAI server on ``http.server``, a stand-in for servers of others: its abilities can be switched off.

It is written from OpenAI's and vLLM's documentation alone, takes its model from the tests, and
shares no code with ``deployment.openai`` or with the client that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.servers.loopback_http import JsonHandler, listening

NAME = "org/tiny"
EXTENSIONS = frozenset({"return_token_ids", "return_tokens_as_token_ids", "ignore_eos"})
_FIELDS = frozenset(
    {"model", "prompt", "max_tokens", "temperature", "echo", "logprobs", "stop", "stream", "n", "top_p"}
)

Forward = Callable[[Sequence[int]], Any]
"""From token ids to log probabilities [n, V] behind each of them."""


@dataclass
class StandIn:
    """What the server is and can do, and what it was asked.

    Attributes:
        forward: the model; None for one that always prefers the next number.
        encode: from text to token ids; None for a server that the tests send ids alone.
        decode: from token ids to text; None for numbers with spaces.
        end_id: the token that ends an answer.
        extensions: fields of vLLM that it knows; others are refused.
        takes_ids, echoes, takes_zero: whether token ids are prompts, echo has log probabilities, max_tokens may be 0.
        tokenizes: whether it has vLLM's /tokenize and /detokenize.
        key: bearer key that it wants; empty for none.
        max_model_len: that it lists; None for none.
        owned_by, version: who it says that it is; an empty version is not told.
        faults: answers to give instead, first come first: status, headers and body.
        asked: bodies of completions.
        headers: of every request.
    """

    forward: Forward | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    end_id: int | None = None
    extensions: frozenset[str] = EXTENSIONS
    takes_ids: bool = True
    echoes: bool = True
    takes_zero: bool = True
    tokenizes: bool = False
    key: str = ""
    max_model_len: int | None = 128
    owned_by: str = "stand-in"
    version: str = "0.1"
    faults: list[tuple[int, Mapping[str, str], bytes]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def text(self, ids: Sequence[int]) -> str:
        return self.decode(ids) if self.decode else "".join(f" {token}" for token in ids)

    def rows(self, ids: Sequence[int]) -> list[dict[int, float]]:
        """Log probabilities behind each token of a sequence, by token id."""
        if self.forward is None:
            return [{token + 1: -0.5, token: -1.5} for token in ids]
        return [dict(enumerate(row)) for row in self.forward(ids).tolist()]


class RefusalError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def complete(served: StandIn, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a body of ``/v1/completions``."""
    unknown = set(body) - _FIELDS - served.extensions
    if unknown:
        raise RefusalError(400, f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}")
    if body["model"] != NAME:
        raise RefusalError(404, f"The model `{body['model']}` does not exist.")
    given = body["prompt"]
    prompts = given if isinstance(given, list) and isinstance(given[0], (list, str)) else [given]
    if any(isinstance(prompt, list) for prompt in prompts) and not served.takes_ids:
        raise RefusalError(400, "prompt must be a string")
    choices = [_choice(served, body, index, prompt) for index, prompt in enumerate(prompts)]
    counts = [choice.pop("counts") for choice in choices]
    usage = {"prompt_tokens": sum(each[0] for each in counts), "completion_tokens": sum(each[1] for each in counts)}
    return {"id": "cmpl-1", "object": "text_completion", "model": NAME, "choices": choices, "usage": usage}


def _choice(served: StandIn, body: dict[str, Any], index: int, prompt: Any) -> dict[str, Any]:
    assert isinstance(prompt, list) or served.encode is not None
    ids = list(prompt) if isinstance(prompt, list) else list(served.encode(prompt))  # type: ignore[misc]
    wanted, echo, top = body.get("max_tokens", 16), body.get("echo", False), body.get("logprobs")
    if wanted < 1 and not (echo and served.takes_zero):
        raise RefusalError(400, "max_tokens must be at least 1")
    if echo and top is not None and not served.echoes:
        raise RefusalError(400, "Setting 'echo' and 'logprobs' at the same time is not supported for this model.")
    assert body.get("temperature", 1) == 0
    if served.max_model_len is not None and len(ids) + wanted > served.max_model_len:
        raise RefusalError(400, f"This model's maximum context length is {served.max_model_len} tokens.")
    made, finish = list[int](), "length"
    while len(made) < wanted:
        row = served.rows([*ids, *made])[-1]
        made.append(max(row, key=lambda token: row[token]))
        if made[-1] == served.end_id and not body.get("ignore_eos"):
            finish = "stop"
            break
    shown = made[:-1] if finish == "stop" else made
    text = served.text([*ids, *shown])[0 if echo else len(served.text(ids)) :]
    for stop in body.get("stop") or []:
        if stop in text:
            text, finish = text[: text.index(stop)], "stop"
    choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
    if top is not None:
        choice["logprobs"] = _scores(served, body, ids, made, top, echo)
    if body.get("return_token_ids"):
        choice |= {"token_ids": made, "prompt_token_ids": ids}
    return {**choice, "counts": (len(ids), len(made))}


def _scores(
    served: StandIn, body: dict[str, Any], ids: list[int], made: list[int], top: int, echo: bool
) -> dict[str, Any]:
    by_id = body.get("return_tokens_as_token_ids")

    def name(token: int) -> str:
        return f"token_id:{token}" if by_id else served.text([token])

    whole = [*ids, *made]
    rows = [None, *served.rows(whole)[:-1]]
    first = 0 if echo else len(ids)
    tops: list[dict[str, float] | None] = []
    for token, row in list(zip(whole, rows, strict=True))[first:]:
        if row is None:
            tops.append(None)
            continue
        best = sorted(row, key=lambda other: -row[other])[:top]
        # As vLLM does: the token itself first, then the most probable ones.
        tops.append({name(other): row.get(other, -9.0) for other in dict.fromkeys([token, *best])})
    return {
        "tokens": [name(token) for token in whole[first:]],
        "token_logprobs": [
            None if row is None else row.get(token, -9.0) for token, row in list(zip(whole, rows, strict=True))[first:]
        ],
        "top_logprobs": tops,
        "text_offset": [0] * (len(whole) - first),
    }


class _Handler(JsonHandler):
    served: StandIn

    def answer(self, body: dict[str, Any] | None) -> None:
        served = self.served
        served.headers.append(dict(self.headers))
        if served.faults:
            status, headers, content = served.faults.pop(0)
            self._send(status, headers, content)
            return
        if served.key and self.headers.get("Authorization") != f"Bearer {served.key}":
            self._refuse(401, f"Incorrect API key provided: {self.headers.get('Authorization', 'none')}")
            return
        try:
            self._json(200, self._content(body))
        except RefusalError as refusal:
            self._refuse(refusal.status, str(refusal))

    def _content(self, body: dict[str, Any] | None) -> dict[str, Any]:
        served = self.served
        if body is not None and self.path == "/v1/completions":
            served.asked.append(body)
            return complete(served, body)
        if body is not None and served.tokenizes and self.path == "/tokenize" and served.encode:
            return {"tokens": list(served.encode(body["prompt"]))}
        if body is not None and served.tokenizes and self.path == "/detokenize":
            return {"prompt": served.text(body["tokens"])}
        if self.path == "/v1/models":
            card = {"id": NAME, "object": "model", "created": 1, "owned_by": served.owned_by, "root": "/models/tiny"}
            return {"object": "list", "data": [{**card, "max_model_len": served.max_model_len}]}
        if self.path == "/version" and served.version:
            return {"version": served.version}
        raise RefusalError(404, "Not Found")

    def _refuse(self, status: int, message: str) -> None:
        self._json(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})

    def _json(self, status: int, content: Mapping[str, Any]) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _send(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send(status, headers, content)
        if headers.get("Content-Length", str(len(content))) != str(len(content)) or headers.get("Connection"):
            self.close_connection = True


@contextmanager
def serving(served: StandIn) -> Iterator[StandIn]:
    """Serve on a free port of loopback; ``url`` is the base URL."""
    with listening(type("Handler", (_Handler,), {"served": served})) as port:
        served.url = f"http://127.0.0.1:{port}/v1"
        yield served
