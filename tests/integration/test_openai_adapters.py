"""Adapters by name at the OpenAI endpoint of a real deployment, against transformers' models with them merged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
import tokenizers
from support.servers.llama_endpoint import TEMPLATE
from support.servers.served import Deployment, wait_for
from support.servers.spoilt_bodies import spoilt
from support.tiny_models.huggingface_models import greedy
from support.tiny_models.llama_models import save
from support.tiny_models.low_rank import draw, merged, write

from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository

PROMPT = [7, 5, 30, 12, 9]
TOKENS = 8


class Served(NamedTuple):
    """The address without /v1, transformers' models by the name that asks for them, and where adapters lie."""

    url: str
    models: dict[str, Any]
    adapters: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    model = save("qwen3", root / "hub", bos_token_id=0, eos_token_id=0)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: model.config.vocab_size]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({each: i for i, each in enumerate(letters)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(root / "hub" / "tokenizer.json"))
    models = {"mine": model}
    for number, name in enumerate(("poet", "late", "clerk")):
        pairs = draw(model, number, rank=2 + number)
        write(root / "adapters" / name, pairs, lora_alpha=2 * (2 + number))
        models[name] = merged(model, pairs, 2.0)
    convert(ConvertArguments(root / "hub", root / "hf", weight_data_type="fp32", format="huggingface"))
    repository, keys, template = root / "model_repo", root / "keys", root / "chat.jinja"
    build_repository(
        ExportArguments(root / "hf", repository, "mine", 1, 1, "fp32", 0, 0, max_batch_size=8, decoupled=True)
    )
    for name in ("poet", "clerk"):
        shutil.copytree(root / "adapters" / name, repository / "fastertransformer/1/huggingface/adapters" / name)
    keys.write_text("secret\n")
    template.write_text(TEMPLATE)
    deployment = Deployment(
        repository, root / "run", openai_port=0, openai_adapter_keys_file=keys, openai_chat_template=template
    )
    port = deployment.wait_until_published().openai_port
    yield Served(f"http://127.0.0.1:{port}", models, root / "adapters")
    deployment.begin_to_stop()


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def tokens_of(served: Served, name: str) -> list[int]:
    asked: Any = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"return_token_ids": True}}
    answer = client_of(served).completions.create(model=name, **asked)
    assert answer.model == name
    return list(answer.choices[0].token_ids)


def post(served: Served, path: str, body: Any, key: str = "secret") -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urlopen(Request(f"{served.url}{path}", json.dumps(body).encode(), headers), timeout=180) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_a_name_chooses_the_adapter_in_every_api(served: Served) -> None:
    """Tokens are those of transformers' model with the adapter merged; all APIs write the same text."""
    client = client_of(served)
    for name in ("mine", "poet", "clerk"):
        expected, _ = greedy(served.models[name], PROMPT, TOKENS)
        assert tokens_of(served, name) == list(expected)
        message: Any = {"role": "user", "content": "Ab"}
        chat = client.chat.completions.create(model=name, messages=[message], temperature=0, max_tokens=TOKENS)
        response = client.responses.create(model=name, input="Ab", temperature=0, max_output_tokens=TOKENS)
        body = {"model": name, "messages": [message], "max_tokens": TOKENS, "temperature": 0}
        status, content = post(served, "/v1/messages", body)
        answer = json.loads(content)
        texts = {chat.choices[0].message.content, response.output_text, answer["content"][0]["text"]}
        assert status == 200 and len(texts) == 1 and {chat.model, response.model, answer["model"]} == {name}
    assert len({tuple(tokens_of(served, name)) for name in served.models if name != "late"}) == 3


def test_requests_with_and_without_adapters_run_side_by_side(served: Served) -> None:
    names = ["mine", "poet", "clerk"] * 4
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda name: tokens_of(served, name), names))
    assert found == [list(greedy(served.models[name], PROMPT, TOKENS)[0]) for name in names]


def test_models_lists_adapters_with_their_parent(served: Served) -> None:
    found = {model.id: model.model_dump() for model in client_of(served).models.list()}
    assert {"mine", "poet", "clerk"} <= set(found)
    assert found["poet"]["parent"] == "mine" and Path(found["poet"]["root"]).name == "poet"
    assert found["mine"]["parent"] is None
    assert client_of(served).models.retrieve("clerk").model_dump()["parent"] == "mine"


def test_the_engine_says_which_adapters_have_rows(served: Served) -> None:
    def told() -> list[str]:
        with urlopen(f"{served.url}/metrics", timeout=180) as page:
            text = page.read().decode()
        return [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]

    tokens_of(served, "poet")
    wait_for(told)
    newest = max(told(), key=lambda line: float(line.rsplit(" ")[-1]))
    assert 'max_lora="2"' in newest and 'running_lora_adapters="' in newest


def test_a_name_that_is_none_is_not_found(served: Served) -> None:
    for ask in (lambda: tokens_of(served, "pot"), lambda: client_of(served).models.retrieve("pot")):
        with pytest.raises(openai.NotFoundError, match="there is no model 'pot'") as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_adapters_come_and_go_behind_a_key(served: Served) -> None:
    load = {"lora_name": "late", "lora_path": str(served.adapters / "late")}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert post(served, path, load, key="wrong")[0] == 401
    status, content = post(served, "/v1/load_lora_adapter", load)
    assert (status, content) == (200, "Success: LoRA adapter 'late' added successfully.")
    assert tokens_of(served, "late") == list(greedy(served.models["late"], PROMPT, TOKENS)[0])
    status, content = post(served, "/v1/load_lora_adapter", load)
    assert status == 400 and "late" in content
    assert post(served, "/v1/unload_lora_adapter", {"lora_name": "late"}) == (
        200,
        "Success: LoRA adapter 'late' removed successfully.",
    )
    with pytest.raises(openai.NotFoundError):
        tokens_of(served, "late")
    assert post(served, "/v1/unload_lora_adapter", {"lora_name": "late"})[0] == 404
    assert tokens_of(served, "poet") == list(greedy(served.models["poet"], PROMPT, TOKENS)[0])


HOSTILE: list[Any] = [
    ({}, "lora_name"), ({"lora_name": 5, "lora_path": "/x"}, "lora_name"), ([], "an object"),
    ({"lora_name": "../x", "lora_path": "/x"}, "no name of an adapter"), ({"lora_name": "a"}, "lora_path"),
    ({"lora_name": "mine", "lora_path": "/x"}, "there is a model called"),
    ({"lora_name": "a", "lora_path": "x"}, "the whole path"), ({"lora_name": "a", "lora_path": "/nowhere"}, "nowhere"),
    ({"lora_name": "a", "lora_path": "/etc/passwd"}, "passwd"), ({"lora_name": "a", "lora_path": "/\0"}, "no adapter"),
    ({"lora_name": "a", "lora_path": "/x", "load_inplace": True}, "unknown key"),
]  # fmt: skip


def test_what_cannot_be_loaded_is_refused_in_words(served: Served) -> None:
    for body, said in HOSTILE:
        status, content = post(served, "/v1/load_lora_adapter", body)
        assert status == 400 and said in json.loads(content)["error"]["message"], content
    draw_from = random.Random(5)
    for _ in range(60):
        body = spoilt({"lora_name": "late", "lora_path": str(served.adapters / "nothing")}, draw_from)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            status, content = post(served, path, body)
            assert 400 <= status < 500 and json.loads(content)["error"]["message"], content
