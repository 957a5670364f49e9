"""The sections of ``evaluation``: one for each evaluation that ``evaluation=[...]`` can name."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class TaskConfig:
    """What every evaluation has."""

    data_path: str | None = None
    samples: int | None = None  # the first so many; None: all
    model: str = "fastertransformer"  # or ensemble: text in, text out
    batch_size: int = 16


@dataclass
class DataTaskConfig(TaskConfig):
    """An evaluation on a data file, which it cannot do without."""

    concurrency: int = 2  # requests in flight


@dataclass
class LambadaConfig(DataTaskConfig):
    """conf/evaluation/lambada.yaml: the last word of a text."""

    data_sha256: str | None = None  # of the file; None: one of those that are known


@dataclass
class SquadConfig(DataTaskConfig):
    """conf/evaluation/squad.yaml: questions about a passage."""

    prompt: str | None = None  # YAML file, see evaluation/prompts; None: the template of the p-tuned task
    taskname: str | None = None  # p-tuned task of the checkpoint
    use_request_prompt_embedding: bool = False  # requests bring the task's table instead of naming it
    tokens_to_generate: int = 32


@dataclass
class TextPairConfig(DataTaskConfig):
    """conf/evaluation/translation.yaml and summarization.yaml: texts made of texts."""

    reference_path: str | None = None  # a reference a line; None: data_path is JSON lines
    recover_bpe: bool = False  # lines hold SentencePiece's pieces
    prompt: str = MISSING  # YAML file, see evaluation/prompts
    max_output_len: int = 128
    beam_width: int = 1


@dataclass
class ParityLimits:
    """How far a served model may be from its source."""

    max_log_prob_difference: float = MISSING  # nats, of any one token
    mean_log_prob_difference: float = MISSING  # nats, over all tokens
    greedy_agreement: float = MISSING  # share of tokens where both prefer the same one, at least
    tie: float = MISSING  # nats between two tokens that count as equally probable


@dataclass
class ParityConfig(TaskConfig):
    """conf/evaluation/parity.yaml: the served model against the checkpoint that it was made from."""

    prompts: list[str] = field(default_factory=list)  # texts; data_path brings more
    output_length: int = 32  # tokens to generate for each
    reference: str = "auto"  # huggingface, engine, or auto: the first that can compute the checkpoint
    limits: dict[str, ParityLimits] = field(default_factory=dict)  # by the coarsest format: fp32, fp16, bf16, int8
