"""Arguments of ``python -m evaluation.divergence``; the login node imports this module: no torch, no numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from evaluation.arguments import ENDPOINT, ConsistencyArguments, TaskArguments
from evaluation.parity.arguments import ParityArguments, check_checkpoint, check_data, check_precision
from handover.arguments import ScriptArguments, option, same
from handover.errors import ConfigError
from handover.ranges import BATCH, COUNT, NATS, PASSAGE_TOKENS, TOKENS


@dataclass(frozen=True)
class DivergenceArguments(ScriptArguments):
    """Compare a running deployment's log probabilities with a reference that is streamed out of the checkpoint."""

    needs_scores: ClassVar[bool] = False
    endpoint: str = field(metadata=ENDPOINT)
    output: Path = field(metadata={"help": "directory for metrics.json, summary.json and the tables"})
    checkpoint: Path = same(ParityArguments, "checkpoint")
    adapter: Path | None = same(ParityArguments, "adapter")
    checkpoint_tokenizer: Path | None = same(ParityArguments, "checkpoint_tokenizer")
    references: Path | None = option(None, "directory that keeps references; by default beside the output")
    data_path: Path | None = same(ConsistencyArguments, "data_path")
    samples: int | None = option(128, "passages to take, of all texts in turn; all without it", COUNT)
    longest_passage: int = option(
        512, "tokens of the longest passages; others are a half, a quarter, an eighth", PASSAGE_TOKENS
    )
    top: int = option(20, "log probabilities to ask for in each place, or as many as the API gives", TOKENS)
    reference_top: int = option(256, "log probabilities that the reference keeps of each place", TOKENS)
    precision: str | None = same(ConsistencyArguments, "precision")
    quantization: str | None = option(None, "fp8, fp8_block, int4 or mxfp4: what the checkpoint was served after")
    served_weights: Path | None = option(None, "directory that is served, where the endpoint does not say it")
    most_ratio: float = option(2.0, "divergence to that of the number formats alone: the mean, at most", NATS)
    most_tail_ratio: float = option(4.0, "the same of the 99.9th percentile", NATS)
    batch_size: int = option(8, "passages a request", BATCH)
    model: str = same(ConsistencyArguments, "model")
    tokenizer: Path | None = same(TaskArguments, "tokenizer")
    model_repository: Path | None = same(TaskArguments, "model_repository")
    timeout_s: float = same(TaskArguments, "timeout_s")
    endpoint_key_env: str | None = same(TaskArguments, "endpoint_key_env")

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that divergence reads."""
        files = (self.data_path, self.checkpoint, self.adapter, self.checkpoint_tokenizer, self.served_weights)
        return tuple(path for path in files if path is not None)


def check_files(arguments: DivergenceArguments, converted: Path | None) -> None:
    """Check the arguments and look for the files, as ``evaluation.task_table.Task`` says.

    Raises:
        ConfigError: a precision is unknown, or a file is missing.
    """
    check_texts(arguments, converted)
    check_checkpoint("divergence", arguments.checkpoint, converted)
    if arguments.served_weights is not None and not arguments.served_weights.is_dir():
        raise ConfigError(f"there is no directory {arguments.served_weights}", "mend served_weights")


def check_texts(arguments: DivergenceArguments | ConsistencyArguments, converted: Path | None) -> None:
    """Check what both evaluations over texts are given, as ``evaluation.task_table.Task`` says.

    Raises:
        ConfigError: a precision is unknown, or the file of texts is missing.
    """
    check_precision(arguments.precision)
    check_data(arguments.data_path)
