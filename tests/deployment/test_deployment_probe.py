"""The probe asks every kind of model over a stream, against a fake server that speaks Triton's protocol."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up

from deployment.proof.served_models import ServedModel
from deployment.triton.probe import Probe
from handover.errors import ServerError


def run(fake: FakeTriton, directory: Path, config: dict[str, str] | None = None, timeout_s: float = 10) -> None:
    probe = Probe(fake.url, directory, ServedModel("m", directory, directory, {}, 1, config or {}, {}), timeout_s)
    while not probe.is_done():
        time.sleep(0.01)


def complete(tensors: Tensors) -> Tensors:
    return {"OUTPUT_0": np.array([b"Hello!"], dtype=np.object_), "sequence_length": np.array([[2]], np.uint32)}


def test_a_token_model_is_asked_for_one_token(tmp_path: Path) -> None:
    with FakeTriton(count_up, inputs=("input_ids", "input_lengths", "request_output_len", "beam_width")) as fake:
        run(fake, tmp_path, {"start_id": "7"})
    (sent,) = fake.requests
    assert {name: values.tolist() for name, values in sent.items()} == {
        "input_ids": [[7]], "input_lengths": [[1]], "request_output_len": [[1]],
    }  # fmt: skip


def test_an_ensemble_is_asked_with_text(tmp_path: Path) -> None:
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble" / "config.pbtxt").write_text("")
    with FakeTriton(complete, inputs=("INPUT_0", "INPUT_1", "INPUT_2")) as fake:
        run(fake, tmp_path)
    assert {name: values.tolist() for name, values in fake.requests[0].items()} == {
        "INPUT_0": [[b"Hello"]], "INPUT_1": [[1]], "INPUT_2": [[b""]],
    }  # fmt: skip


def test_a_decoupled_model_may_give_many_answers(tmp_path: Path) -> None:
    with FakeTriton(lambda tensors: [count_up(tensors)] * 3) as fake:
        fake.inputs = ("input_ids", "input_lengths", "request_output_len")
        run(fake, tmp_path)


def test_a_stateful_model_is_asked_in_a_conversation_of_its_own(tmp_path: Path) -> None:
    def answer(tensors: Tensors) -> Tensors:
        return {"output_ids": np.ones((1, 1, 1, 2), np.uint32)}

    with FakeTriton(answer, inputs=("input_ids", "input_lengths", "request_output_len", "session_len")) as fake:
        run(fake, tmp_path)
    assert all(values.shape == (1, 1, 1) for values in fake.requests[0].values())
    assert fake.sequences[0]["sequence_start"] and fake.sequences[0]["sequence_end"]


def test_encoders_and_encoder_decoders_have_names_of_their_own(tmp_path: Path) -> None:
    def encode(tensors: Tensors) -> Tensors:
        return {"output_hidden_state": np.zeros((1, 1, 4), np.float32)}

    def decode(tensors: Tensors) -> Tensors:
        return {"output_ids": np.ones((1, 1, 1), np.int32), "sequence_length": np.ones((1, 1), np.int32)}

    for answer, inputs in ((encode, ["input_ids", "sequence_length"]), (decode, ["max_output_len", "input_ids"])):
        with FakeTriton(answer, inputs=tuple(inputs)) as fake:
            run(fake, tmp_path, {"decoder_start_token_id": "3"})
        assert fake.requests[0].keys() == set(inputs) and fake.requests[0]["input_ids"].tolist() == [[3]]


def test_what_the_server_refuses_is_said(tmp_path: Path) -> None:
    def refuse(tensors: Tensors) -> Tensors:
        raise RefusalError("Stub process is not healthy")

    with FakeTriton(refuse) as fake, pytest.raises(ServerError, match=r"a generation failed: .*not healthy"):
        run(fake, tmp_path)
    nothing = {"output_ids": np.ones((1, 1, 0), np.uint32)}
    with FakeTriton(lambda _: nothing) as fake, pytest.raises(ServerError, match="no generation"):
        run(fake, tmp_path)
