"""Plan the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deployment.arguments import NODE, GemmAutotuneArguments, ServeArguments
from launcher.config.schema import Config, Engine, Stage
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Command, StagePlan, python_module
from launcher.plan.stages.settings import environment, resources, serving_topology


def deploy(config: Config, paths: RunPaths) -> StagePlan:
    """Plan the server over the nodes that TP x PP fill.

    FasterTransformer drives all GPUs of a node from one process. Our engine takes one process a rank where the
    cluster's steps start them (Slurm); elsewhere one process runs all ranks of a node.
    """
    deployment = config.deployment
    layout = serving_topology(config)
    has_clients = deployment.endpoint is None and bool({Stage.evaluate, Stage.benchmark} & set(config.stages))
    arguments = ServeArguments(
        model_repository=paths.model_repository,
        endpoint=paths.endpoint,
        log=paths.deployment / "server.log",
        http_port=deployment.http_port,
        grpc_port=deployment.grpc_port,
        metrics_port=deployment.metrics_port,
        host=deployment.host or ("127.0.0.1" if has_clients else NODE),
        engine=str(deployment.engine),
        cuda_devices=layout.cuda_devices or "",
        start_timeout_s=deployment.start_timeout_s,
        exit_timeout_s=deployment.exit_timeout_s,
        restart=deployment.restart,
        open_apis=tuple(map(str, deployment.open_apis)),
        edited_files=tuple(deployment.edited_files),
        server_args=tuple(deployment.server_args),
    )
    gpus_per_node = layout.gpus // layout.nodes
    is_task_a_rank = deployment.engine is Engine.slipway and config.cluster.one_task_per_rank
    tasks_per_node = max(1, gpus_per_node) if is_task_a_rank else 1
    return StagePlan(
        stage="deploy",
        name=deployment.run.name,
        commands=(
            *_preparations(config, paths),
            replace(python_module("deployment.serve", arguments), tasks_per_node=tasks_per_node),
        ),
        resources=resources(config, deployment.run.time_limit, layout.nodes, gpus_per_node, deployment.container),
        inputs=(paths.model_repository,),
        output=paths.deployment,
        log=paths.log("deploy"),
        env=environment(config) | ({"SLIPWAY_TORCH_KERNELS": "1"} if deployment.torch_kernels else {}),
        service=True,
    )


def _preparations(config: Config, paths: RunPaths) -> tuple[Command, ...]:
    """Plan what runs once, on the first node, before the server is started."""
    if not config.deployment.gemm_autotune:
        return ()
    arguments = GemmAutotuneArguments(paths.model_repository, binary=Path(config.deployment.gemm_binary))
    return (replace(python_module("deployment.gemm_autotune", arguments), nodes=1),)
