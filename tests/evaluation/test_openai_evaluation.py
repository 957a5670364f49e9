"""Tasks through an OpenAI API: a stand-in serves a real model, and the figures are those that transformers computes."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from support.measurements.parity_runs import LENGTH, PROMPTS, SOUND, limits, prompts_file
from support.servers.openai_stand_in import EXTENSIONS, NAME, StandIn, serving
from support.tiny_models.huggingface_models import save
from support.tiny_models.learnt_gpt2 import POSITIONS, LearntModel, expected_figures, short_texts

from evaluation import generate, lambada, summarization
from evaluation.client.openai_connection import most_probable
from evaluation.parity.arguments import ParityArguments
from evaluation.parity.run import main as compare_with_source
from handover.errors import ConfigError, ServerError

ABILITIES: dict[str, dict[str, Any]] = {
    "vLLM's": {},
    "no ids in answers": {"extensions": frozenset()},
    "a token with each score": {"takes_zero": False},
    "texts alone": {"takes_ids": False, "extensions": frozenset()},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LearntModel:
    return LearntModel(tmp_path_factory.mktemp("model"))


def stand_in(model: LearntModel, **changes: Any) -> StandIn:
    decode = model.tokenizer.decode
    return StandIn(
        forward=lambda ids: model.log_probs(list(ids)),
        encode=model.encode,
        decode=lambda ids: str(decode(list(ids), clean_up_tokenization_spaces=False)),
        max_model_len=POSITIONS,
        **changes,
    )


def evaluate(
    served: StandIn, model: LearntModel, directory: Path, *flags: str, has_files: bool = True
) -> dict[str, dict[str, Any]]:
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in short_texts()))
    given = [f"--endpoint={served.url}", f"--output={directory / 'out'}", f"--data-path={data}", "--data-sha256=any"]
    tokenizer = [f"--tokenizer={model.directory}"] if has_files else []
    lambada.main([*given, *tokenizer, "--batch-size=5", *flags])
    content = json.loads((directory / "out" / "metrics.json").read_text())
    assert content["model"]["api"] == "OpenAI" and content["model"]["address"] == served.url
    return {metric["name"]: metric for metric in content["metrics"]}


@pytest.mark.parametrize("ability", ABILITIES)
def test_every_figure_of_lambada_equals_what_transformers_computes(
    model: LearntModel, ability: str, tmp_path: Path
) -> None:
    with serving(stand_in(model, **ABILITIES[ability])) as served:
        metrics = evaluate(served, model, tmp_path)
    expected, n = expected_figures(model, short_texts()), len(short_texts())
    for name, values in (
        ("last_token_accuracy", expected["token"]),
        ("last_word_accuracy_greedy", expected["word"]),
        ("lambada_openai_accuracy", expected["openai"]),
        ("nemo_harness_accuracy", expected["nemo"]),
    ):
        assert 0 < sum(values) < n, "the test needs hits and misses"
        assert (metrics[name]["value"], metrics[name]["n"]) == (pytest.approx(sum(values) / n), n)
    for name, log_probs in (("lambada_openai", "log_prob"), ("nemo_harness", "nemo_log_prob")):
        perplexity = math.exp(-statistics.mean(expected[log_probs]))
        assert metrics[f"{name}_perplexity"]["value"] == pytest.approx(perplexity, rel=1e-6)  # fp32 of another length
    texts = [model.encode(text)[-POSITIONS:] for text in short_texts()]
    hits = sum(
        int(row.argmax()) == token for ids in texts for row, token in zip(model.log_probs(ids), ids[1:], strict=False)
    )
    assert metrics["1-gram_accuracy"]["value"] == pytest.approx(hits / sum(len(ids) - 1 for ids in texts))


def test_without_echo_accuracies_are_generated_and_log_probabilities_are_missing(
    model: LearntModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(stand_in(model, echoes=False)) as served:
        metrics = evaluate(served, model, tmp_path)
    expected, n = expected_figures(model, short_texts()), len(short_texts())
    assert metrics["lambada_openai_accuracy"]["value"] == pytest.approx(sum(expected["openai"]) / n)
    assert metrics["nemo_harness_accuracy"]["value"] == pytest.approx(sum(expected["nemo"]) / n)
    for name in ("lambada_openai_perplexity", "nemo_harness_perplexity"):
        assert (metrics[name]["value"], metrics[name]["n"]) == (None, 0)
    assert "1-gram_accuracy" not in metrics
    printed = capsys.readouterr().out
    assert "; no log probabilities of prompts (echo)" in printed and "no sample could be scored" in printed


def test_another_tokenizer_than_the_servers_is_an_error_and_no_score(model: LearntModel, tmp_path: Path) -> None:
    served = stand_in(model, takes_ids=False)
    served.encode = lambda text: [3, *model.encode(text)]
    with serving(served), pytest.raises(ServerError, match="its tokenizer is another one, or it adds tokens"):
        evaluate(served, model, tmp_path)


def test_without_a_tokenizer_it_is_said_which_to_name(model: LearntModel, tmp_path: Path) -> None:
    with serving(stand_in(model)) as served:
        flags = [f"--endpoint={served.url}", f"--output={tmp_path}", f"--data-path={tmp_path / 'd'}"]
        (tmp_path / "d").write_text(json.dumps({"text": "one two three"}) + "\n")
        said = "tokenizer of the model at http.*its API does not tokenize(?s:.*)deployment.endpoint_tokenizer"
        with pytest.raises(ConfigError, match=said):
            lambada.main([*flags, "--data-sha256=any"])


def test_a_tokenizer_that_is_not_here_is_asked_for_and_the_figures_are_the_same(
    model: LearntModel, tmp_path: Path
) -> None:
    found = []
    for has_files in (True, False):
        (tmp_path / str(has_files)).mkdir()
        with serving(stand_in(model, tokenizes=True)) as served:
            found.append(evaluate(served, model, tmp_path / str(has_files), has_files=has_files))
    assert found[0] == found[1] and found[1]["lambada_openai_accuracy"]["n"] == len(short_texts())


@pytest.mark.parametrize("extensions", [frozenset({"return_token_ids"}), frozenset()])
def test_generated_texts_are_those_of_transformers(
    model: LearntModel, extensions: frozenset[str], tmp_path: Path
) -> None:
    sources, count, end_id = short_texts()[:4], 7, 33
    data, prompt = tmp_path / "data.jsonl", tmp_path / "prompt.yaml"
    data.write_text("".join(json.dumps({"source": text, "reference": text}) + "\n" for text in sources))
    prompt.write_text('prompt_template: "{source}"\n')
    expected, tokens = [], 0
    for text in sources:
        ids, made = model.encode(text), list[int]()
        while len(made) < count and end_id not in made:
            made.append(int(model.log_probs([*ids, *made])[-1].argmax()))
        tokens += len(made)
        expected.append(" ".join(model.tokenizer.decode([token for token in made if token != end_id]).split()))
    with serving(stand_in(model, extensions=extensions, end_id=end_id)) as served:
        summarization.main(
            [
                *(f"--endpoint={served.url}", f"--output={tmp_path / 'out'}", f"--data-path={data}"),
                *(f"--prompt={prompt}", f"--tokenizer={model.directory}", f"--max-output-len={count}"),
            ]
        )
    assert (tmp_path / "out" / "predictions.txt").read_text().splitlines() == expected
    with (tmp_path / "out" / "samples.csv").open(newline="") as stream:
        assert sum(int(row["generated_tokens"]) for row in csv.DictReader(stream)) == tokens


def test_beams_are_refused(model: LearntModel, tmp_path: Path) -> None:
    data, prompt = tmp_path / "data.jsonl", tmp_path / "prompt.yaml"
    data.write_text(json.dumps({"source": "one", "reference": "two"}) + "\n")
    prompt.write_text('prompt_template: "{source}"\n')
    with serving(stand_in(model)) as served, pytest.raises(ConfigError, match="OpenAI's API has no beam search"):
        summarization.main(
            [
                *(f"--endpoint={served.url}", f"--output={tmp_path / 'out'}", f"--data-path={data}"),
                *(f"--prompt={prompt}", f"--tokenizer={model.directory}", "--beam-width=2", "--max-output-len=4"),
            ]
        )


def parity(served: StandIn, checkpoint: Path, directory: Path, **changes: Any) -> dict[str, Any]:
    given = {"data_path": prompts_file(directory), "output_length": LENGTH, "limits": limits(*SOUND), "batch_size": 2}
    arguments = ParityArguments(served.url, directory / "parity", checkpoint, **{**given, **changes})
    try:
        compare_with_source(arguments.to_argv())
    except ServerError as error:
        assert "is not its source" in error.problem
    return dict(json.loads((directory / "parity" / "summary.json").read_text()))


def of_huggingface(network: Any, **changes: Any) -> StandIn:
    @torch.no_grad()
    def forward(ids: Any) -> torch.Tensor:
        return torch.log_softmax(network(torch.tensor([list(ids)])).logits[0].double(), dim=-1)

    return StandIn(forward=forward, max_model_len=24, **changes)


@pytest.mark.parametrize("names", ["ids", "texts"])
def test_parity_holds_for_the_source_and_fails_for_another_model(names: str, tmp_path: Path) -> None:
    """SGLang's log probabilities name tokens by their texts alone; generated ids it returns."""
    network = save("gpt2", tmp_path / "source")
    extensions = EXTENSIONS - ({"return_tokens_as_token_ids"} if names == "texts" else set())
    with serving(of_huggingface(network, extensions=extensions)) as served:
        summary = parity(served, tmp_path / "source", tmp_path)
        assert summary["verdict"] == "HOLDS" and summary["greedy_agreement"] == 1.0
        assert summary["max_log_prob_difference"] < 1e-4
        with torch.no_grad():
            network.transformer.h[1].ln_2.weight[:8] *= 2
        summary = parity(served, tmp_path / "source", tmp_path)
        assert summary["verdict"] == "FAILS" and summary["max_log_prob_difference"] > 0.01
    with (tmp_path / "parity" / "positions.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == sum(len(prompt) - 1 + LENGTH for prompt in PROMPTS)


def test_parity_needs_tokens_by_id(tmp_path: Path) -> None:
    network = save("gpt2", tmp_path / "source")
    served = of_huggingface(network, extensions=frozenset({"ignore_eos"}))
    with serving(served), pytest.raises(ConfigError, match="it has no return_token_ids .*Unrecognized"):
        parity(served, tmp_path / "source", tmp_path)


@pytest.mark.parametrize(
    ("name", "log_prob", "top", "found"),
    [
        ("token_id:5", -0.1, {"token_id:5": -0.1}, 5),
        ("token_id:5", -2.0, {"token_id:5": -2.0, "token_id:8": -0.2}, 8),  # vLLM's order
        ("token_id:5", -2.0, {"token_id:8": -0.2, "token_id:5": -2.0}, 8),
        ("token_id:5", -2.0, {"token_id:8": -0.2}, 8),  # the given token is left out
        ("token_id:5", -0.7, {"token_id:5": -0.7, "token_id:8": -0.7}, 8),  # as probable: the server's choice
        ("token_id:5", -0.1, {"token_id:5": -0.1, "token_id:8": -3.0}, 5),  # a server that gives one more
        (" the", -0.1, {" the": -0.1}, 5),
        (" the", -2.0, {" the": -2.0, " a": -0.2}, -1),
        (" the", -2.0, {" the": -0.3}, -1),  # two tokens of one text
    ],
)
def test_the_most_probable_token_is_read_from_any_servers_form(
    name: str, log_prob: float, top: dict[str, float], found: int
) -> None:
    assert most_probable(5, name, log_prob, top) == found


def test_requests_have_the_fields_that_the_server_takes_and_no_others(model: LearntModel, tmp_path: Path) -> None:
    with serving(stand_in(model, extensions=frozenset({"ignore_eos"}))) as served:
        evaluate(served, model, tmp_path)
    scoring = [body for body in served.asked if body.get("echo") and len(body["prompt"]) == 5]
    assert scoring and all(
        {key: body[key] for key in body if key != "prompt"}
        == {"model": NAME, "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1}
        for body in scoring
    )


def test_prompts_are_completed_through_an_api(model: LearntModel, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [" ".join(text.split()[:6]) for text in short_texts()[1:3]]
    expected = []
    for prompt in prompts:
        ids, made = model.encode(prompt), list[int]()
        while len(made) < 5:
            made.append(int(model.log_probs([*ids, *made])[-1].argmax()))
        expected.append(model.tokenizer.decode([*ids, *made])[len(prompt) :])
    with serving(stand_in(model)) as served:
        generate.main([f"--endpoint={served.url}", "--output-len=5", "--prompts", *prompts])
    assert capsys.readouterr().out == "\n".join(
        f"> {prompt}\n{text}\n" for prompt, text in zip(prompts, expected, strict=True)
    )


def test_a_streamed_completion_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    card = json.dumps({"data": [{"id": NAME}]}).encode()
    events: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in (" of", " all")] + [
        {"choices": [], "usage": {}}
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    served = StandIn(faults=[(200, {}, card), (200, {"Content-Type": "text/event-stream"}, stream.encode())])
    with serving(served):
        generate.main([f"--endpoint={served.url}", "--stream", "--prompts", "first"])
    assert capsys.readouterr().out == "> first\n of all\n"
