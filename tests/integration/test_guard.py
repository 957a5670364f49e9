"""The guard in front of the real tritonserver: what ends the server is refused, all else is as without it."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from support.servers.served import Deployment, inputs_of, wait_for
from tritonclient.grpc.service_pb2 import (
    LogSettingsRequest,
    ModelConfigRequest,
    ModelInferRequest,
    ModelMetadataRequest,
    ModelReadyRequest,
    ServerMetadataRequest,
    SystemSharedMemoryRegisterRequest,
)
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from benchmarks.serving.made_up_repository import write_repository
from deployment.doors.known_faults import FAULTS, find_version
from deployment.guard import frames
from deployment.processes.linux import command_line, descendants
from deployment.triton.installation import locate
from handover.endpoint import Endpoint

MOST_BYTES = 2 << 20
MODEL, UNARY = "fastertransformer", "preprocessing"
PROMPT = {
    "input_ids": np.arange(40, 48, dtype=np.uint32)[None],
    "input_lengths": np.array([[8]], np.uint32),
    "request_output_len": np.array([[6]], np.uint32),
}
"""Six tokens of the made-up model."""


@dataclass(frozen=True)
class Sides:
    """One server, through the guard and past it."""

    guarded: Endpoint
    direct_http: int
    direct_grpc: int
    deployment: Deployment

    @property
    def http_ports(self) -> tuple[int, int]:
        return self.guarded.http_port, self.direct_http

    @property
    def grpc_ports(self) -> tuple[int, int]:
        return self.guarded.grpc_port, self.direct_grpc


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    repository = write_repository(tmp_path_factory.mktemp("made_up"), (2, 64, 2), "fp32", 1 << 26)
    deployment = Deployment(repository, tmp_path_factory.mktemp("run"), guard="always", guard_max_body_bytes=MOST_BYTES)
    endpoint = deployment.wait_until_published()
    (server,) = deployment.pids_of("tritonserver")
    flags = dict(flag.lstrip("-").partition("=")[::2] for flag in command_line(server)[1:])
    assert {flags[f"{door}-address"] for door in ("http", "grpc", "metrics")} == {"127.0.0.1"}
    yield Sides(endpoint, int(flags["http-port"]), int(flags["grpc-port"]), deployment)
    deployment.begin_to_stop()


@pytest.fixture
def alive(sides: Sides) -> Iterator[None]:
    """After the test the server that was there before it answers, and none was started in its place."""
    before = sides.deployment.pids_of("tritonserver")
    yield
    with triton_http.InferenceServerClient(f"127.0.0.1:{sides.guarded.http_port}") as client:
        assert client.is_server_live()
    assert sides.deployment.pids_of("tritonserver") == before


def send(port: int, *parts: bytes) -> tuple[int, Any]:
    """Send bytes over a connection of their own; return status and body of the answer."""
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            pass  # the answer may be there already
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, json.loads(answer.read() or b"null")


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: triton", f"Content-Length: {len(body)}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def chunked(path: str, chunks: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: triton\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks


def infer_json(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def tensor(shape: Sequence[Any], data: Any = None, datatype: str = "UINT32", **parameters: Any) -> dict[str, Any]:
    found = {"name": "input_ids", "shape": list(shape), "datatype": datatype, "parameters": parameters}
    return found if data is None else {**found, "data": data}


INFER = f"/v2/models/{MODEL}/infer"
BODY_ROUTES = (
    INFER,
    f"/v2/models/{MODEL}/versions/1/infer",
    f"/v2/models/{MODEL}/generate",
    f"/v2/models/{MODEL}/generate_stream",
    "/v2/repository/index",
    f"/v2/repository/models/{MODEL}/load",
    "/v2/systemsharedmemory/region/x/register",
    "/v2/trace/setting",
    "/v2/logging",
)
JSON_LENGTH = "Inference-Header-Content-Length"
NO_BYTES = infer_json(tensor([1, 1 << 62], binary_data_size=0))
DEEP = b"[" * 400_000
HOSTILE: dict[str, bytes] = {
    "a million chunks": chunked(INFER, b"1\r\n[\r\n" * 1_000_000 + b"0\r\n\r\n"),
    **{f"deep lists at {route}": post(route, DEEP) for route in BODY_ROUTES},
    **{f"lists as tensors at {route}": post(route, DEEP, f"{JSON_LENGTH}: 0") for route in BODY_ROUTES[2:]},
    "deep objects": post(INFER, b'{"a":' * 240_000),
    "deep behind strings": post(INFER, b'{"\\"[": "]]]]", "b": ' + DEEP),
    "deep, compressed": post(INFER, gzip.compress(DEEP), "Content-Encoding: gzip"),
    "deep, in chunks": chunked(INFER, b"%x\r\n" % len(DEEP) + DEEP + b"\r\n0\r\n\r\n"),
    "a bomb": post(INFER, gzip.compress(bytes(1 << 26)), "Content-Encoding: gzip"),
    "a bomb by deflate": post(INFER, zlib.compress(bytes(1 << 26)), "Content-Encoding: deflate"),
    "compressed where Triton ignores it": post("/v2/repository/index", gzip.compress(b"{}"), "Content-Encoding: gzip"),
    "2^62 elements": post(INFER, infer_json(tensor([1, 1 << 62], [1]))),
    "2^64 elements by two dimensions": post(INFER, infer_json(tensor([1 << 33, 1 << 33], [1]))),
    "2^62 elements of no bytes": post(INFER, NO_BYTES, f"{JSON_LENGTH}: {len(NO_BYTES)}"),
    "elements in the first of two": post(
        INFER, b'{"inputs": [{"name": "input_ids", "datatype": "UINT32", "shape": [4611686018427387904], '
        b'"shape": [1], "data": [1]}]}'
    ),
    "100 GB of values": post(INFER, infer_json(tensor([6, 2147483648], [1] * 20, "FP64"))),
    "a negative dimension": post(INFER, infer_json(tensor([-1], [1]))),
    "more values than the shape has": post(INFER, infer_json(tensor([1, 2], [1, 2, 3]))),
    "300,000 outputs": post(INFER, infer_json(tensor([1], [1]), outputs=[{"name": "a"}] * 300_000)),
    "2,000 inputs": post(INFER, infer_json(*[tensor([1], [1])] * 2000)),
    "a header length beyond the body": post(INFER, b"{}", f"{JSON_LENGTH}: 3"),
    "a header length below 0": post(INFER, b"{}", f"{JSON_LENGTH}: -5"),
    "a header length of 2^64": post(INFER, b"{}", f"{JSON_LENGTH}: 18446744073709551616"),
    "two lengths": post(INFER, b"{}", "Content-Length: 400000"),
    "a length beyond the limit": post(INFER, b"", f"X: y\r\nContent-Length: {MOST_BYTES + 1}").replace(
        b"Content-Length: 0\r\n", b""
    ),
    "a length and chunks": post(INFER, b"0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a folded header": post(INFER, b"{}", "Transfer-Encoding:\r\n chunked"),
    "a line feed alone": post(INFER, b"{}", "X: y\nTransfer-Encoding: chunked"),
    "BOM": post(INFER, b"\xef\xbb\xbf" + infer_json(tensor([1 << 62], [1]))),
    "text behind a NUL": post(INFER, infer_json(tensor([1 << 62], [1])) + b"\0" + b"["),
}  # fmt: skip


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_request_that_could_end_the_server_is_refused_at_the_http_door(sides: Sides, name: str) -> None:
    status, answer = send(sides.guarded.http_port, HOSTILE[name])
    assert 400 <= status < 502 and isinstance(answer["error"], str)


def message(shape: Sequence[int], raw: bytes | None = None, datatype: str = "UINT32") -> ModelInferRequest:
    request = ModelInferRequest(model_name=MODEL, id="seven")
    request.inputs.add(name="input_ids", datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


def typed(shape: Sequence[int]) -> ModelInferRequest:
    request = message(shape)
    request.inputs[0].contents.uint_contents.append(1)
    return request


HOSTILE_MESSAGES = {
    "2^62 elements of no bytes": message([1, 1 << 62], b""),
    "2^64 elements by two dimensions": message([1 << 33, 1 << 33], b""),
    "2^62 values in the message": typed([1, 1 << 62]),
    "too few bytes": message([1, 4], bytes(15)),
    "texts without room for lengths": message([1, 4], bytes(15), "BYTES"),
    "a negative dimension": message([-1], b""),
    "an entry too many": message([1], bytes(4)),
    "2,000 inputs": ModelInferRequest(
        model_name=MODEL, inputs=[{"name": "a", "datatype": "INT8", "shape": [0]}] * 2000
    ),
    "too large": message([MOST_BYTES], bytes(MOST_BYTES), "UINT8"),
}
HOSTILE_MESSAGES["an entry too many"].raw_input_contents.append(b"")


@pytest.fixture(scope="module")
def stubs(sides: Sides) -> Iterator[tuple[GRPCInferenceServiceStub, GRPCInferenceServiceStub]]:
    channels = [grpc.insecure_channel(f"127.0.0.1:{port}") for port in sides.grpc_ports]
    yield (GRPCInferenceServiceStub(channels[0]), GRPCInferenceServiceStub(channels[1]))
    for channel in channels:
        channel.close()


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("name", HOSTILE_MESSAGES)
@pytest.mark.parametrize(
    "compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]
)
def test_a_message_that_could_end_the_server_is_refused_at_the_grpc_door(
    stubs: Any, name: str, compression: grpc.Compression
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stubs[0].ModelInfer(HOSTILE_MESSAGES[name], compression=compression)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "refused: " in refused.value.details()
    if name != "too large":  # of which nothing is kept
        (answer,) = stubs[0].ModelStreamInfer(iter([HOSTILE_MESSAGES[name]]), compression=compression)
        assert "refused: " in answer.error_message and answer.infer_response.id == HOSTILE_MESSAGES[name].id


def test_a_stream_goes_on_after_a_message_that_was_refused(stubs: Any) -> None:
    good = stream_request(PROMPT, "good")
    answers = list(stubs[0].ModelStreamInfer(iter([HOSTILE_MESSAGES["2^62 elements of no bytes"], good])))
    assert [bool(answer.error_message) for answer in answers] == [True] + [False] * 6
    direct = list(stubs[1].ModelStreamInfer(iter([good])))
    assert answers[1:] == direct


ERRORS = "triton_grpc_error"
UNFIT = {**PROMPT, "input_lengths": np.array([[9999]], np.uint32)}


def stream_request(tensors: dict[str, Any], name: str = "") -> ModelInferRequest:
    return triton_grpc._utils._get_inference_request(
        model_name=MODEL, inputs=inputs_of(triton_grpc, tensors), model_version="", request_id=name, outputs=None,
        sequence_id=0, sequence_start=False, sequence_end=False, priority=0, timeout=None, parameters=None,
    )  # fmt: skip


@pytest.mark.usefixtures("alive")
def test_streams_that_ask_for_errors_of_grpc_which_end_this_version_are_refused(sides: Sides) -> None:
    """Without the guard some of them end the server: it uses a stream's memory after it has closed it."""
    one = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
    with grpc.insecure_channel(f"127.0.0.1:{sides.guarded.grpc_port}", one) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for number in range(3):  # the second time the metadata's name is an index
            requests = [stream_request(PROMPT), stream_request(UNFIT), stream_request(PROMPT)][number:]
            answers = list(stub.ModelStreamInfer(iter(requests), metadata=((ERRORS, "true"),)))
            assert [ERRORS in answer.error_message for answer in answers] == [True] * len(requests)
        assert len(list(stub.ModelStreamInfer(iter([stream_request(PROMPT)])))) == 6  # without it all is as always


HUFFMAN = {"_": "100010", "c": "00100", "e": "00101", "g": "100110", "i": "00110", "n": "101010", "o": "00111",
           "p": "101011", "r": "101100", "t": "01001"}  # fmt: skip
"""Of RFC 7541, Appendix B, what is needed here."""


@pytest.mark.parametrize("is_coded", [False, True])
def test_such_metadata_is_found_in_either_form_of_hpack(sides: Sides, is_coded: bool) -> None:
    bits = "".join(HUFFMAN[letter] for letter in ERRORS)
    coded = int(bits.ljust(-len(bits) // 8 * -8, "1"), 2).to_bytes(-(-len(bits) // 8), "big")
    name = bytes([0x80 | len(coded)]) + coded if is_coded else bytes([len(ERRORS)]) + ERRORS.encode()

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\0" + name + bytes([len(value)]) + value

    def plain(text: bytes) -> bytes:
        return bytes([len(text)]) + text

    path = b"/inference.GRPCInferenceService/ModelStreamInfer"
    headers = b"\x83\x86" + literal(plain(b":path"), path) + literal(plain(b":authority"), b"t")
    headers += literal(plain(b"content-type"), b"application/grpc") + literal(plain(b"te"), b"trailers")
    headers += literal(name, b"true")
    request = stream_request(PROMPT).SerializeToString()
    with socket.create_connection(("127.0.0.1", sides.guarded.grpc_port), 20) as connection:
        connection.sendall(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
        connection.sendall(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, headers))
        connection.sendall(frames.frame(frames.DATA, 0, 1, b"\0" + len(request).to_bytes(4, "big") + request))
        found = b""
        while ERRORS.encode() not in found:
            more = connection.recv(65536)
            assert more, found
            found += more


def without_times(answer: Any) -> Any:
    """Leave out what no two answers have alike."""
    if isinstance(answer, dict):
        kept = {name: without_times(value) for name, value in answer.items()}
        return {name: value for name, value in kept.items() if name not in ("last_inference", "inference_stats")}
    return [without_times(each) for each in answer] if isinstance(answer, list) else answer


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[Any, ...]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        names = sorted(name.lower() for name in answer.headers)
        try:
            return answer.status, names, without_times(json.loads(content))
        except ValueError:
            return answer.status, names, content
    finally:
        connection.close()


QUERY = {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES"}
LENGTH = {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "UINT32"}
TEXT = infer_json({**QUERY, "data": ["the world"]}, {**LENGTH, "data": [4]})
BINARY_HEAD = infer_json(
    {**QUERY, "parameters": {"binary_data_size": 9}}, {**LENGTH, "parameters": {"binary_data_size": 4}},
    parameters={"binary_data_output": True},
)  # fmt: skip
BINARY = BINARY_HEAD + b"\x05\0\0\0world" + b"\x04\0\0\0"
HEADED = {JSON_LENGTH: str(len(BINARY_HEAD))}
IN_GZIP = {"Content-Encoding": "gzip"}
NO_TYPE = {**LENGTH, "datatype": "X"}
STREAM = json.dumps({"INPUT_0": "the world", "INPUT_1": 5}).encode()
ALIKE: dict[str, tuple[str, str, bytes | None, dict[str, str]]] = {
    "live": ("GET", "/v2/health/live", None, {}),
    "server": ("GET", "/v2", None, {}),
    "configuration": ("GET", f"/v2/models/{MODEL}/config", None, {}),
    "statistics": ("GET", f"/v2/models/{UNARY}/stats", None, {}),
    "statistics by HEAD": ("HEAD", f"/v2/models/{UNARY}/stats", None, {}),
    "JSON": ("POST", f"/v2/models/{UNARY}/infer", TEXT, {}),
    "JSON of a version": ("POST", f"/v2/models/{UNARY}/versions/1/infer", TEXT, {}),
    "binary": ("POST", f"/v2/models/{UNARY}/infer", BINARY, HEADED),
    "gzip": ("POST", f"/v2/models/{UNARY}/infer", gzip.compress(TEXT), IN_GZIP),
    "gzip and binary": ("POST", f"/v2/models/{UNARY}/infer", gzip.compress(BINARY), {**HEADED, **IN_GZIP}),
    "an answer in gzip": ("POST", f"/v2/models/{UNARY}/infer", TEXT, {"Accept-Encoding": "gzip"}),
    "an encoding that is none": ("POST", f"/v2/models/{UNARY}/infer", TEXT, {"Content-Encoding": "br"}),
    "generate": ("POST", f"/v2/models/{UNARY}/generate", b'{"QUERY": "the world", "REQUEST_OUTPUT_LEN": 4}', {}),
    "generate_stream": ("POST", "/v2/models/ensemble/generate_stream", STREAM, {}),
    "no such model": ("POST", "/v2/models/none/infer", TEXT, {}),
    "no such route": ("GET", "/v3", None, {}),
    "a tensor too few": ("POST", f"/v2/models/{UNARY}/infer", infer_json({**QUERY, "data": ["a"]}), {}),
    "another type": ("POST", f"/v2/models/{UNARY}/infer", infer_json({**LENGTH, "name": "QUERY", "data": [4]}), {}),
    "a type that is none": ("POST", f"/v2/models/{UNARY}/infer", infer_json({**NO_TYPE, "data": [4]}), {}),
    "a decoupled model asked once": ("POST", INFER, infer_json(tensor([1, 1], [4])), {}),
    "a closed API": ("POST", "/v2/repository/index", b"{}", {}),
    "shared memory": ("GET", "/v2/systemsharedmemory/status", None, {}),
    "a method that is none": ("PUT", "/v2/models/none/infer", TEXT, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_an_answer_over_http_is_the_same_as_without_the_guard(sides: Sides, name: str) -> None:
    method, path, body, headers = ALIKE[name]
    guarded, direct = (ask(port, method, path, body, **headers) for port in sides.http_ports)
    assert guarded == direct


def read_answer(stream: BinaryIO) -> tuple[int, Any]:
    status = int(stream.readline().split()[1])
    headers = http.client.parse_headers(stream)
    return status, json.loads(stream.read(int(headers["Content-Length"])))


def test_chunks_and_requests_behind_each_other_are_answered_in_order(sides: Sides) -> None:
    pieces = [TEXT[at : at + 10] for at in range(0, len(TEXT), 10)]
    body = b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: x\r\n\r\n"
    first = chunked(f"/v2/models/{UNARY}/infer", body)
    with socket.create_connection(("127.0.0.1", sides.guarded.http_port), 20) as connection:
        connection.sendall(first + b"GET /v2/models/none HTTP/1.1\r\nHost: t\r\n\r\n" + first)
        wanted = ask(sides.direct_http, "POST", f"/v2/models/{UNARY}/infer", TEXT)[2]
        with connection.makefile("rb") as stream:
            found = [read_answer(stream) for _ in range(3)]
    assert found[0] == found[2] == (200, wanted) and found[1][0] in (400, 404)


def code_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except grpc.RpcError as error:
        return error.code(), error.details(), error.trailing_metadata()


def unary_request() -> ModelInferRequest:
    request = ModelInferRequest(model_name=UNARY, id="x")
    request.inputs.add(name="QUERY", datatype="BYTES", shape=[1, 1])
    request.inputs.add(name="REQUEST_OUTPUT_LEN", datatype="UINT32", shape=[1, 1])
    request.raw_input_contents.extend([b"\x05\0\0\0world", b"\x04\0\0\0"])
    return request


CALLS: dict[str, Callable[[GRPCInferenceServiceStub], Any]] = {
    "inference": lambda stub: stub.ModelInfer(unary_request()),
    "inference, compressed": lambda stub: stub.ModelInfer(unary_request(), compression=grpc.Compression.Gzip),
    "values in the message": lambda stub: stub.ModelInfer(with_values()),
    "a large message": lambda stub: stub.ModelInfer(with_text(b"a" * 1_000_000)),
    "no such model": lambda stub: stub.ModelInfer(ModelInferRequest(model_name="none")),
    "no such input": lambda stub: stub.ModelInfer(message([1], bytes(4), "X")),
    "configuration": lambda stub: stub.ModelConfig(ModelConfigRequest(name=MODEL)),
    "server": lambda stub: stub.ServerMetadata(ServerMetadataRequest()),
    "model": lambda stub: stub.ModelMetadata(ModelMetadataRequest(name="none")),
    "ready": lambda stub: stub.ModelReady(ModelReadyRequest(name=MODEL)),
    "a closed API": lambda stub: stub.LogSettings(LogSettingsRequest()),
    "shared memory": lambda stub: stub.SystemSharedMemoryRegister(SystemSharedMemoryRegisterRequest(name="x")),
}


def with_values() -> ModelInferRequest:
    request = unary_request()
    del request.raw_input_contents[:]
    request.inputs[0].contents.bytes_contents.append(b"world")
    request.inputs[1].contents.uint_contents.append(4)
    return request


def with_text(text: bytes) -> ModelInferRequest:
    request = unary_request()
    request.raw_input_contents[0] = len(text).to_bytes(4, "little") + text
    return request


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_over_grpc_is_the_same_as_without_the_guard(stubs: Any, name: str) -> None:
    guarded, direct = (code_of(partial(CALLS[name], stub)) for stub in stubs)
    assert guarded == direct


def test_a_method_that_is_none_is_answered_by_the_server(sides: Sides) -> None:
    found = []
    for port in sides.grpc_ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            found.append(code_of(partial(channel.unary_unary("/inference.GRPCInferenceService/No"), b"")))
    assert found[0] == found[1] and found[0][0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_cancelled_stream_is_cancelled_at_the_server(sides: Sides) -> None:
    def cancelled() -> float:
        connection = http.client.HTTPConnection("127.0.0.1", sides.guarded.metrics_port, timeout=180)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("slipway_request_cancelled{")
        )

    before = cancelled()
    with triton_grpc.InferenceServerClient(sides.guarded.grpc_url) as client:
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(result or error))
        long = {**PROMPT, "request_output_len": np.array([[900]], np.uint32)}
        client.async_stream_infer(MODEL, inputs_of(triton_grpc, long))
        wait_for(lambda: answers)
        client.stop_stream(cancel_requests=True)
    wait_for(lambda: cancelled() == before + 1)


def test_the_asynchronous_clients_are_answered_too(sides: Sides) -> None:
    inputs = {"QUERY": np.array([["the world"]], object), "REQUEST_OUTPUT_LEN": np.array([[4]], np.uint32)}

    async def ask_both() -> list[Any]:
        found = []
        for module, port in ((triton_http_aio, sides.guarded.http_port), (triton_grpc_aio, sides.guarded.grpc_port)):
            async with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
                made = inputs_of(triton_http if module is triton_http_aio else triton_grpc, inputs)
                answers = await asyncio.gather(*(client.infer(UNARY, made) for _ in range(5)))
                found += [answer.as_numpy("INPUT_ID").tolist() for answer in answers]
        return found

    found = asyncio.run(ask_both())
    assert len(found) == 10 and all(each == found[0] for each in found)


def test_the_metrics_are_read_and_nothing_else(sides: Sides) -> None:
    port = sides.guarded.metrics_port
    assert b"nv_inference_count" in ask(port, "GET", "/metrics")[2]
    assert send(port, chunked("/metrics", b"1\r\n[\r\n" * 300_000))[0] == 405
    assert send(port, post("/metrics", b"{}"))[0] == 405


def test_others_are_answered_while_hostile_requests_are_looked_at(sides: Sides) -> None:
    """A canary beside bodies that are the most work: none waits for longer than half a second."""
    slow = [post(INFER, b'{"inputs": [' + b",".join([b"[]"] * 500_000) + b"]}"), post(INFER, b"[" * 1_900_000)]
    connections = [socket.create_connection(("127.0.0.1", sides.guarded.http_port), 20) for _ in range(6)]
    try:
        for connection, body in zip(connections, slow * 3, strict=True):
            connection.sendall(body)
        waited = []
        for _ in range(20):
            started = time.monotonic()
            assert ask(sides.guarded.http_port, "GET", "/v2/health/live")[0] == 200
            waited.append(time.monotonic() - started)
        assert max(waited) < 0.5
    finally:
        for connection in connections:
            connection.close()


def test_the_version_that_is_known_before_the_start_is_the_servers_own(sides: Sides) -> None:
    version = find_version(locate("slipway").binary)
    assert f"triton {version}" in sides.guarded.settings["versions"].split(", ")
    assert f"triton     {version}: " in sides.deployment.text and "CVE-2026-24207" in sides.deployment.text


def test_the_table_of_known_faults_names_tests_that_are_here() -> None:
    names = {name for fault in FAULTS for name in fault.tests}
    assert names and names <= {*HOSTILE, *HOSTILE_MESSAGES, *ALIKE, *CALLS, f"metadata {ERRORS}"}


def test_a_killed_guard_comes_back_while_the_server_goes_on(sides: Sides) -> None:
    deployment = sides.deployment
    before = deployment.pids_of("tritonserver")
    below = descendants([deployment.process.pid])
    (guard,) = [each.pid for each in below if "deployment.guard" in command_line(each.pid)]
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: "started again, 1 of 3" in deployment.text)

    def is_live() -> bool:
        try:
            return bool(ask(sides.guarded.http_port, "GET", "/v2/health/live")[0] == 200)
        except OSError:
            return False

    wait_for(is_live)
    assert deployment.pids_of("tritonserver") == before
