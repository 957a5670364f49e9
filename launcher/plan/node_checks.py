"""What can be known of an engine over several nodes, or of several copies of a model, before anything is submitted."""

from __future__ import annotations

import re

from handover.errors import ConfigError
from launcher.clusters.table import cluster_of
from launcher.config.choices import DistributedExecutor, Engine
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.programs import command_of, program_of
from launcher.plan.stages.settings import serving_topology

_SPLIT_BY_A_SHELL = re.compile(r"[\s*?\[]")
_OF_THE_NODES = "it says which of several nodes this is, or where they find each other, which the deployment does"


def check_nodes(config: Config) -> None:
    """Refuse nodes and copies that the engine cannot be spread over, and flags that only the deployment gives.

    Raises:
        ConfigError: naming the key, and what to do.
    """
    layout, engine = serving_topology(config), config.deployment.engine
    _check_copies(config, layout.nodes)
    _check_executor(config, layout.nodes)
    if layout.nodes == 1:
        return
    if not engine.is_program:
        raise ConfigError(
            f"deployment.engine={engine} on {layout.nodes} nodes: Triton's vLLM backend is one process, on one node",
            "lower export.model.tensor_model_parallel_size or export.triton_deployment.pipeline_model_parallel_size, "
            "or take deployment.engine=vllm",
        )
    _check_stages(config, layout.nodes)
    _check_flags(config)
    if program_of(config).over_nodes.is_mpis:
        _check_mpi(config)


def check_alone(config: Config) -> None:
    """Refuse what an engine that reads shards is not spread by: its own ranks fill nodes by TP x PP.

    Raises:
        ConfigError: naming the key, and what to do.
    """
    deployment, nodes = config.deployment, serving_topology(config).nodes
    given = {
        "nodes": deployment.nodes not in (None, nodes),
        "data_parallel_size": (deployment.data_parallel_size or 1) > 1,
        "expert_parallel": bool(deployment.expert_parallel),
        "distributed_executor": deployment.distributed_executor is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"deployment.{name}={getattr(deployment, name)} with deployment.engine={deployment.engine}, whose "
                f"ranks are TP x PP, on {nodes} node{'s' if nodes > 1 else ''} here",
                "leave it out, or take deployment.engine=vllm",
            )


def _check_copies(config: Config, nodes: int) -> None:
    copies, program = config.deployment.data_parallel_size or 1, program_of(config)
    if copies == 1:
        return
    if not config.deployment.engine.is_program or "data_parallel_size" not in program.flags:
        raise ConfigError(
            f"deployment.data_parallel_size={copies} with deployment.engine={config.deployment.engine}, which serves "
            "one copy of a model",
            "leave it out, or take deployment.engine=vllm",
        )
    if nodes > 1 and not program.over_nodes.copies:
        raise ConfigError(
            f"deployment.data_parallel_size={copies} on {nodes} nodes: {program.title} has copies of a model on one "
            "node alone",
            "over nodes its attention can be data-parallel within the tensor parallelism: leave the key out, and "
            "give deployment.engine_args=[--attn-dp-size=N]",
        )
    if nodes > 1 and nodes % copies and copies % nodes:
        raise ConfigError(
            f"deployment.data_parallel_size={copies} on {nodes} nodes: a node has whole copies, or a copy whole nodes",
            "take a divisor or a multiple of the number of nodes",
        )


def _check_executor(config: Config, nodes: int) -> None:
    deployment = config.deployment
    given = f"deployment.distributed_executor={deployment.distributed_executor}"
    if deployment.distributed_executor is None:
        return
    if not deployment.engine.is_program or not program_of(config).over_nodes.executors:
        raise ConfigError(
            f"{given} with deployment.engine={deployment.engine}, whose processes are joined here in one way alone",
            "leave it out, or take deployment.engine=vllm",
        )
    if nodes == 1:
        raise ConfigError(f"{given} on one node: it joins several", "leave it out, or give deployment.nodes")
    if deployment.distributed_executor is DistributedExecutor.ray and (deployment.data_parallel_size or 1) > 1:
        raise ConfigError(
            f"{given} with deployment.data_parallel_size={deployment.data_parallel_size}: copies of a model over "
            "several nodes are joined by mp alone",
            "leave one of the two out",
        )


def _check_stages(config: Config, nodes: int) -> None:
    """SGLang gives a node whole stages of the pipeline, or a stage whole nodes; it computes wrongly with others."""
    stages = config.export.triton_deployment.pipeline_model_parallel_size
    if config.deployment.engine is Engine.sglang and nodes % stages and stages % nodes:
        raise ConfigError(
            f"export.triton_deployment.pipeline_model_parallel_size={stages} on {nodes} nodes: SGLang gives a node "
            "whole stages of the pipeline, or a stage whole nodes",
            "take a divisor or a multiple of the number of nodes",
        )


def _check_flags(config: Config) -> None:
    for word in (*command_of(config), *config.deployment.engine_args):
        name = word.partition("=")[0].replace("_", "-")
        if name in program_of(config).over_nodes.flags:
            raise ConfigError(
                f"{word} is given for a server over several nodes: {_OF_THE_NODES}",
                "leave it out of deployment.command and deployment.engine_args",
            )


def _check_mpi(config: Config) -> None:
    """Refuse what a program cannot have whose processes MPI joins, one a GPU."""
    title, deployment = program_of(config).title, config.deployment
    if not cluster_of(config).starts_mpi:
        raise ConfigError(
            f"deployment.engine={deployment.engine} over several nodes with cluster_type={config.cluster_type}: "
            f"{title} joins its processes through MPI, which nothing there starts",
            "take cluster_type=bcm or bcp",
        )
    if not config.cluster.gpus_per_node:
        raise ConfigError(
            f"deployment.engine={deployment.engine} over several nodes takes a process a GPU, and "
            "cluster.gpus_per_node is not known",
            "say how many GPUs a node has: cluster.gpus_per_node=8",
        )
    words = (*command_of(config), *deployment.engine_args, str(RunPaths.of(config).model_repository))
    if split := next((word for word in words if _SPLIT_BY_A_SHELL.search(word)), None):
        raise ConfigError(
            f"'{split}' cannot be told to {title} over several nodes: what starts it there, "
            f"{program_of(config).over_nodes.starter[0]}, splits words at spaces and expands patterns",
            "choose a base_results_dir without spaces, and put such settings into a file that a flag names",
        )
    if deployment.restart:
        raise ConfigError(
            f"deployment.restart={deployment.restart} with deployment.engine={deployment.engine} over several nodes: "
            "a process that MPI has joined cannot be started again beside the others",
            "leave it at 0, and start the deployment again",
        )
