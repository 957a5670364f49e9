"""Output that follows a grammar, drawn by a model of random weights: it must be valid whatever the model would say.

Oracles: the package jsonschema, and Python's re.
"""

from __future__ import annotations

import json
import queue
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from support.engines.asking import CPU, ask, generated
from support.engines.paged_steps import paged_steps
from support.engines.rank_processes import RankProcesses
from support.tiny_models.guided_model import END, TOKENS, guided, guided_gpt2, texts

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.errors import EngineError, RequestError
from backends.fastertransformer.engine.grammar.compiled import Grammars
from backends.fastertransformer.engine.request.guides import Guide
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure, Tensors
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.steps.steps import Steps

END_ID, LENGTH = 1, 3
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return open_engine(guided_gpt2(tmp_path_factory.mktemp("guided")), CPU)


def answer(engine: Engine, tensors: dict[str, Any]) -> dict[str, Any]:
    return engine.generate([engine.parse(tensors)])[0]


NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=5)
PATTERNS = ["^[a-c]{2,4}$", "^x?[0-9]+y$", "^(red|green|blue)$", "^\\d{3}-\\d{4}$", "^$", "^.{0,3}$", "^[^a-z]{2}é?$"]
FORMATS = ["date", "date-time", "uuid", "ipv4"]


def strings() -> st.SearchStrategy[Schema]:
    lengths = st.tuples(st.integers(0, 4), st.integers(0, 6))
    return st.one_of(
        lengths.map(lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    )


def numbers() -> st.SearchStrategy[Schema]:
    whole, real = st.integers(-1000, 1000), st.floats(-100, 100).map(lambda value: round(value, 2))

    def bounded(kind: str, low: float, size: float) -> Schema:
        return {"type": kind, "minimum": low, "maximum": low + abs(size)}

    return st.one_of(
        st.builds(bounded, st.just("integer"), whole, whole),
        st.builds(bounded, st.just("number"), real, real.map(lambda value: value + 1)),
        st.builds(lambda low: {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 5}, whole),
        st.sampled_from([{"type": "integer"}, {"type": "number"}, {"type": "integer", "multipleOf": 5, "minimum": 0}]),
    )


VALUES = st.one_of(st.booleans(), st.none(), st.integers(-99, 99), NAMES, st.lists(st.integers(0, 9), max_size=2))


def leaves() -> st.SearchStrategy[Schema]:
    return st.one_of(
        strings(),
        numbers(),
        st.lists(VALUES, min_size=1, max_size=5).map(lambda values: {"enum": values}),
        VALUES.map(lambda value: {"const": value}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    )


def arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    lengths = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return st.one_of(
        st.builds(
            lambda each, pair: {"type": "array", "items": each, "minItems": pair[0], "maxItems": sum(pair)},
            items,
            lengths,
        ),
        st.lists(items, min_size=1, max_size=3).map(
            lambda each: {"type": "array", "prefixItems": each, "items": False, "minItems": len(each)}
        ),
    )


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(NAMES, values, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        objects(inner), arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    ),
    max_leaves=6,
)
VALID: list[str] = []


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(SCHEMAS, min_size=8, max_size=8, unique_by=json.dumps))
def test_whatever_the_schema_the_output_is_valid(engine: Engine, schemas: list[Schema]) -> None:
    outputs = answer(engine, guided(["json_schema"] * len(schemas), list(map(json.dumps, schemas)), 600))
    for schema, text, (reason,) in zip(schemas, texts(outputs), outputs["finish_reason"].tolist(), strict=True):
        Draft202012Validator.check_schema(schema)
        assert reason == END_ID  # nothing of these schemas is unbounded but numbers
        Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))
        VALID.append(json.dumps(schema))


def test_these_were_more_than_a_hundred_schemas() -> None:
    assert len(set(VALID)) > 100


OPEN_SCHEMAS: list[Schema] = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "array", "items": {"type": "string"}},
    {"type": "string"},
    {},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
]


def test_what_the_length_cuts_off_is_the_beginning_of_a_valid_output(engine: Engine) -> None:
    """With one seed a row draws the same tokens whatever its length."""
    kinds, guides = ["json_schema"] * len(OPEN_SCHEMAS) * 4, list(map(json.dumps, OPEN_SCHEMAS)) * 4
    bias = {'"': 3.0, "}": 4.0, "]": 4.0, '"}': 3.0}  # or few strings and objects would end
    biases = np.array([[[TOKENS.index(text.encode()) for text in bias], list(bias.values())]] * len(kinds))
    bias_tensors = {
        "logit_bias_ids": biases[:, 0].astype(np.int32),
        "logit_bias_values": biases[:, 1].astype(np.float32),
    }
    whole = answer(engine, {**guided(kinds, guides, 600), **bias_tensors})
    cut = answer(engine, {**guided(kinds, guides, 5), **bias_tensors})
    ended = whole["finish_reason"][:, 0] == END_ID
    assert ended.sum() > len(kinds) // 2
    assert (cut["finish_reason"] == LENGTH).any()
    for row, text in enumerate(texts(whole)):
        if ended[row]:
            Draft202012Validator(json.loads(guides[row])).validate(json.loads(text))
        assert texts(whole)[row].startswith(texts(cut)[row])


REGEXES = [
    "(ab|cd)*e?",
    r"\d{4}-[01]\d",
    "^[a-z]+@[a-z]+\\.(com|org)$",
    "日本*語?",
    "[^x]{3}",
    r"(\+|-)?\d+(\.\d{1,2})?",
    r"cost: \$",
    "x|^yy$",
]


def test_regular_expressions_match_the_whole_output(engine: Engine) -> None:
    found = set()
    for seed in range(0, 600, 100):
        outputs = answer(engine, guided(["regex"] * len(REGEXES), REGEXES, 300, seed))
        assert (outputs["finish_reason"] == END_ID).all()
        for regex, text in zip(REGEXES, texts(outputs), strict=True):
            assert re.fullmatch(regex, text.decode()), (regex, text)
            found.add(text)
    assert len(found) > 20


def test_choices_any_json_and_grammars(engine: Engine) -> None:
    choices = ["yes", "no", "maybe not", 'a "quoted" one\n', "日本語", "no way"]
    gbnf = 'root ::= "<" [a-c]+ ">" | "(" root ")"'
    lark = 'start: "x" NUMBER\nNUMBER: /[0-9]+/'
    kinds, guides = ["choice", "json", "ebnf_grammar", "ebnf_grammar"] * 16, [json.dumps(choices), "", gbnf, lark] * 16
    outputs = answer(engine, guided(kinds, guides, 150))
    found = [text.decode("utf-8", "replace") for text in texts(outputs)]
    ended = outputs["finish_reason"][:, 0] == END_ID
    assert ended[0::4].all() and len(set(found[0::4])) > 2 and set(found[0::4]) <= set(choices)
    assert ended[1::4].any() and ended[2::4].any() and ended[3::4].any()
    for row in np.flatnonzero(ended).tolist():
        if row % 4 == 1:
            json.loads(found[row])
        elif row % 4 == 2:
            depth = found[row].count("(")
            assert re.fullmatch(r"\(*<[a-c]+>\)*", found[row]) and found[row].count(")") == depth
        elif row % 4 == 3:
            assert re.fullmatch("x[0-9]+", found[row])


@pytest.mark.parametrize(
    "sampling", [{}, {"runtime_top_p": 0.0}, {"runtime_top_k": 3}, {"temperature": 0.4, "min_p": 0.1}]
)
def test_every_way_of_choosing_honours_a_grammar(engine: Engine, sampling: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", 7, None]}}, "required": ["a"]}
    strict = json.dumps({**schema, "additionalProperties": False})
    outputs = answer(engine, guided(["json_schema"] * 4, [strict] * 4, 200, **sampling))
    for text in texts(outputs):
        Draft202012Validator(json.loads(strict)).validate(json.loads(text))


def test_a_grammar_goes_before_a_minimum_length_and_bad_words(engine: Engine) -> None:
    tensors = guided(["choice"] * 2, ['["yes"]', '["no"]'], 50, min_length=20)
    tensors["bad_words_list"] = np.array([[[ord("n")], [1]]] * 2, np.int32)
    assert texts(answer(engine, tensors)) == [b"yes", b"no"]


def test_an_own_end_token_ends_a_row_when_its_grammar_is_complete(engine: Engine) -> None:
    tensors = guided(["regex"] * 3, ["[a-c]{2,}"] * 3, 300, end_id=[ord("b"), END, END - 1])
    tensors["stop_token_ids"] = np.array([[-1], [ord("c")], [-1]], np.int32)
    outputs = answer(engine, tensors)
    assert (outputs["finish_reason"] == END_ID).all()
    first, second, third = (generated(outputs, row) for row in range(3))
    assert first[-1] == ord("b") and ord("b") not in first[:-1] and len(first) > 2
    assert second[-1] in (ord("c"), END) and ord("c") not in second[:-1]
    assert third[-1] == END - 1  # stands for no text, but ends this row
    assert re.fullmatch("[a-c]{2,}", bytes(third[:-1]).decode() if max(third[:-1]) < 256 else "ab")


def test_rows_without_a_grammar_are_left_alone(engine: Engine) -> None:
    plain = ask([[5, 6, 7], [8, 9]] * 2, 40, random_seed=range(4), runtime_top_p=[1.0, 1.0, 0.0, 0.9], end_id=END)
    alone = answer(engine, plain)
    kinds = ["", "json_schema", "", ""]
    mixed = {**plain, "guided_decoding_guide_type": np.array([[kind.encode()] for kind in kinds], object)}
    mixed["guided_decoding_guide"] = np.array([[b""], [b'{"enum": [12345]}'], [b""], [b"ignored"]], object)
    requests = [mixed, guided(["json"] * 3, [""] * 3, 60)]
    together = engine.generate([engine.parse(tensors) for tensors in requests])[0]
    for row in (0, 2, 3):
        assert generated(together, row) == generated(alone, row)
    assert texts(together)[1] == b"12345"


REFUSED = [
    ({"kinds": ["yaml"]}, "guided_decoding_guide_type is 'yaml' in row 0; it must be one of json, json_schema"),
    ({"kinds": ["regex"]}, "guided_decoding_guide is empty in row 0"),
    ({"kinds": ["json"], "beam_width": 2}, "guided_decoding_guide_type: a beam search does not apply it"),
    ({"kinds": ["json"], "end_id": 5000}, "guided_decoding_guide_type in row 0 needs an end_id that may come"),
    ({"kinds": ["json"], "ignore_eos": True}, "needs an end_id .* no ignore_eos"),
    ({"kinds": ["regex"], "guides": ["x" * 300_000]}, "guided_decoding_guide has 300000 characters in row 0; at most"),
]
INVALID = [
    ("regex", "(ab", "unclosed group"),
    ("regex", "(?=a)a", "look-around"),
    ("regex", "a^b", "lookarounds not supported"),
    ("json_schema", "{bad", "key must be a string"),
    ("json_schema", "[1]", "Expecting object schema"),
    ("json_schema", '{"type": "objekt"}', "Invalid type: objekt"),
    ("json_schema", '{"not": {"type": "null"}}', 'Unimplemented keys: ."not".'),
    ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "minimum .3. is greater than maximum"),
    ("json_schema", "[" * 100_000, "recursion limit"),
    ("choice", '{"a": 1}', "a JSON list of texts, at least one"),
    ("choice", "[]", "a JSON list of texts, at least one"),
    ("choice", "[1]", "a JSON list of texts, at least one"),
    ("ebnf_grammar", "(((", "Expected name"),
]


@pytest.mark.parametrize(("told", "words"), REFUSED)
def test_what_a_request_may_not_ask_is_refused_by_name(engine: Engine, told: dict[str, Any], words: str) -> None:
    kinds, guides = told.pop("kinds"), told.pop("guides", [""])
    with pytest.raises(RequestError, match=words):
        engine.parse(guided(kinds, guides, **told))


@pytest.mark.parametrize(("kind", "guide", "words"), INVALID)
def test_an_invalid_grammar_is_the_requests_fault(engine: Engine, kind: str, guide: str, words: str) -> None:
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    engine.submit(engine.parse(guided([kind], [guide])), answers.put)
    found = answers.get(timeout=180)
    assert isinstance(found, Failure) and found.code == "INVALID_ARG" and found.is_final
    assert re.search(words, found.problem), found.problem
    assert texts(answer(engine, guided(["choice"], ['["yes"]']))) == [b"yes"]


def test_a_grammar_that_grows_too_large_fails_its_own_request(engine: Engine) -> None:
    hostile = "(" + "|".join(f"(a|b)*a(a|b){{{count}}}" for count in range(12, 30)) + ")c"
    requests = [guided(["regex"], [hostile], 60), guided(["choice"], ['["yes"]'])]
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    for request in requests:
        engine.submit(engine.parse(request), answers.put)
    found = [answers.get(timeout=180) for _ in requests]
    assert [
        texts(each.tensors) for each in found if isinstance(each, Tensors) and len(each.tensors["output_ids"]) == 1
    ][0] == [b"yes"]


def test_a_row_whose_grammar_has_no_way_on_fails_alone(tmp_path: Path) -> None:
    settings_ = guided_gpt2(tmp_path)
    file = settings_.checkpoint / "vocab.json"
    file.write_text(json.dumps({piece: token for piece, token in json.loads(file.read_text()).items() if piece != "z"}))
    engine = open_engine(settings_, CPU)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    engine.submit(engine.parse(guided(["choice"] * 2, ['["yes", "no"]', '["crazy", "lazy"]'])), answers.put)
    found = answers.get(timeout=180)
    assert found.code == "INVALID_ARG" and "the grammar allows no further token" in (found.problem or "")
    assert texts(answer(engine, guided(["choice"], ['["yes"]']))) == [b"yes"]


def test_a_checkpoint_without_a_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"neither tokenizer.json, nor vocab.json, nor tokenizer.model; copy one"):
        Grammars(tmp_path, 10).compile(Guide("json", ""))


def test_without_the_library_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'slipway\[structured\]'"):
        Grammars(tmp_path, 10).compile(Guide("json", ""))


def test_grammars_are_kept_by_their_text(tmp_path: Path) -> None:
    grammars = Grammars(guided_gpt2(tmp_path).checkpoint, END + 1)
    first = grammars.compile(Guide("regex", "a+"))
    assert grammars.compile(Guide("regex", "a+")) is first
    for count in range(70):
        grammars.compile(Guide("regex", f"b{{{count}}}"))
    assert grammars.compile(Guide("regex", "a+")) is not first


def scheduled(tensors: dict[str, Any], grammars: Grammars, steps: Steps, is_ahead: bool) -> tuple[list[list[int]], int]:
    """What a scheduler without an engine generates, and how often it sets a row back."""
    answers: list[Answer] = []
    request = parse_request(tensors, steps.config)
    scheduler = Scheduler(steps, 16, steps_ahead=is_ahead)
    guides = [row.sampling.guide for row in request.rows]
    compiled = tuple(grammars.compile(guide) if guide else None for guide in guides)
    scheduler.add(Job(request, answers.append, grammars=compiled))
    while not scheduler.is_idle:
        scheduler.step()
    assert not isinstance(answers[-1], Failure), answers[-1]
    return [generated(answers[-1].tensors, row) for row in range(len(guides))], scheduler.metrics.preemptions


@pytest.mark.parametrize("pages", [200, 8])
def test_steps_ahead_and_rows_that_are_set_back_change_nothing(engine: Engine, tmp_path: Path, pages: int) -> None:
    settings_ = guided_gpt2(tmp_path)
    schema = json.dumps({"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9})
    kinds = ["json_schema", "", "regex", "json_schema"]
    tensors = guided(kinds, [schema, "", "[a-z]{60,}", schema], 90)
    expected = [generated(answer(engine, tensors), row) for row in range(4)]
    grammars = Grammars(settings_.checkpoint, END + 1)
    for is_ahead in (False, True):
        steps = paged_steps(settings_, pages)
        found, set_back = scheduled(tensors, grammars, steps, is_ahead)
        assert found == expected
        assert bool(set_back) == (pages < 200)


def test_tensor_ranks_give_what_one_process_gives(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    shards = guided_gpt2(tmp_path / "two", ranks=2).checkpoint
    requests = [
        guided(["json_schema", "", "regex", "choice"], ['{"type": "object"}', "", "[0-9a-f]{8}", '["a", "b"]'], 40)
    ]
    ranks = RankProcesses(shards, tmp_path, 2, 1, requests)
    try:
        assert ranks.wait(240) == [0, 0], ranks.text
    finally:
        ranks.stop()
    (found,) = ranks.answers
    single = answer(engine, requests[0])
    assert [generated(found, row) for row in range(4)] == [generated(single, row) for row in range(4)]
    assert re.fullmatch(b"[0-9a-f]{8}", texts(found)[2])


def test_closing_answers_what_is_being_compiled(tmp_path: Path) -> None:
    engine = open_engine(guided_gpt2(tmp_path), CPU)
    request = engine.parse(guided(["json"], [""]))
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    guides = [json.dumps([f"{name}{number}" for number in range(9000)]) for name in range(6)]
    for guide in guides:
        engine.submit(engine.parse(guided(["choice"], [guide])), answers.put)
    engine.close()
    assert all(answers.get(timeout=180).is_final for _ in guides)
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request, answers.put)
