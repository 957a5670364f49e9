"""A GPT-J, a Gemma 2 and a T5 from the hub's files to the report, as a user runs them; the oracle is transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import support.huggingface_models as huggingface_models
import support.llama_models as llama_models
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from support.served import PROJECT, Deployment
from support.t5_models import huggingface_t5
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from evaluation import generate

SUBSET = PROJECT / "examples" / "data" / "lambada_subset.jsonl"
TEXTS = [json.loads(line)["text"] for line in SUBSET.read_text(encoding="utf-8").splitlines()]
PROMPTS = ["Thank you for the", "She said"]
SAMPLES, OUTPUT_LEN = 5, 6


class Served:
    """A family's checkpoint, converted and exported by main.py, and one server for everything that is asked of it."""

    def __init__(self, root: Path, *overrides: str) -> None:
        self.root, self.overrides = root, overrides
        made = self.main("[convert,export]")
        assert made.returncode == 0, made.stdout + made.stderr
        self.results = root / "tiny" / "export_tp1_pp1_fp32_fp32"
        self.deployment = Deployment(self.results / "model_repo", root / "server")
        self.endpoint = self.deployment.wait_until_published()

    def main(self, stages: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        given = [
            *(f"stages={stages}", "cluster_type=interactive", f"base_results_dir={self.root}"),
            *("export.run.model_train_name=tiny", f"export.model.checkpoint_path={self.root / 'source'}"),
            *("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32"),
            *("benchmark.batch_sizes=[1,2]", "benchmark.lengths=[[4,4]]", "benchmark.repeats=2"),
            *("benchmark.load.concurrencies=[2]", "benchmark.load.lengths=[4/4]", "benchmark.load.requests=4"),
            *("benchmark.load.min_repeats=1", "benchmark.load.repeats=1", f"evaluation.lambada.samples={SAMPLES}"),
        ]
        command = [sys.executable, str(PROJECT / "main.py"), *given, *self.overrides, *overrides]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False, timeout=120)

    def ask(self, stages: str, *overrides: str) -> str:
        done = self.main(stages, f"deployment.endpoint={self.deployment.endpoint_file}", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def completions(self, capsys: pytest.CaptureFixture[str], *options: str) -> str:
        prompts = ["--prompts", *PROMPTS, "--output-len", str(OUTPUT_LEN)]
        generate.main([*prompts, "--endpoint", str(self.deployment.endpoint_file), *options])
        return capsys.readouterr().out

    def table(self) -> pandas.DataFrame:
        return pandas.read_csv(self.results / "benchmark" / "static" / "benchmark.csv")


def blocks(answers: list[str]) -> str:
    return "\n\n".join(f"> {prompt}\n{text}" for prompt, text in zip(PROMPTS, answers, strict=True)) + "\n"


@pytest.fixture(scope="module", params=[pytest.param("gptj", marks=pytest.mark.long), "gemma2"])
def decoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Any, Tokenizer]]:
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
    served = Served(root)
    yield served, model, tokenizer
    served.deployment.stop()


def test_a_decoder_is_scored_and_measured_as_transformers_computes_it(decoder: tuple[Served, Any, Tokenizer]) -> None:
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
    assert list(served.table()["state"]) == ["ok", "ok"]


def test_a_decoder_completes_prompts_as_transformers_does(
    decoder: tuple[Served, Any, Tokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    served, model, tokenizer = decoder
    expected = []
    for prompt in PROMPTS:
        tokens, _ = huggingface_models.greedy(model, tokenizer.encode(prompt).ids, OUTPUT_LEN)
        expected.append(tokenizer.decode(tokens))
    assert served.completions(capsys) == blocks(expected)
    assert served.completions(capsys, "--model", "fastertransformer") == blocks(expected)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any, SentencePieceProcessor]]:
    root = tmp_path_factory.mktemp("t5")
    (root / "source").mkdir()
    pieces = root / "source" / "spiece"
    SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\n", " ") for text in TEXTS), model_prefix=str(pieces), vocab_size=400,
        byte_fallback=True, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    model = huggingface_t5(vocab_size=400, pad_token_id=0, eos_token_id=1)
    model.save_pretrained(root / "source")
    served = Served(
        root, "export=t5/export_t5", "export.run.results_dir=${base_results_dir}/tiny/export_tp1_pp1_fp32_fp32"
    )
    yield served, model, SentencePieceProcessor(model_file=f"{pieces}.model")
    served.deployment.stop()


def test_t5_is_measured_and_reported(t5: tuple[Served, Any, SentencePieceProcessor]) -> None:
    served, _, _ = t5
    assert "report.html" in served.ask("[benchmark]")
    assert list(served.table()["state"]) == ["ok", "ok"]
    served.ask("[benchmark]", "benchmark=load")
    loads = pandas.read_csv(served.results / "benchmark" / "load" / "load.csv")
    assert list(loads["state"]) == ["ok"] and not loads["failed_requests"].any()


def test_lambada_of_t5_is_scored_by_the_drop_in_engine_and_refused_for_fastertransformers(
    t5: tuple[Served, Any, SentencePieceProcessor],
) -> None:
    served, _, _ = t5
    assert "lambada_openai_perplexity" in served.ask("[evaluate]")
    refused = served.main("[convert,export,deploy,evaluate]", "deployment.engine=fastertransformer")
    assert refused.returncode == 1 and "running" not in refused.stdout
    assert refused.stderr.startswith("slipway: ") and "(T5), and lambada scores given words" in refused.stderr


def test_t5s_decoder_writes_what_transformers_writes(
    t5: tuple[Served, Any, SentencePieceProcessor], capsys: pytest.CaptureFixture[str]
) -> None:
    served, model, pieces = t5
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([[*pieces.encode(prompt), pieces.eos_id()]])
        # transformers 5 sizes its cache by the encoder's layers, and the decoder has more.
        written = model.generate(ids, max_new_tokens=OUTPUT_LEN, do_sample=False, num_beams=1, use_cache=False)
        expected.append(pieces.decode(written[0, 1:].tolist()))
    assert len(set(expected)) == len(expected) and all(expected)
    assert served.completions(capsys) == blocks(expected)
