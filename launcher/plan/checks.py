"""What can be known before anything is submitted or written. Each check names what is wrong and what is legal."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path

from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError, SlipwayError
from handover.manifest import FILE_NAME
from launcher.config.schema import BenchmarkKind, ClusterType, Config, ContainerRuntime, Engine, Stage
from launcher.plan.evaluation_checks import check_evaluations
from launcher.plan.model_checks import check_checkpoint, check_exported_task
from launcher.plan.mounts import check_mountable, usual_mounts
from launcher.plan.paths import RunPaths
from launcher.plan.stages.benchmark import load_arguments
from launcher.plan.stages.settings import serving_topology
from launcher.plan.time_limit import limit_s
from launcher.plan.topology import Topology
from launcher.submit.bcp import check_job


def check(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Run every check that applies to the stages; the first problem is raised."""
    _check_lengths(config)
    _check_time_limits(config)
    _check_model_name(config)
    _check_sessions(config, stages)
    _check_text_deltas(config)
    _check_cluster(config, stages)
    _check_mounts(config, paths)
    if Stage.convert in stages:
        check_checkpoint(config, paths, stages)
    elif Stage.evaluate in stages and not config.deployment.endpoint:
        check_exported_task(config, paths)
    if Stage.deploy in stages:
        _check_repository(paths, stages)
        _check_ports(config)
    if Stage.evaluate in stages or Stage.benchmark in stages:
        _check_endpoint(config, paths, stages)
        _check_gate(config)
    if Stage.evaluate in stages:
        check_evaluations(config, paths, stages)
    if Stage.benchmark in stages and config.benchmark.kind is BenchmarkKind.load:
        _check_load(config, paths)
    _check_writable(paths.results)
    _check_writable(paths.ft_checkpoint)


def _check_lengths(config: Config) -> None:
    for pair in config.benchmark.lengths:
        if len(pair) != 2:
            raise ConfigError(f"benchmark.lengths holds {pair}", "each is [input, output] in tokens")


def _check_time_limits(config: Config) -> None:
    for name in ("export", "deployment", "evaluation", "benchmark"):
        try:
            limit_s(getattr(config, name).run.time_limit)
        except ConfigError as error:
            raise ConfigError(f"{name}.run.time_limit: {error.problem}", error.hint) from None


def _check_model_name(config: Config) -> None:
    from export_scripts.repository.names import check_model_name

    check_model_name(config.export.run.model_train_name)


def _check_text_deltas(config: Config) -> None:
    triton = config.export.triton_deployment
    if triton.text_deltas and config.deployment.engine is Engine.fastertransformer:
        raise ConfigError(
            "export.triton_deployment.text_deltas=true with deployment.engine=fastertransformer: FasterTransformer's "
            "backend does not give text_start, which the ensemble would wait for",
            "take text_deltas=false, or deployment.engine=slipway",
        )


def _check_sessions(config: Config, stages: Collection[Stage]) -> None:
    """The stateful store is for conversations: its tensors have one axis more than evaluation and benchmark send."""
    triton = config.export.triton_deployment
    askers = [stage.value for stage in (Stage.evaluate, Stage.benchmark) if stage in stages]
    if triton.interactive_sessions and askers and not config.deployment.endpoint:
        raise ConfigError(
            f"export.triton_deployment.interactive_sessions={triton.interactive_sessions} makes a stateful store, "
            f"which {' and '.join(askers)} cannot ask",
            "take interactive_sessions=0 for them",
        )


def _check_cluster(config: Config, stages: Collection[Stage]) -> None:
    """TP x PP against nodes and GPUs; the GPUs of this machine are counted where none are given."""
    interactive = config.cluster_type is ClusterType.interactive
    if interactive and (config.container or config.deployment.container):
        raise ConfigError(
            "cluster_type=interactive starts no container", "unset container, or start main.py inside the container"
        )
    if config.cluster_type is ClusterType.bcp and config.deployment.container:
        raise ConfigError(
            "deployment.container: a job of Base Command Platform has one container, for all stages",
            "unset deployment.container, and start the job in an image that has what every stage needs",
        )
    if interactive and config.cluster.gpus_per_node is None:
        config.cluster.gpus_per_node = gpus_here()
    layout: Topology = serving_topology(config)
    if config.cluster_type is ClusterType.bcp and not config.dry_run:
        check_job(layout.nodes)
    limit = config.cluster.nodes
    if limit is not None and layout.nodes > limit:
        raise ConfigError(
            f"TP x PP = {layout.gpus} GPUs take {layout.nodes} nodes of {config.cluster.gpus_per_node} GPUs, "
            f"but there are {limit}",
            "lower export.model.tensor_model_parallel_size or "
            "export.triton_deployment.pipeline_model_parallel_size, or raise cluster.nodes",
        )
    engine = config.deployment.engine
    if Stage.deploy in stages and engine is Engine.slipway and config.deployment.gemm_autotune:
        raise ConfigError(
            "deployment.gemm_autotune=true: the drop-in engine does not read gemm_config.ini",
            "take gemm_autotune=false, or deployment.engine=fastertransformer in its container",
        )


def _check_mounts(config: Config, paths: RunPaths) -> None:
    is_contained = config.container or config.deployment.container
    is_started = config.cluster.container_runtime is not ContainerRuntime.none
    if is_contained and is_started and config.cluster_type is ClusterType.bcm:
        check_mountable(usual_mounts(config, paths))


def gpus_here() -> int:
    """Number of GPUs that nvidia-smi lists; 0 where there is none."""
    program = shutil.which("nvidia-smi")
    if not program:
        return 0
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def _check_repository(paths: RunPaths, stages: Collection[Stage]) -> None:
    if Stage.export not in stages and not (paths.model_repository / FILE_NAME).is_file():
        raise ConfigError(
            f"there is no model repository at {paths.model_repository}", "add export to stages: stages=[export,deploy]"
        )


def _check_ports(config: Config) -> None:
    deployment = config.deployment
    host = deployment.host or "127.0.0.1"
    if config.cluster_type is not ClusterType.interactive:
        return
    given = [
        (name, getattr(deployment, name))
        for name in ("http_port", "grpc_port", "metrics_port")
        if getattr(deployment, name)
    ]
    for name, port in given:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"deployment.{name}={port} cannot be used on {host}: {error}",
                    "take another port, or 0 for a free one",
                ) from None
    ports = [port for _, port in given]
    if len(set(ports)) < len(ports):
        raise ConfigError(f"deployment's ports {ports} are not all different")


def _check_endpoint(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Clients need a server: their own, a given one, or the one that stages=[deploy] left running here."""
    if config.deployment.endpoint:
        Endpoint.read(config.deployment.endpoint)
    elif Stage.deploy not in stages:
        try:
            served = Endpoint.read(paths.endpoint).model_repository
        except ServerError:
            raise ConfigError(
                f"nothing is deployed: there is no {paths.endpoint}",
                "add deploy to stages, or give deployment.endpoint=<file or host:port>",
            ) from None
        exist = bool(served) and Path(served).is_dir() and paths.model_repository.is_dir()
        if exist and not paths.model_repository.samefile(served):
            raise ConfigError(
                f"nothing of these results is deployed: {paths.endpoint} was copied, it is that of {served}",
                "add deploy to stages; to ask that other server, give its file as deployment.endpoint",
            )


def _check_load(config: Config, paths: RunPaths) -> None:
    from evaluation.speed.load_check import check_arguments

    arguments = load_arguments(config, paths)
    check_arguments(arguments)
    if arguments.prompt_file is not None and not arguments.prompt_file.is_file():
        raise ConfigError(f"benchmark.load.prompt_file: there is no file {arguments.prompt_file}")


def _check_gate(config: Config) -> None:
    given = config.evaluation.gate
    if given.thresholds:
        from evaluation.report.thresholds import read_thresholds

        read_thresholds(Path(given.thresholds).expanduser())
    if given.baseline and not Path(given.baseline).expanduser().is_dir():
        raise ConfigError(
            f"evaluation.gate.baseline: there is no directory {given.baseline}", "give a run's results directory"
        )


def _check_writable(path: Path) -> None:
    """Find the deepest directory that exists and ask whether it can be written."""
    directory = path
    while not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise SlipwayError(f"{directory} is in the way of {path}: it is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {directory}", "choose another base_results_dir")
