"""A decoupled store behind the real tritonserver: token by token, directly, through the ensemble, and given up."""

from __future__ import annotations

import json
import queue
import re
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from pytriton.client import DecoupledModelClient
from support.servers.served import infer, inputs_of
from transformers import GPT2Tokenizer

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings
from evaluation import generate, request
from evaluation.client.client import Client
from evaluation.client.request_tensors import prepare_ids
from handover.endpoint import Endpoint

PROMPT, IDS, COUNT = "the world", [5, 6, 7], 20
NEVER = 2**31 - 1


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    """Input and output of IDS by our engine in process."""
    engine = open_engine(Settings(checkpoint, 1, 1, "fp32"))
    (answer,) = engine.generate([engine.parse(ids_request())])
    engine.close()
    row: list[int] = answer["output_ids"][0, 0].tolist()
    return row


def ids_request(count: int = COUNT) -> dict[str, np.ndarray]:
    column = np.ones((1, 1), np.uint32)
    return {
        "input_ids": np.array([IDS], np.uint32),
        "input_lengths": column * len(IDS),
        "request_output_len": column * count,
        "end_id": column * NEVER,
    }


def text_request(count: int = COUNT) -> dict[str, np.ndarray]:
    column = np.ones((1, 1), np.uint32)
    return {
        "INPUT_0": np.array([[PROMPT]], dtype=object),
        "INPUT_1": column * count,
        "end_id": column * NEVER,
    }


def stream(url: str, model: str, tensors: dict[str, np.ndarray], stop_after: int = 0) -> list[tuple[Any, bool]]:
    """All answers that have content, with their final flags; with stop_after, cancel after that many.

    What ends the engine's answers has none; the ensemble passes that on, or marks its last one.
    """
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    answers: list[tuple[Any, bool]] = []
    with triton_grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, inputs_of(triton_grpc, tensors), enable_empty_final_response=True)
        while not (answers and answers[-1][1]) and (not stop_after or len(answers) < stop_after):
            result, error = arrived.get(timeout=180)
            assert error is None
            answers.append((result, result.get_response().parameters["triton_final_response"].bool_param))
        client.stop_stream(cancel_requests=bool(stop_after))
    if not stop_after:
        assert [is_final for _, is_final in answers] == [False] * (len(answers) - 1) + [True]
        has_content = bool(answers[-1][0].get_response().outputs)
        assert not has_content or model == "ensemble"
        answers = answers if has_content else answers[:-1]
    return answers


def cancelled_requests(triton: Endpoint) -> int:
    with urlopen(f"http://127.0.0.1:{triton.metrics_port}/metrics", timeout=180) as metrics:
        lines = metrics.read().decode()
    pattern = r'slipway_request_cancelled{model="fastertransformer",version="1"} (\d+)'
    found = re.search(pattern, lines)
    assert found, lines
    return int(found.group(1))


@pytest.mark.clock  # what is late gives way to what is newer
@pytest.mark.parametrize("model", ["fastertransformer", "gpt"])
def test_every_token_is_an_answer_and_an_empty_one_ends_them(triton: Endpoint, expected: list[int], model: str) -> None:
    answers = stream(triton.grpc_url, model, ids_request())
    lengths = [int(answer.as_numpy("sequence_length")[0, 0]) for answer, _ in answers]
    assert lengths == list(range(len(IDS) + 1, len(IDS) + COUNT + 1))
    for (answer, _), length in zip(answers, lengths, strict=True):
        assert answer.as_numpy("output_ids")[0, 0, :length].tolist() == expected[:length]


@pytest.mark.clock  # what is late gives way to what is newer
def test_every_answer_of_a_stream_holds_the_scores_of_its_tokens(triton: Endpoint) -> None:
    wanted = {"num_top_log_probs": np.full((1, 1), 3, np.uint32)}
    answers = [answer for answer, _ in stream(triton.grpc_url, "fastertransformer", ids_request(6) | wanted)]
    tops, raw = ([answer.as_numpy(f"output_{name}") for answer in answers] for name in ("top_ids", "raw_log_probs"))
    assert [each.shape for each in tops] == [(1, 1, count, 3) for count in range(1, 7)]
    for count, answer in enumerate(answers):  # greedy: each token is the most probable one
        tokens = answer.as_numpy("output_ids")[0, 0, len(IDS) : len(IDS) + count + 1]
        np.testing.assert_array_equal(tops[count][0, 0, :, 0], tokens)
        np.testing.assert_array_equal(raw[count], raw[-1][:, :, : count + 1])
    assert [int(answer.as_numpy("finish_reason")[0, 0]) for answer in answers] == [0] * 5 + [3]


def test_the_ensemble_gives_the_text_so_far(triton: Endpoint, checkpoint: Path, tokenizer: GPT2Tokenizer) -> None:
    answers = stream(triton.grpc_url, "ensemble", text_request())
    assert 1 < len(answers) <= COUNT
    texts = [answer.as_numpy("OUTPUT_0")[0].decode() for answer, _ in answers]
    assert all(longer.startswith(shorter) for shorter, longer in zip([PROMPT, *texts], texts, strict=False))
    ids = tokenizer.encode(PROMPT)
    engine = open_engine(Settings(checkpoint, 1, 1, "fp32"))
    tensors = ids_request() | {"input_ids": np.array([ids], np.uint32), "input_lengths": np.array([[len(ids)]], "u4")}
    (answer,) = engine.generate([engine.parse(tensors)])
    engine.close()
    whole = tokenizer.decode(answer["output_ids"][0, 0].tolist(), clean_up_tokenization_spaces=False)
    assert texts[-1] == whole.rstrip("\ufffd")  # bytes of a character that is not complete are held back
    deltas = [answer.as_numpy("OUTPUT_DELTA")[0].decode() for answer, _ in answers]
    assert PROMPT + "".join(deltas) == texts[-1] and max(map(len, deltas)) < len(texts[-1]) // 2


def test_pytritons_client_gets_every_answer(triton: Endpoint, expected: list[int]) -> None:
    with DecoupledModelClient(f"grpc://{triton.grpc_url}", "fastertransformer") as client:
        tensors = {name: array[0] for name, array in ids_request().items()}
        lengths = [int(answer["sequence_length"].max()) for answer in client.infer_sample(**tensors)]
    assert lengths == sorted({*lengths}) and len(lengths) > 1 and lengths[-1] == len(IDS) + COUNT


@pytest.mark.clock  # what is late gives way to what is newer
def test_generate_stream_sends_one_event_a_token(triton: Endpoint) -> None:
    for model, body in (
        ("ensemble", {"INPUT_0": PROMPT, "INPUT_1": 5}),
        ("fastertransformer", {"input_ids": IDS, "input_lengths": 3, "request_output_len": 5}),
    ):
        url = f"http://127.0.0.1:{triton.http_port}/v2/models/{model}/generate_stream"
        with urlopen(Request(url, json.dumps(body).encode()), timeout=180) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        assert len(events) == 5
        lengths = [event["sequence_length"] for event in events]
        assert lengths == list(range(lengths[0], lengths[0] + 5))


def test_a_cancelled_stream_ends_the_work(triton: Endpoint) -> None:
    before = cancelled_requests(triton)
    deadline = time.monotonic() + 240
    while cancelled_requests(triton) == before:  # on a busy machine many have had their last token before
        assert time.monotonic() < deadline
        stream(triton.grpc_url, "fastertransformer", ids_request(28), stop_after=2)
        time.sleep(0.05)
    (*_, (last, _)) = stream(triton.grpc_url, "fastertransformer", ids_request())
    assert last.as_numpy("sequence_length")[0, 0] == len(IDS) + COUNT


def test_a_refusal_ends_its_stream_alone(triton: Endpoint) -> None:
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    too_long = ids_request(1000)
    with triton_grpc.InferenceServerClient(triton.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        for tensors in (too_long, ids_request(1)):
            client.async_stream_infer("fastertransformer", inputs_of(triton_grpc, tensors))
        found = [arrived.get(timeout=180) for _ in range(2)]
        client.stop_stream()
    assert sorted(str(error) for _, error in found if error) and sum(error is None for _, error in found) == 1
    assert any("max_pos_seq_len" in str(error) for _, error in found)


def test_unary_requests_are_refused_by_triton_itself(triton: Endpoint) -> None:
    with (
        triton_grpc.InferenceServerClient(triton.grpc_url) as client,
        pytest.raises(Exception, match="decoupled transaction policy"),
    ):
        infer(client, triton_grpc, "ensemble", text_request())


def test_our_clients_ask_a_decoupled_store(
    triton: Endpoint, expected: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(triton.grpc_url) as client:
        for model in ("fastertransformer", "gpt"):
            (generation,) = client.generate(prepare_ids([IDS], COUNT, end_id=NEVER), model)
            assert [*IDS, *generation.tokens] == expected
    generate.main(["--stream", "--prompts", PROMPT, "--output-len", "6", "--endpoint", triton.grpc_url])
    streamed = capsys.readouterr().out
    generate.main(["--prompts", PROMPT, "--output-len", "6", "--endpoint", triton.grpc_url])
    assert capsys.readouterr().out == streamed and len(streamed) > len(f"> {PROMPT}\n\n")
    tensors = [{"name": t.name(), "data": [[1]], "dtype": "uint32"} for t in prepare_ids([[1]], 1).inputs[:3]]
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"config": {"stream_api": True}, "request": tensors}))
    request.main([str(path), "--url", triton.grpc_url])
    assert capsys.readouterr().out.count("Partial result:\noutput_ids:") == 1
