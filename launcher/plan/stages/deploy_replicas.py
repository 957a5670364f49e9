"""Several servers of one model behind a router: ``deployment.replicas``."""

from __future__ import annotations

import os
from dataclasses import replace

from deployment.arguments import NODE, EngineArguments, ReplicasArguments, ServeArguments
from deployment.replicas.haproxy import check_header
from deployment.replicas.replica import own_arguments
from deployment.replicas.router import find_program
from deployment.replicas.table import ROUTERS
from handover.errors import ConfigError, ServerError
from launcher.clusters.cluster import Replicas
from launcher.clusters.table import cluster_of
from launcher.config.choices import ContainerRuntime, Engine, Router, Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.plan import PYTHON, REPLICA, StagePlan, python_module
from launcher.plan.programs import words_of
from launcher.plan.stages.settings import serving_topology


def check(config: Config) -> None:
    """Refuse what replicas cannot share, and look for GPUs and the router's program.

    Raises:
        ConfigError: naming the key, and what to do.
    """
    deployment = config.deployment
    router_command(config)
    if deployment.replicas == 1:
        _check_unused(config)
        return
    _check_shared(config)
    if deployment.affinity_header is not None:
        if deployment.router is not Router.haproxy:
            raise ConfigError(
                f"deployment.affinity_header with deployment.router={deployment.router}, which goes by the prompt",
                "leave it out, or take deployment.router=haproxy",
            )
        check_header(deployment.affinity_header)
    kind = cluster_of(config).replicas_are(config)
    _check_jobs(config, kind)
    if kind is Replicas.pods:
        return
    if kind is Replicas.children:
        _check_gpus(config)
    if deployment.router is not Router.haproxy and not deployment.engine.is_program:
        raise ConfigError(
            f"deployment.router={deployment.router} with deployment.engine={deployment.engine}: it passes an OpenAI "
            "API on alone, and clients ask this engine by Triton's gRPC",
            "take deployment.router=haproxy",
        )
    if deployment.router is Router.sglang and deployment.engine is not Engine.sglang:
        raise ConfigError(
            f"deployment.router=sglang with deployment.engine={deployment.engine}: it learns the model's name by what "
            "SGLang's servers alone say",
            "take deployment.router=haproxy or vllm",
        )
    _check_program(config)


def router_command(config: Config) -> tuple[str, ...]:
    """Words of ``deployment.router_command``; empty where it is not given."""
    return words_of(config.deployment.router_command, "deployment.router_command", "haproxy")


def plans_of(config: Config, plan: StagePlan) -> list[StagePlan]:
    """Return the plans of as many servers as are asked for, given that of one."""
    count = config.deployment.replicas
    if count == 1:
        return [plan]
    kind = cluster_of(config).replicas_are(config)
    if kind is Replicas.pods:
        return [
            replace(plan, replicas=count, log=plan.output / plan.log.name)
        ]  # each pod has that directory for itself
    *preparations, server = plan.commands
    python, _, program, *words = server.argv
    assert python == PYTHON
    arguments = filled(
        ReplicasArguments,
        config.deployment,
        program=program,
        server=tuple(words),
        gpus=serving_topology(config).gpus,
        router=str(config.deployment.router),
        router_command=router_command(config),
        job_logs=plan.log.parent if kind is Replicas.jobs else None,
        lasting=not {Stage.evaluate, Stage.benchmark} & set(config.stages),
    )
    router = python_module("deployment.replicas.serve", arguments)
    if kind is Replicas.jobs:
        servers = [_job(config, plan, number) for number in range(count)]
        of_router = replace(plan.resources, nodes=1, gpus_per_node=0, container=None, container_mounts=())
        return [*servers, replace(plan, commands=(router,), resources=of_router, replicas=count)]
    resources = replace(plan.resources, gpus_per_node=plan.resources.gpus_per_node * count)
    return [replace(plan, commands=(*preparations, router), resources=resources)]


def _job(config: Config, plan: StagePlan, number: int) -> StagePlan:
    """Return the plan of a server that is a job of its own: it listens on free ports of its node."""
    stage = f"{REPLICA}{number}"
    directory, server = plan.output / stage, plan.commands[-1]
    kind = EngineArguments if config.deployment.engine.is_program else ServeArguments
    given = kind.from_argv(server.argv[3:])
    own = own_arguments(given, directory, NODE, given.cuda_devices)
    return replace(
        plan,
        stage=stage,
        name=f"{plan.name}_replica{number}",
        commands=(replace(server, argv=python_module(server.argv[2], own).argv),),
        output=directory,
        log=plan.log.with_name(f"{stage}.log"),
    )


def _check_unused(config: Config) -> None:
    deployment = config.deployment
    given = {
        "router": deployment.router is not Router.haproxy,
        "router_command": deployment.router_command is not None,
        "affinity_header": deployment.affinity_header is not None,
        "replica_jobs": not deployment.replica_jobs,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"deployment.{name} is given with one server, before which no router stands",
                "give deployment.replicas=2 or more too, or leave it out",
            )


def _check_shared(config: Config) -> None:
    """Refuse what one replica would know and the others not."""
    deployment, sessions = config.deployment, config.export.triton_deployment.interactive_sessions
    controlled = [flag for flag in deployment.server_args if flag.startswith("--model-control")]
    reasons = {
        f"export.triton_deployment.interactive_sessions={sessions}": (
            bool(sessions),
            "a conversation is in one server, and no router reads Triton's correlation id",
        ),
        "deployment.openai_adapter_keys_file": (
            deployment.openai_adapter_keys_file is not None,
            "an adapter would be loaded in one of the servers alone",
        ),
        f"deployment.open_apis={[str(api) for api in deployment.open_apis]}": (
            bool(deployment.open_apis),
            "such a request would reach one of the servers alone",
        ),
        f"deployment.server_args={controlled}": (
            bool(controlled),
            "a model would be loaded in one of the servers alone",
        ),
    }
    for key, (is_given, reason) in reasons.items():
        if is_given:
            raise ConfigError(
                f"{key} with deployment.replicas={deployment.replicas}: {reason}", "leave one of them out"
            )


def _check_jobs(config: Config, kind: Replicas) -> None:
    """Refuse what jobs of their own cannot have, and the key where there are none."""
    deployment, layout, on_node = config.deployment, serving_topology(config), config.cluster.gpus_per_node
    if kind is not Replicas.jobs:
        if not deployment.replica_jobs and not cluster_of(config).allocates:
            raise ConfigError(
                f"deployment.replica_jobs=false with cluster_type={config.cluster_type}: no server is a Slurm job",
                "leave it out",
            )
        return
    share = layout.gpus // layout.nodes
    if config.cluster.exclusive and 0 < share < (on_node or 0):
        raise ConfigError(
            f"deployment.replicas={deployment.replicas} of {share} GPUs each, as jobs of their own with "
            f"cluster.exclusive=true: each would hold a node of {on_node} GPUs",
            "take cluster.exclusive=false and cluster.mem for one of them, and Slurm fills nodes with them; or "
            "deployment.replica_jobs=false, and all share one job of one node",
        )
    if deployment.gemm_autotune:
        raise ConfigError(
            "deployment.gemm_autotune=true with several servers that are jobs: each would write the model's file",
            "tune with one server before, or take deployment.replica_jobs=false",
        )


def _check_gpus(config: Config) -> None:
    layout, count, on_node = serving_topology(config), config.deployment.replicas, config.cluster.gpus_per_node
    if layout.nodes > 1:
        raise ConfigError(
            f"deployment.replicas={count} of servers over {layout.nodes} nodes each: these replicas share one node",
            "take a server that fits a node, or replicas that are jobs (Slurm) or pods",
        )
    if on_node and layout.gpus * count > on_node:
        raise ConfigError(
            f"deployment.replicas={count} of {layout.gpus} GPUs each are {layout.gpus * count} GPUs, and a node has "
            f"{on_node}: replicas divide the GPUs of one node",
            "lower deployment.replicas, export.model.tensor_model_parallel_size or "
            "export.triton_deployment.pipeline_model_parallel_size",
        )


def _check_program(config: Config) -> None:
    """Look for the router where the stage runs on this very host."""
    is_contained = config.container or config.deployment.container
    if not cluster_of(config).runs_here or config.dry_run:
        return
    if is_contained and config.cluster.container_runtime is not ContainerRuntime.none:
        return
    kind = ROUTERS[str(config.deployment.router)]
    try:
        find_program(os.path.expanduser((router_command(config) or kind.own_command)[0]), kind.title)
    except ServerError as error:
        raise ConfigError(f"deployment.router={config.deployment.router}: {error.problem}", error.hint) from None
