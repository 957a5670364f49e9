"""Share of tool calls that parse and match their schemas, in the form of Moonshot's K2 Vendor Verifier.

    python3 -m benchmarks.clients.tool_calls --url=http://127.0.0.1:9000/v1 --model=mine
    python3 -m benchmarks.clients.tool_calls --url=... --model=... --prompts=100 --seed=7     # any OpenAI server

Every prompt has random tools with random schemas. By turns a call is required, the function is named, all tools are
strict and a call is required, and the model is left free. The table has, for each way to ask, the answers, those that
``max_tokens`` has cut off, those without a call, the complete calls, and which of these are JSON, and name a declared
tool and match its schema. Where the model is not left free one that does not match is an error. What a model with 512
positions can be asked: ``deployment.openai_chat_template=examples/tool_names.jinja``, ``--max-tokens=300``.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, fields
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import jsonschema

from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status

REQUIRED, NAMED, STRICT, FREE = WAYS = ("required", "named", "strict", "auto")
HELD = (REQUIRED, NAMED, STRICT)
"""Ways to ask after which every complete call must match."""
_VERBS, _NOUNS = ("get", "find", "set", "send", "plan"), ("weather", "flight", "room", "letter", "meal", "route")
_KEYS = ("city", "date", "count", "unit", "is_open", "tags", "person", "price", "note", "items", "größe")


@dataclass(frozen=True)
class ToolCallArguments(ScriptArguments):
    """What to ask."""

    url: str = field(metadata={"help": "of the API, as clients are given it: http://host:port/v1"})
    model: str = field(metadata={"help": "its name there"})
    prompts: int = field(default=500, metadata={"help": "number of requests"})
    clients: int = field(default=8, metadata={"help": "requests at once"})
    max_tokens: int = field(default=400, metadata={"help": "of an answer"})
    temperature: float = field(default=0.8, metadata={"help": "of sampling"})
    seed: int = field(default=0, metadata={"help": "of prompts and sampling"})
    api_key: str = field(default="none", metadata={"help": "sent as a bearer token"})


@dataclass(frozen=True)
class Line:
    """One line of the table; ``matching`` is a share of the complete calls, 0 where there are none."""

    way: str
    answers: int
    cut: int
    without_call: int
    calls: int
    parsed: int
    matched: int
    matching: float


def draw_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw the schema of a value."""
    plain: list[dict[str, Any]] = [
        {"type": "string", "maxLength": draw.randint(4, 20)},
        {"type": "string", "enum": draw.sample(["C", "F", "red", 'a "b"', "größer"], 3)},
        {"type": "integer", "minimum": 0, "maximum": 10 ** draw.randint(1, 6)},
        {"type": "number", "minimum": 0, "maximum": 1000},
        {"type": "boolean"},
        {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    ]
    if depth < 2 and draw.random() < 0.25:
        return draw_object(draw, depth + 1)
    return draw.choice(plain)


def draw_object(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw the schema of an object with one to four keys."""
    keys = draw.sample(_KEYS, draw.randint(1, 4 - depth))
    properties = {key: draw_schema(draw, depth) for key in keys}
    required = [key for key in keys if draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def draw_body(draw: random.Random, way: str, arguments: ToolCallArguments) -> dict[str, Any]:
    """Draw a request that asks for a call in one of the ways."""
    names = draw.sample([f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS], draw.randint(1, 6))
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": f"Helps to {name}", "parameters": draw_object(draw)},
        }
        for name in names
    ]
    wanted = draw.choice(names)
    choice: Any = "required" if way in (REQUIRED, STRICT) else FREE
    if way == NAMED:
        choice = {"type": "function", "function": {"name": wanted}}
    if way == STRICT:
        tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    return {
        "model": arguments.model,
        "messages": [
            {"role": "user", "content": f"Please {wanted.replace('_', ' the ')} for {draw.randint(1, 99)} of us."}
        ],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": draw.random() < 0.3,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "seed": draw.randrange(1 << 31),
    }


def judge(body: dict[str, Any], choice: dict[str, Any]) -> Counter[str]:
    """Count what an answer is; the last call of one that was cut off is not complete."""
    calls = choice["message"].get("tool_calls") or []
    is_cut = choice["finish_reason"] == "length"
    counts = Counter(answers=1, cut=int(is_cut), without_call=int(not calls and not is_cut))
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    for call in calls[: len(calls) - is_cut]:
        counts["calls"] += 1
        try:
            arguments = json.loads(call["function"]["arguments"])
            counts["parsed"] += 1
            jsonschema.validate(arguments, schemas[call["function"]["name"]])
        except (ValueError, KeyError, jsonschema.ValidationError):
            continue
        counts["matched"] += 1
    return counts


def ask(arguments: ToolCallArguments, body: dict[str, Any]) -> Counter[str]:
    """Send a request; returns the counts of its answer.

    Raises:
        ServerError: it was refused.
    """
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {arguments.api_key}"}
    request = Request(f"{arguments.url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=600) as answer:
            return judge(body, json.loads(answer.read())["choices"][0])
    except HTTPError as error:
        raise ServerError(f"a request was refused: {error.code} {error.read().decode()[:400]}") from error


def measure(arguments: ToolCallArguments) -> list[Line]:
    """Send all prompts, the ways by turns."""
    draw = random.Random(arguments.seed)
    ways = [WAYS[number % len(WAYS)] for number in range(arguments.prompts)]
    asked = [(way, draw_body(draw, way, arguments)) for way in ways]
    with ThreadPoolExecutor(arguments.clients) as pool:
        counted = list(pool.map(lambda each: ask(arguments, each[1]), asked))
    lines = list[Line]()
    for way in WAYS:
        counts = sum(
            (each for (asked_way, _), each in zip(asked, counted, strict=True) if asked_way == way), Counter[str]()
        )
        names = ("answers", "cut", "without_call", "calls", "parsed", "matched")
        share = counts["matched"] / counts["calls"] if counts["calls"] else 0.0
        lines.append(Line(way, matching=round(share, 4), **{name: counts[name] for name in names}))
    return lines


def main(argv: Sequence[str]) -> None:
    """Print the table; ServerError: a complete call that was asked for does not match."""
    lines = measure(ToolCallArguments.from_argv(argv, __doc__))
    print("  ".join(each.name.rjust(12) for each in fields(Line)))
    for line in lines:
        print("  ".join(str(value).rjust(12) for value in astuple(line)))
    if wrong := [line.way for line in lines if line.way in HELD and line.matched < line.calls]:
        raise ServerError(f"calls do not match their schemas where they must: {', '.join(wrong)}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "tool_calls"))
