"""LAMBADA: splits by hand, and every figure against Hugging Face's forward pass of the same model.

The model is a tiny GPT-2 that has learnt half of the texts by heart, so that there are hits and misses.
It is served by a fake that speaks Triton's protocol; the expected figures come from teacher-forced
log probabilities over whole texts, which no part of the evaluation computes.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_triton import FakeTriton, RefusalError, Tensors, count_up
from learnt_gpt2 import POSITIONS, SUBSET, LearntModel, expected_figures, short_texts

from evaluation import lambada
from evaluation.lambada_task import (
    FULL_FILE_SHA256,
    SUBSET_SHA256,
    prepare_sample,
    read_texts,
    split_last_word,
    split_openai,
)
from evaluation.tokenizer import load_tokenizer
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError
from handover.manifest import Manifest


def answer(model: LearntModel, tensors: Tensors) -> Tensors:
    """A fake Triton model: generate greedily as FasterTransformer would, one row after another."""
    ids, lengths, wanted = tensors["input_ids"], tensors["input_lengths"][:, 0], tensors["request_output_len"][:, 0]
    longest = int(wanted.max())
    output = np.zeros((len(ids), 1, ids.shape[1] + longest), np.uint32)
    cum, each = np.zeros((len(ids), 1), np.float32), np.zeros((len(ids), 1, longest), np.float32)
    for row, (length, count) in enumerate(zip(lengths, wanted, strict=True)):
        sequence = [int(token) for token in ids[row, :length]]
        if length + count > POSITIONS:
            raise RefusalError("too long")
        prompt = model.log_probs(sequence)
        cum[row] = sum(float(prompt[at, token]) for at, token in enumerate(sequence[1:]))
        for step in range(count):
            last = model.log_probs(sequence)[-1]
            token = int(last.argmax())
            cum[row] += float(last[token])
            # FasterTransformer's top-k kernel reports the probability among the top k; its top-p kernel the model's.
            each[row, 0, step] = float(last[token]) if tensors["runtime_top_k"][row, 0] == 0 else 0.0
            sequence.append(token)
        output[row, 0, : len(sequence)] = sequence
    assert tensors["is_return_context_cum_log_probs"].all()
    sequence_lengths = (lengths + wanted)[:, None].astype(np.uint32)
    return {
        "output_ids": output,
        "sequence_length": sequence_lengths,
        "cum_log_probs": cum,
        "output_log_probs": each,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LearntModel:
    return LearntModel(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fake(model: LearntModel) -> Iterator[FakeTriton]:
    with FakeTriton(partial(answer, model), parameters={"model_checkpoint_path": str(model.directory)}) as server:
        yield server


def write_data(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def evaluate(endpoint: str, output: Path, data: Path, *flags: str) -> dict[str, Any]:
    lambada.main(
        [f"--endpoint={endpoint}", f"--output={output}", f"--data-path={data}", "--data-sha256=any", *flags],
    )
    content: dict[str, Any] = json.loads((output / "metrics.json").read_text())
    return content


def test_every_figure_equals_what_hugging_face_computes(model: LearntModel, fake: FakeTriton, tmp_path: Path) -> None:
    texts = short_texts()
    content = evaluate(fake.url, tmp_path / "out", write_data(tmp_path / "d.jsonl", texts), "--batch-size=5")
    expected = expected_figures(model, texts)
    metrics = {metric["name"]: metric for metric in content["metrics"]}
    n = len(texts)
    assert expected["word"] != expected["openai"], "the test needs a text that the definitions see differently"
    for name, values in (
        ("last_token_accuracy", expected["token"]),
        ("last_word_accuracy_greedy", expected["word"]),
        ("lambada_openai_accuracy", expected["openai"]),
    ):
        assert 0 < sum(values) < n, "the test needs hits and misses"
        assert metrics[name]["value"] == pytest.approx(sum(values) / n)
        assert metrics[name]["stderr"] == pytest.approx(statistics.stdev(values) / math.sqrt(n))
        assert (metrics[name]["n"], metrics[name]["failed"]) == (n, 0)
    assert metrics["lambada_openai_perplexity"]["value"] == pytest.approx(
        math.exp(-statistics.mean(expected["log_prob"])), rel=1e-4
    )


def test_samples_are_in_file_order_with_their_own_figures(model: LearntModel, fake: FakeTriton, tmp_path: Path) -> None:
    texts = short_texts()
    evaluate(fake.url, tmp_path, write_data(tmp_path / "d.jsonl", texts), "--batch-size=3", "--concurrency=3")
    with (tmp_path / "samples.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    expected = expected_figures(model, texts)
    assert [row["target"] for row in rows] == [text.rpartition(" ")[2] for text in texts]
    assert [float(row["openai_hit"]) for row in rows] == expected["openai"]
    assert [float(row["openai_log_prob"]) for row in rows] == pytest.approx(expected["log_prob"], abs=1e-3)


def test_a_number_of_samples_takes_the_first_lines(fake: FakeTriton, tmp_path: Path) -> None:
    data = write_data(tmp_path / "d.jsonl", short_texts())
    content = evaluate(fake.url, tmp_path / "out", data, "--samples=3")
    assert content["samples"] == 3
    assert {metric["n"] for metric in content["metrics"]} == {3}


def test_coinciding_queries_are_sent_once(fake: FakeTriton, tmp_path: Path) -> None:
    text = short_texts()[0]
    evaluate(fake.url, tmp_path, write_data(tmp_path / "d.jsonl", [text, text]), "--batch-size=1")
    prompts = [(tuple(r["input_ids"][0]), int(r["request_output_len"][0, 0])) for r in fake.requests]
    assert len(prompts) == len(set(prompts))


def test_contexts_longer_than_the_model_are_cut_on_the_left_and_counted(
    fake: FakeTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [*short_texts()[:2], read_texts(SUBSET, 1)[0]]
    content = evaluate(fake.url, tmp_path, write_data(tmp_path / "d.jsonl", texts))
    assert content["cut_contexts"] == 1
    assert f"1 of 3 contexts are cut on the left to the model's {POSITIONS} positions" in capsys.readouterr().out
    assert content["failed"] == 0


def test_a_failed_request_fails_the_sample_and_the_run_but_is_no_miss(
    model: LearntModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = short_texts()[:4]
    broken = model.encode(texts[1])

    def refuse_one(tensors: Tensors) -> Tensors:
        if [int(token) for token in tensors["input_ids"][0]] == broken:
            raise RefusalError("out of memory")
        return answer(model, tensors)

    data = write_data(tmp_path / "d.jsonl", texts)
    parameters = {"model_checkpoint_path": str(model.directory)}
    with (
        FakeTriton(refuse_one, parameters=parameters) as fake,
        pytest.raises(ServerError, match=r"1 of 4 samples have no score; the first, line 2: .*out of memory"),
    ):
        evaluate(fake.url, tmp_path / "out", data, "--batch-size=1")
    content = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {(metric["n"], metric["failed"]) for metric in content["metrics"]} == {(3, 1)}
    with (tmp_path / "out" / "samples.csv").open(newline="") as stream:
        row = list(csv.DictReader(stream))[1]
    assert (row["openai_hit"], row["openai_log_prob"]) == ("", "")
    assert "out of memory" in row["error"]


def test_a_server_that_dies_ends_the_evaluation(model: LearntModel, tmp_path: Path) -> None:
    data = write_data(tmp_path / "d.jsonl", short_texts())
    server = FakeTriton(partial(answer, model), parameters={"model_checkpoint_path": str(model.directory)})

    def die(tensors: Tensors) -> Tensors:
        server.server.stop(None)
        raise RefusalError("dying")

    server.answer = die
    with server, pytest.raises(ServerError, match="no server answers"):
        evaluate(server.url, tmp_path / "out", data)
    assert not (tmp_path / "out").exists()


def test_results_carry_digests_settings_and_a_manifest(model: LearntModel, fake: FakeTriton, tmp_path: Path) -> None:
    endpoint = tmp_path / "endpoint.json"
    settings = {"tensor_para_size": "1", "data_type": "fp32"}
    Endpoint("127.0.0.1", grpc_port=fake.port, engine="slipway", model_digest="sha256:abc", settings=settings).write(
        endpoint
    )
    content = evaluate(str(endpoint), tmp_path / "out", write_data(tmp_path / "d.jsonl", short_texts()[:2]))
    assert content["model"] == {
        "model": "fastertransformer",
        "engine": "slipway",
        "model_digest": "sha256:abc",
        **settings,
    }
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.kind == "evaluation"
    assert {record.path for record in manifest.files} == {"metrics.json", "samples.csv"}
    assert manifest.problems(tmp_path / "out") == []


def test_a_model_that_takes_text_is_refused(tmp_path: Path) -> None:
    data = write_data(tmp_path / "d.jsonl", short_texts()[:1])
    with FakeTriton(count_up, inputs=("INPUT_0",)) as fake, pytest.raises(ConfigError, match="takes no token ids"):
        evaluate(fake.url, tmp_path / "out", data, "--model=ensemble")


def test_the_committed_subset_is_known_by_its_digest() -> None:
    assert lambada.check_data(SUBSET, None) == SUBSET_SHA256
    assert lambada.check_data(SUBSET, f"sha256:{SUBSET_SHA256}") == SUBSET_SHA256


def test_a_wrong_digest_names_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        lambada.check_data(SUBSET, FULL_FILE_SHA256)
    assert SUBSET_SHA256 in raised.value.problem
    assert FULL_FILE_SHA256 in raised.value.problem
    unknown = write_data(tmp_path / "d.jsonl", ["a b"])
    with pytest.raises(ConfigError, match="no known LAMBADA file"):
        lambada.check_data(unknown, None)
    assert lambada.check_data(unknown, "any")
    with pytest.raises(ConfigError, match="cannot be read"):
        lambada.check_data(tmp_path / "missing", None)


@pytest.mark.parametrize(
    ("text", "openai", "last_word"),
    [
        ("the end is near", ("the end is", " near"), ("the end is", " near")),
        ("kind of\n\nPower", ("kind", " of\n\nPower"), ("kind of", " Power")),
        ("saw the \n\nrecorder", ("saw the", " \n\nrecorder"), ("saw the", " recorder")),
        ("two  spaces", ("two", "  spaces"), ("two", " spaces")),
        (" leading and last", (" leading and", " last"), ("leading and", " last")),
    ],
)
def test_texts_are_split_as_their_sources_split_them(
    text: str, openai: tuple[str, str], last_word: tuple[str, str]
) -> None:
    assert split_openai(text) == openai
    assert split_last_word(text) == last_word


def test_the_joint_encoding_is_split_where_the_contexts_own_encoding_ends(model: LearntModel) -> None:
    # lm-eval: context ids, then whatever the joint encoding has after as many tokens.
    text = short_texts()[1]
    sample = prepare_sample(0, text, load_tokenizer(model.directory), None)
    context = model.encode(text.rpartition(" ")[0])
    assert sample.openai_context.prompt == tuple(context)
    assert sample.openai_target == tuple(model.encode(text)[len(context) :])
    assert sample.openai_whole.prompt == tuple(model.encode(text))


@pytest.mark.parametrize("line", ["{", '{"txt": 1}', "[1]"])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "d.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match="is not LAMBADA"):
        read_texts(tmp_path / "d.jsonl", None)


def test_more_samples_than_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 1 texts, but 2 are asked for"):
        read_texts(write_data(tmp_path / "d.jsonl", ["a b"]), 2)


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "one\u2028line here"}\n', encoding="utf-8")
    assert read_texts(tmp_path / "d.jsonl", None) == ["one\u2028line here"]
