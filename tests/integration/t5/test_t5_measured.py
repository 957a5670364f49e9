"""A T5 from the hub's files to measurements and texts, as a user runs them; the oracle is transformers."""

from __future__ import annotations

from typing import Any

import pandas
import pytest
import torch
from sentencepiece import SentencePieceProcessor
from support.measurements.task_runs import OUTPUT_LEN, PROMPTS, Run, blocks, completions


def test_t5_is_measured_and_reported(t5: tuple[Run, Any, SentencePieceProcessor]) -> None:
    served, _, _ = t5
    assert "report.html" in served.ask("[benchmark]")
    assert list(pandas.read_csv(served.results / "benchmark" / "static" / "benchmark.csv")["state"]) == ["ok", "ok"]
    served.ask("[benchmark]", "benchmark=load")
    loads = pandas.read_csv(served.results / "benchmark" / "load" / "load.csv")
    assert list(loads["state"]) == ["ok"] and not loads["failed_requests"].any()


def test_lambada_of_t5_is_scored_by_the_drop_in_engine_and_refused_for_fastertransformers(
    t5: tuple[Run, Any, SentencePieceProcessor],
) -> None:
    served, _, _ = t5
    assert "lambada_openai_perplexity" in served.ask("[evaluate]", "evaluation.lambada.samples=5")
    refused = served.main(
        "[convert,export,deploy,evaluate]", "deployment.engine=fastertransformer", "evaluation.lambada.samples=5"
    )
    assert refused.returncode == 1 and "running" not in refused.stdout
    assert refused.stderr.startswith("slipway: ") and "(T5), and lambada scores given words" in refused.stderr


def test_t5s_decoder_writes_what_transformers_writes(
    t5: tuple[Run, Any, SentencePieceProcessor], capsys: pytest.CaptureFixture[str]
) -> None:
    served, model, pieces = t5
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([[*pieces.encode(prompt), pieces.eos_id()]])
        # transformers 5 sizes its cache by the encoder's layers, and the decoder has more.
        written = model.generate(ids, max_new_tokens=OUTPUT_LEN, do_sample=False, num_beams=1, use_cache=False)
        # What no piece stands for is "<unk>" in transformers' texts, and "⁇" in SentencePiece's.
        expected.append(" ".join(pieces.decode(written[0, 1:].tolist()).split()).replace(" ⁇", "<unk>"))
    assert len(set(expected)) == len(expected) and all(expected)
    assert completions(served, capsys) == blocks(expected)
