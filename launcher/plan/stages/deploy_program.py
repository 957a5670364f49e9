"""Another project's server over the Hugging Face directory: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from deployment.arguments import NODE, EngineArguments
from handover.errors import ConfigError
from handover.manifest import FILE_NAME
from launcher.config.choices import Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.engine_checks import check_engine
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, python_module
from launcher.plan.programs import command_of, program_of
from launcher.plan.stages.settings import environment, grace_s, resources, serving_topology, trust


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


def tasks_per_node(config: Config) -> int:
    """Return how many processes a node has: one, or one a GPU where MPI joins those of several nodes."""
    layout = serving_topology(config)
    return layout.gpus // layout.nodes if layout.nodes > 1 and program_of(config).over_nodes.is_mpis else 1


def plan(config: Config, paths: RunPaths) -> StagePlan:
    """Plan the server: one process a node, which starts those of its GPUs itself; where MPI joins them, one a GPU."""
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
        nodes=layout.nodes if layout.nodes > 1 else None,
        cuda_devices=layout.cuda_devices or "",
        **trust(config),
    )
    gpus = layout.gpus // layout.nodes
    command = python_module("deployment.engines.serve", arguments)
    return StagePlan(
        stage="deploy",
        name=deployment.run.name,
        commands=(replace(command, tasks_per_node=tasks_per_node(config)),),
        resources=resources(config, deployment.run.time_limit, layout.nodes, gpus, deployment.container),
        inputs=(paths.model_repository,),
        output=paths.deployment,
        log=paths.log("deploy"),
        env=environment(config),
        service=True,
        grace_s=grace_s(config),
    )
