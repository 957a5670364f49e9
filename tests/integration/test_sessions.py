"""The stateful store behind the real tritonserver: conversations side by side, with tokens and with text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from support.servers.served import PROJECT, Deployment, inputs_of

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.settings import Settings
from evaluation import generate
from evaluation.client.streaming import Turn, stream
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.endpoint import Endpoint

DATA = Path(__file__).resolve().parents[1] / "data"
SOURCES = {
    "gpt": DATA / "nemo" / "gpt122_tp1_pp1.nemo",
    "llama": PROJECT / "examples" / "llama_demo" / "checkpoints" / "llama_demo.nemo",
}
NEVER, LIMIT = 2**31 - 1, 32


# A GPT goes on with conversations in test_published_stores.py.
@pytest.fixture(scope="module", params=[pytest.param("gpt", marks=pytest.mark.long), "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("convert") / "1-gpu"
    convert(ConvertArguments(SOURCES[request.param], output, 1, "fp32"))
    return output


@pytest.fixture(scope="module")
def endpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    output = tmp_path_factory.mktemp("export") / "model_repo"
    store = ExportArguments(
        checkpoint, output, "gpt", 1, 1, "fp32", 0, 0, max_batch_size=8, decoupled=True, interactive_sessions=3,
        session_idle_s=30,
    )  # fmt: skip
    build_repository(store)
    deployment = Deployment(output, tmp_path_factory.mktemp("deployment"))
    yield deployment.wait_until_published()
    deployment.begin_to_stop()


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    is_llama = "[llama]" in (checkpoint / "config.ini").read_text()
    opened = open_engine(Settings(checkpoint, 1, 1, "fp32", model_type="Llama" if is_llama else "GPT"))
    yield opened
    opened.close()


def request_of(ids: list[int], count: int, **more: int) -> dict[str, np.ndarray]:
    values = {"input_lengths": len(ids), "request_output_len": count, "end_id": NEVER, **more}
    return {"input_ids": np.array([ids], np.uint32)} | {k: np.array([[v]], np.uint32) for k, v in values.items()}


def continued(engine: Engine, ids: list[int], count: int) -> list[int]:
    """What one long request gives."""
    (answer,) = engine.generate([engine.parse(request_of(ids, count))])
    row: list[int] = answer["output_ids"][0, 0].tolist()
    return row


def say(client: Any, tensors: dict[str, np.ndarray], **place: Any) -> list[int]:
    """One turn; a decoupled model is asked over a stream, and its last answer is taken."""
    turn = Turn(place["sequence_id"], place.get("sequence_start", False), place.get("sequence_end", False))
    inputs = inputs_of(triton_grpc, {name: array[None] for name, array in tensors.items()})
    *_, last = stream(client, "fastertransformer", inputs, 30, turn)
    length = int(last.as_numpy("sequence_length")[0, 0, 0])
    row: list[int] = last.as_numpy("output_ids")[0, 0, 0, :length].tolist()
    return row


def test_conversations_side_by_side_give_what_one_long_request_gives(endpoint: Endpoint, engine: Engine) -> None:
    limits = {"session_len": LIMIT, "memory_len": LIMIT}
    openings: dict[int | str, list[int]] = {1: [5, 6, 7], "tea": [8], 3: [9, 10]}
    with triton_grpc.InferenceServerClient(endpoint.grpc_url) as client:
        said = {
            key: say(client, request_of(ids, 5, **limits), sequence_id=key, sequence_start=True)
            for key, ids in openings.items()
        }
        assert said == {key: continued(engine, ids, 5) for key, ids in openings.items()}
        for more, is_last in (([20, 21], False), ([22], True)):
            expected = {key: continued(engine, [*row, *more], 4) for key, row in said.items()}
            said = {
                key: say(client, request_of(more, 4), sequence_id=key, sequence_end=is_last) for key in reversed(said)
            }
            assert said == expected


def test_a_conversation_that_was_not_begun_is_refused(endpoint: Endpoint) -> None:
    with (
        triton_grpc.InferenceServerClient(endpoint.grpc_url) as client,
        pytest.raises(Exception, match="must specify the START flag"),
    ):
        say(client, request_of([5], 1), sequence_id=99)


def test_text_goes_on_through_the_ensemble(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    turns = ["the world", " is wide"]
    given = ["--endpoint", endpoint.grpc_url, "--output-len", "6", "--session-len", str(LIMIT)]
    generate.main(["--session", "--stream", "--prompts", *turns, *given])
    streamed = capsys.readouterr().out
    generate.main(["--session", "again", "--prompts", *turns, *given])
    assert capsys.readouterr().out == streamed
    blocks = streamed.split("> ")[1:]
    assert [block.split("\n")[0] for block in blocks] == turns
    assert all(len(block) > len(f"{turn}\n\n") for block, turn in zip(blocks, turns, strict=True))
