"""The real tritonserver on a converted checkpoint: over HTTP and gRPC, moved, broken, killed."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import sentencepiece
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from support.engines.generated_texts import generated_ids, generated_texts
from support.servers.served import Deployment, deaths_by_signal, generate, infer, inputs_of, shared_memory, wait_for
from tritonclient.utils import InferenceServerException

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.endpoint import Endpoint

DATA = Path(__file__).resolve().parents[1] / "data"
NAME = "my \"model\"; touch 'x'"
PROMPTS = ["the world", "a", "where the river is wide and", "x y z"]
OUTPUT_LEN = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("convert") / "1-gpu"
    convert(ConvertArguments(DATA / "nemo" / "gpt122_tp1_pp1.nemo", output, 1, "fp32"))
    return output


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("export") / "model_repo"
    build_repository(ExportArguments(checkpoint, output, NAME, 1, 1, "fp32", 0, 0, max_batch_size=32))
    return output


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    """A copy of its own, moved to where a shell would stumble: Triton starts stubs through ``bash -c``."""
    return Path(shutil.copytree(exported, tmp_path / "moved \"repo'; touch injected;"))


@pytest.fixture(scope="module")
def deployment(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    running = Deployment(exported, tmp_path_factory.mktemp("deployment"))
    running.wait_until_published()
    yield running
    running.begin_to_stop()


@pytest.fixture(scope="module")
def endpoint(deployment: Deployment) -> Endpoint:
    return Endpoint.read(deployment.endpoint_file)


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as grpc_client:
        yield grpc_client


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[str]:
    return generated_texts(checkpoint, PROMPTS, OUTPUT_LEN)


def text_request(prompts: list[str], output_len: int = OUTPUT_LEN) -> dict[str, np.ndarray]:
    return {
        "INPUT_0": np.array([[prompt] for prompt in prompts], dtype=object),
        "INPUT_1": np.full((len(prompts), 1), output_len, np.uint32),
    }


def texts_of(result: Any) -> list[str]:
    return [text.decode() for text in result.as_numpy("OUTPUT_0")]


def test_text_over_grpc_is_what_the_engine_generates(client: object, expected: list[str]) -> None:
    assert texts_of(infer(client, triton_grpc, "ensemble", text_request(PROMPTS))) == expected
    one_by_one = [infer(client, triton_grpc, "ensemble", text_request([prompt])) for prompt in PROMPTS]
    assert [texts_of(result)[0] for result in one_by_one] == expected


def test_text_over_http_is_the_same(endpoint: Endpoint, expected: list[str]) -> None:
    with triton_http.InferenceServerClient(f"{endpoint.host}:{endpoint.http_port}") as http_client:
        assert texts_of(infer(http_client, triton_http, "ensemble", text_request(PROMPTS))) == expected


def test_text_over_plain_http_json_is_the_same(endpoint: Endpoint, expected: list[str]) -> None:
    body = {
        "inputs": [
            {"name": "INPUT_0", "shape": [1, 1], "datatype": "BYTES", "data": [PROMPTS[0]]},
            {"name": "INPUT_1", "shape": [1, 1], "datatype": "UINT32", "data": [OUTPUT_LEN]},
        ]
    }
    url = f"http://{endpoint.host}:{endpoint.http_port}/v2/models/ensemble/infer"
    with urlopen(Request(url, json.dumps(body).encode()), timeout=180) as answer:
        outputs = {output["name"]: output["data"] for output in json.load(answer)["outputs"]}
    assert outputs["OUTPUT_0"] == [expected[0]]


def test_the_next_token_is_the_argmax_of_nemos_logits(client: object) -> None:
    ids = np.load(DATA / "nemo" / "gpt122_tp1_pp1.input_ids.npy").astype(np.uint32)
    logits = np.load(DATA / "nemo" / "gpt122_tp1_pp1.logits.npy")
    tensors = {
        "input_ids": ids,
        "input_lengths": np.full((len(ids), 1), ids.shape[1], np.uint32),
        "request_output_len": np.ones((len(ids), 1), np.uint32),
        "is_return_log_probs": np.ones((len(ids), 1), bool),
    }
    last = logits[:, -1].astype(np.float64)
    log_probs = last.max(-1) - np.log(np.exp(last).sum(-1))
    for model in ("fastertransformer", NAME):
        result = infer(client, triton_grpc, model, tensors)
        output = result.as_numpy("output_ids")
        assert output[:, 0, :-1].tolist() == ids.tolist()
        assert output[:, 0, -1].tolist() == last.argmax(-1).tolist()
        np.testing.assert_allclose(result.as_numpy("cum_log_probs")[:, 0], log_probs, atol=1e-4)


def test_every_input_that_published_clients_send_is_accepted(client: object, expected: list[str]) -> None:
    ones = np.ones((len(PROMPTS), 1))
    neutral = {
        "INPUT_2": np.array([[""]] * len(PROMPTS), dtype=object),
        "INPUT_3": np.array([[""]] * len(PROMPTS), dtype=object),
        "runtime_top_k": ones.astype(np.uint32),
        "runtime_top_p": 0 * ones.astype(np.float32),
        "beam_search_diversity_rate": 0 * ones.astype(np.float32),
        "temperature": ones.astype(np.float32),
        "len_penalty": ones.astype(np.float32),
        "repetition_penalty": ones.astype(np.float32),
        "random_seed": 0 * ones.astype(np.uint64),
        "is_return_log_probs": ones.astype(bool),
        "beam_width": ones.astype(np.uint32),
        "start_id": 0 * ones.astype(np.uint32),
        "end_id": 0 * ones.astype(np.uint32),
    }
    result = infer(client, triton_grpc, "ensemble", {**text_request(PROMPTS), **neutral})
    assert texts_of(result) == expected
    assert result.as_numpy("output_log_probs").shape == (len(PROMPTS), 1, OUTPUT_LEN)
    assert (result.as_numpy("cum_log_probs") < 0).all()


def test_an_empty_prompt_continues_the_start_token(client: object) -> None:
    result = infer(client, triton_grpc, "ensemble", text_request([""], output_len=3))
    assert result.as_numpy("sequence_length").tolist() == [[4]]


def test_a_request_of_another_shape_gets_an_error_of_its_own(client: object) -> None:
    wrong = {"INPUT_0": np.array([["a", "b"]], dtype=object), "INPUT_1": np.array([[1]], np.uint32)}
    with pytest.raises(Exception, match=r"QUERY must have the shape \[batch, 1\]"):
        infer(client, triton_grpc, "ensemble", wrong)
    assert texts_of(infer(client, triton_grpc, "ensemble", text_request(["a"], 1)))


def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenized(client: object, expected: list[str]) -> None:
    with pytest.raises(Exception, match=r"QUERY of row 0 has 10000000 bytes; at most \d+ are read"):
        infer(client, triton_grpc, "ensemble", text_request(["x" * 10_000_000]))
    with pytest.raises(Exception, match="QUERY of row 0 is not UTF-8: byte 0xff at 0"):
        infer(client, triton_grpc, "ensemble", text_request([b"\xff"]))
    assert texts_of(infer(client, triton_grpc, "ensemble", text_request(PROMPTS))) == expected


def test_penalties_and_lengths_reach_the_engine_through_every_door(client: object, endpoint: Endpoint) -> None:
    spoilt = {"min_length": np.array([[-1]], np.int32), "presence_penalty": np.array([[np.nan]], np.float32)}
    for name, tensor in spoilt.items():
        with pytest.raises(Exception, match=f"{name} is (-1|nan) in row 0"):
            infer(client, triton_grpc, "ensemble", text_request(PROMPTS[:1], 3) | {name: tensor})
    body = {"INPUT_0": PROMPTS[0], "INPUT_1": 3, "min_length": -1}
    url = f"http://127.0.0.1:{endpoint.http_port}/v2/models/ensemble/generate"
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(url, json.dumps(body).encode()), timeout=180)
    assert "min_length is -1" in refused.value.read().decode()


def test_what_the_openai_api_needs_reaches_the_engine_through_every_door(client: object, endpoint: Endpoint) -> None:
    """Raw and most probable tokens against NeMo's logits; a bias, stop tokens and finish reasons by what they mean."""
    ids = np.load(DATA / "nemo" / "gpt122_tp1_pp1.input_ids.npy").astype(np.uint32)
    logits = torch.from_numpy(np.load(DATA / "nemo" / "gpt122_tp1_pp1.logits.npy")).double().log_softmax(-1)
    ones = np.ones((len(ids), 1), np.uint32)
    tensors = {"input_ids": ids, "input_lengths": ones * ids.shape[1], "request_output_len": ones * 3}
    tensors |= {"end_id": ones * (2**31 - 1), "num_top_log_probs": ones * 5, "num_context_top_log_probs": ones * 2}
    forced = np.repeat(np.array([[7, -1]], np.int32), len(ids), 0)
    bias = {"logit_bias_ids": forced, "logit_bias_values": np.repeat(np.array([[1e4, 0]], np.float32), len(ids), 0)}
    for model in ("fastertransformer", NAME):
        answer = infer(client, triton_grpc, model, tensors)
        best = logits.topk(5, dim=-1)
        for name, wanted in (("output_top_log_probs", best.values[:, -1]), ("output_top_ids", best.indices[:, -1])):
            np.testing.assert_allclose(answer.as_numpy(name)[:, 0, 0], wanted, atol=1e-4)
        np.testing.assert_allclose(answer.as_numpy("output_raw_log_probs")[:, 0, 0], best.values[:, -1, 0], atol=1e-4)
        np.testing.assert_allclose(answer.as_numpy("context_top_log_probs")[:, 1:], best.values[:, :-1, :2], atol=1e-4)
        assert answer.as_numpy("finish_reason").tolist() == [[3]] * len(ids)
        answer = infer(client, triton_grpc, model, tensors | bias)
        assert (answer.as_numpy("output_ids")[:, 0, -3:] == 7).all()
        answer = infer(client, triton_grpc, model, tensors | bias | {"stop_token_ids": forced})
        assert answer.as_numpy("finish_reason").tolist() == [[1]] * len(ids)
        assert (answer.as_numpy("sequence_length") == ids.shape[1] + 1).all()
    with pytest.raises(Exception, match=r"min_p is 2.0 in row 0; it must be a number from 0 to 1"):
        infer(client, triton_grpc, NAME, tensors | {"min_p": 2 * ones.astype(np.float32)})
    body = {"INPUT_0": PROMPTS[0], "INPUT_1": 3, "num_top_log_probs": 2, "is_return_raw_log_probs": True}
    url = f"http://{endpoint.host}:{endpoint.http_port}/v2/models/ensemble/generate"
    with urlopen(Request(url, json.dumps(body).encode()), timeout=180) as reply:
        outputs = json.load(reply)
    assert len(outputs["output_top_ids"]) == 2 * len(outputs["output_raw_log_probs"]) and outputs["finish_reason"] in (
        1,
        3,
    )


def test_concurrent_requests_are_answered_each_by_itself(endpoint: Endpoint, expected: list[str]) -> None:
    repeated = PROMPTS * 6
    with ThreadPoolExecutor(len(repeated)) as pool:
        assert list(pool.map(lambda prompt: generate(endpoint, prompt, OUTPUT_LEN), repeated)) == expected * 6


@pytest.mark.clock
def test_a_short_request_does_not_wait_for_a_long_one(client: triton_grpc.InferenceServerClient) -> None:
    def ask(rows: int, count: int) -> list[triton_grpc.InferInput]:
        never = np.full((rows, 1), 2**31 - 1, np.uint32)
        tensors = {
            "input_ids": np.full((rows, 1), 5, np.uint32),
            "input_lengths": np.ones((rows, 1), np.uint32),
            "request_output_len": np.full((rows, 1), count, np.uint32),
            "end_id": never,
        }
        return inputs_of(triton_grpc, tensors)

    def ask_both() -> list[tuple[str, object]]:
        ended: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        client.async_infer("fastertransformer", ask(8, 31), lambda result, error: ended.put(("long", error)))
        client.async_infer("fastertransformer", ask(1, 1), lambda result, error: ended.put(("short", error)))
        return [ended.get(timeout=180) for _ in range(2)]

    # On a busy host a short one may come when the long one, of 30 ms, is done.
    assert any(ask_both() == [("short", None), ("long", None)] for _ in range(10))


def test_the_endpoint_file_says_what_is_served(deployment: Deployment, endpoint: Endpoint, exported: Path) -> None:
    assert endpoint.pid == deployment.process.pid
    assert (endpoint.host, endpoint.engine) == ("127.0.0.1", "slipway")
    assert endpoint.model_repository == str(exported)
    assert endpoint.model_digest == json.loads((exported / "manifest.json").read_text())["digest"]
    assert endpoint.settings["data_type"] == endpoint.settings["weight_data_type"] == "fp32"
    assert "enable_custom_all_reduce=0" in endpoint.settings["flags"].split()
    with urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/metrics", timeout=180) as metrics:
        assert b"nv_inference_request_success" in metrics.read()


def test_the_server_listens_on_loopback_only(endpoint: Endpoint) -> None:
    ports = {endpoint.http_port, endpoint.grpc_port, endpoint.metrics_port}
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(port, 16) in ports:
                listening[int(port, 16)] = address
    assert listening.keys() == ports
    # 127.0.0.1 in the kernel's byte order, also as IPv4 mapped into IPv6
    assert set(listening.values()) <= {"0100007F", "0000000000000000FFFF00000100007F"}


CLOSED = [
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/evil/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/fastertransformer/unload"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/models/fastertransformer/trace/setting"),
]
OPEN = [
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/ensemble", "/v2/models/ensemble/ready"),
    *("/v2/models/ensemble/config", "/v2/models/ensemble/stats", "/v2/models/stats"),
]


def http_status(endpoint: Endpoint, method: str, path: str, header: dict[str, str] | None = None) -> int:
    url = f"http://127.0.0.1:{endpoint.http_port}{path}"
    try:
        with urlopen(
            Request(url, b"{}" if method == "POST" else None, header or {}, method=method), timeout=180
        ) as got:
            return int(got.status)
    except HTTPError as error:
        return error.code


def test_apis_that_a_client_need_not_have_are_closed(deployment: Deployment, endpoint: Endpoint) -> None:
    assert {path: http_status(endpoint, method, path) for method, path in CLOSED} == {path: 403 for _, path in CLOSED}
    assert {path: http_status(endpoint, "GET", path) for path in OPEN} == dict.fromkeys(OPEN, 200)
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        for refused in (
            client.get_system_shared_memory_status,
            client.get_cuda_shared_memory_status,
            client.get_model_repository_index,
            client.get_log_settings,
            client.get_trace_settings,
            lambda: client.register_system_shared_memory("evil", "/x", 8),
            lambda: client.unload_model("fastertransformer"),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                refused()
        assert client.is_model_ready("fastertransformer") and client.get_inference_statistics()


def test_the_header_beside_the_endpoint_file_opens_them_to_its_owner(
    deployment: Deployment, endpoint: Endpoint
) -> None:
    file = deployment.directory / "endpoint.header"
    assert file.stat().st_mode & 0o777 == 0o600
    name, _, secret = file.read_text().strip().partition(": ")
    assert http_status(endpoint, "POST", "/v2/repository/index", {name: secret}) == 200
    assert http_status(endpoint, "POST", "/v2/repository/index", {name: "x" * len(secret)}) == 403
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        assert client.get_log_settings(headers={f"triton-grpc-protocol-{name}": secret})
    shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    shown += [path.read_bytes() for path in deployment.directory.iterdir() if path != file and path.is_file()]
    assert not any(secret.encode() in text for text in shown)


def test_a_port_in_use_is_refused(endpoint: Endpoint, repository: Path, tmp_path: Path) -> None:
    second = Deployment(repository, tmp_path / "run", http_port=endpoint.http_port)
    assert second.process.wait(240) == 1
    assert f"port {endpoint.http_port} on 127.0.0.1 cannot be used for http" in second.text
    assert "Traceback" not in second.text


def test_a_second_deployment_with_the_same_endpoint_file_is_refused(deployment: Deployment, repository: Path) -> None:
    second = Deployment(repository, deployment.directory)
    assert second.process.wait(240) == 1
    assert f"running already, pid {deployment.process.pid}" in second.text
    assert deployment.endpoint_file.exists()


def rewrite_checkpoint_path(repository: Path, path: str) -> None:
    config = repository / "fastertransformer" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "1/1-gpu"', f'string_value: "{path}"'))


def nothing_is_left(deployment: Deployment, before: set[str]) -> bool:
    return not (
        deployment.processes
        or [name for name in shared_memory() - before if name.startswith(deployment.prefix)]
        or deployment.private.exists()
        or deployment.endpoint_file.exists()
        or list(deployment.directory.glob(".*.state"))
        or deaths_by_signal(deployment.directory)
    )


def test_moved_and_relative_then_sigterm(repository: Path, tmp_path: Path, expected: list[str]) -> None:
    before = shared_memory()
    deployment = Deployment(repository, tmp_path / "run", exit_timeout_s=2)
    endpoint = deployment.wait_until_published()
    assert generate(endpoint, PROMPTS[0], OUTPUT_LEN) == expected[0]
    assert len(deployment.pids_of("tritonserver")) == 1
    assert len(deployment.pids_of("triton_python_backend_stub")) == 3
    idle = socket.create_connection((endpoint.host, endpoint.http_port or 0))  # holds Triton for its whole time-out
    started = time.monotonic()
    assert deployment.stop() == 0
    idle.close()
    assert time.monotonic() - started < 20  # Triton's own time-out is 30
    assert nothing_is_left(deployment, before)


def test_absolute_path_then_the_server_is_killed(
    repository: Path, checkpoint: Path, tmp_path: Path, expected: list[str]
) -> None:
    before = shared_memory()
    rewrite_checkpoint_path(repository, str(checkpoint))
    deployment = Deployment(repository, tmp_path / "run", edited_files=("*/config.pbtxt",))
    endpoint = deployment.wait_until_published()
    assert generate(endpoint, PROMPTS[1], OUTPUT_LEN) == expected[1]
    assert endpoint.settings["edited_files"].startswith("fastertransformer/config.pbtxt sha256:")
    os.kill(deployment.pids_of("tritonserver")[0], signal.SIGKILL)
    assert deployment.process.wait(240) == 1
    assert "tritonserver was killed by SIGKILL" in deployment.text
    assert "last lines of" in deployment.text and "Started GRPCInferenceService" in deployment.text
    assert "Traceback" not in deployment.text
    assert nothing_is_left(deployment, before)


def kill_engine_while_a_client_waits(deployment: Deployment, endpoint: Endpoint) -> tuple[int, float]:
    """Kill the engine's stub under a long request; give its pid, and the seconds until that client had an error."""
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(generate, endpoint, PROMPTS[0], 100)
        (stub,) = [pid for pid, line in deployment.processes.items() if "fastertransformer_0_0" in line]
        time.sleep(0.1)
        os.kill(stub, signal.SIGKILL)
        killed = time.monotonic()
        assert client.exception(30) is not None
        return stub, time.monotonic() - killed


def test_a_killed_stub_is_noticed_though_triton_says_ready(
    repository: Path, tmp_path: Path, expected: list[str]
) -> None:
    before = shared_memory()
    rewrite_checkpoint_path(repository, "/where/it/was/made/1-gpu")  # gone: the repository was moved
    deployment = Deployment(repository, tmp_path / "run", restart=1, edited_files=("*/config.pbtxt",))
    endpoint = deployment.wait_until_published()
    stub, waited_s = kill_engine_while_a_client_waits(deployment, endpoint)
    assert waited_s < 8  # on a machine of its own 0.3; the server's exit time-out is 10
    wait_for(lambda: deployment.text.count("serving ") == 2 or deployment.process.poll() is not None)
    assert f"restarting 1 of 1: a Python stub of tritonserver died (pid {stub})" in deployment.text
    again = Endpoint.read(deployment.endpoint_file)
    assert (again.http_port, again.grpc_port) == (endpoint.http_port, endpoint.grpc_port)
    assert generate(again, PROMPTS[1], OUTPUT_LEN) == expected[1]
    stub, waited_s = kill_engine_while_a_client_waits(deployment, again)
    assert deployment.process.wait(240) == 1 and waited_s < 8
    assert deployment.text.rstrip().count(f"a Python stub of tritonserver died (pid {stub})") == 1
    assert nothing_is_left(deployment, before)


def test_sentencepiece_and_two_shards_then_the_supervisor_is_killed(tmp_path: Path) -> None:
    before = shared_memory()
    shards, repository = tmp_path / "2-gpu", tmp_path / "model_repo"
    convert(ConvertArguments(DATA / "nemo" / "gpt_spm.nemo", shards, 2, "fp16"))
    build_repository(ExportArguments(shards, repository, "fastertransformer", 2, 1, "fp32", 0, 0, max_batch_size=2))
    deployment = Deployment(repository, tmp_path / "run")
    endpoint = deployment.wait_until_published()
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(shards / "tokenizer.model"))
    engine = open_engine(Settings(shards, 2, 1, "fp32"))
    row = generated_ids(engine, tokenizer.encode(PROMPTS[0]), 4)
    known = [token for token in row if token < tokenizer.get_piece_size()]
    assert generate(endpoint, PROMPTS[0], 4) == tokenizer.decode(known)
    assert deployment.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: nothing_is_left(deployment, before))


def test_the_end_of_the_parent_ends_the_deployment(repository: Path, tmp_path: Path) -> None:
    before = shared_memory()
    parent = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    deployment = Deployment(repository, tmp_path / "run", parent=(sys.executable, "-c", parent))
    deployment.wait_until_published()
    deployment.stop(signal.SIGKILL)  # of the parent
    wait_for(lambda: nothing_is_left(deployment, before))
    assert "the parent process ended" in deployment.text


def test_after_everything_was_killed_the_next_start_sweeps(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Deployments of other tests that start do not sweep there. Its path is short, for sockets lie in it.
    private = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", private)
    before = shared_memory()
    deployment = Deployment(repository, tmp_path / "run")
    deployment.wait_until_published()
    for pid in deployment.processes:  # the helper too, as when a batch system kills the job
        os.kill(pid, signal.SIGKILL)
    deployment.process.wait(240)
    region = Path("/dev/shm") / f"{json.loads((tmp_path / 'run/.endpoint.json.state').read_text())['prefix']}left"
    region.touch()
    (repository / "fastertransformer" / "1" / "1-gpu" / "model.wpe.bin").unlink()  # the next one ends early
    again = Deployment(repository, tmp_path / "run")
    assert again.process.wait(240) == 1
    assert "what a killed deployment had left" in again.text
    assert not region.exists()
    assert nothing_is_left(deployment, before)
    os.rmdir(private)  # nothing is left there either


@pytest.mark.parametrize("harm", ["missing", "truncated", "swapped"])
def test_a_harmed_shard_is_refused_by_name_and_nothing_starts(repository: Path, tmp_path: Path, harm: str) -> None:
    shards = repository / "fastertransformer" / "1" / "1-gpu"
    shard, other = (shards / f"model.layers.{layer}.mlp.dense_h_to_4h.weight.0.bin" for layer in (0, 1))
    if harm == "missing":
        shard.unlink()
    elif harm == "truncated":
        os.truncate(shard, shard.stat().st_size - 2)
    else:
        shard.rename(shards / "aside")
        other.rename(shard)
        (shards / "aside").rename(other)
    deployment = Deployment(repository, tmp_path / "run")
    assert deployment.process.wait(240) == 1
    assert shard.name in deployment.text and "Traceback" not in deployment.text
    assert not deployment.log.exists() and not deployment.endpoint_file.exists()


def test_a_server_that_cannot_load_says_why(repository: Path, tmp_path: Path) -> None:
    before = shared_memory()
    (repository / "preprocessing" / "1" / "vocab.json").unlink()
    (repository / "manifest.json").unlink()  # or the missing file would be refused before the start
    deployment = Deployment(repository, tmp_path / "run")
    assert deployment.wait_for_failed_start(60) == 1
    assert "no tokenizer in" in deployment.text
    assert nothing_is_left(deployment, before)


def test_a_start_that_takes_too_long_is_ended(repository: Path, tmp_path: Path) -> None:
    before = shared_memory()
    deployment = Deployment(repository, tmp_path / "run", start_timeout_s=0.5)
    assert deployment.wait_for_failed_start(30) == 1
    assert "no generation came back within 0.5 s" in deployment.text or "took no request in time" in deployment.text
    assert nothing_is_left(deployment, before)
