"""FasterTransformer backend's published stores, served as they are: model_checkpoint_path alone is set.

``tests/data/ft_backend_stores.json`` holds the facts of its ``all_models``: names, types, shapes, parameters; Llama's
are those of void-main's fork (01c793e). A store is called "fastertransformer" there; here all of them are in one
server, each under its family's name. Expected tokens are transformers', with the weights rounded to the store's fp16.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf import json_format, text_format
from support.servers.served import Deployment, infer, inputs_of
from support.shards import prefix_prompts as prefixes
from support.shards.family_shards import write_family
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.random_t5 import random_t5
from support.tiny_models import llama_models
from support.tiny_models.huggingface_models import build
from transformers import T5EncoderModel
from tritonclient.grpc import model_config_pb2

from handover.endpoint import Endpoint

DATA = Path(__file__).resolve().parents[1] / "data"
STORES = json.loads((DATA / "ft_backend_stores.json").read_text())
PROMPTS, COUNT = [[11, 12, 13, 14, 15], [20], [30, 31, 32]], 8


INTERACTIVE = "gpt-interactive-text-generation"


def build_gptneox() -> Any:
    return build("gpt_neox", hidden_act="gelu_new")


def build_encoder() -> Any:
    return T5EncoderModel(random_t5().config).eval()


DECODERS = {
    "gpt": random_gpt2,
    "gptj": lambda: build("gptj"),
    "gptneox": build_gptneox,
    "bloom": lambda: build("bloom"),
}
LLAMA = "llama"  # decoupled, where the others answer once
MODELS = {
    **DECODERS,
    LLAMA: lambda: llama_models.build("llama_mha", rms_norm_eps=1e-6),
    INTERACTIVE: random_gpt2,
    "t5": random_t5,
    "t5-encoder": build_encoder,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {family: make() for family, make in MODELS.items()}


def add_store(repository: Path, family: str, shards: Path) -> None:
    """Write the published configuration; the checkpoint's path is what its guides tell a user to set."""
    facts = json.loads(json.dumps(STORES[family]["fastertransformer"]))
    facts["name"] = family
    facts["instance_group"] = [{"count": 1, "kind": "KIND_CPU"}]
    facts["parameters"]["model_checkpoint_path"]["string_value"] = str(shards)
    message = json_format.ParseDict(facts, model_config_pb2.ModelConfig())
    (repository / family / "1").mkdir(parents=True)
    (repository / family / "config.pbtxt").write_text(text_format.MessageToString(message))


@pytest.fixture(scope="module")
def endpoint(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    root = tmp_path_factory.mktemp("stores")
    for family, model in models.items():
        ranks = int(STORES[family]["fastertransformer"]["parameters"]["tensor_para_size"]["string_value"])
        write = write_shards if family in ("gpt", INTERACTIVE) else write_family
        shards = write(model, root / family, ranks)
        if family == "gptj":
            prefixes.add_prefixes(shards, family, ranks)
        add_store(root / "model_repo", family, shards)
    deployment = Deployment(root / "model_repo", root / "run")
    yield deployment.wait_until_published()
    deployment.begin_to_stop()


def request_of(prompts: list[list[int]], count: int = COUNT) -> dict[str, np.ndarray]:
    ids = np.zeros((len(prompts), max(map(len, prompts))), np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    column = np.ones((len(prompts), 1))
    return {
        "input_ids": ids,
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], np.uint32),
        "request_output_len": (count * column).astype(np.uint32),
        "runtime_top_k": column.astype(np.uint32),
        "runtime_top_p": (0 * column).astype(np.float32),
        "beam_search_diversity_rate": (0 * column).astype(np.float32),
        "temperature": column.astype(np.float32),
        "len_penalty": column.astype(np.float32),
        "repetition_penalty": column.astype(np.float32),
        "random_seed": (0 * column).astype(np.uint64),
        "is_return_log_probs": column.astype(bool),
        "beam_width": column.astype(np.uint32),
        "bad_words_list": np.array([[[0], [-1]]] * len(prompts), np.int32),
        "stop_words_list": np.array([[[0], [-1]]] * len(prompts), np.int32),
    }


def greedy(model: Any, prompt: list[int], count: int = COUNT) -> tuple[list[int], float]:
    """Transformers' tokens behind the prompt, and the sum of their log-probabilities."""
    rounded, total = model.half().float(), 0.0
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            log_probs = rounded(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
            ids.append(int(log_probs.argmax()))
            total += float(log_probs.max())
    return ids, total


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_published_store_gives_transformers_tokens(
    endpoint: Endpoint, models: dict[str, Any], family: str, protocol: str
) -> None:
    module = triton_grpc if protocol == "grpc" else triton_http
    port = endpoint.grpc_port if protocol == "grpc" else endpoint.http_port
    end = np.full((len(PROMPTS), 1), 2**31 - 1, np.uint32)
    with module.InferenceServerClient(f"{endpoint.host}:{port}") as client:
        answer = infer(client, module, family, request_of(PROMPTS) | {"end_id": end})
    assert answer.as_numpy("output_ids").dtype == np.uint32
    for row, prompt in enumerate(PROMPTS):
        expected, total = greedy(models[family], prompt)
        assert answer.as_numpy("output_ids")[row, 0, : len(expected)].tolist() == expected
        # With top_k 1 FasterTransformer's output_log_probs are 0; cum_log_probs are the model's.
        assert answer.as_numpy("cum_log_probs")[row, 0] == pytest.approx(total, abs=2e-3)


@pytest.mark.clock  # what is late gives way to what is newer
def test_the_published_llama_store_streams_transformers_tokens(endpoint: Endpoint, models: dict[str, Any]) -> None:
    """Its example of config.ini has no layernorm_eps."""
    tensors = request_of(PROMPTS) | {"end_id": np.full((len(PROMPTS), 1), 2**31 - 1, np.uint32)}
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(LLAMA, inputs_of(triton_grpc, tensors))
        for count in range(1, COUNT + 1):
            answer, error = arrived.get(timeout=180)
            assert not error, error
            assert answer.as_numpy("sequence_length")[0, 0] == len(PROMPTS[0]) + count
    for row, prompt in enumerate(PROMPTS):
        expected, total = greedy(models[LLAMA], prompt)
        assert answer.as_numpy("output_ids")[row, 0, : len(expected)].tolist() == expected
        assert answer.as_numpy("cum_log_probs")[row, 0] == pytest.approx(total, abs=2e-3)


def test_the_published_gptj_store_begins_with_its_tasks_prefixes(endpoint: Endpoint, models: dict[str, Any]) -> None:
    model, tasks, column = models["gptj"].half().float(), [0, 2, 1], np.ones((3, 1), np.uint32)
    tensors = request_of(PROMPTS) | {"end_id": prefixes.NEVER * column}
    tensors["prompt_learning_task_name_ids"] = np.array(tasks, np.uint32)[:, None]
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        answer = infer(client, triton_grpc, "gptj", tensors)
    rows = answer.as_numpy("output_ids")[:, 0]
    for row, prompt, task in zip(rows, PROMPTS, tasks, strict=True):
        prefix = prefixes.PREFIXES[task].astype(np.float16).astype(np.float32)
        assert row[len(prompt) :][:COUNT].tolist() == prefixes.greedy(model, prompt, prefix, COUNT)


def test_what_a_store_does_not_declare_is_refused_by_triton(endpoint: Endpoint) -> None:
    tensors = request_of(PROMPTS) | {"presence_penalty": np.zeros((3, 1), np.float32)}
    with (
        triton_grpc.InferenceServerClient(endpoint.grpc_url) as client,
        pytest.raises(Exception, match="unexpected inference input 'presence_penalty' for model 'gptj'"),
    ):
        infer(client, triton_grpc, "gptj", tensors)


def test_the_published_interactive_store_continues_a_conversation(endpoint: Endpoint, models: dict[str, Any]) -> None:
    """Requests as in its ``tools/interactive_text_generation``: [1, batch, n], lengths with the first."""
    model, limit = models[INTERACTIVE], np.full((2, 1), 40, np.uint32)
    first, second = [[1, 2, 3], [4, 5, 6]], [[7, 8], [9, 10]]
    so_far = [greedy(model, prompt, 5)[0] for prompt in first]
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        for prompts, count, extra, place in (
            (first, 5, {"session_len": limit, "memory_len": limit}, {"sequence_start": True}),
            (second, 4, {}, {"sequence_end": True}),
        ):
            tensors = request_of(prompts, count) | extra | {"end_id": np.full((2, 1), 2**31 - 1, np.uint32)}
            answer = infer(
                client, triton_grpc, INTERACTIVE, {k: v[None] for k, v in tensors.items()}, sequence_id=11, **place
            )
            (rows,) = answer.as_numpy("output_ids")
            if prompts is second:
                so_far = [greedy(model, [*row, *more], 4)[0] for row, more in zip(so_far, second, strict=True)]
            assert [row[0].tolist() for row in rows] == so_far


def test_the_published_t5_store_gives_transformers_tokens(endpoint: Endpoint, models: dict[str, Any]) -> None:
    rounded, column = models["t5"].half().float(), np.ones((3, 1))
    given = request_of(PROMPTS)
    tensors = {name: array for name, array in given.items() if name not in ("input_lengths", "request_output_len")}
    tensors |= {"sequence_length": given["input_lengths"], "max_output_len": (COUNT * column).astype(np.uint32)}
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        answer = infer(client, triton_grpc, "t5", tensors)
    assert answer.as_numpy("output_ids").dtype == answer.as_numpy("sequence_length").dtype == np.int32
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        found = rounded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, decoder_start_token_id=0
        )
        expected = found[0, 1:].tolist()  # behind the decoder's start token
        assert answer.as_numpy("output_ids")[row, 0, : len(expected)].tolist() == expected
        assert answer.as_numpy("sequence_length")[row, 0] == len(expected)


def test_the_published_encoder_store_gives_transformers_states(endpoint: Endpoint, models: dict[str, Any]) -> None:
    rounded, given = models["t5-encoder"].half().float(), request_of(PROMPTS)
    rounded.set_attn_implementation("eager")
    tensors = {"input_ids": given["input_ids"], "sequence_length": given["input_lengths"]}
    tensors["is_return_attentions"] = np.ones((3, 1), bool)
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        answer = infer(client, triton_grpc, "t5-encoder", tensors)
    states, attentions = answer.as_numpy("output_hidden_state"), answer.as_numpy("output_attentions")
    for row, prompt in enumerate(PROMPTS):
        length = len(prompt)
        with torch.inference_mode():
            expected = rounded(torch.tensor([prompt]), output_attentions=True)
        np.testing.assert_allclose(states[row, :length], expected.last_hidden_state[0], atol=1e-3)
        theirs = torch.cat(expected.attentions)  # [layers, heads, S, S]
        np.testing.assert_allclose(attentions[row, :, :, :length, :length], theirs, atol=1e-3)
