"""One server for all tests of this directory, which only ask: a T5 that main.py has converted and exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from support.measurements.task_runs import QUICK, Run
from support.servers.served import PROJECT
from support.tiny_models.t5_models import huggingface_t5


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Any, SentencePieceProcessor]]:
    root = tmp_path_factory.mktemp("t5")
    (root / "source").mkdir()
    pieces = root / "source" / "spiece"
    lines = (PROJECT / "examples" / "data" / "lambada_subset.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"].replace("\n", " ") for line in lines]
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(pieces), vocab_size=400, pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    model = huggingface_t5(vocab_size=400, pad_token_id=0, eos_token_id=1)
    model.save_pretrained(root / "source")
    results = "export.run.results_dir=${base_results_dir}/tiny/results"
    run = Run(root, root / "source", "export=t5/export_t5", results, *QUICK)
    yield run, model, SentencePieceProcessor(model_file=f"{pieces}.model")
    run.deployment.begin_to_stop()
