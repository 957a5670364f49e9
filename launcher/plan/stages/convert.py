"""Conversion of a training checkpoint, into FasterTransformer's shards or a directory of Hugging Face or PEFT.

What the checkpoint says now, and the plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from export_scripts.arguments import HUGGINGFACE, PEFT, ConvertArguments
from ft_format.families.family import Family
from ft_format.layout import Dims
from handover.errors import CheckpointError, ConfigError
from handover.manifest import FILE_NAME
from handover.progress import human_bytes
from launcher.config.choices import Engine, ModelFormat, Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.adapter_checks import check_adapter, writes_adapter
from launcher.plan.engine_checks import check_ranks, check_served
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial, python_module
from launcher.plan.source_checks import (
    check_directory,
    check_drafts,
    check_engine,
    check_family,
    check_tokenizer,
    say_family,
)
from launcher.plan.stages.settings import Known, environment, resources, signing
from models.directory import CONFIG_FILE

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
        check_family(config, str(checkpoint), made_up.source.family)
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
    check_family(config, str(checkpoint), source.family)
    say_family(config, str(checkpoint), source.family, source.source_map.name)
    if Stage.deploy in stages:
        check_engine(config, str(checkpoint), source.family.kernel_problem(source.dims))
    if Stage.export in stages:
        check_drafts(config, str(checkpoint), None)
    check_tokenizer(str(checkpoint), source.tokenizer.members, stages)
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
    check_family(config, str(paths.checkpoint), source.family)
    say_family(config, str(paths.checkpoint), source.family, source.source_map.name)
    is_served = bool({Stage.export, Stage.deploy} & set(stages))
    if is_served and config.deployment.engine.reads_shards:
        check_directory(config, str(paths.checkpoint), json.loads(planned.small_files[CONFIG_FILE]))
        check_tokenizer(str(paths.checkpoint), source.tokenizer.members, stages)
    elif is_served:
        check_served(config, str(paths.checkpoint), planned.architecture, source.dims)
        check_ranks(config, str(paths.checkpoint), planned)
    known.model, known.is_encoder_decoder = str(paths.checkpoint), source.family.is_encoder_decoder
