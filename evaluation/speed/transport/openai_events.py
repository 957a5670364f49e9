"""Answers of an OpenAI API as they arrived: from pieces of bytes with times to tokens with times.

Tokens are counted by ``token_ids`` or, where the server does not return them, by ``usage``, never by events: an event
may carry several tokens, or none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.client.http_connection import DATA, DONE
from evaluation.client.http_wording import summary
from handover.errors import ServerError, shortened

_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call")
"""Keys of a conversation's delta that hold what was generated; vLLM and others renamed ``reasoning_content``."""
Piece = tuple[int, bytes]
"""A time in nanoseconds, and the bytes that arrived then."""


@dataclass(frozen=True)
class Tokens:
    """What was generated for one request.

    Attributes:
        times_ns: arrival times of the events with new tokens; one without streaming.
        counts: number of new tokens in each. Where only ``usage`` counts, each but the last has one.
        prompt_tokens: as ``usage`` has it; None if it does not.
    """

    times_ns: tuple[int, ...]
    counts: tuple[int, ...]
    prompt_tokens: int | None


def read_answer(arrived_ns: int, content: bytes) -> Tokens:
    """Read an answer that came as a whole, of one or of several prompts.

    Raises:
        ServerError: it is no answer, is an error, or does not say how many tokens it has.
    """
    answer = _parse(content)
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ServerError(f"the answer has no choices: {summary(content)}")
    ids = [choice.get("token_ids") for choice in choices if isinstance(choice, dict)]
    usage = _usage(answer)
    given = usage.get("prompt_tokens")
    if len(ids) == len(choices) and all(isinstance(each, list) for each in ids):
        count = sum(len(each) for each in ids if each is not None)
    elif isinstance(usage.get("completion_tokens"), int):
        count = usage["completion_tokens"]
    else:
        raise ServerError("the answer does not say how many tokens it has: neither usage nor token_ids")
    return Tokens((arrived_ns,), (count,), given if isinstance(given, int) else None)


class _Events:
    """Joins the ``data`` lines of a stream to events: an event may have several, and an empty line ends it.

    It has ended, too, where its lines are JSON: some servers leave the empty line out, and it comes no sooner.
    """

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def take(self, line: bytes) -> Any:
        """Take a line; returns the event that it ends as JSON has it, or DONE, and None for no end.

        Raises:
            ServerError: an empty line ends what is no JSON.
        """
        line = line.removesuffix(b"\r")
        if line.startswith(DATA):
            self._lines.append(line[len(DATA) :].strip())
            with contextlib.suppress(ValueError):
                return self._end(json.loads)
        elif not line and self._lines:
            return self._end(_parse)
        return None

    def end(self) -> Any:
        """Return the event at the end of the stream; None where there is none."""
        return self._end(_parse) if self._lines else None

    def _end(self, parse: Callable[[bytes], Any]) -> Any:
        text = b"\n".join(self._lines)
        event = DONE if text == DONE else parse(text)
        self._lines.clear()
        return event


class HangUp:
    """Says when a client hangs up that does so after some tokens of a stream; an event of unknown size counts as one.

    Args:
        after: number of tokens.
        whole: number of tokens of the whole answer, after which there is nothing to hang up on.

    Attributes:
        is_due: whether the client hangs up now.
    """

    def __init__(self, after: int, whole: int) -> None:
        self._after, self._whole, self._tokens, self._rest = after, whole, 0, b""
        self._events = _Events()
        self.is_due = False

    def take(self, piece: bytes) -> bytes:
        """Return what the client reads of the piece that arrived next: all, or up to the event at which it hangs up.

        A piece may hold several events. What is no event is left to ``read_events`` to complain of.
        """
        text, start = self._rest + piece, 0
        while (end := text.find(b"\n", start)) >= 0:
            line, start = text[start:end], end + 1
            with contextlib.suppress(ServerError):
                event = self._events.take(line)
                if event is not None and event != DONE:
                    count = _new_tokens(_checked(event), self._tokens)
                    self._tokens += 1 if count is None else count
            self.is_due = self._after <= self._tokens < self._whole
            if self.is_due:
                return piece[: start - len(self._rest)]
        self._rest = text[start:]
        return piece


def read_events(pieces: Sequence[Piece], has_hung_up: bool = False) -> Tokens:
    """Read a stream of server-sent events; an event has arrived with the piece that ends its last line of data.

    Args:
        pieces: what arrived.
        has_hung_up: whether the client did not wait for the end, which counts tokens where events do not. Each
            event counts as one there.

    Raises:
        ServerError: the stream was cut off, holds an error or no JSON, or does not say how many tokens it has.
    """
    times_ns: list[int] = []
    counts: list[int | None] = []
    usage: dict[str, Any] = {}
    is_complete, before = False, 0
    for arrived_ns, content in _data(pieces):
        if content == DONE:
            is_complete = True
            break
        event = _checked(content)
        usage = _usage(event) or usage
        count = _new_tokens(event, before)
        if count != 0:
            times_ns.append(arrived_ns)
            counts.append(count)
            before += count or 0
    if has_hung_up:
        return Tokens(tuple(times_ns), tuple(1 if count is None else count for count in counts), None)
    if not is_complete:
        raise ServerError(f"the stream was cut off after {len(times_ns)} events with text")
    given = usage.get("prompt_tokens")
    return Tokens(
        tuple(times_ns), _spread(counts, usage.get("completion_tokens")), given if isinstance(given, int) else None
    )


def _new_tokens(event: dict[str, Any], before: int) -> int | None:
    """Count the tokens of an event behind those ``before`` it; None where it has text and does not say."""
    choices = event.get("choices") or ()
    choice = choices[0] if choices and isinstance(choices[0], dict) else None
    if choice is None:
        return 0  # the event that holds usage alone
    if isinstance(choice.get("token_ids"), list):
        return len(choice["token_ids"])
    total = _usage(event).get("completion_tokens")
    if isinstance(total, int):  # with continuous_usage_stats
        return max(0, total - before)
    delta = choice.get("delta")
    has_text = any(delta.get(key) for key in _TEXTS) if isinstance(delta, dict) else bool(choice.get("text"))
    return None if has_text else 0


def _spread(counts: Sequence[int | None], total: Any) -> tuple[int, ...]:
    """Return tokens by event: those that are known or, where one is not, one each, and in the last one the rest."""
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and known:
        return tuple(known)
    if not isinstance(total, int):
        raise ServerError(
            "the stream does not say how many tokens it has: neither usage nor token_ids", "take streaming=false"
        )
    if not counts:
        raise ServerError(f"no event of the stream has text, and usage counts {total} tokens")
    shown = [1 if number < total else 0 for number in range(len(counts))]
    shown[-1] += max(0, total - len(counts))
    return tuple(shown)


def _data(pieces: Iterable[Piece]) -> Iterator[tuple[int, Any]]:
    """Yield each event with its time; comments and other fields of the protocol are skipped."""
    events, rest, arrived_ns = _Events(), b"", 0
    for arrived_ns, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if (event := events.take(line)) is not None:
                yield arrived_ns, event
    for event in (events.take(rest), events.end()):  # the last line may lack its end
        if event is not None:
            yield arrived_ns, event


def _parse(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        raise ServerError(f"the answer is not JSON: {summary(content)}") from None
    return _checked(found)


def _checked(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ServerError(f"the answer is no JSON object: {summary(json.dumps(found).encode())}")
    if found.get("error"):
        raise ServerError(f"the server reports an error: {said_by(json.dumps(found).encode())}")
    return found


def said_by(content: bytes) -> str:
    """Return a server's own words for an error: OpenAI's form, that of FastAPI, or the beginning of what it sent."""
    try:
        found = json.loads(content)
        error = found.get("error") or found
        said = error if isinstance(error, str) else error.get("message") or error.get("detail")
        return shortened(str(said)) if said else summary(content)
    except (ValueError, AttributeError):
        return summary(content)


def _usage(content: dict[str, Any]) -> dict[str, Any]:
    usage = content.get("usage")
    return usage if isinstance(usage, dict) else {}
