"""What may stand for a guide: choices of every kind, keywords that ask for nothing, grammars in both forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.engines.asking import CPU
from support.tiny_models.guided_model import guided, guided_gpt2, submit, texts

from backends.fastertransformer.engine.engine import Engine, open_engine

WAIT_S = 60
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    opened = open_engine(guided_gpt2(tmp_path_factory.mktemp("forms")), CPU)
    yield opened
    opened.close()


@pytest.mark.parametrize("count", [2001, 10_000])
def test_texts_of_one_beginning_are_chosen_from_whatever_their_number(engine: Engine, count: int) -> None:
    choices = [f"choice {at}" for at in range(count)]
    found = submit(engine, "choice", json.dumps(choices)).get(timeout=WAIT_S)
    assert found.tensors and texts(found.tensors)[0].decode() in choices, found.problem


def test_choices_may_have_every_character_and_be_empty(engine: Engine) -> None:
    every = "".join(map(chr, range(1, 128))) + "é😀日"
    for choices in ([every], ["", "x"], ["a|b", "(", "["], [""]):
        found = submit(engine, "choice", json.dumps(choices), 200).get(timeout=WAIT_S)
        assert found.tensors and texts(found.tensors)[0].decode() in choices, found.problem


ASKING_FOR_NOTHING: list[Schema] = [
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": False, "maxItems": 2},
    {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "items": {"enum": [1]}, "maxItems": 1, "minContains": 2, "unevaluatedItems": True},
    {"type": "array", "items": {"enum": [1]}, "maxItems": 1, "contains": {"const": 5}, "minContains": 0},
    {"type": "object", "properties": {"uniqueItems": {"const": False}}, "additionalProperties": False},
    {"enum": [{"uniqueItems": False}, {"not": False}]},
    {"type": "integer", "not": False, "if": {"minimum": 3}, "minimum": 0, "maximum": 9},
    {"type": "integer", "then": {"minimum": 5}, "else": False, "minimum": 0, "maximum": 9},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$dynamicAnchor": "x", "enum": [4, "uniqueItems"]}}},
    {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "null"}, {"const": 1, "uniqueItems": False}]}},
        "required": ["a"],
        "additionalProperties": False,
        **{"propertyNames": {}, "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}},
        **{"dependencies": {}, "unevaluatedProperties": {}},
    },
]


@pytest.mark.parametrize("schema", ASKING_FOR_NOTHING, ids=lambda schema: next(iter(schema)))
def test_keywords_whose_values_ask_for_nothing_are_taken(engine: Engine, schema: Schema) -> None:
    Draft202012Validator.check_schema(schema)
    for seed in range(2):
        request = guided(["json_schema"], [json.dumps(schema)], 300, seed=seed)
        found = engine.generate([engine.parse(request)])[0]
        Draft202012Validator(schema).validate(json.loads(texts(found)[0]))


ASKING = [{"uniqueItems": True}, {"not": {"type": "null"}}, {"propertyNames": {"maxLength": 3}}, {"contains": {}}]
ASKING += [{"if": {"minimum": 3}, "then": {"maximum": 5}}, {"dependentRequired": {"a": ["b"]}}]
ASKING += [{"$schema": "http://json-schema.org/draft-07/schema#", "contains": {}, "minContains": 0}]


@pytest.mark.parametrize("schema", ASKING, ids=lambda schema: next(iter(schema)))
def test_keywords_that_ask_for_what_is_not_followed_are_still_refused_by_name(engine: Engine, schema: Schema) -> None:
    found = submit(engine, "json_schema", json.dumps(schema)).get(timeout=WAIT_S)
    name = [key for key in schema if key != "$schema"][0]
    assert found.code == "INVALID_ARG" and f'"{name}"' in (found.problem or ""), found.problem


@pytest.mark.parametrize(
    "grammar",
    [
        '?start: "x"\n    | "x"',
        '!start: "x"',
        '?!start: "x"',
        '// a comment\n?start: a\n!a: "x"',
        '%import common.INT\n?start: "x" | "x" b\nb: "x"',
        "start[capture]: /x+/",
        'root ::= "x" | "x" start\nstart ::= "x"',
        'start ::= "x"\nroot ::= start',
        "# start: no Lark\nroot ::= [x]",
    ],
)
def test_grammars_in_either_form_whatever_the_first_rule_has_beside_its_name(engine: Engine, grammar: str) -> None:
    found = submit(engine, "ebnf_grammar", grammar).get(timeout=WAIT_S)
    assert found.tensors and set(texts(found.tensors)[0].decode()) == {"x"}, found.problem
