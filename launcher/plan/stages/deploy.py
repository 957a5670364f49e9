"""The server over the model repository."""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from deployment.arguments import NODE, OF_OPENAI, GemmAutotuneArguments, ServeArguments
from deployment.openai.tools.dialects import dialect_named
from handover.errors import ConfigError
from handover.manifest import FILE_NAME
from launcher.clusters.table import cluster_of
from launcher.config.choices import Engine, Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.node_checks import check_alone
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Command, StagePlan, python_module
from launcher.plan.stages import deploy_program, deploy_replicas
from launcher.plan.stages.settings import Known, environment, grace_s, resources, serving_topology, trust

_WITHOUT_EFFECT = ("openai_port", "openai_processes")
"""Settings of the OpenAI API that do not ask for it to be on: the port is what turns it on."""


def check(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Look for the repository and try the ports.

    Raises:
        ConfigError: the engine is not started from here, there is no repository, a port is taken, the engine does not
            tune its GEMMs, or there are settings for an API that is off or that it does not know.
    """
    engine = config.deployment.engine
    _check_gpus_per_task(config)
    deploy_replicas.check(config)
    if engine.is_program:
        deploy_program.check(config, paths, stages)
        if cluster_of(config).runs_here:
            _check_ports(config)
        return
    if engine is Engine.vllm_triton:
        raise ConfigError(
            "deployment.engine=vllm_triton with deploy: Triton's vLLM backend is in NVIDIA's container alone, which "
            "is not started from here",
            f"take stages=[export], start tritonserver --model-repository={paths.model_repository} in "
            "nvcr.io/nvidia/tritonserver:<yy.mm>-vllm-python-py3, or take deployment.engine=vllm",
        )
    check_alone(config)
    asking = [name for name in OF_OPENAI if name not in _WITHOUT_EFFECT]
    given = [name for name in asking if getattr(config.deployment, name) is not None]
    if given and config.deployment.openai_port is None:
        raise ConfigError(
            f"deployment.{given[0]} is given, and the OpenAI API is off",
            "give deployment.openai_port too, 0 for a free one",
        )
    if config.deployment.openai_tool_dialect:
        dialect_named(config.deployment.openai_tool_dialect)
    if engine is Engine.slipway and config.deployment.gemm_autotune:
        raise ConfigError(
            "deployment.gemm_autotune=true: the drop-in engine does not read gemm_config.ini",
            "take gemm_autotune=false, or deployment.engine=fastertransformer in its container",
        )
    if Stage.export not in stages and not (paths.model_repository / FILE_NAME).is_file():
        raise ConfigError(
            f"there is no model repository at {paths.model_repository}", "add export to stages: stages=[export,deploy]"
        )
    if cluster_of(config).runs_here:
        _check_ports(config)


def plan(config: Config, paths: RunPaths) -> list[StagePlan]:
    """Plan the servers."""
    return deploy_replicas.plans_of(config, plan_server(config, paths))


def plan_server(config: Config, paths: RunPaths) -> StagePlan:
    """Plan one server over the nodes that TP x PP fill.

    FasterTransformer drives all GPUs of a node from one process. Our engine takes one process a rank where the
    cluster's steps start them (Slurm); elsewhere one process runs all ranks of a node.
    """
    deployment = config.deployment
    if deployment.engine.is_program:
        return deploy_program.plan(config, paths)
    layout = serving_topology(config)
    has_clients = deployment.endpoint is None and bool({Stage.evaluate, Stage.benchmark} & set(config.stages))
    arguments = filled(
        ServeArguments,
        deployment,
        model_repository=paths.model_repository,
        endpoint=paths.endpoint,
        log=paths.deployment / "server.log",
        host=deployment.host or ("127.0.0.1" if has_clients else NODE),
        cuda_devices=layout.cuda_devices or "",
        **trust(config),
    )
    files = arguments.api_keys_file, arguments.openai_adapter_keys_file, arguments.openai_chat_template
    gpus_per_node, tasks_per_node = layout.gpus // layout.nodes, _tasks_per_node(config)
    return StagePlan(
        stage="deploy",
        name=deployment.run.name,
        commands=(
            *_preparations(config, paths),
            replace(python_module("deployment.serve", arguments), tasks_per_node=tasks_per_node),
        ),
        resources=resources(config, deployment.run.time_limit, layout.nodes, gpus_per_node, deployment.container),
        inputs=(paths.model_repository, *(path for path in files if path is not None)),
        output=paths.deployment,
        log=paths.log("deploy"),
        env=environment(config) | ({"SLIPWAY_TORCH_KERNELS": "1"} if deployment.torch_kernels else {}),
        service=True,
        grace_s=grace_s(config),
    )


def _tasks_per_node(config: Config) -> int:
    if config.deployment.engine.is_program:
        return deploy_program.tasks_per_node(config)
    layout = serving_topology(config)
    is_task_a_rank = config.deployment.engine is Engine.slipway and config.cluster.one_task_per_rank
    return max(1, layout.gpus // layout.nodes) if is_task_a_rank else 1


def _check_gpus_per_task(config: Config) -> None:
    """Hold ``cluster.gpus_per_task``, which shapes the allocation alone, against what the server's tasks use."""
    given, layout = config.cluster.gpus_per_task, serving_topology(config)
    if not given or not cluster_of(config).allocates:
        return
    if not layout.gpus:
        raise ConfigError(
            f"cluster.gpus_per_task={given} without cluster.gpus_per_node: how the ranks fill nodes is not known",
            "say how many GPUs a node has: cluster.gpus_per_node=8",
        )
    tasks = _tasks_per_node(config)
    needed = layout.gpus // layout.nodes // tasks
    if given < needed:
        raise ConfigError(
            f"cluster.gpus_per_task={given}: of the server's tasks, {tasks} on a node, each takes {needed} GPUs",
            f"take cluster.gpus_per_task={needed}, or null: the job then has the GPUs that the model takes",
        )


def _check_ports(config: Config) -> None:
    deployment = config.deployment
    host = deployment.host or "127.0.0.1"
    given = [
        (name, getattr(deployment, name))
        for name in ("http_port", "grpc_port", "metrics_port", "openai_port")
        if getattr(deployment, name)
    ]
    for name, port in given:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError, UnicodeError) as error:
                raise ConfigError(
                    f"deployment.{name}={port} cannot be used on {host}: {error}",
                    "take another port, or 0 for a free one",
                ) from None
    ports = [port for _, port in given]
    if len(set(ports)) < len(ports):
        raise ConfigError(f"deployment's ports {ports} are not all different")


def _preparations(config: Config, paths: RunPaths) -> tuple[Command, ...]:
    """Plan what runs once, on the first node, before the server is started."""
    if not config.deployment.gemm_autotune:
        return ()
    arguments = GemmAutotuneArguments(paths.model_repository, binary=Path(config.deployment.gemm_binary))
    return (replace(python_module("deployment.gemm_autotune", arguments), nodes=1),)
