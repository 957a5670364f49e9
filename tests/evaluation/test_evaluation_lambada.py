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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, RefusalError, Tensors, count_up
from support.tiny_models.learnt_gpt2 import POSITIONS, SUBSET, LearntModel, expected_figures, short_texts

from evaluation import lambada
from evaluation.client.tokenizer import load_tokenizer
from evaluation.tasks.lambada.data import FULL_FILE_SHA256, SUBSET_SHA256, check_data, read_texts
from evaluation.tasks.lambada.score import Verdict, judge_scored, score_sample, summarise
from evaluation.tasks.lambada.spans import Span, prepare_sample, split_harness, split_last_word, split_openai
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
        if "is_return_context_cum_log_probs" in tensors:
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
    answered = {"output_ids": output, "sequence_length": (lengths + wanted)[:, None].astype(np.uint32)}
    if "is_return_log_probs" in tensors:
        answered |= {"cum_log_probs": cum, "output_log_probs": each}
    return answered


def scoring_answer(model: LearntModel, tensors: Tensors) -> Tensors:
    """The drop-in engine: it also scores every token of an input, where it is asked to."""
    answered = answer(model, tensors)
    if "is_return_context_log_probs" in tensors:
        ids, lengths = tensors["input_ids"], tensors["input_lengths"][:, 0]
        log_probs, best = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, np.uint32)
        for row, length in enumerate(lengths):
            rows = model.log_probs(ids[row, :length].tolist())
            best[row, 1:length] = rows[:-1].argmax(-1)
            log_probs[row, 1:length] = [float(rows[at, token]) for at, token in enumerate(ids[row, 1:length])]
        answered |= {"context_log_probs": log_probs, "context_argmax_ids": best}
    return answered


def ensemble_of(engine: Callable[[LearntModel, Tensors], Tensors], model: LearntModel, tensors: Tensors) -> Tensors:
    """Text in, text out, around an engine; it has no output_ids."""
    rows = [model.encode(text.decode()) for text in tensors["INPUT_0"][:, 0]]
    ids = np.zeros((len(rows), max(map(len, rows))), np.uint32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    lengths = np.array([[len(tokens)] for tokens in rows], np.uint32)
    given = {"input_ids": ids, "input_lengths": lengths, "request_output_len": tensors["INPUT_1"]}
    answered = engine(model, {**tensors, **given})
    output = answered.pop("output_ids")
    texts = [
        model.tokenizer.decode(row[0, : int(length)], clean_up_tokenization_spaces=False)
        for row, length in zip(output, answered["sequence_length"][:, 0], strict=True)
    ]
    return {**answered, "OUTPUT_0": np.array([text.encode() for text in texts], dtype=np.object_)}


SCORES = "is_return_context_log_probs"
SERVERS: dict[str, tuple[Callable[[LearntModel, Tensors], Tensors], tuple[str, ...]]] = {
    "FasterTransformer": (answer, ("input_ids",)),
    "FasterTransformer, exported by us": (answer, ("input_ids", SCORES)),
    "drop-in engine": (scoring_answer, ("input_ids", SCORES)),
    "FasterTransformer's ensemble": (partial(ensemble_of, answer), ("INPUT_0",)),
    "drop-in engine's ensemble": (partial(ensemble_of, scoring_answer), ("INPUT_0", SCORES)),
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


@pytest.mark.parametrize("server", SERVERS)
def test_every_figure_equals_what_hugging_face_computes(model: LearntModel, server: str, tmp_path: Path) -> None:
    engine, inputs = SERVERS[server]
    texts, data = short_texts(), write_data(tmp_path / "d.jsonl", short_texts())
    parameters = {"model_checkpoint_path": str(model.directory)}
    with FakeTriton(partial(engine, model), inputs=inputs, parameters=parameters) as fake:
        content = evaluate(fake.url, tmp_path / "out", data, "--batch-size=5")
    expected = expected_figures(model, texts)
    metrics = {metric["name"]: metric for metric in content["metrics"]}
    n = len(texts)
    assert expected["word"] != expected["openai"], "the test needs a text that the definitions see differently"
    for name, values in (
        ("last_token_accuracy", expected["token"]),
        ("last_word_accuracy_greedy", expected["word"]),
        ("lambada_openai_accuracy", expected["openai"]),
        ("nemo_harness_accuracy", expected["nemo"]),
    ):
        assert 0 < sum(values) < n, "the test needs hits and misses"
        assert metrics[name]["value"] == pytest.approx(sum(values) / n)
        assert metrics[name]["stderr"] == pytest.approx(statistics.stdev(values) / math.sqrt(n))
        assert (metrics[name]["n"], metrics[name]["failed"]) == (n, 0)
    assert expected["nemo_log_prob"] != pytest.approx(expected["log_prob"], rel=1e-3)
    for name, log_probs in (("lambada_openai", "log_prob"), ("nemo_harness", "nemo_log_prob")):
        perplexity = math.exp(-statistics.mean(expected[log_probs]))
        assert metrics[f"{name}_perplexity"]["value"] == pytest.approx(perplexity, rel=1e-4)


@pytest.mark.parametrize("server", [name for name in SERVERS if "drop-in" in name])
def test_k_grams_are_those_that_greedy_generation_gives_anywhere(
    model: LearntModel, server: str, tmp_path: Path
) -> None:
    """Oracle: FasterTransformer's definition to the letter: generate four tokens after each prefix, and compare."""
    engine, inputs = SERVERS[server]
    texts = short_texts()[4:8]  # some learnt, some not
    hits, places = [0] * 5, [0] * 5
    for text in texts:
        ids = model.encode(text)
        for at in range(1, len(ids)):
            grown = ids[:at]
            for _ in range(4):
                grown = [*grown, int(model.log_probs(grown)[-1].argmax())]
            for length in range(1, min(4, len(ids) - at) + 1):
                places[length] += 1
                hits[length] += grown[at : at + length] == ids[at : at + length]
    parameters = {"model_checkpoint_path": str(model.directory)}
    with FakeTriton(partial(engine, model), inputs=inputs, parameters=parameters) as fake:
        content = evaluate(fake.url, tmp_path / "out", write_data(tmp_path / "d.jsonl", texts))
        assert len(fake.requests) == 2, "one to learn what the engine can, one for all texts"
    metrics = {metric["name"]: metric for metric in content["metrics"]}
    for length in range(1, 5):
        found = metrics[f"{length}-gram_accuracy"]
        assert found["n"] == places[length] and found["value"] == pytest.approx(hits[length] / places[length])
    assert 0 < hits[4] < hits[1] < places[1]


def test_a_run_of_hits_counts_in_every_k_gram_that_it_holds() -> None:
    verdict = judge_scored(Span((1, 2, 3, 4, 5, 6), 4), [-1.0, -2.0, -3.0, -4.0, -5.0], [2, 3, 9, 5, 6])
    assert verdict.gram_hits == (4, 2, 0, 0)  # hits at the 1st, 2nd, 4th and 5th place
    assert verdict.is_hit and verdict.log_prob == -9.0


def test_a_text_that_an_ensemble_would_encode_otherwise_is_left_out_of_that_figure(
    model: LearntModel, tmp_path: Path
) -> None:
    """FasterTransformer's ensemble is asked for the last token after all others: not every ids are a text's."""
    text = next(
        text for text in ["a caf\u00e9", "so na\u00efve \u2026", "\u201cno\u201d said I \u20ac"]
        if model.encode(model.tokenizer.decode(model.encode(text)[:-1])) != model.encode(text)[:-1]
    )  # fmt: skip
    engine, inputs = SERVERS["FasterTransformer's ensemble"]
    parameters = {"model_checkpoint_path": str(model.directory)}
    data = write_data(tmp_path / "d.jsonl", [short_texts()[1], text])
    with FakeTriton(partial(engine, model), inputs=inputs, parameters=parameters) as fake:
        content = evaluate(fake.url, tmp_path / "out", data)
    metrics = {metric["name"]: (metric["n"], metric["failed"]) for metric in content["metrics"]}
    assert metrics["last_token_accuracy"] == (1, 1) and metrics["lambada_openai_accuracy"] == (2, 0)
    assert content["failed"] == 0


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
        pytest.raises(ServerError, match=r"1 of 4 samples have no score; the first, number 2: .*out of memory"),
    ):
        evaluate(fake.url, tmp_path / "out", data, "--batch-size=1")
    content = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert {(metric["n"], metric["failed"]) for metric in content["metrics"]} == {(3, 1)}
    with (tmp_path / "out" / "samples.csv").open(newline="") as stream:
        row = list(csv.DictReader(stream))[1]
    assert (row["openai_hit"], row["openai_log_prob"]) == ("", "")
    assert "out of memory" in row["error"]


@pytest.mark.parametrize("said", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_fails_its_sample(model: LearntModel, said: float) -> None:
    texts, tokenizer = short_texts()[:2], load_tokenizer(model.directory)
    samples = [prepare_sample(index, text, tokenizer, None) for index, text in enumerate(texts)]
    scores = []
    for sample, log_prob in zip(samples, (said, -2.0), strict=True):
        answers = {span: Verdict(True, log_prob) for span in sample.spans}
        scores.append(score_sample(sample, answers))
    assert "not finite" in scores[0].error and not scores[1].error
    figures = {figure.name: figure for figure in summarise(scores)}
    assert figures["lambada_openai_perplexity"].value == pytest.approx(math.exp(2))
    assert figures["lambada_openai_perplexity"].failed == figures["last_token_accuracy"].failed == 1


def test_a_server_that_another_one_replaces_meanwhile_leaves_no_figures(model: LearntModel, tmp_path: Path) -> None:
    def take_over(tensors: Tensors) -> Tensors:
        server.parameters["weights_digest"] = "sha256:b"
        return count_up(tensors)

    with FakeTriton(take_over, parameters={"weights_digest": "sha256:a"}) as server:
        endpoint = Endpoint("127.0.0.1", grpc_port=server.port, settings={"weights_digest": "sha256:a"})
        endpoint.write(tmp_path / "endpoint.json")
        data = tmp_path / "d.jsonl"
        data.write_text(json.dumps({"text": "one two three"}) + "\n")
        argv = [f"--endpoint={tmp_path / 'endpoint.json'}", f"--output={tmp_path / 'out'}", f"--data-path={data}"]
        with pytest.raises(ServerError, match="serves weights sha256:b"):
            lambada.main([*argv, "--data-sha256=any", f"--tokenizer={model.directory}"])
    assert not (tmp_path / "out").exists()


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
    assert {record.path for record in manifest.files} == {"metrics.json", "metrics.csv", "summary.json", "samples.csv"}
    assert manifest.problems(tmp_path / "out") == []


def test_a_model_that_takes_neither_ids_nor_texts_is_refused(tmp_path: Path) -> None:
    data = write_data(tmp_path / "d.jsonl", short_texts()[:1])
    with FakeTriton(count_up, inputs=("QUERY",)) as fake, pytest.raises(ConfigError, match="takes neither"):
        evaluate(fake.url, tmp_path / "out", data, "--model=preprocessing")


def test_the_committed_subset_is_known_by_its_digest() -> None:
    assert check_data(SUBSET, None) == SUBSET_SHA256
    assert check_data(SUBSET, f"sha256:{SUBSET_SHA256}") == SUBSET_SHA256


def test_a_wrong_digest_names_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        check_data(SUBSET, FULL_FILE_SHA256)
    assert SUBSET_SHA256 in raised.value.problem
    assert FULL_FILE_SHA256 in raised.value.problem
    unknown = write_data(tmp_path / "d.jsonl", ["a b"])
    with pytest.raises(ConfigError, match="no known LAMBADA file"):
        check_data(unknown, None)
    assert check_data(unknown, "any")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_data(tmp_path / "missing", None)


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


def test_nemos_harness_starts_a_line_and_straightens_quotes() -> None:
    text = "\u201cdon\u2019t,\u201d said the \n\nrecorder\u2018s"
    assert split_harness(text) == ('\n"don\'t," said the', " \n\nrecorder's")


def test_the_joint_encoding_is_split_where_the_contexts_own_encoding_ends(model: LearntModel) -> None:
    # lm-eval: context ids, then whatever the joint encoding has after as many tokens.
    text = short_texts()[1]
    sample = prepare_sample(0, text, load_tokenizer(model.directory), None)
    context = model.encode(text.rpartition(" ")[0])
    assert sample.openai.sequence[: sample.openai.start] == tuple(context)
    assert sample.openai.target == tuple(model.encode(text)[len(context) :])
    assert sample.openai.sequence == tuple(model.encode(text))


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


def test_an_adapter_of_the_model_answers_every_request(model: LearntModel, tmp_path: Path) -> None:
    data, parameters = write_data(tmp_path / "d.jsonl", short_texts()), {"model_checkpoint_path": str(model.directory)}
    with FakeTriton(
        partial(scoring_answer, model), inputs=("input_ids", SCORES, "lora_name"), parameters=parameters
    ) as fake:
        content = evaluate(fake.url, tmp_path / "out", data, "--lora-name=sql", "--batch-size=5")
        assert fake.requests
        for request in fake.requests:
            assert request["lora_name"].tolist() == [[b"sql"]] * len(request["input_ids"])
    assert content["model"]["adapter"] == "sql"
    with FakeTriton(partial(answer, model), parameters=parameters) as fake:
        with pytest.raises(ConfigError, match="does not take the name of a LoRA adapter"):
            evaluate(fake.url, tmp_path / "out", data, "--lora-name=sql")
        assert not fake.requests
