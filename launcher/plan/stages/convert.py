"""Conversion of a training checkpoint, into FasterTransformer's shards or a directory of Hugging Face or PEFT.

What the checkpoint says now, and the plan.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
from export_scripts.arguments import FP8_CACHE, HUGGINGFACE, MTP, NO_DRAFTS, PEFT, ConvertArguments
from ft_format.families.family import Family
from ft_format.families.gpt import FAMILY as GPT
from ft_format.layout import Dims
from handover.errors import CheckpointError, ConfigError
from handover.manifest import FILE_NAME
from handover.progress import human_bytes
from launcher.config.choices import Engine, ModelFormat, ModelType, Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.adapter_checks import check_adapter, writes_adapter
from launcher.plan.engine_checks import check_ranks, check_served
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial, python_module
from launcher.plan.stages.settings import Known, environment, resources, signing
from models.decoder import Decoder
from models.directory import CONFIG_FILE
from models.engine_limits import (
    beyond_engine,
    cache_problem,
    drafts_problem,
    fp8_problem,
    int8_problem,
    predictor_problem,
    ranks_problem,
)
from models.quantization import QUANTIZATION

_SHA256 = re.compile("[0-9a-fA-F]{64}")


def check(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Open the checkpoint as the conversion will, and compare what it is with what shall be done with it.

    Raises:
        CheckpointError: it cannot be converted; see ``export_scripts.conversion.plan.check.inspect_source``.
        ConfigError: it is another model than the configuration or a stage needs.
    """
    from export_scripts.checkpoints.huggingface.hub import is_fetched
    from export_scripts.conversion.plan.description import is_description
    from export_scripts.conversion.plan.random_weights import plan_random

    model, checkpoint = config.export.model, paths.checkpoint
    if model.checkpoint_sha256 is not None and not _SHA256.fullmatch(model.checkpoint_sha256):
        raise ConfigError(
            f"export.model.checkpoint_sha256 is '{model.checkpoint_sha256}', not a SHA-256",
            "it has 64 hexadecimal digits: python -m export_scripts.inspect --sha256 <checkpoint> prints it",
        )
    if paths.hub_name and not is_fetched(paths.hub_name, checkpoint):
        return  # its name is all that is known here
    if model.random_weights:
        made_up = plan_random(checkpoint, model.tensor_model_parallel_size, str(model.weight_data_type))
        _check_family(config, str(checkpoint), made_up.source.family)
        return
    if is_description(checkpoint):
        if not config.dry_run:
            raise ConfigError(
                f"export.model.checkpoint_path {checkpoint} is the description of a checkpoint",
                "dry_run=true says what its conversion will take; to convert, give the checkpoint itself; "
                "export.model.random_weights=true makes weights of its shape, to measure them",
            )
        return
    if writes_adapter(config):
        check_adapter(config, stages, _arguments(config, paths))
        return
    if writes_huggingface(config):
        _check_huggingface(config, paths, stages, known)
        return
    _check_shards(config, paths, stages, known)


def plan(config: Config, paths: RunPaths) -> list[StagePlan]:
    """Plan the conversion: one command on one node."""
    run, arguments = config.export.run, _arguments(config, paths)
    stage = StagePlan(
        stage="convert",
        name=f"convert_{run.model_train_name}",
        commands=(python_module("export_scripts.convert", arguments),),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=tuple(
            path for path in (None if paths.hub_name else paths.checkpoint, paths.adapter, paths.tokenizer) if path
        ),
        output=output(config, paths),
        log=paths.log("convert"),
        env=environment(config),
    )
    return [stage]


def output(config: Config, paths: RunPaths) -> Path:
    """Return where the result goes."""
    if writes_adapter(config):
        return paths.peft
    return paths.huggingface if writes_huggingface(config) else paths.ft_checkpoint


def adapter_size(config: Config, paths: RunPaths) -> str:
    """Return what writing the adapter by itself will take, as a sentence."""
    from export_scripts.targets.peft.convert import inspect_peft

    file = inspect_peft(_arguments(config, paths)).files[0]
    return f"{file.name} of {human_bytes(file.size_bytes)} with {len(file.tensors)} matrices, and nothing of the model"


def writes_huggingface(config: Config) -> bool:
    """Whether the conversion writes a Hugging Face directory: that is asked for, or the engine reads nothing else."""
    return config.export.model.format is ModelFormat.huggingface or not config.deployment.engine.reads_shards


def with_format(config: Config, paths: RunPaths) -> Config:
    """Settle what the weights are converted to, where it is not asked for.

    A model that FasterTransformer's loader lacks becomes a Hugging Face directory, so does one whose matrices become
    FP8 when they are loaded; any other shards. What cannot be opened, the conversion's check names.
    """
    model = config.export.model
    if model.format is not None or writes_adapter(config):
        return config
    is_written = config.deployment.engine is Engine.slipway and {Stage.convert, Stage.export} & set(config.stages)
    is_directory = bool(is_written) and not model.random_weights
    is_directory = is_directory and bool(config.export.triton_deployment.quantization or _is_beyond(paths))
    found = ModelFormat.huggingface if is_directory else ModelFormat.fastertransformer
    return replace(config, export=replace(config.export, model=replace(model, format=found)))


def _is_beyond(paths: RunPaths) -> bool:
    """Whether FasterTransformer's loader lacks a model: by the checkpoint, its name on the hub, or what it became."""
    from export_scripts.checkpoints.formats import find_archive, open_source
    from export_scripts.checkpoints.huggingface.decoder import described
    from export_scripts.checkpoints.huggingface.hub import is_fetched, peek_config
    from export_scripts.checkpoints.user_files import GivenFiles
    from export_scripts.weights.settings import Settings

    with suppress(CheckpointError):
        if paths.hub_name and not is_fetched(paths.hub_name, paths.checkpoint):
            architecture, dims = described(Settings(peek_config(paths.hub_name)))
            return _is_beyond_its_own(architecture.family, dims)
        if paths.checkpoint.exists():
            archive = find_archive(paths.checkpoint, GivenFiles(paths.adapter, paths.tokenizer))
            source = open_source(archive, for_shards=False)
            return _is_beyond_its_own(source.family, source.dims)
    return (paths.huggingface / FILE_NAME).is_file() and not (paths.ft_checkpoint / FILE_NAME).is_file()


def _is_beyond_its_own(family: Family, dims: Dims) -> bool:
    """Whether FasterTransformer does not compute a model, or has no kernels for it."""
    return bool(family.beyond(dims) or family.kernel_problem(dims))


def _arguments(config: Config, paths: RunPaths) -> ConvertArguments:
    model = config.export.model
    is_huggingface = writes_huggingface(config) and not writes_adapter(config)
    return filled(
        ConvertArguments,
        model,
        checkpoint=paths.checkpoint,
        output=partial(output(config, paths)),
        tensor_para_size=1 if is_huggingface or writes_adapter(config) else model.tensor_model_parallel_size,
        random_weights=model.random_weights or None,
        hub_name=paths.hub_name,
        adapter=paths.adapter,
        tokenizer=paths.tokenizer,
        format=PEFT if writes_adapter(config) else HUGGINGFACE if is_huggingface else None,
        base_model=config.export.adapter.base_model,
        **vars(signing(config)),
    )


def _check_shards(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Work the conversion to FasterTransformer's shards out, and ask what the later stages need of it.

    Raises:
        CheckpointError: it does not work out; see ``inspect_source``.
        ConfigError: a later stage could not use the result.
    """
    from export_scripts.checkpoints.user_files import GivenFiles
    from export_scripts.conversion.plan.check import inspect_source
    from export_scripts.conversion.plan.special_ids import with_settled_ids

    model, checkpoint = config.export.model, paths.checkpoint
    given = GivenFiles(paths.adapter, paths.tokenizer)
    opened = inspect_source(checkpoint, model.tensor_model_parallel_size, str(model.weight_data_type), given)
    source = with_settled_ids(opened, model.start_id, model.end_id)
    _check_family(config, str(checkpoint), source.family)
    _say_family(config, str(checkpoint), source.family, source.source_map.name)
    if Stage.deploy in stages:
        _check_engine(config, str(checkpoint), source.family.kernel_problem(source.dims))
    if Stage.export in stages:
        _check_drafts(config, str(checkpoint), None)
    _check_tokenizer(str(checkpoint), source.tokenizer.members, stages)
    known.model, known.is_encoder_decoder = str(checkpoint), source.family.is_encoder_decoder


def _check_huggingface(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Work the conversion out, as it will, and ask whether the engine serves the result.

    Raises:
        CheckpointError: it does not work out; see ``plan_huggingface``.
        ConfigError: the engine does not serve the result.
    """
    from export_scripts.targets.huggingface.convert import inspect_huggingface

    planned = inspect_huggingface(paths.checkpoint, _arguments(config, paths))
    source = planned.source
    _check_family(config, str(paths.checkpoint), source.family)
    _say_family(config, str(paths.checkpoint), source.family, source.source_map.name)
    is_served = bool({Stage.export, Stage.deploy} & set(stages))
    if is_served and config.deployment.engine.reads_shards:
        _check_directory(config, str(paths.checkpoint), json.loads(planned.small_files[CONFIG_FILE]))
        _check_tokenizer(str(paths.checkpoint), source.tokenizer.members, stages)
    elif is_served:
        check_served(config, str(paths.checkpoint), planned.architecture, source.dims)
        check_ranks(config, str(paths.checkpoint), planned)
    known.model, known.is_encoder_decoder = str(paths.checkpoint), source.family.is_encoder_decoder


def _check_directory(config: Config, checkpoint: str, said: Mapping[str, Any]) -> None:
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
        raise ConfigError(
            f"the drop-in engine does not read {checkpoint} as a Hugging Face directory: {error.problem}",
            "leave export.model.format out: it reads FasterTransformer's shards of this family",
        ) from None
    if beyond := beyond_engine(decoder):
        raise ConfigError(f"the drop-in engine does not serve {checkpoint}\n  " + "\n  ".join(beyond), other)
    are_fp8 = QUANTIZATION in said
    if config.export.triton_deployment.int8_mode and (problem := int8_problem(decoder, are_fp8)):
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.int8_mode out")
    if config.export.triton_deployment.quantization and (problem := fp8_problem(decoder, are_fp8)):
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.quantization out")
    if config.export.triton_deployment.kv_cache_dtype == FP8_CACHE and (problem := cache_problem(decoder)):
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.kv_cache_dtype out")
    _check_drafts(config, checkpoint, decoder)
    if problem := ranks_problem(decoder, config.export.model.tensor_model_parallel_size):
        raise ConfigError(f"{checkpoint}: {problem}", "take another export.model.tensor_model_parallel_size")


def _check_drafts(config: Config, checkpoint: str, decoder: Decoder | None) -> None:
    """Refuse a way of drafting that a model has not; ``decoder`` None: it becomes FasterTransformer's shards."""
    way = config.export.triton_deployment.speculation
    problem = drafts_problem(decoder) if decoder and way not in (None, NO_DRAFTS) else ""
    if way == MTP:
        problem = problem or predictor_problem(decoder)
    if problem:
        raise ConfigError(f"{checkpoint}: {problem}", "leave export.triton_deployment.speculation out")


def _check_tokenizer(checkpoint: str, members: Collection[str], stages: Collection[Stage]) -> None:
    if Stage.export in stages and not members:
        raise ConfigError(
            f"{checkpoint} has no tokenizer, which export needs",
            "put tokenizer.json, vocab.json and merges.txt, or tokenizer.model beside the weights, or name them by "
            "export.model.tokenizer; stages=[convert] does without",
        )


def _check_engine(config: Config, checkpoint: str, problem: str) -> None:
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


def _check_family(config: Config, checkpoint: str, family: Family) -> None:
    """A configuration for T5 names a T5; that for GPT is the default and says nothing."""
    wanted = config.export.run.model_type
    if wanted in (ModelType.t5, ModelType.mt5) and not family.is_encoder_decoder:
        raise ConfigError(
            f"export.run.model_type is {wanted}, but {checkpoint} is no encoder-decoder: its family is {family.name}",
            "take export=gpt3/export_gpt3, or the path of the T5",
        )
    _check_sessions(config, checkpoint, family)


def _say_family(config: Config, checkpoint: str, family: Family, source: str) -> None:
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
