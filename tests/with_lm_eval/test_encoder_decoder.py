"""lm-evaluation-harness on a T5: our endpoint against the harness's own class for Hugging Face's models."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from support.measurements.harness_tasks import SUBSET, harness_task, requests, task_manager
from support.servers.served import Deployment
from support.tiny_models.t5_models import huggingface_t5
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import Metaspace
from transformers import PreTrainedTokenizerFast

from evaluation import lambada
from evaluation.harness import ServedLM
from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository

LENGTH, SAMPLES = 64, 30
SPECIAL = ("<pad>", "</s>", "<unk>")
TEXTS = [json.loads(line)["text"] for line in SUBSET.read_text("utf-8").splitlines()]


def write_tokenizer(directory: Path) -> Any:
    """A tokenizer as T5 has one, which ends an input."""
    pipeline = Tokenizer(models.Unigram())
    pipeline.pre_tokenizer, pipeline.decoder = pre_tokenizers.Metaspace(), Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=list(SPECIAL), unk_token="<unk>")
    pipeline.train_from_iterator((text.replace("\n", " ") for text in TEXTS), trainer)
    pipeline.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pipeline, **names)
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Any]]:
    """A T5 behind a real tritonserver, and the harness's own class around the same checkpoint."""
    from lm_eval.models.huggingface import HFLM

    root = tmp_path_factory.mktemp("t5")
    tokenizer = write_tokenizer(root / "source")
    model = huggingface_t5(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, feed_forward_proj="gated-gelu")
    model.save_pretrained(root / "source")
    convert(ConvertArguments(root / "source", root / "2-gpu", 2, "fp32", 2))
    build_repository(ExportArguments(root / "2-gpu", root / "repository", "tiny", 2, 1, "fp32", 0, 0, 8))
    running = Deployment(root / "repository", root / "deployment")
    running.wait_until_published()
    yield running, HFLM(pretrained=model, tokenizer=tokenizer, backend="seq2seq", batch_size=8, device="cpu")
    running.stop()


def evaluate(model: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = simple_evaluate(
        model, tasks=[harness_task(SUBSET)], task_manager=task_manager(), limit=SAMPLES, log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    assert found is not None
    (figures,), (samples,) = found["results"].values(), found["samples"].values()
    return figures, sorted(samples, key=lambda sample: sample["doc_id"])


@pytest.fixture(scope="module")
def theirs(t5: tuple[Deployment, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return evaluate(t5[1])


@pytest.mark.parametrize("name", ["fastertransformer", "ensemble"])
def test_a_t5s_lambada_is_that_of_the_harnesss_own_class_to_the_last_example(
    t5: tuple[Deployment, Any], theirs: tuple[dict[str, Any], list[dict[str, Any]]], name: str
) -> None:
    figures, samples = evaluate(ServedLM(str(t5[0].endpoint_file), model=name))
    assert figures["acc,none"] == theirs[0]["acc,none"] and len(samples) == SAMPLES
    assert figures["perplexity,none"] == pytest.approx(theirs[0]["perplexity,none"], rel=1e-4)
    for ours, other in zip(samples, theirs[1], strict=True):
        assert ours["acc"] == other["acc"]
        assert ours["perplexity"] == pytest.approx(other["perplexity"], abs=1e-3)


@pytest.mark.parametrize("name", ["fastertransformer", "ensemble"])
def test_our_own_lambada_of_a_t5_says_the_same(
    t5: tuple[Deployment, Any], theirs: tuple[dict[str, Any], list[dict[str, Any]]], name: str, tmp_path: Path
) -> None:
    given = [f"--endpoint={t5[0].endpoint_file}", f"--output={tmp_path}", f"--model={name}"]
    lambada.main([*given, f"--data-path={SUBSET}", f"--samples={SAMPLES}"])
    metrics = {each["name"]: each["value"] for each in json.loads((tmp_path / "metrics.json").read_text())["metrics"]}
    assert metrics["lambada_openai_accuracy"] == theirs[0]["acc,none"]
    assert metrics["lambada_openai_perplexity"] == pytest.approx(theirs[0]["perplexity,none"], rel=1e-4)
    assert "1-gram_accuracy" not in metrics and metrics["last_token_accuracy"] is not None
    with (tmp_path / "samples.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for row, sample in zip(rows, theirs[1], strict=True):
        assert bool(int(row["openai_hit"])) == bool(sample["acc"])
        assert float(row["openai_log_prob"]) == pytest.approx(sample["perplexity"], abs=1e-3)


@pytest.mark.parametrize("name", ["fastertransformer", "ensemble"])
def test_odd_pairs_and_rolling_windows_are_scored_as_the_harnesss_own_class_scores_them(
    t5: tuple[Deployment, Any], name: str
) -> None:
    deployment, other = t5
    other._max_length = LENGTH
    model = ServedLM(str(deployment.endpoint_file), model=name, max_length=LENGTH)
    # The third one's context is longer than the model.
    pairs = [("", "a"), ("The man ", "said"), (TEXTS[0] * 9, " no"), ("Once", "  upon a ")]
    asked = requests("loglikelihood", *pairs)
    scored, expected = model.loglikelihood(asked, disable_tqdm=True), other.loglikelihood(asked, disable_tqdm=True)
    for ours, their in zip(scored, expected, strict=True):
        assert ours == (pytest.approx(their[0], abs=1e-3), their[1])
    ids = model.tok_encode("It was")
    likely = int(other.model(torch.tensor([ids]), labels=torch.tensor([[0]])).logits[0, 0].argmax())
    assert model._loglikelihood_tokens([(None, ids, [likely])])[0][1] and not scored[0][1]
    texts = requests("loglikelihood_rolling", ("a",), (TEXTS[2],), (TEXTS[3] * 7,))  # the last has several windows
    found = model.loglikelihood_rolling(texts, disable_tqdm=True)
    assert found == pytest.approx(other.loglikelihood_rolling(texts, disable_tqdm=True), abs=1e-2)
    other._max_length = None
