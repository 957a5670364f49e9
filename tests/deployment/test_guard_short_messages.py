"""Short requests of the gRPC door: what is passed on by its fields alone is what parsing the whole would pass on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from test_guard_connections import OPENED, pass_frames, talk  # type: ignore[import-not-found]
from tritonclient.grpc.service_pb2 import ModelInferRequest

from deployment.guard import frames, known_fields
from deployment.guard.doors import Door
from deployment.guard.grpc_door import GrpcClient
from deployment.guard.known_fields import fits
from deployment.guard.limits import RefusedError
from deployment.guard.messages import check_request, take_apart


def make_request(draw: random.Random) -> ModelInferRequest:
    """A request as clients make it, now and then with something that is wrong or that needs the whole."""
    request = ModelInferRequest(model_name=draw.choice(["m", "a model"]), id=draw.choice(["", "é1"]))
    request.parameters["priority"].int64_param = draw.randrange(3)
    for _ in range(draw.choice([0, 1, 3])):
        datatype, size = draw.choice([("UINT32", 4), ("FP64", 8), ("BYTES", 5), ("no type", 1)])
        shape = [1, draw.choice([0, 1, 200])]
        tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
        request.raw_input_contents.append(bytes(shape[1] * size + (draw.random() < 0.1)))
        if draw.random() < 0.1:
            tensor.parameters["shared_memory_region"].string_param = "r"
        if draw.random() < 0.1:
            tensor.contents.int_contents.append(1)
    for _ in range(draw.choice([0, 1, 1, 70])):
        request.outputs.add(name="y")
    return request


def is_taken(content: bytes) -> bool:
    """Parse the whole, and check it."""
    try:
        parts = take_apart(memoryview(content))
        if parts is None:
            return False
        check_request(parts)
        return ModelInferRequest.FromString(content) is not None
    except (RefusedError, DecodeError):
        return False


def test_what_passes_by_its_fields_would_pass_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_fields, "_MOST_KNOWN", 50)
    draw = random.Random(1)
    passed = {True: 0, False: 0}
    for number in range(4000):
        content = make_request(draw).SerializeToString()
        is_spoilt = number % 2 == 1
        for _ in range(draw.randrange(1, 4) if is_spoilt else 0):
            at = draw.randrange(len(content))
            new = draw.choice([b"", bytes((draw.randrange(256),)), content[:at]])
            content = content[:at] + new + content[at + draw.randrange(3) :]
        before = draw.randbytes(draw.randrange(3))
        if fits(before + content, len(before)):
            assert is_taken(content), content
            passed[is_spoilt] += 1
        assert len(known_fields._known) <= 50
    assert passed[False] > 500 and passed[True] > 30


def test_requests_pass_in_the_frames_that_they_came_in_and_wrong_ones_do_not() -> None:
    request = ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="UINT32", shape=[1, 2])
    message = request.SerializeToString() + b"\x3a\x08" + bytes(8)
    right = frames.frame(frames.DATA, 0, 1, b"\0" + len(message).to_bytes(4, "big") + message)
    wrong = right.replace(b"\x3a\x08", b"\x3a\x07").replace(b"\x3a\x07\0", b"\x3a\x07")  # a byte less of the tensor
    wrong = (len(wrong) - 9).to_bytes(3, "big") + wrong[3:10] + (len(message) - 1).to_bytes(4, "big") + wrong[14:]
    credit = frames.window_update(1, 9) + frames.window_update(0, 9)
    last = right[:4] + bytes((frames.END_STREAM,)) + right[5:]
    parts = [right, credit + right, right + right, right[:30], right[30:], wrong, right, last]
    got = pass_frames(parts, b"", last)
    begun = frames.PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x83")
    head, refused, tail = got.partition(b"refused: input 'x' has 7 bytes, but its shape and type UINT32 take 8")
    assert refused and tail == right + last
    assert head.startswith(begun + right + credit + right * 4) and wrong[9:] not in got


def test_credit_comes_back_for_short_messages_that_pass_at_once() -> None:
    request = ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="UINT8", shape=[8000])
    message = request.SerializeToString() + b"\x3a\xc0\x3e" + bytes(8000)
    right = frames.frame(frames.DATA, 0, 1, b"\0" + len(message).to_bytes(4, "big") + message)
    assert fits(message, 0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.frame(frames.SETTINGS, 0, 0) + frames.window_update(0, 1 << 20))
        await reader.read()

    async def talking(door: Door, connect: Any) -> dict[int, int]:
        reader, writer = await connect()
        writer.write(frames.PREFACE)
        await reader.readexactly(9 + 13)  # settings, and a connection's first credit
        writer.write(OPENED.removeprefix(frames.PREFACE))
        given = {0: 0, 1: 0}
        for _ in range(5):
            writer.write(right)
            await asyncio.sleep(0.01)
        while min(given.values()) < 2 * len(right):
            head = await reader.readexactly(9)
            assert head[3] == frames.WINDOW_UPDATE
            given[head[8]] += int.from_bytes(await reader.readexactly(4), "big")
        return given

    assert max(talk(GrpcClient, talking, 1 << 20, serve).values()) <= 5 * len(right)
