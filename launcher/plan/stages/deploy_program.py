"""Another project's server over the Hugging Face directory: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Collection

from deployment.arguments import NODE, EngineArguments
from handover.errors import ConfigError
from handover.manifest import FILE_NAME
from launcher.config.choices import Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.engine_checks import check_engine, command_of
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, python_module
from launcher.plan.stages.settings import environment, resources, serving_topology, trust


def check(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Look for the directory and the program, and for keys that the engine has no use for.

    Raises:
        ConfigError: there is no directory, or see ``check_engine``.
    """
    check_engine(config)
    if not {Stage.convert, Stage.export} & set(stages) and not (paths.huggingface / FILE_NAME).is_file():
        raise ConfigError(
            f"there is no Hugging Face directory at {paths.huggingface}", "add export to stages: stages=[export,deploy]"
        )


def plan(config: Config, paths: RunPaths) -> StagePlan:
    """Plan the server: one process on one node, which starts those of its other GPUs itself."""
    deployment, layout = config.deployment, serving_topology(config)
    has_clients = deployment.endpoint is None and bool({Stage.evaluate, Stage.benchmark} & set(config.stages))
    arguments = filled(
        EngineArguments,
        deployment,
        model_repository=paths.model_repository,
        model_name=config.export.run.model_train_name,
        endpoint=paths.endpoint,
        log=paths.deployment / "server.log",
        data_type=str(config.export.triton_deployment.data_type),
        command=command_of(config),
        host=deployment.host or ("127.0.0.1" if has_clients else NODE),
        tensor_para_size=config.export.model.tensor_model_parallel_size,
        pipeline_para_size=config.export.triton_deployment.pipeline_model_parallel_size,
        cuda_devices=layout.cuda_devices or "",
        **trust(config),
    )
    return StagePlan(
        stage="deploy",
        name=deployment.run.name,
        commands=(python_module("deployment.engines.serve", arguments),),
        resources=resources(config, deployment.run.time_limit, 1, layout.gpus, deployment.container),
        inputs=(paths.model_repository,),
        output=paths.deployment,
        log=paths.log("deploy"),
        env=environment(config),
        service=True,
    )
