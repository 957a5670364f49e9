"""Answers in the form of vLLM's server, written by hand from its documented protocol, are read for what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.openai_stand_in import StandIn, serving

from evaluation.client.errors import RequestError
from evaluation.client.model_connection import ModelFiles, Query
from evaluation.client.openai_capabilities import Capabilities
from evaluation.client.openai_client import ModelCard, OpenAIClient
from evaluation.client.openai_connection import OpenAIConnection
from handover.endpoint import Endpoint

JSON = {"Content-Type": "application/json"}
MODELS = {
    "object": "list",
    "data": [
        {
            **{"id": "base", "object": "model", "created": 1760000000, "owned_by": "vllm", "root": "/models/base"},
            **{"parent": None, "max_model_len": 4096, "permission": [{"id": "modelperm-1", "is_blocking": False}]},
        },
        {
            **{"id": "adapter", "object": "model", "created": 1760000000, "owned_by": "vllm", "root": "/lora"},
            **{"parent": "base", "max_model_len": None, "permission": []},
        },
    ],
}
SCORED = {
    **{"id": "cmpl-7c1", "object": "text_completion", "created": 1760000001, "model": "base"},
    "choices": [
        {
            **{"index": 1, "text": " c d", "finish_reason": "length", "stop_reason": None, "prompt_logprobs": None},
            "logprobs": {
                "text_offset": [0, 2],
                "token_logprobs": [None, -0.25],
                "tokens": ["token_id:7", "token_id:8"],
                "top_logprobs": [None, {"token_id:8": -0.25}],
            },
        },
        {
            **{"index": 0, "text": " a b c", "finish_reason": "length", "stop_reason": None, "prompt_logprobs": None},
            "logprobs": {
                "text_offset": [0, 2, 4],
                "token_logprobs": [None, -3.5, -9999.0],
                "tokens": ["token_id:5", "token_id:6", "token_id:7"],
                "top_logprobs": [
                    None,
                    {"token_id:6": -3.5, "token_id:91": -0.5},
                    {"token_id:7": -9999.0, "token_id:90": -0.125},
                ],
            },
        },
    ],
    "usage": {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0, "prompt_tokens_details": None},
    **{"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None},
}
GENERATED = {
    "choices": [
        {
            **{"index": 0, "text": " x y", "finish_reason": "stop", "stop_reason": None, "prompt_logprobs": None},
            **{"token_ids": [20, 21, 2], "prompt_token_ids": [5, 6]},
            "logprobs": {
                "text_offset": [0, 2, 4],
                "token_logprobs": [-0.5, -0.25, -0.125],
                "tokens": ["token_id:20", "token_id:21", "token_id:2"],
                "top_logprobs": [{"token_id:20": -0.5}, {"token_id:21": -0.25}, {"token_id:2": -0.125}],
            },
        }
    ],
    "usage": {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3},
}
TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens.",
        **{"type": "BadRequestError", "param": "input_tokens", "code": 400},
    }
}


def connection(served: StandIn, **changes: Any) -> OpenAIConnection:
    abilities = {
        **dict.fromkeys(("takes_ids", "scores_prompts", "scores_alone", "names_ids", "returns_ids"), True),
        **{"ignores_end": True, "counts_tokens": True, "card": ModelCard("base"), **changes},
    }
    return OpenAIConnection(OpenAIClient(Endpoint.read(served.url), 10), Capabilities(**abilities), ModelFiles())


def answering(content: Any, status: int = 200) -> StandIn:
    return StandIn(faults=[(status, JSON, json.dumps(content).encode())])


def test_models_and_adapters_are_listed() -> None:
    with serving(answering(MODELS)) as served, OpenAIClient(Endpoint.read(served.url), 10) as client:
        base, adapter = client.models()
    assert base == ModelCard("base", "/models/base", "vllm", 4096)
    assert (adapter.id, adapter.root, adapter.max_positions) == ("adapter", "/lora", None)


def test_scores_of_prompts_are_read_in_the_order_of_the_prompts() -> None:
    with serving(answering(SCORED)) as served:
        first, second = connection(served).ask(
            [Query(0, (5, 6, 7), wants_each=True), Query(0, (7, 8), wants_each=True)]
        )
    assert first is not None and second is not None
    assert (first.prompt_log_probs, first.prompt_argmax) == ((-3.5, -9999.0), (91, 90))
    assert (second.prompt_log_probs, second.prompt_argmax) == ((-0.25,), (8,))


def test_generated_tokens_have_their_ids_and_log_probabilities() -> None:
    with serving(answering(GENERATED)) as served:
        (answer,) = connection(served).ask([Query(3, (5, 6), wants_log_probs=True)])
    assert answer is not None
    assert (answer.tokens, answer.log_probs) == ((20, 21, 2), (-0.5, -0.25, -0.125))


def test_without_ids_in_answers_the_names_of_log_probabilities_are_read() -> None:
    content = json.loads(json.dumps(GENERATED))
    del content["choices"][0]["token_ids"]
    with serving(answering(content)) as served:
        (answer,) = connection(served, returns_ids=False).ask([Query(3, (5, 6), wants_log_probs=True)])
    assert answer is not None and answer.tokens == (20, 21, 2)


def test_an_answer_that_scores_fewer_tokens_is_an_error() -> None:
    content = json.loads(json.dumps(SCORED))
    for choice in content["choices"]:
        choice["logprobs"] = None
    queries = [Query(0, (5, 6, 7), wants_each=True), Query(0, (7, 8), wants_each=True)]
    with serving(answering(content)) as served, pytest.raises(RequestError, match="gave 0 log probabilities for"):
        connection(served).ask(queries)


def test_a_refusal_is_shown_in_its_own_words() -> None:
    with serving(answering(TOO_LONG, 400)) as served, pytest.raises(RequestError) as refused:
        connection(served).ask([Query(0, (5,) * 5000, wants_each=True)])
    assert "HTTP 400): This model's maximum context length is 4096 tokens" in str(refused.value)
