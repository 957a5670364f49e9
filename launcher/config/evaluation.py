"""The sections of ``evaluation``: one for each evaluation that ``evaluation=[...]`` can name."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from handover.ranges import (
    BATCH,
    BEAMS,
    COUNT,
    IN_FLIGHT,
    NATS,
    PASSAGE_TOKENS,
    PASSAGES,
    SCALE_ERROR,
    SHARE,
    TOKENS,
    number,
)

IS_TEXT = "is_text"
"""Key of a field's metadata: its strings are texts, which may hold several lines."""


@dataclass
class TaskConfig:
    """What every evaluation has."""

    data_path: str | None = None
    samples: int | None = number(None, COUNT)  # number of samples from the start; None: all
    model: str = "fastertransformer"  # or ensemble: text in, text out
    batch_size: int = number(16, BATCH)


@dataclass
class DataTaskConfig(TaskConfig):
    """An evaluation on a data file, which it cannot do without."""

    concurrency: int = number(2, IN_FLIGHT)  # requests in flight


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
    tokens_to_generate: int = number(32, TOKENS)


@dataclass
class TextPairConfig(DataTaskConfig):
    """conf/evaluation/translation.yaml and summarization.yaml: texts made of texts."""

    reference_path: str | None = None  # a reference a line; None: data_path is JSON lines
    recover_bpe: bool = False  # lines hold SentencePiece's pieces
    prompt: str = MISSING  # YAML file, see evaluation/prompts
    max_output_len: int = number(128, TOKENS)
    beam_width: int = number(1, BEAMS)


@dataclass
class ParityLimits:
    """How far a served model may be from its source."""

    max_log_prob_difference: float = number(MISSING, NATS)  # nats, of any one token
    mean_log_prob_difference: float = number(MISSING, NATS)  # nats, over all tokens
    greedy_agreement: float = number(MISSING, SHARE)  # share of tokens where both prefer the same one, at least
    tie: float = number(MISSING, NATS)  # nats between two tokens that count as equally probable


@dataclass
class ParityConfig(TaskConfig):
    """conf/evaluation/parity.yaml: the served model against the checkpoint that it was made from."""

    prompts: list[str] = field(default_factory=list, metadata={IS_TEXT: True})  # texts; data_path brings more
    output_length: int = number(32, TOKENS)  # tokens to generate for each
    precision: str | None = None  # whose limits count; None: what the server says, fp32 where it does not
    reference: str = "auto"  # huggingface, engine, or auto: the first that can compute the checkpoint
    passages: int = number(48, PASSAGES)  # made up, of 64 tokens, to average over; 0: only prompts are compared
    max_passages: int = number(512, PASSAGES)  # as many are scored as the measured noise needs, up to this
    longest_passage: int = number(2048, PASSAGE_TOKENS)  # of two more, which visit every position as far as they go
    scale_error: float = number(0.02, SCALE_ERROR)  # of a norm, to be seen; else the verdict is INCONCLUSIVE
    limits: dict[str, ParityLimits] = field(default_factory=dict)  # by the coarsest format: fp32, fp16, bf16, int8
