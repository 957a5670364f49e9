"""Conversion of a training checkpoint, into FasterTransformer's shards or a directory of Hugging Face.

What the checkpoint says now, and the plan.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from export_scripts.arguments import HUGGINGFACE, ConvertArguments
from handover.errors import ConfigError
from launcher.config.choices import Engine, ModelFormat, ModelType, Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.engine_checks import check_served
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial, python_module
from launcher.plan.stages.settings import Known, environment, resources

_GPT, _T5 = "gpt", "t5"
_SHA256 = re.compile("[0-9a-fA-F]{64}")


def check(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Open the checkpoint as the conversion will, and compare what it is with what shall be done with it.

    Raises:
        CheckpointError: it cannot be converted; see ``export_scripts.conversion.check.inspect_source``.
        ConfigError: it is another model than the configuration or a stage needs.
    """
    from export_scripts.checkpoints.huggingface.hub import is_fetched
    from export_scripts.conversion.description import is_description
    from export_scripts.conversion.random_weights import plan_random

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
        _check_family(config, str(checkpoint), made_up.source.family.name)
        return
    if is_description(checkpoint):
        if not config.dry_run:
            raise ConfigError(
                f"export.model.checkpoint_path {checkpoint} is the description of a checkpoint",
                "dry_run=true says what its conversion will take; to convert, give the checkpoint itself; "
                "export.model.random_weights=true makes weights of its shape, to measure them",
            )
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
    return paths.huggingface if writes_huggingface(config) else paths.ft_checkpoint


def writes_huggingface(config: Config) -> bool:
    """Whether the conversion writes a Hugging Face directory: that is asked for, or the engine reads nothing else."""
    return config.export.model.format is ModelFormat.huggingface or not config.deployment.engine.reads_shards


def _arguments(config: Config, paths: RunPaths) -> ConvertArguments:
    model = config.export.model
    is_huggingface = writes_huggingface(config)
    return filled(
        ConvertArguments,
        model,
        checkpoint=paths.checkpoint,
        output=partial(output(config, paths)),
        tensor_para_size=1 if is_huggingface else model.tensor_model_parallel_size,
        random_weights=model.random_weights or None,
        hub_name=paths.hub_name,
        adapter=paths.adapter,
        tokenizer=paths.tokenizer,
        format=HUGGINGFACE if is_huggingface else None,
    )


def _check_shards(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Work the conversion to FasterTransformer's shards out, and ask what the later stages need of it.

    Raises:
        CheckpointError: it does not work out; see ``inspect_source``.
        ConfigError: a later stage could not use the result.
    """
    from export_scripts.checkpoints.given import GivenFiles
    from export_scripts.conversion.check import inspect_source
    from export_scripts.conversion.special_ids import with_settled_ids

    model, checkpoint = config.export.model, paths.checkpoint
    given = GivenFiles(paths.adapter, paths.tokenizer)
    opened = inspect_source(checkpoint, model.tensor_model_parallel_size, str(model.weight_data_type), given)
    source = with_settled_ids(opened, model.start_id, model.end_id)
    _check_family(config, str(checkpoint), source.family.name)
    _say_family(config, str(checkpoint), source.family.name, source.source_map.name)
    if Stage.deploy in stages:
        _check_engine(config, str(checkpoint), source.family.beyond(source.dims))
    if Stage.export in stages and not source.tokenizer.members:
        raise ConfigError(
            f"{checkpoint} has no tokenizer, which export needs",
            "put tokenizer.json, vocab.json and merges.txt, or tokenizer.model beside the weights, or name them by "
            "export.model.tokenizer; stages=[convert] does without",
        )
    known.model, known.is_encoder_decoder = str(checkpoint), source.family.name == _T5


def _check_huggingface(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Work the conversion out, as it will, and ask whether the engine serves the result.

    Raises:
        CheckpointError: it does not work out; see ``plan_huggingface``.
        ConfigError: the engine does not serve the result.
    """
    from export_scripts.targets.huggingface.convert import inspect_huggingface

    planned = inspect_huggingface(paths.checkpoint, _arguments(config, paths))
    source = planned.source
    _check_family(config, str(paths.checkpoint), source.family.name)
    _say_family(config, str(paths.checkpoint), source.family.name, source.source_map.name)
    if not config.deployment.engine.reads_shards and {Stage.export, Stage.deploy} & set(stages):
        check_served(config, str(paths.checkpoint), planned.architecture, vars(source.dims))
    known.model, known.is_encoder_decoder = str(paths.checkpoint), source.family.name == _T5


def _check_engine(config: Config, checkpoint: str, beyond: Sequence[str]) -> None:
    """Refuse to plan the deployment of a model that the engine does not compute.

    Args:
        config: of the run.
        checkpoint: for the error.
        beyond: what FasterTransformer's own engine computes otherwise.

    Raises:
        ConfigError: naming the engine and why.
    """
    if config.deployment.engine is Engine.fastertransformer and beyond:
        raise ConfigError(
            f"deployment.engine=fastertransformer would compute another model than {checkpoint}\n  "
            + "\n  ".join(beyond),
            "take deployment.engine=slipway, or export.model.format=huggingface with stages=[convert]",
        )


def _check_family(config: Config, checkpoint: str, family: str) -> None:
    """A configuration for T5 names a T5; that for GPT is the default and says nothing."""
    wanted = config.export.run.model_type
    if wanted in (ModelType.t5, ModelType.mt5) and family != _T5:
        raise ConfigError(
            f"export.run.model_type is {wanted}, but {checkpoint} is no encoder-decoder: its family is {family}",
            "take export=gpt3/export_gpt3, or the path of the T5",
        )
    _check_sessions(config, checkpoint, family)


def _say_family(config: Config, checkpoint: str, family: str, source: str) -> None:
    """Print what a checkpoint is where the configuration is that of GPT, the default, and the checkpoint is none."""
    if family == _GPT or config.export.run.model_type is not ModelType.gpt3:
        return
    default = "export=gpt3/export_gpt3, the default, stays: of it come"
    own = ", export=t5/export_t5 has others" if family == _T5 else ""
    sys.stderr.write(
        f"convert: {checkpoint} is {source}, of the family {family}; {default} the run's name, types and ranks{own}, "
        "the model is the checkpoint's\n"
    )


def _check_sessions(config: Config, checkpoint: str, family: str) -> None:
    """FasterTransformer's own engine continues conversations of GPT alone, the drop-in those of every decoder."""
    sessions = config.export.triton_deployment.interactive_sessions
    if not sessions or family == _GPT:
        return
    problem = f"export.triton_deployment.interactive_sessions={sessions}, but {checkpoint} is of the family {family}: "
    if family == _T5:
        raise ConfigError(f"{problem}an encoder-decoder has no interactive sessions", "take interactive_sessions=0")
    if config.deployment.engine is Engine.fastertransformer:
        raise ConfigError(
            f"{problem}FasterTransformer's own engine has interactive sessions of GPT alone",
            "take deployment.engine=slipway, or interactive_sessions=0",
        )
