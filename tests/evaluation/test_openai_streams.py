"""The forms that servers give a stream of events: which events are tokens, and when they arrived."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evaluation.speed.transport.openai_events import HangUp, read_events

USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


def stream(*deltas: dict[str, Any]) -> list[bytes]:
    """The events of a conversation, each with its empty line."""
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in (*chunks, USAGE)] + [b"data: [DONE]\n\n"]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "refusal", "content"])
def test_a_first_token_is_one_whatever_the_server_calls_the_text(key: str) -> None:
    events = stream({"role": "assistant", "content": ""}, {key: "a"}, {key: "b"}, {"content": "c"}, {"content": "d"})
    tokens = read_events([(1000 * number, event) for number, event in enumerate(events, 1)])
    assert (tokens.times_ns, tokens.counts) == ((2000, 3000, 4000, 5000), (1, 1, 1, 1))


def test_calls_of_tools_are_generated_and_null_is_nothing() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}], "content": None}
    events = stream({"role": "assistant", "content": None, "reasoning": None, "tool_calls": []}, call, call, call, call)
    tokens = read_events([(1000 * number, event) for number, event in enumerate(events, 1)])
    assert tokens.times_ns == (2000, 3000, 4000, 5000)


def pretty(event: bytes) -> bytes:
    """The same event with its data over several lines, as the protocol allows it."""
    text = json.dumps(json.loads(event[len(b"data: ") :]), indent=1)
    return "".join(f"data: {line}\n" for line in text.splitlines()).encode() + b"\n"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_data_over_several_lines_is_one_event_that_arrives_with_its_last_line(line_end: bytes) -> None:
    plain = stream(*({"content": letter} for letter in "abcd"))
    events = [pretty(event).replace(b"\n", line_end) for event in plain[:-1]] + plain[-1:]
    whole = read_events([(1000 * number, event) for number, event in enumerate(events, 1)])
    assert (whole.times_ns, whole.counts, whole.prompt_tokens) == ((1000, 2000, 3000, 4000), (1, 1, 1, 1), 3)
    pieces = [(1000 * number + half, part) for number, event in enumerate(events, 1) for half, part in halves(event)]
    assert read_events(pieces).times_ns == (1500, 2500, 3500, 4500), "the first half is no event yet"
    hang_up = HangUp(2, 4)
    read = b"".join(hang_up.take(event) for event in events[:2])
    assert hang_up.is_due and read.count(b'"content"') == 2


def halves(event: bytes) -> list[tuple[int, bytes]]:
    return [(0, event[: len(event) // 2]), (500, event[len(event) // 2 :])]


def test_events_without_empty_lines_between_them_are_still_read() -> None:
    events = [event.replace(b"\n\n", b"\n") for event in stream(*({"content": letter} for letter in "abcd"))]
    assert read_events([(7, b"".join(events))]).counts == (1, 1, 1, 1)
