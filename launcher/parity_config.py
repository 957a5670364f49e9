"""Configuration of ``evaluation=parity``: the served model against the checkpoint that it was made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class ParityLimits:
    """How far a served model may be from its source."""

    max_log_prob_difference: float = MISSING  # nats, of any one token
    mean_log_prob_difference: float = MISSING  # nats, over all tokens
    greedy_agreement: float = MISSING  # share of tokens where both prefer the same one, at least
    tie: float = MISSING  # nats between two tokens that count as equally probable


@dataclass
class ParityConfig:
    """What is compared, and with what."""

    prompts: list[str] = field(default_factory=list)  # texts; task.data_path brings more
    output_length: int = 32  # tokens to generate for each
    reference: str = "auto"  # huggingface, engine, or auto: the first that can compute the checkpoint
    limits: dict[str, ParityLimits] = field(default_factory=dict)  # by the coarsest format: fp32, fp16, bf16, int8
