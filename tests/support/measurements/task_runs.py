"""Runs of the text tasks on a deployment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation import generate, squad
from support.servers.served import PROJECT, Deployment

SQUAD = PROJECT / "tests" / "data" / "squad" / "v2.0.json"
OUTPUT_LEN = 6
TEMPLATE = {
    "taskname": "squad",
    "prompt_template": "<|VIRTUAL_PROMPT_0|> {context} {question} {answer}",
    "total_virtual_tokens": 3,
    "virtual_token_splits": [3],
    "truncate_field": "context",
    "answer_field": "answer",
}


# Measurements of seconds.
QUICK = (
    *("benchmark.batch_sizes=[1,2]", "benchmark.lengths=[[4,4]]", "benchmark.repeats=2"),
    *("benchmark.load.concurrencies=[2]", "benchmark.load.lengths=[4/4]", "benchmark.load.requests=4"),
    *("benchmark.load.min_repeats=1", "benchmark.load.repeats=1"),
)


class Run:
    """A checkpoint that main.py converts, exports and serves, and what is asked of its server."""

    def __init__(self, root: Path, checkpoint: Path, *overrides: str) -> None:
        self.root, self.checkpoint, self.overrides = root, checkpoint, overrides
        made = self.main("[convert,export]")
        assert made.returncode == 0, made.stdout + made.stderr
        self.results = next(root.glob("tiny/*/model_repo")).parent
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

    def ask(self, stages: str, *overrides: str) -> str:
        done = self.main(stages, f"deployment.endpoint={self.deployment.endpoint_file}", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def evaluate(self, task: str, *overrides: str) -> dict[str, Any]:
        printed = self.ask("[evaluate]", f"evaluation={task}", "force=[evaluate]", *overrides)
        names = task.strip("[]").split(",")
        texts = {name: (self.results / "evaluation" / name / "metrics.json").read_text() for name in names}
        assert all(metric["name"] in printed for text in texts.values() for metric in json.loads(text)["metrics"])
        return {name: json.loads(text) for name, text in texts.items()}


PROMPTS = ["Thank you for the", "She said"]


def completions(run: Run, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the client prints of two prompts."""
    prompts = ["--prompts", *PROMPTS, "--output-len", str(OUTPUT_LEN)]
    generate.main([*prompts, "--endpoint", str(run.deployment.endpoint_file), *options])
    return capsys.readouterr().out


def blocks(answers: list[str]) -> str:
    """The same of these answers."""
    return "\n\n".join(f"> {prompt}\n{text}" for prompt, text in zip(PROMPTS, answers, strict=True)) + "\n"


def predictions_of(run: Run) -> dict[str, str]:
    """What main.py's evaluation has published."""
    found: dict[str, str] = json.loads((run.results / "evaluation" / "squad" / "predictions.json").read_text())
    return found


def answers(run: Run, output: Path, *options: str) -> dict[str, str]:
    """What the same evaluation answers that is no process of main.py's."""
    given = [f"--endpoint={run.deployment.endpoint_file}", f"--output={output}", f"--data-path={SQUAD}"]
    squad.main([*given, f"--tokens-to-generate={OUTPUT_LEN}", *options])
    found: dict[str, str] = json.loads((output / "predictions.json").read_text())
    return found
