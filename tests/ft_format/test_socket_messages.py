"""The messages of the socket between the OpenAI endpoint and the engine, written and read back."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from ft_format.socket_messages import Frames, Kind, MessageError, Scalar, frame, pack, unpack

NUMBERS = of_numpy.arrays(
    st.sampled_from(["<u4", "<i4", "<u8", "<f4", "<f2", "|b1"]), of_numpy.array_shapes(min_dims=0, min_side=0)
)
TEXTS = st.lists(st.binary(max_size=20), max_size=4).map(lambda each: np.array([each], object).reshape(1, len(each)))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=20), st.one_of(NUMBERS, TEXTS), max_size=5), st.text(max_size=10))
def test_what_is_packed_is_unpacked(arrays: dict[str, Any], word: str) -> None:
    fields, found = unpack(pack({"word": word, "none": None}, arrays))
    assert fields == {"word": word, "none": None} and list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes() if array.dtype != object else (found[name] == array).all()
        assert found[name].flags.writeable


@pytest.mark.parametrize(
    ("value", "kind"),
    [(7, "<u4"), (-3, "<i4"), (2**64 - 1, "<u8"), (0.9, "<f4"), (True, "|b1"), (False, "|b1"), (0, "<u4")],
)
def test_a_scalar_arrives_as_an_array(value: float, kind: str) -> None:
    rest = np.array([[1, 2, 3]], np.uint32)
    _, found = unpack(pack({}, {"one": Scalar(value, kind), "rest": rest}))
    assert list(found) == ["one", "rest"] and (found["rest"] == rest).all()
    assert found["one"].dtype == np.dtype(kind) and found["one"].tolist() == [[np.dtype(kind).type(value).item()]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 2**32 - 1), st.binary(max_size=50))), st.data())
def test_frames_are_cut_wherever_the_socket_cuts_them(messages: list[tuple[Kind, int, bytes]], data: Any) -> None:
    stream = b"".join(frame(*each) for each in messages)
    frames, found, start = Frames(), [], 0
    while start < len(stream):
        end = data.draw(st.integers(start + 1, len(stream)))
        found += [tuple(each) for each in frames.feed(stream[start:end])]
        start = end
    assert found == messages


def body(index: object, contents: bytes = b"") -> bytes:
    head = json.dumps({"arrays": index}).encode()
    return struct.pack("<I", len(head)) + head + contents


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\xff\xff\xff\xff{}",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 4) + b"\xff\xfe\x00\x01",
        body([["a", "<u4", [3]]], bytes(8)),
        body([["a", "<u4", [-1]]], bytes(8)),
        body([["a", "|O", [1]]], bytes(8)),
        body([["a", "|O", 1]]),
        body([["a", "<u4", "one"]]),
        body([["a", "<i8", 2**70]]),
        body([["a", "|V8", [1]]], bytes(8)),
        body([["a", "nonsense", [1]]], bytes(8)),
        body([["a", "bytes", [1]]], struct.pack("<I", 9) + b"short"),
        body([["a", "<u4"]]),
    ],
)
def test_a_body_that_is_none_is_refused(broken: bytes) -> None:
    with pytest.raises(MessageError):
        unpack(broken)


def test_a_frame_that_is_too_long_is_refused_before_it_is_there() -> None:
    with pytest.raises(MessageError, match="4294967295 bytes"):
        list(Frames().feed(struct.pack("<IBI", 2**32 - 1, 1, 1)))


@pytest.mark.parametrize("shape", [[10**9], [1, 10**12], [-1, -9], [2]])
def test_an_array_of_bytes_is_not_made_before_its_content_is_there(shape: list[int]) -> None:
    with pytest.raises(MessageError, match="more elements than its content"):
        unpack(body([["a", "bytes", shape]], struct.pack("<I", 0)))
