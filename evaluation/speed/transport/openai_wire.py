"""Requests to an OpenAI API over asynchronous HTTP, with a time stamp for each piece of an answer.

Requests are encoded before the load starts, and answers are parsed after their time stamps, as those of ``wire``. All
times are the client's monotonic clock: what a server says of time is not read.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from evaluation.client.http_connection import BUSY
from evaluation.client.openai_client import CHAT, COMPLETIONS, read_key
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.tables.record import RequestRecord
from evaluation.speed.transport.openai_events import HangUp, Piece, read_answer, read_events, said_by
from evaluation.speed.transport.wire import Encoded
from handover.endpoint import Endpoint
from handover.errors import ServerError, shortened

_STREAM = "text/event-stream"
_MOST_BYTES = 64 << 20
_KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection: a request must not meet a connection that closes."""
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True)
class Dialect:
    """How a server is asked; see ``openai_dialect``, which finds it out.

    Attributes:
        model: the name that the server gives the model.
        is_chat: whether conversations are sent, because the server completes no prompts.
        takes_ids: whether prompts are sent as token ids; else as text.
        takes_lists: whether a request may have several prompts.
        ends_at_limit: whether the server ignores the end token, so that every requested token must come.
        fields: further fields of every request, for those of a stream ``stream_fields`` too.
    """

    model: str
    is_chat: bool = False
    takes_ids: bool = True
    takes_lists: bool = True
    ends_at_limit: bool = True
    fields: dict[str, Any] = field(default_factory=dict)
    stream_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of requests below the server's root."""
        return CHAT if self.is_chat else COMPLETIONS

    def encode(self, prompt: LoadPrompt, is_streaming: bool) -> Encoded:
        """Encode a request for greedy decoding that generates every requested token where the server can do that."""
        given: Any = list(prompt.ids) if self.takes_ids else prompt.text
        body = self.body(given, prompt.output_length, is_streaming)
        return Encoded(json.dumps(body).encode(), prompt, is_text=not self.takes_ids)

    def body(self, given: Any, output_length: int, is_streaming: bool = False) -> dict[str, Any]:
        """Return the body of a request for one prompt, or for a list of them."""
        asked = {"messages": [{"role": "user", "content": given}]} if self.is_chat else {"prompt": given}
        body = {"model": self.model, **asked, "max_tokens": output_length, "temperature": 0, **self.fields}
        if "min_tokens" in body:
            body["min_tokens"] = output_length
        if is_streaming:
            body |= {"stream": True, **self.stream_fields}
        return body


class OpenAIWire:
    """Connections to an OpenAI API, one for each request in flight, kept for the next ones.

    Args:
        endpoint: of the API.
        dialect: how it is asked.
        timeout_s: limit of one request, from sending to the last byte.
        is_streaming: whether answers are streamed.
    """

    def __init__(self, endpoint: Endpoint, dialect: Dialect, timeout_s: float, is_streaming: bool) -> None:
        self.dialect, self.timeout_s, self.is_streaming = dialect, timeout_s, is_streaming
        self._url = endpoint.server_url + dialect.path
        self._key = key = read_key(endpoint)
        self._headers = {"Content-Type": "application/json", "Accept": _STREAM if is_streaming else "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._reading = asyncio.Lock()

    async def __aenter__(self) -> OpenAIWire:
        # aiohttp limits connections to 100 by default: the load decides how many there are.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        limits = aiohttp.ClientTimeout(total=self.timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=limits, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, request: Encoded, scheduled_ns: int) -> RequestRecord:
        """Send one request, wait for its last token, and check the answer; a failure is a record too."""
        sent_ns = time.perf_counter_ns()
        prompt, given = request.prompt, len(request.prompt.ids)
        hang_up = HangUp(prompt.cancel_after, prompt.output_length) if prompt.cancel_after else None
        try:
            pieces = await self.exchange(request.payload, hang_up)
            is_cancelled = hang_up is not None and hang_up.is_due
            await self._let_others_send()
            return self._record(request, scheduled_ns, sent_ns, pieces, is_cancelled)
        except RefusedError as error:
            failed = RequestRecord(scheduled_ns, sent_ns, time.perf_counter_ns(), given, error=error.problem)
            # A server that is too busy is not asked again at once, or failures alone would fill the measurement.
            await asyncio.sleep(error.pause_s)
            return failed
        except ServerError as error:
            reason = error.problem
        return RequestRecord(scheduled_ns, sent_ns, time.perf_counter_ns(), given, error=reason)

    async def _let_others_send(self) -> None:
        """Wait until the request behind the answer that was read last is on its way.

        aiohttp writes a request a turn of the event loop after it was stamped. Answers that end together would be read
        in between, and the time of reading them would seem to be the server's.
        """
        async with self._reading:
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def exchange(self, payload: bytes, hang_up: HangUp | None = None) -> list[Piece]:
        """Send a body and return the answer's pieces with their times.

        Args:
            payload: the body.
            hang_up: says when the connection is closed before the end; None: it is not.

        Raises:
            ServerError: there was no answer in time, or it is a refusal or no answer of such an API.
        """
        assert self._session is not None
        try:
            # A redirect is not followed: the key would go to another address.
            async with self._session.post(self._url, data=payload, allow_redirects=False) as answer:
                pieces, size = [], 0
                async for piece in answer.content.iter_any():
                    arrived_ns = time.perf_counter_ns()
                    pieces.append((arrived_ns, hang_up.take(piece) if hang_up is not None else piece))
                    size += len(piece)
                    if size > _MOST_BYTES:
                        raise ServerError(f"the answer has more than {_MOST_BYTES >> 20} MiB")
                    if hang_up is not None and hang_up.is_due:
                        answer.close()
                        break
        except asyncio.TimeoutError:  # noqa: UP041 -- in Python 3.10 it is not the built-in one
            raise ServerError(f"no complete answer within {self.timeout_s:g} s") from None
        except aiohttp.ClientPayloadError:
            raise ServerError("the answer was cut off") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{type(error).__name__}: {shortened(str(error))}") from None
        self._check(answer, b"".join(piece for _, piece in pieces))
        return pieces or [(time.perf_counter_ns(), b"")]

    def _check(self, answer: aiohttp.ClientResponse, content: bytes) -> None:
        """Refuse an answer that is none, in the server's own words but without the key."""
        if answer.status != 200:
            said = said_by(content)
            said = said.replace(self._key, "***") if self._key else said
            if answer.status not in BUSY:
                raise ServerError(f"HTTP {answer.status}: {said}")
            asked = answer.headers.get("Retry-After", "")
            after = f" (Retry-After: {shortened(asked, 40)})" if asked else ""
            raise RefusedError(f"HTTP {answer.status}{after}: {said}", _pause_s(asked))
        kind = answer.headers.get("Content-Type", "no type")
        wanted = _STREAM if self.is_streaming else "json"
        if wanted not in kind:
            raise ServerError(f"the answer is {shortened(kind, 60)} and not {wanted}: {said_by(content)}")

    def _record(
        self, request: Encoded, scheduled_ns: int, sent_ns: int, pieces: list[Piece], is_cancelled: bool
    ) -> RequestRecord:
        prompt = request.prompt
        if self.is_streaming:
            tokens = read_events(pieces, has_hung_up=is_cancelled)
        else:
            tokens = read_answer(pieces[-1][0], b"".join(piece for _, piece in pieces))
        generated = sum(tokens.counts)
        fewest = prompt.output_length if self.dialect.ends_at_limit else 1
        if not is_cancelled and not fewest <= generated <= prompt.output_length:
            raise ServerError(f"{generated} tokens were generated instead of {prompt.output_length}")
        given = len(prompt.ids) if tokens.prompt_tokens is None else tokens.prompt_tokens
        return RequestRecord(
            scheduled_ns,
            sent_ns,
            tokens.times_ns[-1],
            given,
            tokens.times_ns,
            tokens.counts,
            self.is_streaming,
            is_cancelled=is_cancelled,
        )


class RefusedError(ServerError):
    """The server is too busy.

    Attributes:
        pause_s: seconds after which it may be asked again.
    """

    def __init__(self, problem: str, pause_s: float) -> None:
        super().__init__(problem)
        self.pause_s = pause_s


def _pause_s(retry_after: str) -> float:
    """Return the pause that a server asks for, at most 1 s; a date, which is by the server's clock, counts as 1 s."""
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(retry_after or 0)))
    except ValueError:
        return _LONGEST_PAUSE_S
