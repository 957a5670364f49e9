"""What all handlers of the endpoint share, and what a request is known by."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from deployment.openai.adapters import ServedAdapters
from deployment.openai.arguments import OpenAIArguments
from deployment.openai.conversations import StoredConversations
from deployment.openai.engine.triton import Triton
from deployment.openai.errors import ApiError
from deployment.openai.sample_log import SampleLog, check_model
from deployment.openai.texts.offered_models import Model, Models
from deployment.openai.texts.preparing import BodyLimits
from deployment.openai.texts.text_pool import TextPool
from deployment.openai.turns import Turns
from handover.errors import ArtefactError

REQUEST_ID = "X-Request-Id"
_LONGEST_ID = 128
_RETRY_AFTER_S = "1"


@dataclass
class Service:
    """The endpoint while it runs.

    Attributes:
        arguments: of the endpoint.
        triton: the server behind it.
        models: that it offers.
        keys: of clients; empty: everybody is answered.
        metrics_url: of Triton's metrics; empty: it is not known.
        started: when it started, in seconds since 1970.
        active: requests that are being answered.
        limits: of each request's body.
        texts: reads requests beside the event loop.
        turns: for long work on the event loop.
        conversations: that clients may continue by an answer's id.
        adapter_keys: of those who may load and unload adapters; empty: that is off.
        adapters: of the model that takes some.
        samples: notes some of the requests.
    """

    arguments: OpenAIArguments
    triton: Triton
    models: Models
    keys: tuple[bytes, ...] = ()
    metrics_url: str = ""
    started: int = field(default_factory=lambda: int(time.time()))
    active: int = 0
    limits: BodyLimits = field(init=False)
    texts: TextPool = field(init=False)
    turns: Turns = field(default_factory=Turns)
    conversations: StoredConversations = field(default_factory=StoredConversations)
    adapter_keys: tuple[bytes, ...] = ()
    adapters: ServedAdapters = field(init=False)
    samples: SampleLog = field(init=False)

    def __post_init__(self) -> None:
        given = self.arguments
        self.samples = SampleLog(given.sample_log, given.sample_share, given.sample_bytes)
        for model in self.models.all if given.sample_log else ():
            check_model(model)
        self.limits = BodyLimits(self.arguments.max_body_bytes, self.arguments.max_sequences)
        self.texts = TextPool(self.models, self.limits)
        self.adapters = ServedAdapters(self.triton)

    async def check_templates(self) -> None:
        """Look which chat templates can be read; one that the operator gave must be.

        Raises:
            ArtefactError: it cannot.
        """
        self.models = await self.texts.check_templates()
        for model in self.models.all:
            if model.chat_problem and self.arguments.chat_template is not None:
                raise ArtefactError(model.chat_problem, "give another with --chat-template")
            if model.chat_problem:
                sys.stdout.write(f"      openai     no conversations with {model.names[0]}: {model.chat_problem}\n")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a place among the requests that are answered at a time; ApiError: there is none."""
        if self.active >= self.arguments.max_requests:
            raise ApiError(
                f"{self.active} requests are being answered",
                "send this one again later",
                status=429,
                headers={"Retry-After": _RETRY_AFTER_S},
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


@dataclass
class Record:
    """What is known of a request.

    Attributes:
        id: the client's name for it, or ours.
        model: that it asks.
        arrived_ns: when its body was there, of time.monotonic_ns.
        usage: tokens of it and of its answers.
        has_begun: whether something of an answer was sent.
    """

    id: str
    model: str = ""
    arrived_ns: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    has_begun: bool = False


RECORD: web.RequestKey[Record] = web.RequestKey("record", Record)


def service_of(request: web.Request) -> Service:
    """Return the service that a request belongs to."""
    return request.app[SERVICE]


def begin_record(request: web.Request) -> Record:
    """Note the client's name for a request, or one of our own where it has none that a log can hold."""
    given = request.headers.get(REQUEST_ID, "")
    is_fit = given.isascii() and given.isprintable() and 0 < len(given) <= _LONGEST_ID
    record = request[RECORD] = Record(given if is_fit else secrets.token_hex(16))
    return record


def head(request: web.Request, prefix: str, model: Model, asked: str | None) -> dict[str, Any]:
    """Return what every object of an answer has: its id, its time and the model under the name that was asked for."""
    identity = f"{prefix}-{request[RECORD].id}"
    return {"id": identity, "created": int(time.time()), "model": asked or model.names[0]}
