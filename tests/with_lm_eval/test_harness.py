"""lm-evaluation-harness drives our endpoints.

Oracles: the harness's own LAMBADA task against our evaluation of the same server, and a bigram model whose log
probabilities are a table, so that every sum is known whatever windows a text is cut into.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval import simple_evaluate
from support.measurements.harness_tasks import PROJECT, SUBSET, harness_task, requests, task_manager
from support.servers.fake_triton import T5_INPUTS, FakeTriton, Tensors, count_up_t5
from support.servers.served import Deployment
from tritonclient import grpc as triton

from evaluation import lambada
from evaluation.harness import ServedLM
from handover.errors import ConfigError, ServerError

TEXTS = 80
LETTERS, POSITIONS = "abcdefgh|", 12
END = LETTERS.index("|")

_random = np.random.default_rng(3)
TABLE = np.log(_random.dirichlet(np.ones(len(LETTERS)), len(LETTERS))).astype(np.float32)
"""Log probability of each letter (column) behind each letter (row)."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(LETTERS)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


def bigram(tensors: Tensors) -> Tensors:
    """The drop-in engine around the table: greedy, ended by end_id or a stop word."""
    outputs, rows = fastertransformer(tensors), tensors["input_ids"]
    if "is_return_context_log_probs" in tensors:
        scores = np.zeros(rows.shape, np.float32)
        scores[:, 1:] = TABLE[rows[:, :-1], rows[:, 1:]]
        best = np.zeros(rows.shape, np.uint32)
        best[:, 1:] = TABLE[rows[:, :-1]].argmax(-1)
        outputs |= {"context_log_probs": scores, "context_argmax_ids": best}
    return outputs


def fastertransformer(tensors: Tensors) -> Tensors:
    """The same without scores of single tokens, as FasterTransformer's own engine is."""
    ids, lengths, wanted = tensors["input_ids"], tensors["input_lengths"][:, 0], tensors["request_output_len"][:, 0]
    assert (lengths + wanted).max() <= POSITIONS
    rows, width, longest = len(ids), ids.shape[1], int(wanted.max())
    output, ends = np.zeros((rows, 1, width + longest), np.uint32), lengths.astype(np.uint32)
    sums, log_probs = np.zeros((rows, 1), np.float32), np.zeros((rows, 1, longest), np.float32)
    stops = tensors.get("stop_words_list")
    for row in range(rows):
        text = [int(token) for token in ids[row, : lengths[row]]]
        if "is_return_context_cum_log_probs" in tensors:
            sums[row] = sum(float(TABLE[a, b]) for a, b in zip(text, text[1:], strict=False))
        for step in range(wanted[row]):
            log_probs[row, 0, step] = TABLE[text[-1]].max()
            text.append(int(TABLE[text[-1]].argmax()))
            is_end = "end_id" in tensors and text[-1] == int(tensors["end_id"][row, 0])
            if is_end or any(text[-len(word) :] == word for word in words_of(stops, row)):
                break
        sums[row] += log_probs[row, 0].sum()
        output[row, 0, : len(text)], ends[row] = text, len(text)
    outputs = {"output_ids": output, "sequence_length": ends[:, None]}
    return outputs | (
        {"cum_log_probs": sums, "output_log_probs": log_probs} if "is_return_log_probs" in tensors else {}
    )


def words_of(stops: np.ndarray[Any, Any] | None, row: int) -> list[list[int]]:
    """Read FasterTransformer's layout: all tokens in a line, and where each word ends."""
    ends = [] if stops is None else [int(end) for end in stops[row, 1] if end > 0]
    return [stops[row, 0, start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]  # type: ignore[index]


def served(answer: Callable[[Tensors], Tensors]) -> FakeTriton:
    scores = ("is_return_context_log_probs",) if answer is bigram else ()
    return FakeTriton(answer, ("input_ids", *scores), max_batch_size=4)


def open_model(fake: FakeTriton, tokenizer: Path, **changes: Any) -> ServedLM:
    given = {"max_length": POSITIONS, "prefix_token_id": END, "end_id": END} | changes
    return ServedLM(fake.url, tokenizer=str(tokenizer), **given)


def by_hand(text: str, first: int) -> tuple[float, bool]:
    ids = [LETTERS.index(letter) for letter in text]
    pairs = list(zip(ids, ids[1:], strict=False))[first - 1 :]
    return sum(float(TABLE[a, b]) for a, b in pairs), all(int(TABLE[a].argmax()) == b for a, b in pairs)


@pytest.mark.parametrize("answer", [bigram, fastertransformer])
def test_log_likelihoods_are_those_of_the_table(answer: Callable[[Tensors], Tensors], tokenizer: Path) -> None:
    best = LETTERS[int(TABLE[0].argmax())]
    pairs = [("abc", "de"), ("", "hgf"), ("a", best), ("h", "a"), ("ab", "cdefgh"), ("abcdefgh" * 3, "ab")]
    with served(answer) as fake:
        found = open_model(fake, tokenizer).loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (context, target), (log_prob, is_greedy) in zip(pairs, found, strict=True):
        whole = (context or "|") + target
        expected, is_best = by_hand(whole, len(whole) - len(target))
        assert log_prob == pytest.approx(expected, abs=1e-4) and is_greedy == is_best
    assert found[2][1]


@pytest.mark.parametrize("answer", [bigram, fastertransformer])
def test_rolling_windows_score_each_token_once(answer: Callable[[Tensors], Tensors], tokenizer: Path) -> None:
    texts = ["a", "abcdefgh", "hgfedcba" * 5 + "abc", "ab" * POSITIONS]
    with served(answer) as fake:
        model = open_model(fake, tokenizer)
        found = model.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in texts)), True)
    for text, log_prob in zip(texts, found, strict=True):
        assert log_prob == pytest.approx(by_hand("|" + text, 1)[0], abs=1e-3)


def greedy(text: str, count: int) -> str:
    made = ""
    for _ in range(count):
        made += LETTERS[int(TABLE[LETTERS.index((text + made)[-1])].argmax())]
    return made


def test_generation_ends_at_stop_strings_and_at_the_end_token(tokenizer: Path) -> None:
    free = greedy("abc", 6).split("|")[0]
    assert len(free) >= 2  # something to stop in
    contexts = [("abc", {"until": [], "max_gen_toks": 6}), ("abc", {"until": free[1], "max_gen_toks": 6})]
    contexts += [("abc", {"until": [free[:2], "zz"], "max_gen_toks": 6}), ("abcdefgh" * 4, {"max_gen_toks": 4})]
    with served(bigram) as fake:
        model = open_model(fake, tokenizer)
        texts = model.generate_until(requests("generate_until", *contexts), disable_tqdm=True)
    assert texts[0] == free and texts[1] == free[: free.index(free[1])] and texts[2] == ""
    assert texts[3] == greedy("abcdefgh" * 4, 4).split("|")[0]


def test_sampling_is_asked_for_where_a_task_samples(tokenizer: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_gen_toks": 2, "until": []}
    with served(bigram) as fake:
        open_model(fake, tokenizer).generate_until(requests("generate_until", ("a", settings)), disable_tqdm=True)
    tensors = fake.requests[-1]
    assert tensors["temperature"].tolist() == [[np.float32(0.7)]] and tensors["runtime_top_p"].tolist() == [
        [np.float32(0.9)]
    ]


@pytest.mark.parametrize(
    ("given", "rows"), [({}, 4), ({"rows": 2}, 2), ({"batch_size": 3}, 3), ({"batch_size": "auto:4", "rows": 2}, 2)]
)
def test_rows_of_a_request_are_those_asked_for_up_to_the_models(
    given: dict[str, Any], rows: int, tokenizer: Path
) -> None:
    with served(bigram) as fake:
        model = open_model(fake, tokenizer, **given)
        fake.requests.clear()
        model.loglikelihood(requests("loglikelihood", *(("ab", letter) for letter in LETTERS)), disable_tqdm=True)
    assert max(len(tensors["input_ids"]) for tensors in fake.requests) == rows


def test_what_cannot_be_scored_is_refused(tokenizer: Path) -> None:
    with served(bigram) as fake, pytest.raises(ConfigError, match="end_id is not known"):
        ServedLM(fake.url, tokenizer=str(tokenizer), max_length=POSITIONS)
    pair = requests("loglikelihood", ("a", "b"))
    with FakeTriton(bigram, ("INPUT_0",)) as fake:
        model = open_model(fake, tokenizer)
        with pytest.raises(ConfigError, match="no model inside it that takes token ids is served"):
            model.loglikelihood(pair, disable_tqdm=True)
    with FakeTriton(bigram, ("session_len", "input_ids")) as fake, pytest.raises(ConfigError, match="row by row"):
        open_model(fake, tokenizer)
    with served(bigram) as fake, pytest.raises(ServerError, match="not sha256:wanted"):
        open_model(fake, tokenizer, model_digest="sha256:wanted")


def test_fastertransformers_own_encoder_decoder_generates_and_scores_nothing(tokenizer: Path) -> None:
    """The fake T5 counts up from its input's last token, which is the end token."""
    with FakeTriton(count_up_t5, T5_INPUTS) as fake:
        model = open_model(fake, tokenizer, end_id=1)
        (text,) = model.generate_until(requests("generate_until", ("gh", {"max_gen_toks": 3, "until": []})), True)
        assert fake.requests[0]["input_ids"].tolist() == [[LETTERS.index("g"), LETTERS.index("h"), 1]]
        assert text == LETTERS[2:5]
        with pytest.raises(ConfigError, match="encoder-decoder that takes no decoder_input_ids"):
            model.loglikelihood(requests("loglikelihood", ("a", "b")), disable_tqdm=True)


def test_the_harnesss_own_lambada_agrees_to_the_last_example(deployment: Deployment, tmp_path: Path) -> None:
    model = ServedLM(str(deployment.endpoint_file))
    results = simple_evaluate(
        model, tasks=[harness_task(SUBSET)], task_manager=task_manager(), limit=TEXTS, log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    assert results is not None
    (figures,), (theirs,) = results["results"].values(), results["samples"].values()
    assert results["config"]["model_digest"].startswith("sha256:")

    output = tmp_path / "ours"
    endpoint, data = f"--endpoint={deployment.endpoint_file}", f"--data-path={SUBSET}"
    lambada.main([endpoint, f"--output={output}", data, f"--samples={TEXTS}"])
    ours = {each["name"]: each["value"] for each in json.loads((output / "metrics.json").read_text())["metrics"]}
    assert figures["acc,none"] == ours["lambada_openai_accuracy"]
    assert figures["perplexity,none"] == pytest.approx(ours["lambada_openai_perplexity"], rel=1e-4)
    with (output / "samples.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    theirs.sort(key=lambda sample: sample["doc_id"])
    assert len(rows) == len(theirs) == TEXTS
    for row, sample in zip(rows, theirs, strict=True):
        assert bool(int(row["openai_hit"])) == bool(sample["acc"])
        assert float(row["openai_log_prob"]) == pytest.approx(sample["perplexity"], abs=1e-3)
    assert math.isfinite(figures["perplexity,none"])


def test_the_documented_command_works_without_a_network(deployment: Deployment, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "evaluation.harness", "run", "--model", "slipway", "--tasks", "lambada_file"),
        *("--model_args", f"url={deployment.endpoint_file}", "--include_path", "examples/lm_eval", "--limit", "8"),
        *("--output_path", str(tmp_path)),
    ]
    closed = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    finished = subprocess.run(command, cwd=PROJECT, env={**os.environ, **closed}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "lambada_file" in finished.stdout and "perplexity" in finished.stdout
    (written,) = tmp_path.rglob("results_*.json")
    assert json.loads(written.read_text())["n-samples"]["lambada_file"]["effective"] == 8


def answers_of(deployment: Deployment, model: str) -> int:
    """How many requests a model of the server has answered so far."""
    with triton.InferenceServerClient(deployment.wait_until_published().grpc_url) as client:
        return int(client.get_inference_statistics(model).model_stats[0].inference_stats.success.count)


def test_an_ensemble_is_asked_by_texts_and_gives_what_the_model_inside_gives(deployment: Deployment) -> None:
    texts = [json.loads(line)["text"] for line in SUBSET.read_text("utf-8").splitlines()[:6]]
    pairs = [(text.rpartition(" ")[0], " " + text.rpartition(" ")[2]) for text in texts]
    ways = [{"until": [". ", "\n"], "max_gen_toks": 9}, {"until": ['"', ","], "max_gen_toks": 5}]
    contexts = [(text, ways[number % 2]) for number, text in enumerate(texts)]
    found = {}
    for name in ("fastertransformer", "ensemble"):
        before = answers_of(deployment, "ensemble")
        model = ServedLM(str(deployment.endpoint_file), model=name)
        scored = model.loglikelihood(requests("loglikelihood", *pairs, ("", "Once upon a time")), disable_tqdm=True)
        rolling = model.loglikelihood_rolling(requests("loglikelihood_rolling", (texts[0] * 8,)), disable_tqdm=True)
        made = model.generate_until(requests("generate_until", *contexts), disable_tqdm=True)
        found[name] = scored, rolling, made
        assert (answers_of(deployment, "ensemble") > before) is (name == "ensemble")
    for ids, by_text in zip(*(found[name][0] for name in found), strict=True):
        assert by_text == (pytest.approx(ids[0], abs=1e-3), ids[1])
    assert found["ensemble"][1] == pytest.approx(found["fastertransformer"][1], abs=1e-2)
    assert found["ensemble"][2] == found["fastertransformer"][2] and any(found["ensemble"][2])


def test_our_task_is_the_harnesss_but_for_its_data() -> None:
    import yaml

    ours = yaml.safe_load((PROJECT / "examples" / "lm_eval" / "lambada_file.yaml").read_text())
    own = harness_task(SUBSET)
    for key in ("output_type", "test_split", "doc_to_text", "doc_to_target", "metric_list", "metadata"):
        assert ours[key] == own[key], key
