"""Arguments of the commands: the launcher renders them, the commands parse them.

They are apart from the commands so that the login node does not import pandas or matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from handover.arguments import ScriptArguments
from handover.ranges import BATCH, BEAMS, COUNT, IDS, IN_FLIGHT, PRICE, RANGE, REPEATS, SEED, TOKENS, UNCOUNTED, WEEK_S


@dataclass(frozen=True)
class TaskArguments(ScriptArguments):
    """Arguments of every task.

    Attributes:
        needs_scores: whether the task scores tokens that are given to the model's decoder.
    """

    needs_scores: ClassVar[bool] = False

    endpoint: str = field(metadata={"help": "endpoint.json, its directory, host:port of gRPC, or http://host:port/v1"})
    output: Path = field(metadata={"help": "directory for metrics.json and samples.csv"})
    data_path: Path = field(metadata={"help": "the task's data file"})
    samples: int | None = field(default=None, metadata={RANGE: COUNT, "help": "take the first ones; all by default"})
    batch_size: int = field(default=16, metadata={RANGE: BATCH, "help": "prompts a request"})
    concurrency: int = field(default=2, metadata={RANGE: IN_FLIGHT, "help": "requests in flight"})
    model: str = field(
        default="fastertransformer", metadata={"help": "model to ask, by token ids or, of an ensemble, by text"}
    )
    tokenizer: Path | None = field(default=None, metadata={"help": "tokenizer files, if not beside the shards"})
    model_digest: str | None = field(default=None, metadata={"help": "digest of the model that must be served"})
    model_repository: Path | None = field(
        default=None, metadata={"help": "the repository that must be served; its manifest says the digest"}
    )
    timeout_s: float = field(default=600.0, metadata={RANGE: WEEK_S, "help": "limit of one request in seconds"})
    endpoint_key_env: str | None = field(
        default=None, metadata={"help": "environment variable with the bearer key of an OpenAI API"}
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the task reads."""
        return (self.data_path,)


@dataclass(frozen=True)
class LambadaArguments(TaskArguments):
    """Score a running deployment on LAMBADA."""

    needs_scores = True

    data_sha256: str | None = field(
        default=None, metadata={"help": "digest the data file must have; 'any' accepts any; by default a known file"}
    )


@dataclass(frozen=True)
class SquadArguments(TaskArguments):
    """Score a running deployment on SQuAD."""

    prompt: Path | None = field(default=None, metadata={"help": "YAML file with prompt_template, examples, ..."})
    taskname: str | None = field(
        default=None, metadata={"help": "p-tuned task of the served checkpoint, whose template is taken for the prompt"}
    )
    use_request_prompt_embedding: bool = field(
        default=False, metadata={"help": "requests bring the task's table instead of naming it"}
    )
    tokens_to_generate: int = field(default=32, metadata={RANGE: TOKENS, "help": "tokens of an answer at most"})

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the task reads."""
        return (self.data_path,) if self.prompt is None else (self.data_path, self.prompt)


@dataclass(frozen=True)
class TextPairArguments(TaskArguments):
    """Have texts translated or summarised, and compare with references."""

    prompt: Path = field(kw_only=True, metadata={"help": "YAML file with prompt_template, examples, ..."})
    reference_path: Path | None = field(
        default=None, metadata={"help": "a reference a line; without it data-path is JSON lines"}
    )
    recover_bpe: bool = field(default=False, metadata={"help": "lines hold SentencePiece's pieces"})
    max_output_len: int = field(default=128, metadata={RANGE: TOKENS, "help": "tokens of an answer at most"})
    beam_width: int = field(default=1, metadata={RANGE: BEAMS, "help": "beams; 1 is greedy"})

    @property
    def data_files(self) -> tuple[Path, ...]:
        """Sources and references."""
        return (self.data_path,) if self.reference_path is None else (self.data_path, self.reference_path)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the task reads."""
        return (*self.data_files, self.prompt)


@dataclass(frozen=True)
class BenchmarkArguments(ScriptArguments):
    """Measure latency and throughput of a running deployment, point by point."""

    endpoint: str = field(metadata={"help": "endpoint.json, its directory, host:port of gRPC, or http://host:port/v1"})
    output: Path = field(metadata={"help": "directory for benchmark.csv"})
    model: str = field(default="fastertransformer", metadata={"help": "model to ask"})
    batch_sizes: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16, 32, 64, 128, 256), metadata={RANGE: BATCH, "help": "JSON list"}
    )
    lengths: tuple[tuple[int, int], ...] = field(
        default=(),
        metadata={RANGE: TOKENS, "help": "JSON list of [input, output] in tokens; the published pairs if empty"},
    )
    warmup: int = field(default=1, metadata={RANGE: UNCOUNTED, "help": "requests before each point that do not count"})
    repeats: int = field(default=5, metadata={RANGE: REPEATS, "help": "requests a point"})
    max_batch_size: int = field(default=256, metadata={RANGE: BATCH, "help": "larger batch sizes are left out"})
    seed: int = field(default=0, metadata={RANGE: SEED, "help": "of the random prompts"})
    vocab_size: int | None = field(
        default=None, metadata={RANGE: IDS, "help": "of the random ids; by default the served model's"}
    )
    model_digest: str | None = field(default=None, metadata={"help": "digest of the model that must be served"})
    model_repository: Path | None = field(
        default=None, metadata={"help": "the repository that must be served; its manifest says the digest"}
    )
    timeout_s: float = field(default=600.0, metadata={RANGE: WEEK_S, "help": "limit of one request in seconds"})
    gpu_hour_price: float | None = field(
        default=None, metadata={RANGE: PRICE, "help": "of one GPU, in any currency, for the cost of a million tokens"}
    )
    gpus: int | None = field(
        default=None, metadata={RANGE: COUNT, "help": "GPUs that serve; by default what the deployment says"}
    )
    label: str | None = field(default=None, metadata={"help": "name of the deployment in tables and reports"})
    endpoint_key_env: str | None = field(
        default=None, metadata={"help": "environment variable with the bearer key of an OpenAI API"}
    )


@dataclass(frozen=True)
class RecomputeArguments(ScriptArguments):
    """Compute the figures of a benchmark again from the requests that were recorded."""

    output: Path = field(metadata={"help": "directory of benchmark.csv or load.csv, or the results of a run"})


@dataclass(frozen=True)
class ReportArguments(ScriptArguments):
    """Write report.md and report.html over what a run produced."""

    results: Path = field(metadata={"help": "results directory of the run"})
    output: Path = field(metadata={"help": "directory for the report"})
    title: str = field(metadata={"help": "name of the model"})
    stages: Path = field(metadata={"help": "stages.json of the runner"})
    baseline: Path | None = field(
        default=None, metadata={"help": "results directory of an earlier run, to stand beside this one"}
    )
    thresholds: Path | None = field(default=None, metadata={"help": "YAML file of limits: the gate's verdict is shown"})


@dataclass(frozen=True)
class GateArguments(ScriptArguments):
    """Decide by thresholds whether a deployment may go live."""

    results: Path = field(metadata={"help": "results directory of the run", "positional": True})
    thresholds: Path = field(metadata={"help": "YAML file of limits"})
    baseline: Path | None = field(default=None, metadata={"help": "results directory of the run to compare with"})
    output: Path | None = field(default=None, metadata={"help": "JSON file for the verdict and its reasons"})


POINTS_NAME = "points.json"
"""A sweep's list of its points: the launcher writes it, the sweep's report reads it."""


@dataclass(frozen=True)
class SweepReportArguments(ScriptArguments):
    """Write one report over all points of a sweep."""

    sweep: Path = field(metadata={"help": "directory of the sweep: has points.json, gets the report"})
