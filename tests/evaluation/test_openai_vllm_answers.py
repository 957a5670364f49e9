"""Recorded answers of vLLM's own server are read for what they say; ``tests/data/vllm/README.md`` says how to record.

Oracle: transformers, which computes the demonstration model of the recordings.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.servers.openai_stand_in import StandIn, serving
from support.servers.recorded_openai import replaying

from evaluation.client.connecting import check_tokenizer
from evaluation.client.errors import RequestError
from evaluation.client.model_connection import ModelFiles, Query, WrittenPrompt
from evaluation.client.openai_capabilities import Capabilities
from evaluation.client.openai_client import CHAT, COMPLETIONS, ModelCard, OpenAIClient
from evaluation.client.openai_connection import OpenAIConnection
from evaluation.client.served_model import open_target
from evaluation.client.tokenizer import load_tokenizer
from evaluation.speed.prompts.workload import LoadPrompt
from evaluation.speed.tables.record import RequestRecord
from evaluation.speed.transport.openai_dialect import find_dialect
from evaluation.speed.transport.openai_wire import Dialect, OpenAIWire
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.endpoint import Endpoint

PROJECT = Path(__file__).resolve().parents[2]
RECORDINGS = PROJECT / "tests" / "data" / "vllm"
LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
JSON = {"Content-Type": "application/json"}
NAME, TEXT, COUNT = "demo", "She opened the door and looked at the", 8
CAN = Capabilities(
    takes_ids=True,
    scores_prompts=True,
    scores_alone=True,
    names_ids=True,
    returns_ids=True,
    ignores_end=True,
    counts_tokens=True,
    card=ModelCard(NAME, "hf_fp32", "vllm", 512),
    version="0.32.0",
)


@dataclass(frozen=True)
class Oracle:
    """The model of the recordings, computed by transformers."""

    directory: Path
    model: Any
    tokenizer: Any

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text)["input_ids"])

    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Of every token behind each of a sequence: [n, V]."""
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), -1)

    def greedy(self, ids: Sequence[int], count: int) -> tuple[int, ...]:
        made = self.model.generate(torch.tensor([ids]), do_sample=False, min_new_tokens=count, max_new_tokens=count)
        return tuple(made[0, len(ids) :].tolist())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    directory = tmp_path_factory.mktemp("llama") / "hf_fp32"
    convert(ConvertArguments(LLAMA, directory, weight_data_type="fp32", format="huggingface"))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return Oracle(directory, model, transformers.AutoTokenizer.from_pretrained(directory))


@contextmanager
def connected(name: str, files: ModelFiles | None = None) -> Iterator[OpenAIConnection]:
    with replaying(RECORDINGS / name) as vllm, OpenAIClient(Endpoint.read(vllm.url), 120) as client:
        yield OpenAIConnection(client, CAN, files or ModelFiles())


def test_what_it_can_do_is_found_by_asking(oracle: Oracle) -> None:
    with replaying(RECORDINGS / "questions.json") as vllm:
        target = open_target(vllm.url, "fastertransformer")
        check_tokenizer(target, load_tokenizer(oracle.directory))
    assert target.capabilities == CAN
    assert (target.served.endpoint.engine, target.served.max_positions) == ("vllm", 512)
    assert target.served.endpoint.settings["versions"] == "vllm 0.32.0"


def test_given_tokens_have_their_log_probabilities(oracle: Oracle) -> None:
    rows = [oracle.ids(TEXT), oracle.ids("Thank you for your letter.")]
    with connected("scores.json") as connection:
        found = connection.ask([Query(0, row, wants_each=True) for row in rows])
    for row, answer in zip(rows, found, strict=True):
        expected = oracle.log_probs(row)[:-1]
        assert answer is not None and answer.prompt_log_probs is not None
        assert answer.prompt_log_probs == pytest.approx(expected[range(len(row) - 1), row[1:]].tolist(), abs=1e-3)
        assert answer.prompt_argmax == tuple(expected.argmax(-1).tolist())


def scores_of(change: Callable[[list[dict[str, Any]]], object]) -> StandIn:
    """The recorded scores of two prompts, with a change to the answer's choices."""
    content = json.loads((RECORDINGS / "scores.json").read_text())[0]["answer"]
    change(content["choices"])
    return StandIn(faults=[(200, JSON, json.dumps(content).encode())])


def test_answers_are_read_in_the_order_of_the_prompts(oracle: Oracle) -> None:
    rows = [oracle.ids(TEXT), oracle.ids("Thank you for your letter.")]
    with serving(scores_of(list.reverse)) as served:
        client = OpenAIClient(Endpoint.read(served.url), 10)
        found = OpenAIConnection(client, CAN, ModelFiles()).ask([Query(0, row, wants_each=True) for row in rows])
    assert [len(answer.prompt_log_probs or ()) + 1 for answer in found if answer] == [len(row) for row in rows]


def test_an_answer_that_scores_fewer_tokens_is_an_error(oracle: Oracle) -> None:
    queries = [Query(0, oracle.ids(text), wants_each=True) for text in (TEXT, "Thank you for your letter.")]
    with serving(scores_of(lambda choices: [choice.update(logprobs=None) for choice in choices])) as served:
        connection = OpenAIConnection(OpenAIClient(Endpoint.read(served.url), 10), CAN, ModelFiles())
        with pytest.raises(RequestError, match="gave 0 log probabilities for"):
            connection.ask(queries)


def test_generated_tokens_have_their_ids_and_log_probabilities(oracle: Oracle) -> None:
    prompt = oracle.ids(TEXT)
    with connected("generated.json") as connection:
        (answer,) = connection.ask([Query(COUNT, prompt, wants_log_probs=True)])
    expected = oracle.greedy(prompt, COUNT)
    scores = oracle.log_probs([*prompt, *expected])[len(prompt) - 1 : -1]
    assert answer is not None and answer.tokens == expected
    assert answer.log_probs == pytest.approx(scores[range(COUNT), expected].tolist(), abs=1e-3)


def test_without_ids_in_answers_the_names_of_log_probabilities_are_read(oracle: Oracle) -> None:
    content = json.loads((RECORDINGS / "generated.json").read_text())[0]["answer"]
    del content["choices"][0]["token_ids"]
    with serving(StandIn(faults=[(200, JSON, json.dumps(content).encode())])) as served:
        connection = OpenAIConnection(
            OpenAIClient(Endpoint.read(served.url), 10),
            replace(CAN, returns_ids=False),
            ModelFiles(),
        )
        (answer,) = connection.ask([Query(COUNT, oracle.ids(TEXT), wants_log_probs=True)])
    assert answer is not None and answer.tokens == oracle.greedy(oracle.ids(TEXT), COUNT)


def test_a_text_ends_at_a_stop_string(oracle: Oracle) -> None:
    prompt = oracle.ids(TEXT)
    with connected("stopped.json", ModelFiles(load_tokenizer(oracle.directory))) as connection:
        plain, stopped = (
            connection.complete([WrittenPrompt(TEXT, prompt)], COUNT, None, stop)[0] for stop in ((), ("I",))
        )
    expected = oracle.tokenizer.decode(oracle.greedy(prompt, COUNT))
    assert (plain.text, plain.generated) == (expected, COUNT)
    assert stopped.text == expected[: expected.index("I")]


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_load_counts_its_tokens(oracle: Oracle, is_chat: bool, is_streaming: bool) -> None:
    found = replace(CAN, takes_ids=not is_chat, is_chat_only=is_chat)
    prompt = LoadPrompt(oracle.ids(TEXT), COUNT, TEXT)
    name = f"load_{'chat' if is_chat else 'completions'}_{'streamed' if is_streaming else 'whole'}.json"
    with replaying(RECORDINGS / name) as vllm:
        with OpenAIClient(Endpoint.read(vllm.url), 120) as client:
            dialect = find_dialect(client, found, is_streaming)
        record = asyncio.run(_ask(vllm.url, dialect, prompt, is_streaming))
    fields = {"ignore_eos": True, "min_tokens": 4, "return_token_ids": True}
    usage = {"stream_options": {"include_usage": True}} if is_streaming else {}
    assert dialect == Dialect(NAME, is_chat, not is_chat, not is_chat, True, fields, usage)
    assert not record.error and (record.output_tokens, record.input_tokens) == (COUNT, len(prompt.ids))
    assert sum(record.chunk_tokens) == COUNT


async def _ask(url: str, dialect: Dialect, prompt: LoadPrompt, is_streaming: bool) -> RequestRecord:
    async with OpenAIWire(Endpoint.read(url), dialect, 120.0, is_streaming) as wire:
        return await wire.ask(dialect.encode(prompt, is_streaming), 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_the_text_and_the_tokens_of_the_whole_answer(oracle: Oracle, path: str) -> None:
    is_chat = path == CHAT
    asked = {"messages": [{"role": "user", "content": TEXT}]} if is_chat else {"prompt": TEXT}
    body = {"model": NAME, **asked, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    name = f"stream_{'chat' if is_chat else 'completions'}.json"
    with replaying(RECORDINGS / name) as vllm, OpenAIClient(Endpoint.read(vllm.url), 120) as client:
        events = [choice for event in client.stream(path, body) for choice in event["choices"]]
    expected = oracle.greedy(oracle.ids(TEXT), COUNT)
    assert [token for event in events for token in event.get("token_ids") or ()] == list(expected)
    texts = [event["delta"].get("content") or "" if is_chat else event["text"] for event in events]
    assert "".join(texts) == oracle.tokenizer.decode(expected)
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("model", "text", "fields", "said"),
    [
        (NAME, "word " * 600, {}, "maximum context length is 512 tokens"),
        ("other", TEXT, {}, "The model `other` does not exist"),
        (NAME, TEXT, {"temperature": -1}, "temperature must be"),
        (NAME, TEXT, {"max_tokens": "ten"}, "max_tokens"),
    ],
)
def test_a_refusal_is_shown_in_its_own_words(model: str, text: str, fields: dict[str, Any], said: str) -> None:
    with (
        replaying(RECORDINGS / "refusals.json") as vllm,
        OpenAIClient(Endpoint.read(vllm.url), 120) as client,
        pytest.raises(RequestError) as refused,
    ):
        client.complete(model, [text], **{"max_tokens": 1, **fields})
    assert said in str(refused.value) and "(HTTP 4" in str(refused.value)


def test_models_and_adapters_are_listed() -> None:
    base = json.loads((RECORDINGS / "questions.json").read_text())[0]["answer"]["data"][0]
    adapter = {**base, "id": "adapter", "root": "lora", "parent": NAME, "max_model_len": None}
    served = StandIn(faults=[(200, JSON, json.dumps({"object": "list", "data": [base, adapter]}).encode())])
    with serving(served), OpenAIClient(Endpoint.read(served.url), 10) as client:
        assert client.models() == (CAN.card, ModelCard("adapter", "lora", "vllm"))
