"""Measurement of the served model: a static sweep, or a serving load."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from evaluation.arguments import BenchmarkArguments
from evaluation.speed.load_arguments import LoadArguments, check_arguments
from evaluation.speed.prompts.trace import read_trace
from handover.errors import ConfigError
from launcher.config.choices import BenchmarkKind, Stage
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Command, StagePlan, partial, python_module
from launcher.plan.stages.clients import check_server, served_by
from launcher.plan.stages.settings import Known, asked_endpoint, environment, expected_repository, resources


def check(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Look for the server and read what a load is made of.

    Raises:
        ConfigError: there is no server, nothing to measure, or no file of prompts.
    """
    check_server(config, paths, stages)
    if config.benchmark.kind is not BenchmarkKind.load:
        return
    arguments = load_arguments(config, paths)
    check_arguments(arguments)
    if arguments.trace is not None:
        read_trace(arguments.trace, arguments.trace_block_size)
    if arguments.prompt_file is not None and not arguments.prompt_file.is_file():
        raise ConfigError(f"benchmark.load.prompt_file: there is no file {arguments.prompt_file}")


def plan(config: Config, paths: RunPaths) -> list[StagePlan]:
    """Plan a benchmark against the run's own server, or against ``deployment.endpoint``."""
    attached = config.deployment.endpoint
    command = _load if config.benchmark.kind is BenchmarkKind.load else _static
    stage = StagePlan(
        stage="benchmark",
        name=config.benchmark.run.name,
        commands=(command(config, paths),),
        resources=resources(config, config.benchmark.run.time_limit, nodes=1, gpus_per_node=0),
        inputs=() if attached else (paths.model_repository,),
        output=paths.benchmark,
        log=paths.log("benchmark"),
        env=environment(config),
        needs_server=attached is None and Stage.deploy in config.stages,
        independent=True,
        served_by=served_by(config, paths),
    )
    return [stage]


def _static(config: Config, paths: RunPaths) -> Command:
    max_batch_size = config.export.triton_deployment.max_batch_size
    own = _of_the_run(config, paths)
    return python_module(
        "evaluation.benchmark", filled(BenchmarkArguments, config.benchmark, max_batch_size=max_batch_size, **own)
    )


def _load(config: Config, paths: RunPaths) -> Command:
    return python_module("evaluation.load", load_arguments(config, paths))


def load_arguments(config: Config, paths: RunPaths) -> LoadArguments:
    """Arguments of the serving load; what is a file is absolute."""
    limits = dataclasses.asdict(config.benchmark.slos)
    slos = tuple((name.removesuffix("_ms"), limit) for name, limit in limits.items() if limit is not None)
    own = _of_the_run(config, paths)
    return filled(LoadArguments, config.benchmark, config.benchmark.load, slos=slos, **own)


def _of_the_run(config: Config, paths: RunPaths) -> dict[str, Any]:
    return {
        "endpoint": asked_endpoint(config, paths),
        "output": partial(paths.benchmark),
        "model_repository": expected_repository(config, paths),
        "endpoint_key_env": config.deployment.endpoint_key_env,
        "label": config.deployment.label,
    }
