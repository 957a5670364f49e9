"""What ``vllm bench serve`` sends and reads, by its own unmodified functions, on the endpoint of a real deployment.

The whole program, which needs all of vLLM, is what ``make test-vllm`` runs. Oracles: what was asked for, the engine's
own metrics, and the answers that are not streamed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
import pytest
from support.servers.llama_endpoint import MODEL, LlamaEndpoint, llama_endpoint

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
PROMPTS = [f"She looked at the {number} ships." * (1 + number % 3) for number in range(12)]
LENGTHS = [3 + 2 * number for number in range(12)]


@pytest.fixture(scope="module")
def functions() -> ModuleType:
    """The file as a module of its own name."""
    spec = importlib.util.spec_from_file_location("endpoint_request_func", os.environ["VLLM_CLIENT"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaEndpoint]:
    with llama_endpoint(tmp_path_factory.mktemp("llama")) as found:
        yield found


def ask_all(functions: ModuleType, endpoint: LlamaEndpoint, backend: str, model: str = MODEL, **more: Any) -> list[Any]:
    """Send all prompts at once, as the program does."""
    ask = functions.ASYNC_REQUEST_FUNCS[backend]

    async def run() -> list[Any]:
        async with aiohttp.ClientSession() as session:
            requests = [
                functions.RequestFuncInput(
                    prompt=prompt,
                    api_url=endpoint.url + PATHS[backend],
                    prompt_len=0,
                    output_len=length,
                    model=model,
                    ignore_eos=True,
                    request_id=f"bench-{length}",
                    extra_body={"temperature": 0.0},
                    **more,
                )
                for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
            ]
            return list(await asyncio.gather(*(ask(each, session) for each in requests)))

    return asyncio.run(run())


def whole_answer(endpoint: LlamaEndpoint, backend: str, prompt: str, length: int) -> tuple[str, int]:
    """The text of an answer that is not streamed, and the tokens of its prompt."""
    asked = {"prompt": prompt} if backend == "openai" else {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": MODEL, "max_tokens": length, "temperature": 0, "ignore_eos": True, **asked}
    request = Request(endpoint.url + PATHS[backend], json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=180) as answer:
        found = json.loads(answer.read())
    choice = found["choices"][0]
    return choice["text"] if backend == "openai" else choice["message"]["content"], found["usage"]["prompt_tokens"]


# The role's event, which comes with the first token, is vLLM's own way of streaming too.
@pytest.mark.parametrize(("backend", "events"), [("openai", 0), ("openai-chat", 1)])
def test_every_token_is_seen_and_counted(
    functions: ModuleType, endpoint: LlamaEndpoint, backend: str, events: int
) -> None:
    before = endpoint.counts()
    found = ask_all(functions, endpoint, backend)
    after = endpoint.counts()
    assert [(each.success, each.error) for each in found] == [(True, "")] * len(PROMPTS)
    assert [each.output_tokens for each in found] == LENGTHS
    assert [len(each.itl) + 1 - events for each in found] == LENGTHS
    assert all(0 < each.ttft <= each.latency for each in found)
    assert {name: after[name] - before.get(name, 0) for name in after} == {
        "request_success_total": len(PROMPTS),
        "generation_tokens_total": sum(LENGTHS),
        "prompt_tokens_total": sum(each.prompt_len for each in found),
    }
    whole = [whole_answer(endpoint, backend, *each) for each in zip(PROMPTS, LENGTHS, strict=True)]
    assert [(each.generated_text, each.prompt_len) for each in found] == whole


def test_log_probabilities_are_taken_as_vllms_own(functions: ModuleType, endpoint: LlamaEndpoint) -> None:
    found = ask_all(functions, endpoint, "openai", logprobs=2)
    assert all(each.success for each in found) and [each.output_tokens for each in found] == LENGTHS


def test_what_is_refused_is_a_failed_request(functions: ModuleType, endpoint: LlamaEndpoint) -> None:
    found = ask_all(functions, endpoint, "openai", model="another")
    assert [(each.success, each.error) for each in found] == [(False, "Not Found")] * len(PROMPTS)
