"""Export of an FT checkpoint, or of a Hugging Face directory, as a Triton model repository."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from export_scripts.arguments import ExportArguments, ExportVllmArguments
from handover.errors import ConfigError
from launcher.config.choices import Engine, ModelFormat, Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.adapter_checks import served_adapters
from launcher.plan.engine_checks import check_engine
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial, python_module
from launcher.plan.stages.settings import Known, environment, resources, signing


def check(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Refuse a repository that its engine could not serve.

    Raises:
        ConfigError: ``text_deltas`` for FasterTransformer's own backend, or a key that vLLM has no use for.
    """
    if config.deployment.engine is Engine.vllm_triton:
        check_engine(config)
    triton = config.export.triton_deployment
    served_adapters(config)
    if triton.text_deltas and config.deployment.engine is Engine.fastertransformer:
        raise ConfigError(
            "export.triton_deployment.text_deltas=true with deployment.engine=fastertransformer: FasterTransformer's "
            "backend does not give text_start, which the ensemble would wait for",
            "take text_deltas=false, or deployment.engine=slipway",
        )


def plan(config: Config, paths: RunPaths) -> list[StagePlan]:
    """Plan the export: one command on one node; weights are linked, so it takes no space.

    There is none where the engine serves the Hugging Face directory as the conversion has written it.
    """
    if config.deployment.engine.is_program:
        return []
    if config.deployment.engine is Engine.vllm_triton:
        return [_for_vllm(config, paths)]
    run, triton = config.export.run, config.export.triton_deployment
    adapters = served_adapters(config)
    draft = Path(os.path.abspath(triton.draft_model)) if triton.draft_model else None
    checkpoint = paths.huggingface if config.export.model.format is ModelFormat.huggingface else paths.ft_checkpoint
    arguments = filled(
        ExportArguments,
        triton,
        ft_checkpoint=checkpoint,
        output=partial(paths.model_repository),
        model_name=run.model_train_name,
        tensor_para_size=config.export.model.tensor_model_parallel_size,
        pipeline_para_size=triton.pipeline_model_parallel_size,
        adapters=adapters or None,
        draft_model=draft,
        **vars(signing(config)),
    )
    stage = StagePlan(
        stage="export",
        name=run.name,
        commands=(python_module("export_scripts.export", arguments),),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=(checkpoint, *(Path(path) for _, path in adapters), *([draft] if draft else ())),
        output=paths.model_repository,
        log=paths.log("export"),
        env=environment(config),
    )
    return [stage]


def _for_vllm(config: Config, paths: RunPaths) -> StagePlan:
    """Plan the repository of Triton's vLLM backend, over the Hugging Face directory."""
    run = config.export.run
    arguments = filled(
        ExportVllmArguments,
        config.deployment,
        huggingface=paths.huggingface,
        output=partial(paths.model_repository),
        repository=paths.model_repository,
        model_name=run.model_train_name,
        data_type=str(config.export.triton_deployment.data_type),
        tensor_para_size=config.export.model.tensor_model_parallel_size,
        pipeline_para_size=config.export.triton_deployment.pipeline_model_parallel_size,
        **vars(signing(config)),
    )
    return StagePlan(
        stage="export",
        name=run.name,
        commands=(python_module("export_scripts.export_vllm", arguments),),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=(paths.huggingface,),
        output=paths.model_repository,
        log=paths.log("export"),
        env=environment(config),
    )
