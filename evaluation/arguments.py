"""Arguments of the commands: the launcher renders them, the commands parse them.

They are apart from the commands so that the login node does not import pandas or matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from handover.arguments import ScriptArguments, option, same
from handover.errors import ConfigError
from handover.ranges import BATCH, BEAMS, COUNT, IDS, IN_FLIGHT, PRICE, REPEATS, SEED, TOKENS, UNCOUNTED, WEEK_S
from handover.signatures.arguments import SigningArguments

ADAPTER = "adapter"
"""Key of the served model in results: the LoRA adapter that answered."""
ENDPOINT = {"help": "endpoint.json, its directory, host:port of gRPC, or http://host:port/v1"}


def result_name(task: str, adapter: str | None) -> str:
    """Return what the results of an evaluation are called, in files and among figures."""
    return f"{task}_{adapter}" if adapter else task


@dataclass(frozen=True)
class TaskArguments(ScriptArguments):
    """Arguments of every task.

    Attributes:
        needs_scores: whether the task scores tokens that are given to the model's decoder.
    """

    needs_scores: ClassVar[bool] = False

    endpoint: str = field(metadata=ENDPOINT)
    output: Path = field(metadata={"help": "directory for metrics.json and samples.csv"})
    data_path: Path = field(metadata={"help": "the task's data file"})
    samples: int | None = option(None, "take the first ones; all by default", COUNT)
    batch_size: int = option(16, "prompts a request", BATCH)
    concurrency: int = option(2, "requests in flight", IN_FLIGHT)
    model: str = option("fastertransformer", "model to ask, by token ids or, of an ensemble, by text")
    tokenizer: Path | None = option(None, "tokenizer files, if not beside the shards")
    model_digest: str | None = option(None, "digest of the model that must be served")
    model_repository: Path | None = option(None, "the repository that must be served; its manifest says the digest")
    timeout_s: float = option(600.0, "limit of one request in seconds", WEEK_S)
    endpoint_key_env: str | None = option(None, "environment variable with the bearer key of an OpenAI API")
    lora_name: str | None = option(None, "LoRA adapter of the served model that answers; without it the model alone")

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the task reads."""
        return (self.data_path,)


@dataclass(frozen=True)
class LambadaArguments(TaskArguments):
    """Score a running deployment on LAMBADA."""

    needs_scores = True

    data_sha256: str | None = option(None, "digest the data file must have; 'any' accepts any; by default a known file")


@dataclass(frozen=True)
class SquadArguments(TaskArguments):
    """Score a running deployment on SQuAD."""

    prompt: Path | None = option(None, "YAML file with prompt_template, examples, ...")
    taskname: str | None = option(None, "p-tuned task of the served checkpoint, whose template is taken for the prompt")
    use_request_prompt_embedding: bool = option(False, "requests bring the task's table instead of naming it")
    tokens_to_generate: int = option(32, "tokens of an answer at most", TOKENS)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the task reads."""
        return (self.data_path,) if self.prompt is None else (self.data_path, self.prompt)


@dataclass(frozen=True)
class TextPairArguments(TaskArguments):
    """Have texts translated or summarised, and compare with references."""

    prompt: Path = field(kw_only=True, metadata={"help": "YAML file with prompt_template, examples, ..."})
    reference_path: Path | None = option(None, "a reference a line; without it data-path is JSON lines")
    recover_bpe: bool = option(False, "lines hold SentencePiece's pieces")
    max_output_len: int = option(128, "tokens of an answer at most", TOKENS)
    beam_width: int = option(1, "beams; 1 is greedy", BEAMS)

    @property
    def data_files(self) -> tuple[Path, ...]:
        """Sources and references."""
        return (self.data_path,) if self.reference_path is None else (self.data_path, self.reference_path)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the task reads."""
        return (*self.data_files, self.prompt)


@dataclass(frozen=True)
class ConsistencyArguments(ScriptArguments):
    """Compare what a running deployment says of the same tokens, asked in several ways."""

    needs_scores: ClassVar[bool] = False

    endpoint: str = field(metadata=ENDPOINT)
    output: Path = field(metadata={"help": "directory for metrics.json and ways.csv"})
    data_path: Path | None = option(
        None, 'texts in place of the own ones: a .txt, or JSON lines with "text", "input_ids"'
    )
    samples: int = option(16, "prompts", COUNT)
    longest_prompt: int = option(256, "tokens of the longest prompts; others are a half, a quarter, an eighth", TOKENS)
    output_length: int = option(32, "tokens to generate for each prompt", TOKENS)
    pressure: int = option(8, "times as many other prompts, which fill the cache in between", REPEATS)
    precision: str | None = option(None, "fp32, fp16, bf16 or int8, for a server that does not say it")
    batch_size: int = same(TaskArguments, "batch_size", default=8)
    concurrency: int = same(TaskArguments, "concurrency", default=4)
    model: str = option("fastertransformer", "model to ask; it must take token ids")
    tokenizer: Path | None = same(TaskArguments, "tokenizer")
    model_digest: str | None = same(TaskArguments, "model_digest")
    model_repository: Path | None = same(TaskArguments, "model_repository")
    timeout_s: float = same(TaskArguments, "timeout_s")
    endpoint_key_env: str | None = same(TaskArguments, "endpoint_key_env")

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that are read."""
        return () if self.data_path is None else (self.data_path,)


@dataclass(frozen=True)
class BenchmarkArguments(ScriptArguments):
    """Measure latency and throughput of a running deployment, point by point."""

    endpoint: str = field(metadata=ENDPOINT)
    output: Path = field(metadata={"help": "directory for benchmark.csv"})
    model: str = option("fastertransformer", "model to ask")
    batch_sizes: tuple[int, ...] = option((1, 2, 4, 8, 16, 32, 64, 128, 256), "JSON list", BATCH)
    lengths: tuple[tuple[int, int], ...] = option(
        (), "JSON list of [input, output] in tokens; the published pairs if empty", TOKENS
    )
    warmup: int = option(1, "requests before each point that do not count", UNCOUNTED)
    repeats: int = option(5, "requests a point", REPEATS)
    max_batch_size: int = option(256, "larger batch sizes are left out", BATCH)
    seed: int = option(0, "of the random prompts", SEED)
    vocab_size: int | None = option(None, "of the random ids; by default the served model's", IDS)
    model_digest: str | None = same(TaskArguments, "model_digest")
    model_repository: Path | None = same(TaskArguments, "model_repository")
    timeout_s: float = same(TaskArguments, "timeout_s")
    gpu_hour_price: float | None = option(None, "of one GPU, in any currency, for the cost of a million tokens", PRICE)
    gpus: int | None = option(None, "GPUs that serve; by default what the deployment says", COUNT)
    label: str | None = option(None, "name of the deployment in tables and reports")
    endpoint_key_env: str | None = same(TaskArguments, "endpoint_key_env")


@dataclass(frozen=True)
class RecomputeArguments(ScriptArguments):
    """Compute the figures of a benchmark again from the requests that were recorded."""

    output: Path = field(metadata={"help": "directory of benchmark.csv or load.csv, or the results of a run"})


@dataclass(frozen=True)
class ReportArguments(SigningArguments):
    """Write report.md and report.html over what a run produced."""

    results: Path = field(metadata={"help": "results directory of the run"})
    output: Path = field(metadata={"help": "directory for the report"})
    title: str = field(metadata={"help": "name of the model"})
    stages: Path = field(metadata={"help": "stages.json of the runner"})
    baseline: Path | None = option(None, "results directory of an earlier run, to stand beside this one")
    thresholds: Path | None = option(None, "YAML file of limits: the gate's verdict is shown")


TRACKED_MODES = ("online", "offline")
"""How Weights & Biases may be told."""


@dataclass(frozen=True)
class TrackArguments(ScriptArguments):
    """Tell a run's figures to MLflow or Weights & Biases."""

    results: Path = field(metadata={"help": "results directory of the run"})
    report: Path = field(metadata={"help": "directory of its report"})
    output: Path = field(metadata={"help": "directory for tracking.json, which says where the figures are"})
    title: str = field(metadata={"help": "name of the run"})
    experiment: str = option("slipway", "MLflow's experiment, and the project of Weights & Biases")
    mlflow: str | None = option(None, "MLflow's tracking URI; without it MLflow is told nothing")
    wandb: str | None = option(None, f"{' or '.join(TRACKED_MODES)}; without it Weights & Biases is told nothing")

    def __post_init__(self) -> None:
        """Refuse a mode that there is not, and secrets in an address, which would stand in plans; ConfigError."""
        if self.wandb not in (None, *TRACKED_MODES):
            raise ConfigError(f"evaluation.tracking.wandb={self.wandb}", f"legal: {', '.join(TRACKED_MODES)}")
        if self.mlflow is not None and urlsplit(self.mlflow).password is not None:
            raise ConfigError(
                "evaluation.tracking.mlflow holds a password, which would stand in plans and logs",
                "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            )


@dataclass(frozen=True)
class GateArguments(ScriptArguments):
    """Decide by thresholds whether a deployment may go live."""

    results: Path = field(metadata={"help": "results directory of the run", "positional": True})
    thresholds: Path = field(metadata={"help": "YAML file of limits"})
    baseline: Path | None = option(None, "results directory of the run to compare with")
    output: Path | None = option(None, "JSON file for the verdict and its reasons")


POINTS_NAME = "points.json"
"""A sweep's list of its points: the launcher writes it, the sweep's report reads it."""


@dataclass(frozen=True)
class SweepReportArguments(ScriptArguments):
    """Write one report over all points of a sweep."""

    sweep: Path = field(metadata={"help": "directory of the sweep: has points.json, gets the report"})
