"""Refusals of a checkpoint that opens, but is not what the configuration or a later stage needs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import models
from export_scripts.arguments import EAGLE3, FP8_CACHE, MTP
from ft_format.families.family import Family
from ft_format.families.gpt import FAMILY as GPT
from handover.errors import ConfigError
from launcher.config.choices import Engine, ModelType, Stage
from launcher.config.schema import Config
from models.decoder import Decoder
from models.eagle3 import read_eagle3
from models.engine_limits import (
    beyond_engine,
    cache_problem,
    fp8_problem,
    head_problem,
    int8_problem,
    predictor_problem,
    ranks_problem,
)
from models.quantization import FP8, QUANTIZATION


def check_directory(config: Config, checkpoint: str, said: Mapping[str, Any]) -> None:
    """Refuse a model that the drop-in engine does not serve from a Hugging Face directory.

    Args:
        config: of the run.
        checkpoint: for the error.
        said: config.json of the directory.

    Raises:
        ConfigError: naming what it does not compute.
    """
    other = "take another engine, such as deployment.engine=vllm, or stages=[convert] for the directory alone"
    try:
        decoder = models.find(said.get("model_type"), said).read(said)
    except models.ModelError as error:
        # FP8 at load asks for a directory where no format is given; see stages/convert.py.
        key = "triton_deployment.quantization" if config.export.triton_deployment.quantization else "model.format"
        raise ConfigError(
            f"the drop-in engine does not read {checkpoint} as a Hugging Face directory: {error.problem}",
            f"leave export.{key} out: it reads FasterTransformer's shards of this family",
        ) from None
    if beyond := beyond_engine(decoder):
        raise ConfigError(f"the drop-in engine does not serve {checkpoint}\n  " + "\n  ".join(beyond), other)
    are_fp8 = QUANTIZATION in said
    if config.export.triton_deployment.int8_mode and (problem := int8_problem(FP8 if are_fp8 else "")):
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.int8_mode out")
    if config.export.triton_deployment.quantization and (problem := fp8_problem(decoder, are_fp8)):
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.quantization out")
    if config.export.triton_deployment.kv_cache_dtype == FP8_CACHE and (problem := cache_problem(decoder)):
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.kv_cache_dtype out")
    check_drafts(config, checkpoint, decoder)
    if problem := ranks_problem(decoder, config.export.model.tensor_model_parallel_size):
        raise ConfigError(f"{checkpoint}: {problem}", "take another export.model.tensor_model_parallel_size")


def check_drafts(config: Config, checkpoint: str, decoder: Decoder | None) -> None:
    """Refuse a way of drafting that a model has not; ``decoder`` None: it becomes FasterTransformer's shards."""
    triton = config.export.triton_deployment
    way, problem = triton.speculation, ""
    if way == MTP:
        problem = predictor_problem(decoder)
    elif way == EAGLE3:
        problem = head_problem(decoder, triton.pipeline_model_parallel_size)
    if problem:
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.speculation out")
    if way == EAGLE3 and decoder and triton.draft_model and Path(triton.draft_model).is_dir():
        ranks = config.export.model.tensor_model_parallel_size
        read_eagle3(Path(triton.draft_model), decoder, ranks, ConfigError)


def check_tokenizer(checkpoint: str, members: Collection[str], stages: Collection[Stage]) -> None:
    """Refuse to export a checkpoint that has no tokenizer."""
    if Stage.export in stages and not members:
        raise ConfigError(
            f"{checkpoint} has no tokenizer, which export needs",
            "put tokenizer.json, vocab.json and merges.txt, or tokenizer.model beside the weights, or name them by "
            "export.model.tokenizer; stages=[convert] does without",
        )


def check_engine(config: Config, checkpoint: str, problem: str) -> None:
    """Refuse to plan the deployment of a model that the engine does not compute.

    Args:
        config: of the run.
        checkpoint: for the error.
        problem: why FasterTransformer's own engine does not; empty: it does.

    Raises:
        ConfigError: naming the engine and why.
    """
    if config.deployment.engine is Engine.fastertransformer and problem:
        raise ConfigError(
            f"deployment.engine=fastertransformer does not compute {checkpoint}: {problem}",
            "take deployment.engine=slipway",
        )


def check_family(config: Config, checkpoint: str, family: Family) -> None:
    """Refuse a configuration for T5 of what is none; that for GPT is the default and says nothing."""
    wanted = config.export.run.model_type
    if wanted in (ModelType.t5, ModelType.mt5) and not family.is_encoder_decoder:
        raise ConfigError(
            f"export.run.model_type is {wanted}, but {checkpoint} is no encoder-decoder: its family is {family.name}",
            "take export=gpt3/export_gpt3, or the path of the T5",
        )
    _check_sessions(config, checkpoint, family)


def say_family(config: Config, checkpoint: str, family: Family, source: str) -> None:
    """Print what a checkpoint is where the configuration is that of GPT, the default, and the checkpoint is none."""
    if family is GPT or config.export.run.model_type is not ModelType.gpt3:
        return
    default = "export=gpt3/export_gpt3, the default, stays: of it come"
    own = ", export=t5/export_t5 has others" if family.is_encoder_decoder else ""
    sys.stderr.write(
        f"convert: {checkpoint} is {source}, of the family {family.name}; {default} the run's name, types and "
        f"ranks{own}, the model is the checkpoint's\n"
    )


def _check_sessions(config: Config, checkpoint: str, family: Family) -> None:
    """FasterTransformer's own engine continues conversations of GPT alone, the drop-in those of every decoder."""
    sessions = config.export.triton_deployment.interactive_sessions
    if not sessions or family is GPT:
        return
    problem = (
        f"export.triton_deployment.interactive_sessions={sessions}, but {checkpoint} is of the family {family.name}: "
    )
    if family.is_encoder_decoder:
        raise ConfigError(f"{problem}an encoder-decoder has no interactive sessions", "take interactive_sessions=0")
    if config.deployment.engine is Engine.fastertransformer:
        raise ConfigError(
            f"{problem}FasterTransformer's own engine has interactive sessions of GPT alone",
            "take deployment.engine=slipway, or interactive_sessions=0",
        )
