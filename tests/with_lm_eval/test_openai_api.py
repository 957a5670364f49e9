"""lm-evaluation-harness asks the OpenAI endpoint, unmodified: the figures are those of the direct path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from support.measurements.harness_tasks import SUBSET, choice_task, harness_task, requests, task_manager, write_choices
from support.servers.openai_endpoint import openai_endpoint
from support.servers.served import Deployment

from evaluation.harness import ServedLM
from handover.endpoint import Endpoint

TEXTS, CHOICES = 30, 24
TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"


@pytest.fixture(scope="module")
def url(deployment: Deployment) -> str:
    return f"http://127.0.0.1:{deployment.wait_until_published().openai_port}/v1/completions"


def test_lambada_by_local_completions_is_the_direct_paths_to_the_last_digit(deployment: Deployment, url: str) -> None:
    found = {}
    for name, model in (
        ("direct", ServedLM(str(deployment.endpoint_file))),
        ("openai", completions(url)),
        ("slipway", ServedLM(url.removesuffix("/completions"), tokenizer=_shards(deployment), rows=8)),
    ):
        results = simple_evaluate(
            model, tasks=[harness_task(SUBSET)], task_manager=task_manager(), limit=TEXTS, log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
        (figures,), (samples,) = results["results"].values(), results["samples"].values()
        each = {sample["doc_id"]: (sample["acc"], sample["perplexity"]) for sample in samples}
        found[name] = each, figures["acc,none"], figures["perplexity,none"]
    assert len(found["direct"][0]) == TEXTS
    assert found["openai"] == found["direct"]
    assert found["slipway"] == found["direct"]


def test_choices_by_local_completions_are_scored_as_by_the_direct_path(
    deployment: Deployment, url: str, tmp_path: Path
) -> None:
    """Four endings of several words each, as HellaSwag has them."""
    texts = [json.loads(line)["text"] for line in SUBSET.read_text("utf-8").splitlines()[:CHOICES]]
    write_choices(tmp_path / "choices.jsonl", texts)
    figures, choices = {}, {}
    for name, model in (("direct", ServedLM(str(deployment.endpoint_file))), ("openai", completions(url))):
        results = simple_evaluate(
            model, tasks=[choice_task(tmp_path / "choices.jsonl")], task_manager=task_manager(), log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
        (found,), (samples,) = results["results"].values(), results["samples"].values()
        figures[name] = found["acc,none"], found["acc_norm,none"]
        choices[name] = {sample["doc_id"]: [answer for (answer,) in sample["resps"]] for sample in samples}
    assert figures["openai"] == figures["direct"]
    assert figures["direct"][0] > 0.4  # four endings drawn by lot give 0.25
    assert choices["openai"].keys() == choices["direct"].keys() == set(range(CHOICES))
    for document, direct in choices["direct"].items():
        assert len(direct) == 4 and len({log_prob for log_prob, _ in direct}) == 4
        for (expected, is_argmax), (log_prob, is_greedy) in zip(direct, choices["openai"][document], strict=True):
            assert log_prob == pytest.approx(expected, rel=0, abs=1e-6) and is_greedy == is_argmax


def _shards(deployment: Deployment) -> str:
    """The directory of the served checkpoint, with its tokenizer."""
    repository = Path(Endpoint.read(deployment.endpoint_file).model_repository)
    return str(next(repository.glob("fastertransformer/1/*-gpu")))


def completions(url: str, **settings: Any) -> Any:
    """The harness's own client; it has no tokenizer, but asks the endpoint for tokens."""
    given = {"model": "demo", "base_url": url, "batch_size": 8, "max_length": 512, "max_retries": 1, **settings}
    model = get_model("local-completions")(**given)
    assert model.tokenizer_backend == "remote"
    return model


def test_generations_by_both_clients_are_the_direct_paths(deployment: Deployment, url: str, tmp_path: Path) -> None:
    texts = [json.loads(line)["text"] for line in SUBSET.read_text("utf-8").splitlines()[:6]]
    ways = [{"until": [". ", "\n"], "max_gen_toks": 9}, {"until": ['"', ","], "max_gen_toks": 5}]
    asked = [(text, ways[number % 2]) for number, text in enumerate(texts)]
    expected = ServedLM(str(deployment.endpoint_file)).generate_until(requests("generate_until", *asked), True)
    assert completions(url).generate_until(requests("generate_until", *asked), True) == expected and any(expected)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = {"chat_template": tmp_path / "chat.jinja"}
    with openai_endpoint(str(deployment.endpoint_file), tmp_path, **settings) as endpoint:
        chat = get_model("local-chat-completions")(
            model="demo", base_url=f"{endpoint.url}/v1/chat/completions", max_retries=1
        )
        conversations = [(json.dumps([{"role": "user", "content": text}]), way) for text, way in asked]
        given = [(json_chat(text), way) for text, way in conversations]
        assert chat.generate_until(requests("generate_until", *given), True) == expected


def json_chat(text: str) -> Any:
    """A conversation as the harness hands it to a client."""
    from lm_eval.models.api_models import JsonChatStr

    return JsonChatStr(text)


def test_the_tokens_that_the_harness_asks_for_are_the_models(url: str) -> None:
    model = completions(url)
    assert model.eot_token_id == model.tokenizer.encode(model.tokenizer.eos_token)[0]
    body = json.dumps({"tokens": [model.eot_token_id]}).encode()
    asked = Request(url.replace("/v1/completions", "/detokenize"), body, {"Content-Type": "application/json"})
    with urlopen(asked, timeout=180) as answer:
        assert json.load(answer) == {"prompt": model.tokenizer.eos_token}
