"""What the endpoint makes of the fields that ask for structured output, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.servers.fake_triton import FakeTriton, Tensors, count_up
from support.servers.openai_endpoint import application_of

INPUTS = ("input_ids", "input_lengths", "request_output_len", "guided_decoding_guide_type", "guided_decoding_guide")
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["é", 1]}}}
DEEP: Any = {}
for _ in range(900):
    DEEP = {"items": DEEP}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters")
    (directory / "vocab.json").write_text(json.dumps({chr(33 + number): number for number in range(90)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


def asked(letters: Path, **fields: Any) -> tuple[int, Any, list[Tensors]]:
    """Status and content of an answer, and what the server was asked."""
    with FakeTriton(count_up, INPUTS) as fake:

        async def inside() -> tuple[int, Any]:
            body = {"prompt": "A", "max_tokens": 2, **fields}
            async with application_of(fake.url, letters) as client, client.post("/v1/completions", json=body) as answer:
                return answer.status, await answer.json()

        return *asyncio.run(inside()), fake.requests


@pytest.mark.parametrize(
    ("fields", "kind", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "é+"}, "regex", "é+"),
        ({"guided_choice": ["é", 'b"']}, "choice", ["é", 'b"']),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf_grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a"]}, "guided_json": None}, "choice", ["a"]),
        ({"structured_outputs": {"grammar": "x"}, "response_format": {"type": "text"}}, "ebnf_grammar", "x"),
    ],
)
def test_each_field_becomes_a_guide(letters: Path, fields: dict[str, Any], kind: str, guide: Any) -> None:
    status, _, (request,) = asked(letters, **fields)
    assert status == 200
    assert request["guided_decoding_guide_type"].tolist() == [[kind.encode()]]
    ((text,),) = request["guided_decoding_guide"].tolist()
    assert (text.decode() if isinstance(guide, str) else json.loads(text)) == guide


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_what_asks_for_nothing_sends_no_guide(letters: Path, fields: dict[str, Any]) -> None:
    status, _, (request,) = asked(letters, **fields)
    assert status == 200 and request.keys().isdisjoint(INPUTS[3:])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "exclude each other"),
        ({"guided_regex": "a", "beam_width": 2}, "beam_width", "exclude each other"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has regex and choice"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "did you mean 'regex'"),
        ({"response_format": {"type": "json"}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "null"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
            "a JSON schema",
        ),
        ({"guided_choice": []}, "guided_choice", "1 to 10000 texts"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]", "a text"),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"guided_json": [SCHEMA]}, "guided_json", "a JSON schema"),
    ],
)
def test_what_is_wrong_is_refused(letters: Path, fields: dict[str, Any], param: str, words: str) -> None:
    status, found, requests = asked(letters, **fields)
    assert status == 400 and not requests
    assert found["error"]["param"] == param and words in found["error"]["message"]


def test_a_schema_may_hold_what_utf_8_cannot(letters: Path) -> None:
    status, _, (request,) = asked(letters, guided_json={"const": "\ud800"})
    assert status == 200 and b"\\ud800" in request["guided_decoding_guide"].item()


def test_deep_nesting_does_no_harm(letters: Path) -> None:
    status, found, _ = asked(letters, guided_json=DEEP)
    assert status in (200, 400) and (status == 200 or found["error"]["message"])
