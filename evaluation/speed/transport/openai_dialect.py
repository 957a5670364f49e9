"""Find out how an OpenAI API is asked for a load: which fields it takes, and how its tokens can be counted.

Each question is a short request, as in ``openai_capabilities``, which has asked for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evaluation.client.errors import RequestError
from evaluation.client.openai_capabilities import PROBE_IDS, PROBE_TEXT, Capabilities
from evaluation.client.openai_client import OpenAIClient
from evaluation.client.served_model import Target
from evaluation.speed.transport.openai_wire import Dialect
from handover.errors import ServerError

_LENGTH = 4
_USAGE = {"stream_options": {"include_usage": True}}


def open_dialect(target: Target, streaming: bool | None) -> Dialect | None:
    """Find out how the load asks a served model; None for one that is asked by gRPC.

    Args:
        target: the model.
        streaming: whether answers will be streamed; None: they will.

    Raises:
        ServerError: as ``find_dialect``.
    """
    if target.capabilities is None:
        return None
    with OpenAIClient(target.served.endpoint) as client:
        return find_dialect(client, target.capabilities, streaming is not False)


def find_dialect(client: OpenAIClient, found: Capabilities, is_streaming: bool) -> Dialect:
    """Ask what a load needs to know beside the capabilities.

    Raises:
        UnreachableError: no server answers, or it refuses the key.
        ServerError: the endpoint does not stream, or does not count its tokens.
    """
    asker = _Asker(client, found)
    fields: dict[str, Any] = {}
    if found.ignores_end:
        fields["ignore_eos"] = True
    if asker.takes({**fields, "min_tokens": _LENGTH}):
        fields["min_tokens"] = _LENGTH
    ends_at_limit = asker.generates_all(fields)
    if found.returns_ids:
        fields["return_token_ids"] = True
    stream_fields = _stream_fields(asker, fields) if is_streaming else {}
    if not is_streaming and not (found.counts_tokens or found.returns_ids):
        raise ServerError(f"{client.url} does not count tokens: its answers have neither usage nor token_ids")
    return Dialect(
        found.card.id,
        is_chat=found.is_chat_only,
        takes_ids=found.takes_ids,
        takes_lists=asker.takes_lists(),
        ends_at_limit=ends_at_limit,
        fields=fields,
        stream_fields=stream_fields,
    )


def _stream_fields(asker: _Asker, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with which streams say how many tokens they have."""
    for stream_fields in (_USAGE, {}):
        events = asker.stream({**fields, **stream_fields})
        if events is None:
            continue
        choices = [choice for event in events for choice in event.get("choices") or ()]
        if any(event.get("usage") for event in events) or any(choice.get("token_ids") for choice in choices):
            return dict(stream_fields)
    raise ServerError(
        f"{asker.url} streams no answers that say how many tokens they have: {asker.refusal or 'no usage in them'}",
        "take streaming=false",
    )


class _Asker:
    """Sends short requests of the kind that the load will send."""

    def __init__(self, client: OpenAIClient, found: Capabilities) -> None:
        self._client, self.url, self.refusal = client, client.url, ""
        self._dialect = Dialect(found.card.id, is_chat=found.is_chat_only)
        self._prompt: Any = list(PROBE_IDS) if found.takes_ids else PROBE_TEXT

    def takes(self, fields: Mapping[str, Any]) -> bool:
        """Whether a request with further fields is not refused."""
        return self._post(self._prompt, fields) is not None

    def generates_all(self, fields: Mapping[str, Any]) -> bool:
        """Whether fields that should make the answer as long as asked for do so."""
        answer = self._post(self._prompt, fields) if fields else None
        return answer is not None and (answer.get("usage") or {}).get("completion_tokens") in (None, _LENGTH)

    def takes_lists(self) -> bool:
        """Whether a request may have two prompts, and answers both."""
        if self._dialect.is_chat:
            return False
        answer = self._post([self._prompt, self._prompt], {})
        return answer is not None and len(answer.get("choices") or ()) == 2

    def stream(self, fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Return the events of a stream; None where the request is refused, with the reason in ``refusal``."""
        try:
            return list(self._client.stream(self._dialect.path, self._body(self._prompt, fields)))
        except RequestError as error:
            self.refusal = error.problem
            return None

    def _post(self, prompt: Any, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            answer = self._client.post(self._dialect.path, self._body(prompt, fields))
        except RequestError:
            return None
        return answer if isinstance(answer, dict) else None

    def _body(self, prompt: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._dialect.body(prompt, _LENGTH), **fields}
