"""Arguments of ``python -m evaluation.monitor``; the login node imports this module: no torch, no numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from evaluation.arguments import ENDPOINT, TaskArguments
from evaluation.divergence.arguments import DivergenceArguments
from evaluation.parity.arguments import ParityArguments, check_checkpoint, check_precision
from handover.arguments import ScriptArguments, option, same
from handover.errors import ConfigError
from handover.ranges import CHANCE, COUNT, PASSAGE_TOKENS, RATIO


@dataclass(frozen=True)
class MonitorArguments(ScriptArguments):
    """Score a deployment's own requests again with a reference out of the checkpoint, and raise an alarm."""

    needs_scores: ClassVar[bool] = False
    endpoint: str = field(metadata=ENDPOINT)
    output: Path = field(metadata={"help": "directory for metrics.json, summary.json and requests.csv"})
    requests: Path = field(metadata={"help": "file that a deployment notes requests in: deployment.openai_sample_log"})
    state: Path = field(metadata={"help": "file that the test is kept in from one run to the next"})
    checkpoint: Path = same(ParityArguments, "checkpoint")
    adapter: Path | None = same(ParityArguments, "adapter")
    checkpoint_tokenizer: Path | None = same(ParityArguments, "checkpoint_tokenizer")
    references: Path | None = same(DivergenceArguments, "references")
    metrics_file: Path | None = option(
        None, "file for Prometheus, which node_exporter's textfile collector reads; none without it"
    )
    samples: int = option(64, "requests to score, the newest that were not scored yet", COUNT)
    longest: int = option(1024, "tokens of a prompt and its answer; longer requests are left out", PASSAGE_TOKENS)
    precision: str | None = same(DivergenceArguments, "precision")
    quantization: str | None = same(DivergenceArguments, "quantization")
    most_ratio: float = option(
        2.0, "squared differences of log probabilities to those of the number formats alone, at most", RATIO
    )
    false_alarms: float = option(0.001, "probability that a sound deployment ever raises the alarm", CHANCE)
    model: str = same(DivergenceArguments, "model")
    model_repository: Path | None = same(TaskArguments, "model_repository")
    endpoint_key_env: str | None = same(TaskArguments, "endpoint_key_env")

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that are read."""
        files = (self.requests, self.checkpoint, self.adapter, self.checkpoint_tokenizer)
        return tuple(path for path in files if path is not None)


def check_files(arguments: MonitorArguments, converted: Path | None) -> None:
    """Check the arguments and look for the files, as ``evaluation.task_table.Task`` says.

    Raises:
        ConfigError: a precision is unknown, or a file is missing.
    """
    check_precision(arguments.precision)
    check_checkpoint("monitor", arguments.checkpoint, converted)
    if not arguments.requests.is_file():
        raise ConfigError(
            f"there is no file {arguments.requests} with the deployment's requests",
            "serve with deployment.openai_sample_log=FILE, and give the same file",
        )
