"""What can be known before anything is submitted or written. Each check names what is wrong and what is legal."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

from export_scripts.repository.names import check_model_name
from handover.errors import ConfigError, SlipwayError
from handover.signatures.sealing import Seal
from launcher.clusters.table import cluster_of
from launcher.config.choices import ContainerRuntime, Engine, Stage
from launcher.config.schema import Config
from launcher.plan.adapter_checks import writes_adapter
from launcher.plan.mounts import check_mountable, usual_mounts
from launcher.plan.paths import RunPaths
from launcher.plan.stages import convert, report
from launcher.plan.stages.settings import Known, serving_topology, signing
from launcher.plan.stages.table import STAGES
from launcher.plan.time_limit import limit_s
from launcher.plan.topology import Topology


def check(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Check the run as a whole, then each of its stages; the first problem is raised."""
    _check_lengths(config)
    _check_time_limits(config)
    check_model_name(config.export.run.model_train_name)
    _check_cluster(config)
    _check_mounts(config, paths)
    _check_format(config, stages)
    _check_signing(config)
    known = Known()
    for stage in stages:
        STAGES[stage].check(config, paths, stages, known)
    if Stage.evaluate in stages or Stage.benchmark in stages:
        report.check(config, paths)
    _check_writable(paths.results)
    _check_writable(convert.output(config, paths))


def _check_format(config: Config, stages: Collection[Stage]) -> None:
    """Refuse stages that need FasterTransformer's shards where none are written."""
    model = config.export.model
    _check_quantization(config, stages)
    if not convert.writes_huggingface(config) or writes_adapter(config):
        return
    is_asked_for = config.deployment.engine.reads_shards
    needing = [stage.name for stage in (Stage.export, Stage.deploy) if stage in stages]
    if config.deployment.engine is Engine.fastertransformer and needing:
        raise ConfigError(
            f"export.model.format=huggingface with stages=[{','.join(stage.name for stage in stages)}]: "
            f"no shards of FasterTransformer are written, which its own engine must have to {' and '.join(needing)}",
            "take export.model.format=fastertransformer, or an engine that reads the directory: "
            "deployment.engine=slipway",
        )
    if model.random_weights:
        why = "export.model.format=huggingface" if is_asked_for else f"deployment.engine={config.deployment.engine}"
        raise ConfigError(
            f"export.model.random_weights=true with {why}: weights are made up for FasterTransformer's shards alone",
            "take export.model.format=fastertransformer and deployment.engine=slipway",
        )


def _check_signing(config: Config) -> None:
    """Open the key and read who is trusted, where the stages will: on another host, and in a container, they do so."""
    given = signing(config)
    given.check_signing()
    contained = config.container and config.cluster.container_runtime is not ContainerRuntime.none
    if not config.dry_run and cluster_of(config).runs_here and not contained:
        Seal.open(given)


def _check_quantization(config: Config, stages: Collection[Stage]) -> None:
    """Refuse to quantize what is no Hugging Face directory, or for an engine that does not read the result."""
    quantization, engine = config.export.model.quantization, config.deployment.engine
    if config.export.triton_deployment.quantization:
        _check_quantization_at_load(config, stages)
    if quantization is None:
        return
    asked = f"export.model.quantization={quantization}"
    if not convert.writes_huggingface(config) or writes_adapter(config):
        other = "adapter.format=peft" if writes_adapter(config) else "model.format=fastertransformer"
        raise ConfigError(
            f"{asked} with export.{other}, which has no such numbers",
            "take export.model.format=huggingface; the drop-in engine quantizes shards when it loads them: "
            "export.triton_deployment.int8_mode=true",
        )
    needing = [stage.name for stage in (Stage.export, Stage.deploy) if stage in stages]
    if needing and not engine.reads(quantization):
        able = ", ".join(each.name for each in Engine if each.reads(quantization))
        raise ConfigError(
            f"{asked} with deployment.engine={engine}, which does not read such a directory to {' and '.join(needing)}",
            f"engines that do: {able}; stages=[convert] writes the directory alone",
        )
    if config.export.triton_deployment.int8_mode:
        raise ConfigError(f"export.triton_deployment.int8_mode=true with {asked}", "take one of the two")


def _check_quantization_at_load(config: Config, stages: Collection[Stage]) -> None:
    """Refuse to quantize what is quantized in another way, or is not written as a Hugging Face directory."""
    model, triton = config.export.model, config.export.triton_deployment
    asked = f"export.triton_deployment.quantization={triton.quantization}"
    for other, is_given in (
        (f"export.model.quantization={model.quantization}", model.quantization is not None),
        ("export.triton_deployment.int8_mode=true", triton.int8_mode),
    ):
        if is_given:
            raise ConfigError(f"{asked} with {other}", "take one of the two")
    if {Stage.convert, Stage.export} & set(stages) and not convert.writes_huggingface(config):
        raise ConfigError(
            f"{asked} with FasterTransformer's shards, which have int8_mode alone",
            "take export.model.format=huggingface, or export.triton_deployment.int8_mode=true",
        )


def _check_lengths(config: Config) -> None:
    for pair in config.benchmark.lengths:
        if len(pair) != 2:
            raise ConfigError(f"benchmark.lengths holds {pair}", "each is [input, output] in tokens")


def _check_time_limits(config: Config) -> None:
    for entry in dataclasses.fields(config):
        if run := getattr(getattr(config, entry.name), "run", None):
            try:
                limit_s(run.time_limit)
            except ConfigError as error:
                raise ConfigError(f"{entry.name}.run.time_limit: {error.problem}", error.hint) from None


def _check_cluster(config: Config) -> None:
    """Hold the run against the kind of cluster, and TP x PP against its nodes and GPUs."""
    cluster = cluster_of(config)
    cluster.check(config)
    layout: Topology = serving_topology(config)
    if not config.dry_run:
        cluster.check_nodes(layout.nodes)
    limit = config.cluster.nodes
    if limit is not None and layout.nodes > limit:
        raise ConfigError(
            f"TP x PP = {layout.gpus} GPUs take {layout.nodes} nodes of {config.cluster.gpus_per_node} GPUs, "
            f"but there are {limit}",
            "lower export.model.tensor_model_parallel_size or "
            "export.triton_deployment.pipeline_model_parallel_size, or raise cluster.nodes",
        )


def _check_mounts(config: Config, paths: RunPaths) -> None:
    is_contained = config.container or config.deployment.container
    is_started = config.cluster.container_runtime is not ContainerRuntime.none
    if is_contained and is_started and cluster_of(config).starts_containers:
        check_mountable(usual_mounts(config, paths))


def _check_writable(path: Path) -> None:
    """Find the deepest directory that exists and ask whether it can be written."""
    directory = path
    while not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise SlipwayError(f"{directory} is in the way of {path}: it is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {directory}", "choose another base_results_dir")
