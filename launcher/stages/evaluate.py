"""Plan the scoring of the served model: a task, or the comparison with its source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from evaluation.arguments import LambadaArguments
from launcher.config import Config, Stage, TaskKind
from launcher.paths import RunPaths
from launcher.plan import Command, StagePlan, partial, python_module
from launcher.stages.benchmark import expected_repository
from launcher.stages.settings import environment, resources
from parity.arguments import ParityArguments


def evaluate(config: Config, paths: RunPaths) -> StagePlan:
    """Plan a task against the run's own server, or against ``deployment.endpoint``."""
    run, attached = config.evaluation.run, config.deployment.endpoint
    is_parity = config.evaluation.task.kind is TaskKind.parity
    command = python_module("parity", parity_arguments(config, paths)) if is_parity else _lambada(config, paths)
    inputs = (data_path(config), paths.checkpoint if is_parity else None)
    return StagePlan(
        stage="evaluate",
        name=run.name,
        commands=(command,),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=(*(path for path in inputs if path), *(() if attached else (paths.model_repository,))),
        output=paths.evaluation,
        log=paths.log("evaluate"),
        env=environment(config),
        needs_server=attached is None and Stage.deploy in config.stages,
    )


def data_path(config: Config) -> Path | None:
    """The task's data, absolute; None where there is none."""
    given = config.evaluation.task.data_path
    return None if given is None else Path(given).expanduser().absolute()


def _lambada(config: Config, paths: RunPaths) -> Command:
    task, file = config.evaluation.task, data_path(config)
    assert file is not None  # see launcher.checks
    arguments = LambadaArguments(
        endpoint=config.deployment.endpoint or str(paths.endpoint),
        output=partial(paths.evaluation),
        data_path=file,
        data_sha256=task.data_sha256,
        samples=task.samples,
        batch_size=min(task.batch_size, config.export.triton_deployment.max_batch_size),
        concurrency=task.concurrency,
        model=task.model,
    )
    return python_module("evaluation.lambada", arguments)


def parity_arguments(config: Config, paths: RunPaths) -> ParityArguments:
    """Arguments of the comparison; what is a file is absolute."""
    task, parity = config.evaluation.task, config.evaluation.parity
    limits = {name: tuple(dataclasses.asdict(given).items()) for name, given in parity.limits.items()}
    return ParityArguments(
        endpoint=config.deployment.endpoint or str(paths.endpoint),
        output=partial(paths.evaluation),
        checkpoint=paths.checkpoint,
        prompts=tuple(parity.prompts),
        data_path=data_path(config),
        samples=task.samples,
        output_length=parity.output_length,
        reference=parity.reference,
        limits=tuple(limits.items()),
        batch_size=min(task.batch_size, config.export.triton_deployment.max_batch_size),
        model=task.model,
        model_repository=expected_repository(config, paths),
    )
