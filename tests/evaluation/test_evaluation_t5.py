"""The clients on an encoder-decoder, whose tensors have other names and whose answers do not repeat the prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.servers.fake_triton import T5_INPUTS, FakeTriton, Tensors, count_up_t5
from tokenizers import ByteLevelBPETokenizer

from evaluation import benchmark, generate, lambada
from evaluation import load as sweep
from evaluation.arguments import BenchmarkArguments, LambadaArguments
from evaluation.client.client import Client
from evaluation.client.request_tensors import prepare_ids
from evaluation.client.served_model import inspect_endpoint
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.table import LOAD_TABLE, STATIC_TABLE
from ft_format.tensors import NO_TOKEN
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError

SUBSET = Path(__file__).resolve().parents[2] / "examples" / "data" / "lambada_subset.jsonl"


def test_prompts_of_several_lengths_get_their_own_answers() -> None:
    with FakeTriton(count_up_t5, inputs=T5_INPUTS) as fake, Client(fake.url) as client:
        assert client.describe("fastertransformer").is_encoder_decoder
        answers = client.generate(prepare_ids([[7, 8, 9], [4]], [2, 5], is_encoder_decoder=True))
    assert [answer.tokens for answer in answers] == [(10, 11), (5, 6, 7, 8, 9)]


def test_an_answer_longer_than_asked_for_is_an_error() -> None:
    def longer(tensors: Tensors) -> Tensors:
        return count_up_t5({**tensors, "max_output_len": tensors["max_output_len"] + 1})

    with (
        FakeTriton(longer, inputs=T5_INPUTS) as fake,
        Client(fake.url) as client,
        pytest.raises(ServerError, match="row 0"),
    ):
        client.generate(prepare_ids([[7]], 2, is_encoder_decoder=True))


def test_the_static_sweep_sends_t5s_tensors(tmp_path: Path) -> None:
    given = BenchmarkArguments(
        *("", tmp_path / "out"), batch_sizes=(1, 2), lengths=((3, 2),), warmup=0, repeats=2, vocab_size=100
    )
    with FakeTriton(count_up_t5, inputs=T5_INPUTS) as fake:
        benchmark.main([*given.to_argv(), "--endpoint", fake.url])
    rows = STATIC_TABLE.read(tmp_path / "out" / "benchmark.csv")
    assert [(row.batch_size, row.state, row.failed_requests) for row in rows] == [(1, "ok", 0), (2, "ok", 0)]
    (last,) = fake.requests[-1:]
    assert last["sequence_length"].tolist() == [[3], [3]] and last["max_output_len"].tolist() == [[2], [2]]
    assert last["end_id"].tolist() == [[NO_TOKEN]] * 2


def test_the_load_sends_t5s_tensors(tmp_path: Path) -> None:
    given = LoadArguments(
        *("", tmp_path / "out"),
        lengths=("uniform:2:5/3",), concurrencies=(1, 2), requests=4, repeats=1, min_repeats=1, vocab_size=100,
    )  # fmt: skip
    with FakeTriton(count_up_t5, inputs=T5_INPUTS) as fake:
        sweep.main([*given.to_argv(), "--endpoint", fake.url])
    rows = LOAD_TABLE.read(tmp_path / "out" / "load.csv")
    assert [(row.concurrency, row.state, row.failed_requests) for row in rows] == [(1, "ok", 0), (2, "ok", 0)]
    assert {int(tensors["max_output_len"].item()) for tensors in fake.requests} == {3}


def test_lambada_refuses_it_before_it_asks(tmp_path: Path) -> None:
    arguments = LambadaArguments("", tmp_path / "out", SUBSET, samples=2)
    with FakeTriton(count_up_t5, inputs=T5_INPUTS) as fake, pytest.raises(ConfigError, match="encoder-decoder") as info:
        lambada.main([*arguments.to_argv(), "--endpoint", fake.url])
    assert "stages=[convert,export,deploy,benchmark]" in info.value.hint
    assert not fake.requests and not (tmp_path / "out").exists()


def repeat_and_go_on(tensors: Tensors) -> list[Tensors]:
    """A model for text whose decoder happens to begin with the input."""
    (text,) = tensors["INPUT_0"].reshape(-1)
    return [{"OUTPUT_0": np.array([text + end], dtype=np.object_)} for end in (b" and", b" and so on")]


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_all_that_the_decoder_wrote_is_printed(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTriton(repeat_and_go_on, inputs=("INPUT_0",), passes_on=T5_INPUTS) as fake:
        generate.main([*options, "--prompts", "a b", "--endpoint", fake.url])
    assert capsys.readouterr().out == "> a b\na b and so on\n"


def test_a_token_id_model_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["a few words to learn"], vocab_size=270, show_progress=False)
    trained.save_model(str(tmp_path))
    (tmp_path / "config.ini").write_text("[encoder]\nvocab_size = 270\n[decoder]\nvocab_size = 270\n")
    with FakeTriton(count_up_t5, inputs=T5_INPUTS, parameters={"model_checkpoint_path": str(tmp_path)}) as fake:
        generate.main(["--prompts", "a", "--endpoint", fake.url, "--model", "fastertransformer", "--output-len", "2"])
    first = trained.encode("a").ids[0]
    assert capsys.readouterr().out == f"> a\n{trained.decode([first + 1, first + 2])}\n"


@pytest.mark.parametrize(("kind", "expected"), [("absolute", 128), ("relative", None)])
def test_only_absolute_positions_limit_a_t5(tmp_path: Path, kind: str, expected: int | None) -> None:
    side = "vocab_size = 270\nrelative_attention_num_buckets_or_max_pos_seq_len = 128\n"
    text = f"[encoder]\n{side}[decoder]\n{side}[structure]\nposition_embedding_type = {kind}\n"
    (tmp_path / "config.ini").write_text(text)
    served = inspect_endpoint(Endpoint("127.0.0.1", grpc_port=1), {"model_checkpoint_path": str(tmp_path)})
    assert (served.vocab_size, served.max_positions) == (270, expected)
