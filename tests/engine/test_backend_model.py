"""The Triton glue, with Triton's own module replaced by a fake; the real server is for the integration tests.

FakePbUtils stands for ``triton_python_backend_utils``, the outermost boundary: everything below is real.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.rank_processes import rank_environment
from support.servers.fake_pb_utils import FakePbUtils, FakeRequest
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.tiny_models.llama_models import save
from support.tiny_models.low_rank import draw, write
from transformers import GPT2LMHeadModel

from ft_format.socket_messages import (
    DIRECTORY_VARIABLE,
    HANDSHAKE,
    LIST,
    LOAD,
    UNLOAD,
    AdapterWish,
    Frames,
    Kind,
    frame,
    pack,
    socket_name,
    unpack,
)

MODEL_PY = Path(__file__).resolve().parent.parent.parent / "backends" / "fastertransformer" / "model.py"
INPUTS = ["input_ids", "input_lengths", "request_output_len", "runtime_top_k", "beam_width", "is_return_log_probs"]


def ask(ids: list[list[int]], output_len: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    rows = len(ids)
    return {
        "input_ids": np.array(ids, np.uint32),
        "input_lengths": np.full(rows, len(ids[0]), np.uint32),  # [B]: what reshape {shape: []} leaves
        "request_output_len": np.full((rows, 1), output_len, np.uint32),
        **more,
    }


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils("triton_python_backend_utils"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("slipway_backend_model", MODEL_PY)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "fastertransformer"]:
        del sys.modules[name]


def arguments(repository: Path, settings: dict[str, Any] | None = None, **changes: str) -> dict[str, str]:
    parameters = {"tensor_para_size": "2", "data_type": "fp32", "model_checkpoint_path": "2-gpu"}
    parameters |= {"cpu_threads": "1"} | changes
    outputs = {"output_ids": "TYPE_INT32", "sequence_length": "TYPE_UINT32", "cum_log_probs": "TYPE_FP32"}
    config = {
        "max_batch_size": 4,
        "input": [{"name": name} for name in INPUTS],
        "output": [{"name": name, "data_type": data_type} for name, data_type in outputs.items()],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    return {
        "model_config": json.dumps(config | (settings or {})),
        "model_repository": str(repository),
        "model_version": "1",
        "model_name": "fastertransformer",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return random_gpt2()


@pytest.fixture
def serve(backend: Any, gpt2: GPT2LMHeadModel, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes instances, with keys of config.pbtxt and parameters."""
    instances = []

    def make(settings: dict[str, Any] | None = None, **parameters: str) -> Any:
        model = backend.TritonPythonModel()
        model.initialize(arguments(tmp_path, settings, **parameters))
        instances.append(model)
        return model

    write_shards(gpt2, tmp_path / "1", 2)
    yield make
    for model in instances:
        model.finalize()


@pytest.fixture
def instance(serve: Callable[..., Any]) -> Any:
    return serve()


def greedy(gpt2: GPT2LMHeadModel, ids: list[int], count: int) -> list[int]:
    """Hugging Face's greedy tokens, the input's first."""
    row = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(count):
            row = torch.cat((row, gpt2(row).logits[:, -1:].argmax(-1)), dim=1)
    tokens: list[int] = row[0].tolist()
    return tokens


def slow_down(instance: Any, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.02) -> None:
    step = instance._engine._scheduler.step
    monkeypatch.setattr(instance._engine._scheduler, "step", lambda: (time.sleep(pause_s), step()))


def ids_of(response: Any) -> list[list[int]]:
    return [row[0].tolist() for row in response.outputs["output_ids"]]


def test_requests_of_different_lengths_get_hugging_faces_tokens(instance: Any, gpt2: GPT2LMHeadModel) -> None:
    requests = [
        FakeRequest(ask([[1, 2, 3], [4, 5, 6]], 4), ("output_ids", "sequence_length")),
        FakeRequest(ask([[7, 8, 9, 10, 11]], 9)),
        FakeRequest(ask([[7]], 2, is_return_log_probs=np.ones((1, 1), np.bool_)), ("cum_log_probs",)),
    ]
    assert instance.execute(requests) is None  # the answers come through the response senders
    first, second, third = (request.wait() for request in requests)
    assert ids_of(first) == [greedy(gpt2, [1, 2, 3], 4), greedy(gpt2, [4, 5, 6], 4)]
    assert ids_of(second) == [greedy(gpt2, [7, 8, 9, 10, 11], 9)]
    assert [set(response.outputs) for response in (first, second, third)] == [
        {"output_ids", "sequence_length"},
        {"output_ids"},
        {"cum_log_probs"},
    ]
    assert first.outputs["output_ids"].dtype == np.int32  # as the configuration says
    assert [len(request.responses) for request in requests] == [1, 1, 1]


def test_a_request_joins_those_that_are_under_way(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(instance, monkeypatch)
    long, short = FakeRequest(ask([[1, 2, 3]], 30)), FakeRequest(ask([[4]], 2))
    instance.execute([long])
    instance.execute([short])
    short.wait()
    assert not long.is_finished.is_set()
    long.wait()


def test_a_static_batch_is_done_before_the_next_one_enters(serve: Callable[..., Any]) -> None:
    requests = [FakeRequest(ask([[1, 2, 3]], 9)), FakeRequest(ask([[4]], 2))]
    serve(inflight_batching="0").execute(requests)
    assert all(request.is_finished.is_set() for request in requests)


DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


def test_a_decoupled_model_answers_after_every_token(serve: Callable[..., Any], gpt2: GPT2LMHeadModel) -> None:
    request = FakeRequest(ask([[1, 2, 3]], 9), ("output_ids", "sequence_length"))
    serve(DECOUPLED).execute([request])
    request.wait()
    expected = greedy(gpt2, [1, 2, 3], 9)
    texts = [
        response.outputs["output_ids"][0, 0, : int(response.outputs["sequence_length"][0, 0])].tolist()
        for response in request.responses
    ]
    assert texts == [expected[:count] for count in range(4, 13)]
    assert request.ends_empty  # what ends the answers is an answer without content


def test_each_answer_says_behind_how_many_tokens_it_adds_some(serve: Callable[..., Any]) -> None:
    names = ("output_ids", "sequence_length", "text_start")
    request = FakeRequest(ask([[1, 2, 3], [4, 5, 6]], 5), names)
    serve(DECOUPLED).execute([request])
    request.wait()
    spans = [
        [response.outputs[name][:, 0].tolist() for name in ("text_start", "sequence_length")]
        for response in request.responses
    ]
    assert [start for start, _ in spans] == [[3, 3], *(length for _, length in spans[:-1])]


def test_a_request_that_takes_too_long_is_given_up(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = serve(DECOUPLED, request_timeout_s="0.2")
    slow_down(model, monkeypatch)
    request = FakeRequest(ask([[1, 2, 3]], 40))
    model.execute([request])
    error = request.wait().error
    assert (error.code, error.text) == (FakePbUtils.TritonError.CANCELLED, "request_timeout_s is over")


def test_a_client_that_goes_away_ends_the_work_on_its_request(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, gpt2: GPT2LMHeadModel
) -> None:
    model = serve(DECOUPLED)
    slow_down(model, monkeypatch)
    request, other = FakeRequest(ask([[1, 2, 3]], 40)), FakeRequest(ask([[4]], 12))
    model.execute([request, other])
    while len(request.responses) < 3:
        time.sleep(0.001)
    request.is_cancelled = True
    seen = len(request.responses)
    assert request.wait().error.code == FakePbUtils.TritonError.CANCELLED
    assert FakePbUtils.MetricFamily.counts["slipway_request_cancelled"] == 1
    assert len(request.responses) <= seen + 3  # the token under way, one if the answer crossed it, and the end
    assert ids_of(other.wait()) == [greedy(gpt2, [4], 12)]


def test_a_conversation_goes_on_where_its_last_answer_ended(serve: Callable[..., Any], gpt2: GPT2LMHeadModel) -> None:
    """Tensors of a stateful model have one axis more; Triton says which request begins and ends a conversation."""

    def say(ids: list[int], count: int, session: Any, flags: int = 0, **more: np.ndarray) -> Any:
        tensors = ask([ids], count, end_id=np.full(1, 2**31 - 1, np.uint32), **more)
        request = FakeRequest({name: array[None] for name, array in tensors.items()}, session=session, flags=flags)
        model.execute([request])
        return request.wait()

    limits = {name: np.full(1, 40, np.uint32) for name in ("session_len", "memory_len")}
    names = [{"name": name} for name in [*INPUTS, "end_id", "session_len", "memory_len"]]
    batching = {"oldest": {"max_candidate_sequences": 4}, "max_sequence_idle_microseconds": 60_000_000}
    model = serve({"sequence_batching": batching, "input": names})
    first, other = greedy(gpt2, [1, 2, 3], 4), greedy(gpt2, [9], 2)
    assert say([1, 2, 3], 4, 7, 1, **limits).outputs["output_ids"][0].tolist() == [[first]]
    assert say([9], 2, "tea", 1, **limits).outputs["output_ids"][0].tolist() == [[other]]
    assert say([5, 6], 5, 7, 2).outputs["output_ids"][0].tolist() == [[greedy(gpt2, [*first, 5, 6], 5)]]
    assert say([4], 3, "tea").outputs["output_ids"][0].tolist() == [[greedy(gpt2, [*other, 4], 3)]]
    ended = say([5], 1, 7)
    assert "session 7 does not exist" in ended.error.text and ended.error.code == FakePbUtils.TritonError.INVALID_ARG


def test_a_request_that_is_not_valid_fails_alone(instance: Any) -> None:
    good = ask([[1, 2, 3]], 4)
    requests = [
        FakeRequest(good),
        FakeRequest(good | {"beam_width": np.full((1, 1), 65, np.uint32)}),
        FakeRequest(good | {"request_output_len": np.full((1, 1), 4000, np.uint32)}),
        FakeRequest(good),
        FakeRequest({}),
    ]
    instance.execute(requests)
    responses = [request.wait() for request in requests]
    assert [response.error is None for response in responses] == [True, False, False, True, False]
    assert "beam_width" in responses[1].error.text and responses[1].error.code == FakePbUtils.TritonError.INVALID_ARG
    assert "max_pos_seq_len 48" in responses[2].error.text
    assert "missing input" in responses[4].error.text
    assert ids_of(responses[0]) == ids_of(responses[3])


def test_an_exception_in_one_request_fails_that_request_alone(
    instance: Any, monkeypatch: pytest.MonkeyPatch, gpt2: GPT2LMHeadModel
) -> None:
    parse = instance._engine.parse
    monkeypatch.setattr(
        instance._engine, "parse", lambda given: 1 / 0 if given["input_ids"][0, 0] == 9 else parse(given)
    )
    bad, good = FakeRequest(ask([[9]], 1)), FakeRequest(ask([[1]], 3))
    instance.execute([bad, good])
    assert "ZeroDivisionError" in bad.wait().error.text and bad.wait().error.code == FakePbUtils.TritonError.INTERNAL
    assert ids_of(good.wait()) == [greedy(gpt2, [1], 3)]


def test_a_step_that_fails_is_said_to_whom_it_concerns(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(instance._engine._steps.network, "decode", fail)
        request = FakeRequest(ask([[1]], 2))
        instance.execute([request])
        assert "out of memory" in request.wait().error.text
    again = FakeRequest(ask([[1]], 2))
    instance.execute([again])
    assert again.wait().error is None


def test_loading_says_what_runs(instance: Any) -> None:
    assert "fastertransformer: GPT 3 layers" in FakePbUtils.Logger.lines[-1]
    assert "2 shards" in FakePbUtils.Logger.lines[-1] and "fp32 on cpu" in FakePbUtils.Logger.lines[-1]


def test_a_missing_shard_keeps_the_model_from_being_served(backend: Any, tmp_path: Path) -> None:
    shards = write_shards(random_gpt2(), tmp_path / "1", 2)
    (shards / "model.wte.bin").unlink()
    with pytest.raises(FakePbUtils.TritonModelException, match=r"fastertransformer: .*\n  model\.wte\.bin"):
        backend.TritonPythonModel().initialize(arguments(tmp_path))


def test_a_parameter_that_is_not_supported_keeps_the_model_from_being_served(backend: Any, tmp_path: Path) -> None:
    write_shards(random_gpt2(), tmp_path / "1", 2)
    with pytest.raises(FakePbUtils.TritonModelException, match="int8_mode = 2"):
        backend.TritonPythonModel().initialize(arguments(tmp_path, int8_mode="2"))


def test_several_processes_make_up_one_instance(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(random_gpt2(), tmp_path / "1", 2)
    for name, value in rank_environment(0, 4, tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FakePbUtils.TritonModelException, match=r"world_size \(4\) should equal to .* \(2 \* 1 here\)"):
        backend.TritonPythonModel().initialize(arguments(tmp_path))
    given = arguments(tmp_path)
    config = json.loads(given["model_config"]) | {"instance_group": [{"count": 2}]}
    with pytest.raises(FakePbUtils.TritonModelException, match="2 instances"):
        backend.TritonPythonModel().initialize(given | {"model_config": json.dumps(config)})


def test_a_server_started_several_times_by_hand_refuses_a_model_of_several_ranks(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``srun --ntasks=2 tritonserver``: two whole servers would answer on two nodes, and nothing would say so."""
    write_shards(random_gpt2(), tmp_path / "1", 2)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FakePbUtils.TritonModelException, match=r"process 1 of 2 \(SLURM_PROCID.*deployment\.serve"):
        backend.TritonPythonModel().initialize(arguments(tmp_path))
    monkeypatch.setenv("SLIPWAY_RANKS", "alone")
    instance = backend.TritonPythonModel()
    instance.initialize(arguments(tmp_path))
    instance.finalize()


def test_an_instance_that_is_alone_ends_without_more_ado(instance: Any) -> None:
    assert instance.finalize() is None
    assert not instance._engine._thread.is_alive()  # other tests' engines may be
    assert not [thread for thread in threading.enumerate() if thread.name == "replies"]


def test_adapters_come_and_go_through_the_socket(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint alone can reach it; whoever asks through Triton names what is loaded."""
    hub, sockets = tmp_path / "1/huggingface", tmp_path / "s"
    llama = save("llama", hub)
    write(hub / "adapters/first", draw(llama, 0))
    later = write(tmp_path / "later", draw(llama, 1))
    sockets.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(sockets))
    model = backend.TritonPythonModel()
    told = {"tensor_para_size": "1", "model_checkpoint_path": "1/huggingface", "model_type": "Llama"}
    model.initialize(arguments(tmp_path, **told, max_adapters="2"))
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(sockets / socket_name("fastertransformer", "1", "0")))
        asking.settimeout(30)
        assert asking.recv(len(HANDSHAKE)) == HANDSHAKE
        frames = Frames()

        def change(number: int, **wish: str) -> tuple[int, Any]:
            asking.sendall(frame(Kind.ADAPTERS, number, AdapterWish(**wish).pack()))
            while not (found := list(frames.feed(asking.recv(1 << 16)))):
                pass
            assert found[0].number == number
            return found[0].kind, unpack(found[0].body)[0]

        first = {"path": str(hub / "adapters/first"), "rank": 4}
        assert change(1, action=LIST) == (Kind.ADAPTERS, {"adapters": {"first": first}})
        both = {"first": first, "second": {"path": str(later), "rank": 4}}
        assert change(2, action=LOAD, name="second", path=str(later)) == (Kind.ADAPTERS, {"adapters": both})
        kind, failed = change(3, action=LOAD, name="third", path=str(tmp_path / "absent"))
        assert (
            kind == Kind.FAILURE and failed["code"] == "INVALID_ARG" and "no adapter_config.json" in failed["problem"]
        )
        tokens = []
        for name in ("", "first", "second"):
            request = FakeRequest(ask([[5, 6, 7]], 6, lora_name=np.array([[name]], object)))
            model.execute([request])
            tokens.append(request.wait().outputs["output_ids"].tolist())
        assert len({str(each) for each in tokens}) == 3
        assert change(4, action=UNLOAD, name="first")[1]["adapters"].keys() == {"second"}
        request = FakeRequest(ask([[5, 6, 7]], 6, lora_name=np.array([[b"first"]], object)))
        model.execute([request])
        assert "lora_name is 'first' in row 0; it must be one of second" in request.wait().error.text
        asking.sendall(frame(Kind.ADAPTERS, 5, pack({"action": "grow"}, {})))
        assert asking.recv(1) == b""
    model.finalize()
