"""The OpenAI endpoint in front of the real tritonserver, asked by OpenAI's own client and by curl.

Oracles: the engine in process for tokens, transformers' tokenizer for texts.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import openai
import pytest
from jsonschema import Draft202012Validator
from support.servers.openai_endpoint import OpenAIEndpoint, openai_endpoint
from transformers import GPT2Tokenizer

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from handover.endpoint import Endpoint

DATA = Path(__file__).resolve().parents[2] / "data"
PROMPT, COUNT = "the world", 12
TEMPLATE = "{% for each in messages %}{{ each.role }} {{ each.content }} {% endfor %}you"
NEVER = 2**31 - 1


@pytest.fixture(scope="module")
def endpoint(triton: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIEndpoint]:
    directory = tmp_path_factory.mktemp("openai")
    (directory / "endpoint.json").write_text(json.dumps(vars(triton)))
    (directory / "chat.jinja").write_text(TEMPLATE)
    with openai_endpoint(str(directory), directory, chat_template=directory / "chat.jinja") as running:
        yield running


@pytest.fixture(scope="module")
def grpc_endpoint(triton: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIEndpoint]:
    """An endpoint that does not know of the engine's socket."""
    directory = tmp_path_factory.mktemp("openai_grpc")
    (directory / "endpoint.json").write_text(json.dumps({**vars(triton), "sockets": ""}))
    with openai_endpoint(str(directory), directory) as running:
        yield running


@pytest.fixture
def client(endpoint: OpenAIEndpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    opened = open_engine(Settings(checkpoint, 1, 1, "fp32"))
    yield opened
    opened.close()


def generated(engine: Engine, ids: list[int], count: int = COUNT, **sampling: np.ndarray) -> list[int]:
    """What the engine in process generates behind a prompt, without an end."""
    columns = {"input_lengths": len(ids), "request_output_len": count, "end_id": NEVER}
    tensors = {name: np.array([[value]], np.uint32) for name, value in columns.items()}
    request = engine.parse({"input_ids": np.array([ids], np.uint32), **tensors, **sampling})
    (answer,) = engine.generate([request])
    row: list[int] = answer["output_ids"][0, 0, len(ids) : int(answer["sequence_length"][0, 0])].tolist()
    return row


def text_behind(tokenizer: GPT2Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text that tokens add to a prompt's; bytes of a character that is not complete are held back."""
    whole, before = (tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (prompt + ids, prompt))
    return whole[len(before) :].rstrip("\ufffd")


def test_the_models_are_those_of_the_repository(client: openai.OpenAI, endpoint: OpenAIEndpoint) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["gpt", "fastertransformer"]
    assert client.models.retrieve("gpt").object == "model"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gtp")
    assert raised.value.code == "model_not_found" and "did you mean 'gpt'" in raised.value.message
    assert endpoint.get("/health") == (200, "")
    assert endpoint.get("/version")[1].keys() == {"version"}


def test_a_deployment_has_an_endpoint_of_its_own(triton: Endpoint) -> None:
    url = f"http://127.0.0.1:{triton.openai_port}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(model="gpt", prompt=PROMPT, max_tokens=2).usage.completion_tokens == 2
    with urlopen(f"{url}/metrics", timeout=180) as answer:
        text = answer.read().decode()
    names = ("nv_inference_request_success", "vllm:generation_tokens_total", "process_resident_memory_bytes")
    assert all(f"# TYPE {name} " in text for name in names)


def test_a_greedy_completion_is_the_engines(client: openai.OpenAI, engine: Engine, tokenizer: GPT2Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = generated(engine, ids)
    text = text_behind(tokenizer, ids, expected)
    extra = {"return_token_ids": True, "ignore_eos": True}
    for prompt in (PROMPT, ids):
        answer = client.completions.create(
            model="gpt", prompt=prompt, max_tokens=COUNT, temperature=0, extra_body=extra
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (text, "length")
        assert choice.model_extra and choice.model_extra["token_ids"] == expected
        assert choice.model_extra["prompt_token_ids"] == ids
        assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), COUNT)


def counted(triton: Endpoint, name: str) -> int:
    """The sum of one of Triton's counters."""
    with urlopen(f"http://127.0.0.1:{triton.metrics_port}/metrics", timeout=180) as page:
        values = re.findall(rf"^{name}\{{.*\}} (\S+)$", page.read().decode(), re.MULTILINE)
    return round(sum(map(float, values)))


FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"seed": 3, "top_p": 0.9, "n": 3, "best_of": 4},
        {"temperature": 0, "logprobs": 2, "echo": True},
        {"temperature": 0, "beam_width": 3},
        {"temperature": 0, "stop": ["e", "the"]},
        {"temperature": 0, "guided_json": FLAG, "max_tokens": 30, "ignore_eos": False},
        {"logit_bias": {"9": 100}, "presence_penalty": 1, "seed": 1},
        {"prompt": [[5, 6, 7], [8]], "seed": 1},
        {"temperature": 0, "max_tokens": 0, "echo": True},
        {"prompt": list(range(40)), "max_tokens": 4000},
    ],
)
def test_the_socket_and_grpc_answer_alike(
    triton: Endpoint, endpoint: OpenAIEndpoint, grpc_endpoint: OpenAIEndpoint, more: dict[str, Any]
) -> None:
    body = {"model": "gpt", "prompt": PROMPT, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True, **more}
    before = counted(triton, "nv_inference_request_success")
    by_socket = endpoint.get("/v1/completions", body)
    assert counted(triton, "nv_inference_request_success") == before  # Triton has seen none of it
    by_grpc = grpc_endpoint.get("/v1/completions", body)
    if by_socket[0] == 200:
        assert counted(triton, "nv_inference_request_success") > before
        for each in (by_socket[1], by_grpc[1]):
            assert each.pop("id") and each.pop("created")
    assert by_socket == by_grpc
    if by_socket[0] == 200 and not {"best_of", "beam_width"} & set(body):  # those have no stream
        parts = [part["choices"][0] for part in endpoint.events("/v1/completions", {**body, "stream": True})]
        for choice in by_grpc[1]["choices"]:
            assert "".join(part["text"] for part in parts if part["index"] == choice["index"]) == choice["text"]


def test_lists_of_prompts_are_answered_one_by_one(client: openai.OpenAI, endpoint: OpenAIEndpoint) -> None:
    texts = [PROMPT, "a", "you and"]
    alone = [
        client.completions.create(model="gpt", prompt=text, max_tokens=5, temperature=0).choices[0] for text in texts
    ]
    ids = [endpoint.get("/tokenize", {"prompt": text})[1]["tokens"] for text in texts]
    for prompts in (texts, ids):
        answer = client.completions.create(model="gpt", prompt=prompts, max_tokens=5, temperature=0)
        assert [(each.index, each.text) for each in answer.choices] == [(i, one.text) for i, one in enumerate(alone)]


def test_a_seed_draws_the_engines_tokens(client: openai.OpenAI, engine: Engine, tokenizer: GPT2Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    answer = client.completions.create(
        model="gpt", prompt=PROMPT, max_tokens=COUNT, temperature=0.9, top_p=0.8, seed=41, n=3,
        extra_body={"top_k": 20, "repetition_penalty": 1.2, "return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    sampling = {
        "runtime_top_k": np.array([[20]], np.uint32),
        "runtime_top_p": np.array([[0.8]], np.float32),
        "temperature": np.array([[0.9]], np.float32),
        "repetition_penalty": np.array([[1.2]], np.float32),
    }
    drawn = [each.model_extra["token_ids"] for each in answer.choices]  # type: ignore[index]
    assert drawn == [
        generated(engine, ids, **sampling, random_seed=np.array([[41 + row]], np.uint64)) for row in range(3)
    ]
    assert len({tuple(each) for each in drawn}) == 3


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    texts = {client.completions.create(model="gpt", prompt=PROMPT, max_tokens=COUNT).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_a_stream_has_a_chunk_a_token(client: openai.OpenAI) -> None:
    settings = {"model": "gpt", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "echo": True}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = client.completions.create(**settings, extra_body=extra)
    chunks = list(
        client.completions.create(**settings, stream=True, stream_options={"include_usage": True}, extra_body=extra)
    )
    *parts, last = chunks
    assert not last.choices and last.usage == whole.usage
    assert len(parts) == 1 + COUNT and parts[0].choices[0].text == PROMPT
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    ids = [token for part in parts[1:] for token in part.choices[0].model_extra["token_ids"]]  # type: ignore[index]
    assert ids == whole.choices[0].model_extra["token_ids"] and all(part.usage is None for part in parts)
    assert [part.choices[0].finish_reason for part in parts] == [None] * COUNT + ["length"]


def test_several_streams_in_one(endpoint: OpenAIEndpoint) -> None:
    body = {"prompt": [PROMPT, "you"], "n": 2, "max_tokens": 6, "seed": 5, "ignore_eos": True}
    _, whole = endpoint.get("/v1/completions", body)
    texts, counts = ["", "", "", ""], [0, 0, 0, 0]
    for event in endpoint.events("/v1/completions", {**body, "stream": True}):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        counts[choice["index"]] += 1
    assert texts == [choice["text"] for choice in whole["choices"]] and counts == [6] * 4


def test_the_reason_for_the_end_is_true(
    client: openai.OpenAI, endpoint: OpenAIEndpoint, engine: Engine, tokenizer: GPT2Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = generated(engine, ids)
    body = {"prompt": ids, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    place = next(i for i in range(2, COUNT) if expected[i] not in expected[:i])
    _, ended = endpoint.get("/v1/completions", {**body, "stop_token_ids": [expected[place]]})
    (choice,) = ended["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected[place])
    assert choice["token_ids"] == expected[: place + 1]
    assert choice["text"] == text_behind(tokenizer, ids, expected[:place])
    assert ended["usage"]["completion_tokens"] == place + 1
    _, bounded = endpoint.get("/v1/completions", {**body, "max_tokens": place + 1})
    assert bounded["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    settings = {"model": "gpt", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    extra = {"ignore_eos": True}
    text = client.completions.create(**settings, extra_body=extra).choices[0].text
    for first in range(1, len(text) - 4, 3):
        word = text[first : first + 3]
        answer = client.completions.create(**settings, stop=[word, "never to be seen"], extra_body=extra)
        assert answer.choices[0].text == text[: text.find(word)] and answer.choices[0].finish_reason == "stop"
        parts = client.completions.create(**settings, stop=word, stream=True, extra_body=extra)
        assert "".join(part.choices[0].text for part in parts if part.choices) == text[: text.find(word)]


@pytest.fixture(scope="module")
def recorded() -> tuple[list[int], np.ndarray]:
    """A text's tokens, and the log probabilities that NeMo's own model gives to what follows each, [tokens, V]."""
    logits = np.load(DATA / "nemo" / "gpt122_tp1_pp1.logits.npy")[0].astype(np.float64)
    ids = np.load(DATA / "nemo" / "gpt122_tp1_pp1.input_ids.npy")[0].tolist()
    return ids, logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_log_probabilities_are_nemos(client: openai.OpenAI, recorded: tuple[list[int], np.ndarray]) -> None:
    ids, scores = recorded
    ids = ids[:20]
    settings = {"model": "gpt", "prompt": ids, "temperature": 0, "echo": True, "logprobs": 3}
    for count in (0, 2):
        answer = client.completions.create(max_tokens=count, extra_body={"ignore_eos": True}, **settings)
        logprobs = answer.choices[0].logprobs
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert len(logprobs.tokens) == len(ids) + count == len(logprobs.text_offset)
        expected = [scores[place, token] for place, token in enumerate(ids[1:])]
        assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=2e-3)
        for place, top in enumerate(logprobs.top_logprobs[1 : len(ids) + bool(count)]):
            assert max(top.values()) == pytest.approx(scores[place].max(), abs=2e-3)
        if count:
            assert logprobs.token_logprobs[len(ids)] == pytest.approx(scores[len(ids) - 1].max(), abs=2e-3)
            assert logprobs.token_logprobs[len(ids)] == max(logprobs.top_logprobs[len(ids)].values())
    parts = client.completions.create(max_tokens=2, stream=True, extra_body={"ignore_eos": True}, **settings)
    streamed = [part.choices[0].logprobs for part in parts]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert sum((getattr(each, name) for each in streamed), []) == getattr(logprobs, name)


def test_a_conversations_log_probabilities(client: openai.OpenAI) -> None:
    settings = {"model": "gpt", "max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True}}
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **settings)
    same = client.completions.create(prompt=f"user {PROMPT} you", logprobs=2, **settings).choices[0].logprobs
    content = whole.choices[0].logprobs.content
    assert [each.logprob for each in content] == same.token_logprobs
    assert [each.token for each in content] == same.tokens
    assert all(len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob == each.logprob for each in content)


def test_biases_and_bounds_reach_the_engine(endpoint: OpenAIEndpoint, engine: Engine, tokenizer: GPT2Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    plain = generated(engine, ids)
    body = {"prompt": ids, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True, "ignore_eos": True}

    def tokens(**more: Any) -> list[int]:
        status, answer = endpoint.get("/v1/completions", {**body, **more})
        assert status == 200, answer
        return list(answer["choices"][0]["token_ids"])

    assert tokens(logit_bias={"9": 100}) == [9] * COUNT
    assert plain[0] not in tokens(logit_bias={str(plain[0]): -100})
    assert len(tokens(stop_token_ids=[plain[0]], min_tokens=5)) >= 5 and tokens(stop_token_ids=[plain[0]]) == plain[:1]
    strong = tokens(frequency_penalty=2, presence_penalty=2, logit_bias={"9": 3})
    assert len(set(strong)) > len(set(tokens(logit_bias={"9": 3}))) or len(set(strong)) == COUNT
    drawn = {"temperature": 1.5, "seed": 3}
    assert tokens(min_p=1, **drawn) == plain and tokens(**drawn) != plain
    assert len(tokens(beam_width=3)) == COUNT


def test_the_best_of_several_is_the_most_probable(client: openai.OpenAI) -> None:
    settings = {"model": "gpt", "prompt": PROMPT, "max_tokens": 6, "seed": 7, "logprobs": 0, "temperature": 1.3}
    extra = {"ignore_eos": True}
    every = client.completions.create(n=5, extra_body=extra, **settings).choices
    best = client.completions.create(n=2, best_of=5, extra_body=extra, **settings)
    ranked = sorted(every, key=lambda each: -sum(each.logprobs.token_logprobs))
    assert [each.text for each in best.choices] == [each.text for each in ranked[:2]]
    assert best.usage.completion_tokens == 30


def test_asynchronous_clients_share_the_server(endpoint: OpenAIEndpoint, client: openai.OpenAI) -> None:
    prompts = [PROMPT[:length] for length in range(1, len(PROMPT))]
    alone = [
        client.completions.create(model="gpt", prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in prompts
    ]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as opened:

            async def one(prompt: str) -> str:
                stream = await opened.completions.create(
                    model="gpt", prompt=prompt, max_tokens=6, temperature=0, stream=True
                )
                return "".join([part.choices[0].text async for part in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(ask()) == alone


def test_a_conversation_is_continued_as_its_text_is(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    settings = {"model": "gpt", "temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    prompt = f"user {PROMPT} you"
    text = client.completions.create(prompt=prompt, max_tokens=6, **settings).choices[0]
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(messages=messages, **{limit: 6}, **settings)
        assert answer.object == "chat.completion" and answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == text.text
        assert answer.choices[0].model_extra["prompt_token_ids"] == text.model_extra["prompt_token_ids"]
    parts = list(client.chat.completions.create(messages=messages, max_tokens=6, stream=True, **settings))
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert parts[0].choices[0].delta.role == "assistant" and len(parts) == 7
    assert "".join(part.choices[0].delta.content for part in parts) == text.text
    assert parts[-1].choices[0].finish_reason == "length"
    several = client.chat.completions.create(model="gpt", messages=messages, max_tokens=4, n=2, seed=3)
    assert [choice.index for choice in several.choices] == [0, 1]
    parted = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    assert client.chat.completions.create(messages=parted, max_tokens=6, **settings).choices[0].message.content == (
        text.text
    )


def test_without_a_limit_a_conversation_goes_on_to_the_last_position(client: openai.OpenAI) -> None:
    limit = client.models.retrieve("gpt").model_extra["max_model_len"]
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(model="gpt", messages=messages, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == limit and answer.choices[0].finish_reason == "length"


def test_refusals_are_openais_errors(client: openai.OpenAI) -> None:
    for extra, words in (
        ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"temperature": 3}, "at least 0 and at most 2"),
        ({"max_tokens": 10_000}, "positions"),
        ({"guided_regex": "(a", "guided_json": {}}, "guided_json and guided_regex exclude each other"),
        ({"prompt": [1, 10_000]}, "the vocabulary has"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(**{"model": "gpt", "prompt": PROMPT, "extra_body": extra})
        assert words in raised.value.message and raised.value.type == "invalid_request_error"
        assert raised.value.param == next(iter(extra))


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"enum": ["Zoë", "Max"]}, "a": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["n", "a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},  # the model has few positions
}
CITIES = ["Paris", "São Paulo", "東京"]


def test_answers_follow_what_openais_client_asks_for(client: openai.OpenAI) -> None:
    """A model of random weights: nothing but the grammar makes its answers valid."""
    settings: dict[str, Any] = {"model": "gpt", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 23}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        (choice,) = client.chat.completions.create(**settings, seed=seed, response_format=wanted).choices
        assert choice.finish_reason == "stop"
        Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content or ""))
    fields: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": r"\d{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"guided_choice": CITIES}, "|".join(CITIES)),
        ({"structured_outputs": {"choice": CITIES}}, "|".join(CITIES)),
        ({"guided_grammar": 'root ::= "(" [a-c] ")"'}, r"\([a-c]\)"),
        ({"guided_json": json.dumps({"const": 12345})}, "12345"),
    ]
    for extra, regex in fields:
        found = client.completions.create(model="gpt", prompt=PROMPT, max_tokens=24, n=3, extra_body=extra)
        assert [choice.finish_reason for choice in found.choices] == ["stop"] * 3
        assert all(re.fullmatch(regex, choice.text) for choice in found.choices), (extra, found.choices)
    stream = client.chat.completions.create(**settings, seed=1, response_format=wanted, stream=True)
    streamed = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    Draft202012Validator(SCHEMA).validate(json.loads(streamed))


def test_a_grammar_that_is_wrong_is_the_requests_fault(client: openai.OpenAI) -> None:
    for extra, words in (
        ({"guided_regex": "(ab"}, "unclosed group"),
        ({"guided_json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"guided_json": {"not": {"type": "null"}}}, "Unimplemented keys"),
    ):
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(model="gpt", prompt=PROMPT, extra_body=extra, stream=is_stream)


def test_tokens_are_transformers(endpoint: OpenAIEndpoint, tokenizer: GPT2Tokenizer) -> None:
    text = "the world's naïve 中 text"
    _, found = endpoint.get("/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == tokenizer.encode(text) and found["count"] == len(found["tokens"])
    assert endpoint.get("/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": text})
    assert endpoint.get("/tokenizer_info")[1]["eos_token"] == "<|endoftext|>"


def test_curl_asks_too(endpoint: OpenAIEndpoint) -> None:
    body = json.dumps({"model": "gpt", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{endpoint.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line[:6] for line in lines if line] == ["data: "] * 4 and lines[-2] == "data: [DONE]"
