"""The evaluations beside LAMBADA on the real tritonserver, as a user runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.nemo_archive import write_nemo
from support.measurements.task_runs import OUTPUT_LEN, SQUAD, TEMPLATE, Run, answers, predictions_of
from support.servers.served import PROJECT

from evaluation.tasks.squad.data import read_dataset

DEMO = PROJECT / "examples" / "gpt3_demo" / "checkpoints" / "gpt3_demo.nemo"
TABLE = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, (3, 256)).astype(np.float16)).float()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The demonstration checkpoint with a prompt table beside it, as NeMo's p-tuning saves one."""
    root = tmp_path_factory.mktemp("tuned")
    (root / "source").mkdir()
    shutil.copy(DEMO, root / "source")
    state = {"prompt_table": {"prompt_table.squad.prompt_embeddings.weight": TABLE}}
    config = {"virtual_prompt_style": "p-tuning", "task_templates": [TEMPLATE]}
    write_nemo(root / "source" / "tuned.nemo", config, {"model_weights.ckpt": state}, files={})
    run = Run(root, root / "source")
    yield run
    run.deployment.begin_to_stop()


def test_lambada_and_squad_in_one_command(tuned: Run, tmp_path: Path) -> None:
    small = (f"evaluation.squad.data_path={SQUAD}", f"evaluation.squad.tokens_to_generate={OUTPUT_LEN}")
    found = tuned.evaluate("[lambada,squad]", "evaluation.lambada.samples=5", *small)
    n = len(read_dataset(SQUAD, None).questions)
    assert (found["lambada"]["samples"], found["squad"]["samples"], found["squad"]["failed"]) == (5, n, 0)
    names = [metric["name"] for metric in found["squad"]["metrics"]]
    assert names[:2] == ["exact", "f1"] and names[-1] == "token_identity_accuracy"
    stages = json.loads((tuned.results / "logs" / "stages.json").read_text())
    assert [entry["stage"] for entry in stages] == ["evaluate", "evaluate", "report"]
    report = (tuned.results / "report" / "report.md").read_text()
    assert "Accuracy: lambada" in report and "Accuracy: squad" in report and "HasAns_f1" in report
    prompt = f"--prompt={PROJECT / 'evaluation' / 'prompts' / 'squad_zero_shot.yaml'}"
    assert predictions_of(tuned) == answers(tuned, tmp_path, prompt, "--model=ensemble")


def greedy(model: Any, embeddings: torch.Tensor) -> list[int]:
    """Continue [T, hidden] by Hugging Face's model."""
    tokens: list[int] = []
    for _ in range(OUTPUT_LEN):
        with torch.no_grad():
            tokens.append(int(model(inputs_embeds=embeddings[None]).logits[0, -1].argmax()))
        embeddings = torch.cat((embeddings, model.transformer.wte.weight[tokens[-1:]].detach()))
    return tokens


def test_a_p_tuned_task_answers_with_its_table_however_it_is_asked(
    tuned: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: Hugging Face's GPT-2 on the table's rows and the tokens of the template, filled in by hand."""
    monkeypatch.syspath_prepend(str(PROJECT / "examples"))
    from huggingface_models import load_nemo

    given = (f"evaluation.squad.data_path={SQUAD}", f"evaluation.squad.tokens_to_generate={OUTPUT_LEN}")
    task = (*given, "evaluation.squad.taskname=squad", "evaluation.squad.prompt=null", "evaluation.squad.samples=3")
    tuned.evaluate("squad", *task)
    named = predictions_of(tuned)
    brought = answers(tuned, tmp_path, "--taskname=squad", "--samples=3", "--use-request-prompt-embedding=true")
    assert brought == named
    model, tokenizer = load_nemo(DEMO)
    wte = model.transformer.wte.weight.detach()
    for question in read_dataset(SQUAD, 3).questions:
        ids = tokenizer(f" {question.context} {question.question}")["input_ids"]
        expected = tokenizer.decode(greedy(model, torch.cat((TABLE, wte[ids]))))
        assert named[question.id] == expected.strip()


def test_a_task_that_was_not_tuned_is_refused_before_anything_runs(tuned: Run) -> None:
    given = ("evaluation=squad", f"evaluation.squad.data_path={SQUAD}", "evaluation.squad.prompt=null")
    refused = tuned.main("[deploy,evaluate]", *given, "evaluation.squad.taskname=squat")
    assert refused.returncode == 1 and "running" not in refused.stdout
    assert "has no p-tuned task squat" in refused.stderr and "did you mean 'squad'?" in refused.stderr
