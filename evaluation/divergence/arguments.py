"""Arguments of ``python -m evaluation.divergence``; the login node imports this module: no torch, no numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from evaluation.parity.arguments import PRECISIONS
from handover.arguments import ScriptArguments, option
from handover.errors import ConfigError, nearest
from handover.ranges import BATCH, COUNT, NATS, PASSAGE_TOKENS, TOKENS, WEEK_S


@dataclass(frozen=True)
class DivergenceArguments(ScriptArguments):
    """Compare a running deployment's log probabilities with a reference that is streamed out of the checkpoint."""

    needs_scores: ClassVar[bool] = False
    endpoint: str = field(metadata={"help": "endpoint.json, its directory, host:port of gRPC, or http://host:port/v1"})
    output: Path = field(metadata={"help": "directory for metrics.json, summary.json and the tables"})
    checkpoint: Path = field(metadata={"help": "what was converted: the source of the served model"})
    adapter: Path | None = option(None, "LoRA adapter that was merged into it")
    checkpoint_tokenizer: Path | None = option(None, "tokenizer in the place of its own")
    references: Path | None = option(None, "directory that keeps references; by default beside the output")
    data_path: Path | None = option(
        None, 'texts in place of the own ones: a .txt, or JSON lines with "text", "input_ids"'
    )
    samples: int | None = option(128, "passages to take, of all texts in turn; all without it", COUNT)
    longest_passage: int = option(
        512, "tokens of the longest passages; others are a half, a quarter, an eighth", PASSAGE_TOKENS
    )
    top: int = option(20, "log probabilities to ask for in each place, or as many as the API gives", TOKENS)
    reference_top: int = option(256, "log probabilities that the reference keeps of each place", TOKENS)
    precision: str | None = option(None, "fp32, fp16, bf16 or int8, for a server that does not say it")
    served_weights: Path | None = option(None, "directory that is served, where the endpoint does not say it")
    most_ratio: float = option(2.0, "divergence to that of the number formats alone: the mean, at most", NATS)
    most_tail_ratio: float = option(4.0, "the same of the 99.9th percentile", NATS)
    batch_size: int = option(8, "passages a request", BATCH)
    model: str = option("fastertransformer", "model to ask; it must take token ids")
    tokenizer: Path | None = option(None, "tokenizer files, if not beside the shards")
    model_repository: Path | None = option(None, "the repository that must be served; its manifest says the digest")
    timeout_s: float = option(600.0, "limit of one request in seconds", WEEK_S)
    endpoint_key_env: str | None = option(None, "environment variable with the bearer key of an OpenAI API")

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
    if arguments.precision is not None and arguments.precision not in PRECISIONS:
        raise ConfigError(f"precision is '{arguments.precision}'", nearest(arguments.precision, PRECISIONS))
    if converted is not None and not arguments.checkpoint.exists():
        raise ConfigError(
            f"divergence compares with the source, and there is no {arguments.checkpoint}",
            "give export.model.checkpoint_path",
        )
    for path in (arguments.data_path, arguments.served_weights):
        if path is not None and not path.exists():
            raise ConfigError(f"there is no {path}", "mend data_path or served_weights")
