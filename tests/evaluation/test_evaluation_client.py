"""The client against a fake server that speaks Triton's protocol."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up

from evaluation.client.answer_tensors import Generation
from evaluation.client.client import Client
from evaluation.client.errors import RequestError, UnreachableError
from evaluation.client.request_tensors import Sampling, prepare_ids
from evaluation.client.served_identity import check_identity, find_endpoint
from evaluation.client.served_model import inspect_endpoint
from ft_format.tensors import NO_TOKEN
from handover.endpoint import Endpoint
from handover.errors import ServerError
from handover.manifest import Manifest, record_files


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_rows_of_different_length_and_output_length_come_back_apart() -> None:
    with FakeTriton(count_up) as fake, Client(fake.url) as client:
        generations = client.generate(prepare_ids([[5], [1, 2, 3]], [2, 1], context_log_probs=True))
    assert generations == [Generation((6, 7), -1.0, (-0.5, -0.5)), Generation((4,), -1.5, (-0.5,))]


def test_a_busy_server_has_a_minute_to_say_what_it_serves() -> None:
    with FakeTriton(count_up) as fake, Client(fake.url) as client:
        client.describe("fastertransformer")
    assert 30 < min(fake.patience_s) < 61  # the server counts from its own clock


def test_a_request_has_the_names_shapes_and_types_of_the_gpt_guide() -> None:
    with FakeTriton(count_up) as fake, Client(fake.url) as client:
        sampling = Sampling(top_k=4, top_p=0.5, temperature=0.7, repetition_penalty=1.2, random_seed=9)
        client.generate(prepare_ids([[5], [1, 2, 3]], 2, sampling=sampling, end_id=NO_TOKEN, context_log_probs=True))
    (tensors,) = fake.requests
    assert tensors["input_ids"].tolist() == [[5, 0, 0], [1, 2, 3]]
    types = {name: values.dtype.name for name, values in tensors.items()}
    assert types == {
        "input_ids": "uint32",
        "input_lengths": "uint32",
        "request_output_len": "uint32",
        "runtime_top_k": "uint32",
        "runtime_top_p": "float32",
        "temperature": "float32",
        "repetition_penalty": "float32",
        "random_seed": "uint64",
        "end_id": "uint32",
        "is_return_log_probs": "bool",
        "is_return_context_cum_log_probs": "bool",
    }
    assert all(values.shape == (2, 1) for name, values in tensors.items() if name != "input_ids")
    assert tensors["random_seed"].tolist() == [[9], [10]]
    assert tensors["runtime_top_k"].tolist() == [[4], [4]]


def test_each_token_of_a_prompt_can_be_scored() -> None:
    def with_scores(tensors: Tensors) -> Tensors:
        scores = np.array([[0, -0.5, 9], [0, -0.25, -0.125]], np.float32)  # 9: padding that must not be read
        return {**count_up(tensors), "context_log_probs": scores, "context_argmax_ids": np.ones((2, 3), np.uint32)}

    with FakeTriton(with_scores) as fake, Client(fake.url) as client:
        generations = client.generate(prepare_ids([[5, 6], [1, 2, 3]], 1, prompt_log_probs=True))
    assert fake.requests[0]["is_return_context_log_probs"].tolist() == [[True], [True]]
    assert [generation.prompt_log_probs for generation in generations] == [(-0.5,), (-0.25, -0.125)]
    assert [generation.prompt_argmax for generation in generations] == [(1,), (1, 1)]


def test_sequence_lengths_counted_from_the_longest_input_are_understood() -> None:
    def as_fastertransformer(tensors: Tensors) -> Tensors:
        outputs = count_up(tensors)
        longest = tensors["input_lengths"].max()
        return {**outputs, "sequence_length": longest + tensors["request_output_len"]}

    with FakeTriton(as_fastertransformer) as fake, Client(fake.url) as client:
        generations = client.generate(prepare_ids([[5], [1, 2, 3]], 2))
    assert [generation.tokens for generation in generations] == [(6, 7), (4, 5)]


def test_an_answer_that_does_not_continue_its_prompt_is_refused() -> None:
    def garble(tensors: Tensors) -> Tensors:
        outputs = count_up(tensors)
        return {**outputs, "output_ids": outputs["output_ids"] + np.uint32(1)}

    with (
        FakeTriton(garble) as fake,
        Client(fake.url) as client,
        pytest.raises(ServerError, match="row 0"),
    ):
        client.generate(prepare_ids([[5]], 2))


def test_text_goes_through_the_ensemble_with_its_four_inputs() -> None:
    def complete(tensors: Tensors) -> Tensors:
        return {"OUTPUT_0": np.array([text + b" you." for (text,) in tensors["INPUT_0"]], dtype=np.object_)}

    with FakeTriton(complete, inputs=("INPUT_0",)) as fake, Client(fake.url) as client:
        assert client.generate_text(["Danke, é"], 4) == ["Danke, é you."]
    assert fake.requests[0]["INPUT_1"].tolist() == [[4]]
    assert {"INPUT_2", "INPUT_3"} <= set(fake.requests[0])


def test_a_refused_request_carries_the_servers_words() -> None:
    def refuse(tensors: Tensors) -> Tensors:
        raise RefusalError("beam_width 4 is not honoured")

    with (
        FakeTriton(refuse) as fake,
        Client(fake.url) as client,
        pytest.raises(RequestError, match="beam_width 4 is not honoured"),
    ):
        client.generate(prepare_ids([[1]], 1))
    assert len(fake.requests) == 1, "an answer must not be retried"


def test_infrastructure_errors_are_retried() -> None:
    with FakeTriton(count_up) as fake, Client(fake.url, retries=2) as client:
        fake.unavailable = 2
        assert client.generate(prepare_ids([[1]], 1))[0].tokens == (2,)


def test_a_server_that_stays_unavailable_is_a_failed_request() -> None:
    with FakeTriton(count_up) as fake, Client(fake.url, retries=1) as client:
        fake.unavailable = 2
        with pytest.raises(RequestError, match="not ready"):
            client.generate(prepare_ids([[1]], 1))


def test_an_unreachable_server_is_one_clear_error() -> None:
    port = free_port()
    with Client(f"127.0.0.1:{port}", retries=1) as client, pytest.raises(UnreachableError) as raised:
        client.generate(prepare_ids([[1]], 1))
    assert f"no server answers at 127.0.0.1:{port}" in raised.value.problem
    assert "--endpoint" in raised.value.hint


def test_a_request_that_takes_too_long_is_given_up() -> None:
    def sleep(tensors: Tensors) -> Tensors:
        time.sleep(1.0)
        return count_up(tensors)

    with (
        FakeTriton(sleep) as fake,
        Client(fake.url, timeout_s=0.2) as client,
        pytest.raises(RequestError, match="no answer within 0.2 s"),
    ):
        client.generate(prepare_ids([[1]], 1))


def test_the_newest_endpoint_below_the_results_is_the_default(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        Endpoint(host="127.0.0.1", grpc_port=1000 + number).write(tmp_path / name / "endpoint.json")
    later = time.time() + 60
    os.utime(tmp_path / "new" / "endpoint.json", (later, later))
    assert find_endpoint(None, tmp_path).grpc_url == "127.0.0.1:1001"
    assert find_endpoint(None, tmp_path / "none").grpc_url == "localhost:8001"
    assert find_endpoint("host:9").grpc_url == "host:9"
    with pytest.raises(ServerError, match="no deployment"):
        find_endpoint(tmp_path / "missing.json")


def repository(root: Path, content: str) -> Path:
    checkpoint = root / "fastertransformer" / "1" / "2-gpu"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.ini").write_text(f"[gpt]\nvocab_size = 50304\nmax_pos_seq_len = 1024\n; {content}\n")
    Manifest("model_repository", record_files(root)).write(root)
    return root


def test_dimensions_come_from_the_served_repository(tmp_path: Path) -> None:
    root = repository(tmp_path, "a")
    served = inspect_endpoint(Endpoint("h", model_repository=str(root), settings={"tensor_para_size": "2"}))
    assert served.directory == root / "fastertransformer" / "1" / "2-gpu"
    assert (served.vocab_size, served.max_positions) == (50304, 1024)


def test_dimensions_of_a_foreign_server_come_from_its_checkpoint_path(tmp_path: Path) -> None:
    directory = repository(tmp_path, "a") / "fastertransformer" / "1" / "2-gpu"
    assert inspect_endpoint(Endpoint("h"), {"model_checkpoint_path": str(directory)}).vocab_size == 50304
    assert inspect_endpoint(Endpoint("h")).vocab_size is None


def test_another_model_than_the_one_asked_for_is_refused(tmp_path: Path) -> None:
    root = repository(tmp_path, "a")
    digest = Manifest.read(root).digest
    endpoint = Endpoint("h", model_repository=str(root), model_digest=digest)
    check_identity(endpoint, None)
    check_identity(endpoint, digest)
    with pytest.raises(ServerError, match="not sha256:other"):
        check_identity(endpoint, "sha256:other")
    repository(tmp_path, "b")
    with pytest.raises(ServerError, match="now holds"):
        check_identity(endpoint, None)
