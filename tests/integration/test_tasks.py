"""The evaluations beside LAMBADA on the real tritonserver, as a user runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nemo_archive import write_nemo
from served import PROJECT, Deployment

from evaluation.squad_data import read_dataset

SQUAD = PROJECT / "tests" / "data" / "squad" / "v2.0.json"
DEMO = PROJECT / "examples" / "gpt3_demo" / "checkpoints" / "gpt3_demo.nemo"
OUTPUT_LEN = 6
TEMPLATE = {
    "taskname": "squad",
    "prompt_template": "<|VIRTUAL_PROMPT_0|> {context} {question} {answer}",
    "total_virtual_tokens": 3,
    "virtual_token_splits": [3],
    "truncate_field": "context",
    "answer_field": "answer",
}
TABLE = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, (3, 256)).astype(np.float16)).float()


class Run:
    """A checkpoint that main.py converts, exports and serves, and evaluations of it."""

    def __init__(self, root: Path, checkpoint: Path, *overrides: str) -> None:
        self.root, self.checkpoint, self.overrides = root, checkpoint, overrides
        made = self.main("[convert,export]")
        assert made.returncode == 0, made.stdout + made.stderr
        self.results = root / "tiny" / "export_tp1_pp1_fp32_fp32"
        self.deployment = Deployment(self.results / "model_repo", root / "server")
        self.endpoint = self.deployment.wait_until_published()

    def main(self, stages: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        given = [
            *(f"stages={stages}", "cluster_type=interactive", f"base_results_dir={self.root}"),
            *("export.run.model_train_name=tiny", f"export.model.checkpoint_path={self.checkpoint}"),
            *("export.model.weight_data_type=fp32", "export.triton_deployment.data_type=fp32"),
        ]
        command = [sys.executable, str(PROJECT / "main.py"), *given, *self.overrides, *overrides]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False, timeout=120)

    def evaluate(self, task: str, *overrides: str) -> dict[str, Any]:
        attached = (f"deployment.endpoint={self.deployment.endpoint_file}", f"evaluation={task}", "force=[evaluate]")
        done = self.main("[evaluate]", *attached, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        names = task.strip("[]").split(",")
        texts = {name: (self.results / "evaluation" / name / "metrics.json").read_text() for name in names}
        assert all(metric["name"] in done.stdout for text in texts.values() for metric in json.loads(text)["metrics"])
        return {name: json.loads(text) for name, text in texts.items()}


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
    run.deployment.stop()


def predictions_of(run: Run) -> dict[str, str]:
    found: dict[str, str] = json.loads((run.results / "evaluation" / "squad" / "predictions.json").read_text())
    return found


def test_lambada_and_squad_in_one_command(tuned: Run) -> None:
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
    by_ids = predictions_of(tuned)
    tuned.evaluate("squad", *small, "evaluation.squad.model=ensemble")
    assert predictions_of(tuned) == by_ids


def greedy(model: Any, embeddings: torch.Tensor) -> list[int]:
    """Continue [T, hidden] by Hugging Face's model."""
    tokens: list[int] = []
    for _ in range(OUTPUT_LEN):
        with torch.no_grad():
            tokens.append(int(model(inputs_embeds=embeddings[None]).logits[0, -1].argmax()))
        embeddings = torch.cat((embeddings, model.transformer.wte.weight[tokens[-1:]].detach()))
    return tokens


def test_a_p_tuned_task_answers_with_its_table_however_it_is_asked(tuned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: Hugging Face's GPT-2 on the table's rows and the tokens of the template, filled in by hand."""
    monkeypatch.syspath_prepend(str(PROJECT / "examples"))
    from huggingface_gpt import load_nemo

    given = (f"evaluation.squad.data_path={SQUAD}", f"evaluation.squad.tokens_to_generate={OUTPUT_LEN}")
    task = (*given, "evaluation.squad.taskname=squad", "evaluation.squad.prompt=null", "evaluation.squad.samples=3")
    tuned.evaluate("squad", *task)
    named = predictions_of(tuned)
    tuned.evaluate("squad", *task, "evaluation.squad.use_request_prompt_embedding=true")
    assert predictions_of(tuned) == named
    model, tokenizer = load_nemo(DEMO)
    wte = model.transformer.wte.weight.detach()
    for question in read_dataset(SQUAD, 3).questions:
        ids = tokenizer(f" {question.context} {question.question}")["input_ids"]
        expected = tokenizer.decode(greedy(model, torch.cat((TABLE, wte[ids]))))
        assert named[question.id] == expected.strip()
