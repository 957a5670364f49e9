"""Arguments of ``python -m evaluation.parity``; the login node imports this module: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from evaluation.arguments import ENDPOINT, TaskArguments
from ft_format.weight_format import FORMATS, FP8, FP8_BLOCK, FP8_FORMATS, INT8, WeightFormat
from handover.arguments import ScriptArguments, option, same
from handover.errors import ConfigError, nearest
from handover.ranges import (
    COUNT,
    NATS,
    PASSAGE_TOKENS,
    PASSAGES,
    SCALE_ERROR,
    SHARE,
    TOKENS,
    check_ranges,
    number,
)

AUTO, HUGGING_FACE, ENGINE = "auto", "huggingface", "engine"
REFERENCES = (AUTO, HUGGING_FACE, ENGINE)
FP8_CACHE, FP8_ACTIVATIONS = "fp8_cache", "fp8_activations"
PRECISIONS = ("fp32", "fp16", "bf16", INT8.name, FP8_CACHE, FP8_BLOCK.name, FP8.name, FP8_ACTIVATIONS)
"""Number formats that have limits, the finest first."""
LEAST_PASSAGES = 16


@dataclass
class ParityLimits:
    """How far a served model may be from its source."""

    max_log_prob_difference: float = number("???", NATS)  # nats, of any one token
    mean_log_prob_difference: float = number("???", NATS)  # nats, over all tokens
    greedy_agreement: float = number("???", SHARE)  # share of tokens where both prefer the same one, at least
    tie: float = number("???", NATS)  # nats between two tokens that count as equally probable


LIMITS = tuple(entry.name for entry in fields(ParityLimits))


@dataclass(frozen=True)
class ParityArguments(ScriptArguments):
    """Compare a running deployment with the checkpoint that it was made from."""

    needs_scores: ClassVar[bool] = False
    endpoint: str = field(metadata=ENDPOINT)
    output: Path = field(metadata={"help": "directory for metrics.json, summary.json, prompts.csv and positions.csv"})
    checkpoint: Path = field(metadata={"help": "what was converted: the source of the served model"})
    adapter: Path | None = option(None, "LoRA adapter that was merged into it")
    checkpoint_tokenizer: Path | None = option(None, "tokenizer in the place of its own")
    lora_name: str | None = same(TaskArguments, "lora_name")
    lora_path: Path | None = option(None, "adapter that this one was exported from: part of the source")
    prompts: tuple[str, ...] = option((), "JSON list of texts", is_text=True)
    data_path: Path | None = option(None, 'more prompts: JSON lines with "text", "prompt" or "input_ids"')
    samples: int | None = option(None, "prompts to take, from the first on; all by default", COUNT)
    output_length: int = option(32, "tokens to generate for each prompt", TOKENS)
    reference: str = option(AUTO, "auto, huggingface or engine: what computes the source")
    precision: str | None = option(
        None, f"{', '.join(PRECISIONS)}: whose limits count, for a server that does not say it"
    )
    passages: int = option(48, "made-up passages to average over, 16 or more; 0: none", PASSAGES)
    max_passages: int = option(512, "most passages, where fewer cannot show an error of scale_error", PASSAGES)
    longest_passage: int = option(
        2048, "tokens of those that visit every position, as far as the model goes", PASSAGE_TOKENS
    )
    scale_error: float = option(0.02, "error of a norm's scale that has to be seen", SCALE_ERROR)
    limits: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = option(
        (), "JSON list of [precision, [[limit, number], ...]]", section=dict[str, ParityLimits]
    )
    batch_size: int = same(TaskArguments, "batch_size")
    model: str = option("fastertransformer", "model to ask; it must take token ids")
    tokenizer: Path | None = same(TaskArguments, "tokenizer")
    model_repository: Path | None = same(TaskArguments, "model_repository")
    timeout_s: float = same(TaskArguments, "timeout_s")
    endpoint_key_env: str | None = same(TaskArguments, "endpoint_key_env")

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that parity reads."""
        files = (self.data_path, self.checkpoint, self.adapter, self.checkpoint_tokenizer, self.lora_path)
        return tuple(path for path in files if path is not None)

    @property
    def limits_by_precision(self) -> dict[str, dict[str, float]]:
        """The limits as a mapping."""
        return {precision: dict(limits) for precision, limits in self.limits}


def check_files(arguments: ParityArguments, converted: Path | None) -> None:
    """Check the arguments and look for the files, as ``evaluation.task_table.Task`` says.

    Raises:
        ConfigError: see ``check_arguments``, or a file is missing.
    """
    check_arguments(arguments)
    check_checkpoint("parity", arguments.checkpoint, converted)
    check_data(arguments.data_path)


def check_checkpoint(name: str, checkpoint: Path, converted: Path | None) -> None:
    """Refuse an evaluation of what was converted before whose source is not there; ConfigError."""
    if converted is not None and not checkpoint.exists():
        raise ConfigError(
            f"{name} compares with the source, and there is no {checkpoint}", "give export.model.checkpoint_path"
        )


def check_data(path: Path | None) -> None:
    """Refuse a file of texts that is not there; ConfigError."""
    if path is not None and not path.is_file():
        raise ConfigError(f"there is no file {path}", "mend data_path")


def check_precision(precision: str | None, where: str = "") -> None:
    """Refuse a precision that is unknown; ConfigError, whose words begin with ``where``."""
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"{where}precision is '{precision}'", nearest(precision, PRECISIONS))


def check_arguments(arguments: ParityArguments) -> None:
    """Refuse arguments that cannot be compared, before anything is written.

    Raises:
        ConfigError: no prompts, an unknown reference, precision or limit, or a limit that is no number.
    """
    if not arguments.prompts and arguments.data_path is None:
        raise ConfigError("parity has no prompts", "give evaluation.parity.prompts, or evaluation.parity.data_path")
    check_ranges(arguments)
    if arguments.reference not in REFERENCES:
        raise ConfigError(
            f"parity: there is no reference '{arguments.reference}'", nearest(arguments.reference, REFERENCES)
        )
    if bool(arguments.lora_name) != bool(arguments.lora_path):
        raise ConfigError(
            "parity of an adapter compares with the one that was exported",
            f"give export.adapters={{{arguments.lora_name}: <path>}} as for the export",
        )
    if arguments.lora_name and arguments.reference == ENGINE:
        raise ConfigError("parity: reference=engine computes no adapter beside its model", "take reference=auto")
    check_precision(arguments.precision, "parity: ")
    if arguments.passages and arguments.passages < LEAST_PASSAGES:
        hint = f"it is 0, or at least {LEAST_PASSAGES}: fewer have no standard error worth the name"
        raise ConfigError(f"parity: passages is {arguments.passages}", hint)
    limits = arguments.limits_by_precision
    for precision in limits:
        if precision not in PRECISIONS:
            raise ConfigError(f"parity: limits for '{precision}'", nearest(precision, PRECISIONS))
    for precision in PRECISIONS:
        _check_limits(precision, limits.get(precision, {}))


def _check_limits(precision: str, limits: Mapping[str, float]) -> None:
    for name, limit in limits.items():
        if name not in LIMITS:
            raise ConfigError(f"parity: limits.{precision} holds '{name}'", nearest(name, LIMITS))
        if not isinstance(limit, (int, float)) or limit not in NATS:
            raise ConfigError(f"parity: limits.{precision}.{name} is {limit}", f"it is a number, {NATS}")
    missing = [name for name in LIMITS if name not in limits]
    if missing:
        raise ConfigError(
            f"parity: limits.{precision} lacks {', '.join(missing)}", "conf/evaluation/parity.yaml has all"
        )


def served_precision(weight_data_type: str, data_type: str, weights: WeightFormat, *others: str) -> str:
    """Return the coarsest number format, of PRECISIONS, of weights, computation and others.

    An unknown format counts as fp32, which has the strictest limits.
    """
    known = [name for name in (weight_data_type, data_type, *others) if name in PRECISIONS]
    if weights:
        known.append(weights.name if weights in (*FORMATS, *FP8_FORMATS) else INT8.name)
    return max(known, key=PRECISIONS.index, default="fp32")
