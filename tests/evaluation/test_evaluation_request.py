"""Request files in FasterTransformer's format, against a fake server that speaks Triton's protocol."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up

from evaluation import request
from evaluation.client.client import Client
from evaluation.client.errors import RequestError, UnreachableError
from evaluation.client.request_tensors import prepare_ids
from evaluation.client.streaming import Turn
from handover.errors import ConfigError

IDS = [
    {"name": "input_ids", "data": [[9915, 27221]], "dtype": "uint32"},
    {"name": "input_lengths", "data": [[2]], "dtype": "uint32"},
    {"name": "request_output_len", "data": [[3]], "dtype": "uint32"},
    {"name": "is_return_log_probs", "data": [[True]], "dtype": "bool"},
]
TEXT = [
    {"name": "INPUT_0", "data": [["Jason Robertson is"], ["é"]], "dtype": "object"},
    {"name": "query", "data": [["as the tokenizer's file has it"]], "dtype": "bytes"},
]


def write(directory: Path, tensors: list[dict[str, Any]], **config: Any) -> str:
    path = directory / "request.json"
    path.write_text(json.dumps({"config": config, "request": tensors}))
    return str(path)


def token_by_token(tensors: Tensors) -> list[Tensors]:
    wanted = int(tensors["request_output_len"].max())
    return [
        count_up({**tensors, "request_output_len": np.full((1, 1), n, np.uint32)}) for n in range(1, wanted + 1)
    ]  # fmt: skip


def test_the_tensors_of_the_answer_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(count_up) as fake:
        request.main([write(tmp_path, IDS, protocol="grpc", url=fake.url)])
    assert capsys.readouterr().out == (
        "output_ids:\n[[[ 9915 27221 27222 27223 27224]]]\n\nsequence_length:\n[[5]]\n\n"
        "cum_log_probs:\n[[-1.5]]\n\noutput_log_probs:\n[[[-0.5 -0.5 -0.5]]]\n\n"
    )
    (sent,) = fake.requests
    assert {name: values.dtype.name for name, values in sent.items()} == {
        "input_ids": "uint32", "input_lengths": "uint32", "request_output_len": "uint32", "is_return_log_probs": "bool",
    }  # fmt: skip


def test_each_answer_of_a_stream_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(token_by_token) as fake:
        request.main([write(tmp_path, IDS, protocol="grpc", stream_api=True), "--url", fake.url])
    blocks = capsys.readouterr().out.split("[After ")[1:]
    assert [block.split("sequence_length:\n")[1].split("\n")[0] for block in blocks] == ["[[3]]", "[[4]]", "[[5]]"]
    assert all("s] Partial result:\noutput_ids:\n[[[ 9915 27221 27222" in block for block in blocks)


def test_text_and_bytes_are_strings_of_triton(tmp_path: Path) -> None:
    with FakeTriton(lambda tensors: {"OUTPUT_0": tensors["INPUT_0"]}) as fake:
        request.main([write(tmp_path, TEXT, protocol="grpc"), "--endpoint", fake.url])
    (sent,) = fake.requests
    assert sent["INPUT_0"].tolist() == [[b"Jason Robertson is"], ["é".encode()]]
    assert sent["query"].tolist() == [[b"as the tokenizer's file has it"]]


def test_parameters_replace_what_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(count_up) as fake:
        other = [*IDS[:2], {"name": "request_output_len", "data": [[1]], "dtype": "uint32"}]
        params = json.dumps({"config": {"url": fake.url, "protocol": "grpc"}, "request": other})
        request.main([write(tmp_path, IDS, url="nowhere:1"), "--params", params])
        request.main(["--params", params])
    assert capsys.readouterr().out == "output_ids:\n[[[ 9915 27221 27222]]]\n\nsequence_length:\n[[3]]\n\n" * 2


@pytest.mark.parametrize("stream_api", [False, True])
def test_a_refusal_carries_the_servers_words(tmp_path: Path, stream_api: bool) -> None:
    def refuse(tensors: Tensors) -> Tensors:
        raise RefusalError("input_lengths is 0 in row 0")

    with FakeTriton(refuse) as fake, pytest.raises(RequestError, match="input_lengths is 0 in row 0"):
        request.main([write(tmp_path, IDS, protocol="grpc", stream_api=stream_api, url=fake.url)])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_server_is_said_so(tmp_path: Path, protocol: str) -> None:
    with pytest.raises(UnreachableError, match="no server answers at 127.0.0.1:9"):
        request.main([write(tmp_path, IDS, protocol=protocol, url="127.0.0.1:9")])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no request file"),
        ("[]", "is no request file"),
        ("{}", "no tensors"),
        ('{"request": [{"name": "a", "data": [1]}]}', "a tensor has no 'dtype'"),
        ('{"request": [{"name": "a", "data": [1], "dtype": "uint33"}]}', "uint33"),
        ('{"request": [{"name": "a", "data": [[1], [1, 2]], "dtype": "uint32"}]}', "is no request file"),
        ('{"config": {"modelname": "x"}, "request": [{"name": "a", "data": [1], "dtype": "uint32"}]}', "'model_name'"),
        ('{"config": {"protocol": "ftp"}, "request": [{"name": "a", "data": [1], "dtype": "uint32"}]}', "http or grpc"),
    ],
)
def test_a_file_without_meaning_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "request.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        request.read_request(path, {})
    assert words in str(refused.value) and (str(path) in str(refused.value))
    with pytest.raises(ConfigError, match=r"there is no request file .*none\.json"):
        request.read_request(tmp_path / "none.json", {})


def test_a_client_asks_a_decoupled_model_over_a_stream() -> None:
    with FakeTriton(token_by_token) as fake, Client(fake.url) as client:
        assert [generation.tokens for generation in client.generate(prepare_ids([[7]], 3))] == [(8, 9, 10)]
        assert [generation.tokens for generation in client.generate(prepare_ids([[7]], 2))] == [(8, 9)]
        assert len(fake.requests) == 3  # it was tried without a stream once


def test_a_turn_of_a_conversation_carries_its_place() -> None:
    with FakeTriton(token_by_token) as fake, Client(fake.url) as client:
        inputs = prepare_ids([[7]], 2).inputs
        for turn in (Turn(5, True, False), Turn("talk", False, True)):
            assert len(list(client.stream("fastertransformer", inputs, turn))) == 2
    names = ("sequence_id", "sequence_start", "sequence_end")
    assert [[parameters[name] for name in names] for parameters in fake.sequences] == [
        [5, True, False],
        ["talk", False, True],
    ]


def test_a_stream_that_takes_too_long_is_ended() -> None:
    def wait(tensors: Tensors) -> list[Tensors]:
        time.sleep(0.5)
        return token_by_token(tensors)

    with (
        FakeTriton(wait) as fake,
        Client(fake.url, timeout_s=0.1) as client,
        pytest.raises(RequestError, match=r"gave no answer within 0\.1 s"),
    ):
        list(client.stream("fastertransformer", prepare_ids([[7]], 2).inputs))
