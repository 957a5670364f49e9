"""Models of several families, from the hub to the report as a user runs them, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas
import pytest
import support.tiny_models.huggingface_models as huggingface_models
import support.tiny_models.llama_models as llama_models
import torch
from support.measurements.task_runs import OUTPUT_LEN, PROMPTS, QUICK, Run, blocks, completions
from support.servers.served import PROJECT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SUBSET = PROJECT / "examples" / "data" / "lambada_subset.jsonl"
TEXTS = [json.loads(line)["text"] for line in SUBSET.read_text(encoding="utf-8").splitlines()]
SAMPLES = 5


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("gptj", "gemma2", "deepseek_v3")]


@pytest.fixture(scope="module", params=[*LONG, "ernie4_5_moe"])
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, Any, Tokenizer]]:
    root = tmp_path_factory.mktemp(request.param)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    ids = {"vocab_size": 400, "bos_token_id": 0, "eos_token_id": 0}
    if request.param == "gptj":
        model = huggingface_models.save("gptj", root / "source", tokenizer=False, n_positions=320, **ids)
    else:
        model = llama_models.save(request.param, root / "source", max_position_embeddings=320, **ids)
    tokenizer.save(str(root / "source" / "tokenizer.json"))
    served = Run(root, root / "source", *QUICK, f"evaluation.lambada.samples={SAMPLES}")
    weights = served.results / "model_repo/fastertransformer/1/huggingface/model.safetensors"
    # What FasterTransformer lacks is served from the source's own file: no copy is written.
    assert weights.exists() == (request.param != "gptj")
    assert not weights.exists() or weights.samefile(root / "source" / "model.safetensors")
    yield served, model, tokenizer
    served.deployment.begin_to_stop()


def test_a_decoder_is_scored_and_measured_as_transformers_computes_it(decoder: tuple[Run, Any, Tokenizer]) -> None:
    served, model, tokenizer = decoder
    printed = served.ask("[evaluate,benchmark]")
    assert "report.html" in printed and "lambada_openai_perplexity" in printed
    metrics = json.loads((served.results / "evaluation" / "lambada" / "metrics.json").read_text())["metrics"]
    perplexity = next(metric["value"] for metric in metrics if metric["name"] == "lambada_openai_perplexity")
    log_probs = []
    for text in TEXTS[:SAMPLES]:
        context, whole = (tokenizer.encode(part).ids for part in (text.rpartition(" ")[0], text))
        rows = torch.from_numpy(huggingface_models.logits(model, np.array([whole]))[0]).log_softmax(-1)
        log_probs.append(sum(float(rows[at - 1, whole[at]]) for at in range(len(context), len(whole))))
    assert perplexity == pytest.approx(np.exp(-np.mean(log_probs)), rel=1e-3)
    assert list(pandas.read_csv(served.results / "benchmark" / "static" / "benchmark.csv")["state"]) == ["ok", "ok"]


def test_a_decoder_completes_prompts_as_transformers_does(
    decoder: tuple[Run, Any, Tokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    served, model, tokenizer = decoder
    expected = []
    for prompt in PROMPTS:
        tokens, _ = huggingface_models.greedy(model, tokenizer.encode(prompt).ids, OUTPUT_LEN)
        expected.append(tokenizer.decode(tokens))
    assert completions(served, capsys) == blocks(expected)
    assert completions(served, capsys, "--model", "fastertransformer") == blocks(expected)
