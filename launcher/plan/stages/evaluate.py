"""Plan the scoring of the served model, one plan for each evaluation that was chosen."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from evaluation.arguments import LambadaArguments, SquadArguments, TaskArguments, TextPairArguments
from evaluation.parity.arguments import ParityArguments
from launcher.config.evaluation import (
    LambadaConfig,
    ParityConfig,
    SquadConfig,
    TaskConfig,
    TextPairConfig,
)
from launcher.config.schema import Config, Stage
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial, python_module
from launcher.plan.stages.settings import environment, expected_repository, resources

_ARGUMENTS: dict[type[TaskConfig], type[TaskArguments]] = {
    LambadaConfig: LambadaArguments,
    SquadConfig: SquadArguments,
    TextPairConfig: TextPairArguments,
}
_PATHS = (Path, Path | None)


def evaluate(config: Config, paths: RunPaths) -> list[StagePlan]:
    """Plan each evaluation against the run's own server, or against ``deployment.endpoint``."""
    return [_plan(config, paths, name, task) for name, task in config.evaluation.tasks.items()]


def task_arguments(config: Config, paths: RunPaths, name: str, task: TaskConfig) -> TaskArguments | ParityArguments:
    """Arguments of one evaluation; what is a file is absolute."""
    kind: type[TaskArguments | ParityArguments] = ParityArguments
    given: dict[str, Any] = {entry.name: getattr(task, entry.name) for entry in dataclasses.fields(task)}
    if isinstance(task, ParityConfig):
        limits = {precision: tuple(dataclasses.asdict(limit).items()) for precision, limit in task.limits.items()}
        given |= {"checkpoint": paths.checkpoint, "prompts": tuple(task.prompts), "limits": tuple(limits.items())}
    else:
        kind = _ARGUMENTS[type(task)]
    hints = typing.get_type_hints(kind)
    for key, value in given.items():
        if isinstance(value, str) and hints[key] in _PATHS:
            given[key] = Path(value).expanduser().absolute()
    batch_size = config.evaluation.model.eval_batch_size or task.batch_size
    given["batch_size"] = min(batch_size, config.export.triton_deployment.max_batch_size)
    return kind(
        endpoint=config.deployment.endpoint or str(paths.endpoint),
        output=partial(paths.evaluation / name),
        model_repository=expected_repository(config, paths),
        **given,
    )


def _plan(config: Config, paths: RunPaths, name: str, task: TaskConfig) -> StagePlan:
    run, attached = config.evaluation.run, config.deployment.endpoint
    arguments = task_arguments(config, paths, name, task)
    return StagePlan(
        stage=Stage.evaluate.name,
        name=f"{run.name}_{name}",
        commands=(python_module(f"evaluation.{name}", arguments),),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=arguments.files if attached else (*arguments.files, paths.model_repository),
        output=paths.evaluation / name,
        log=paths.log(f"evaluate_{name}"),
        env=environment(config),
        needs_server=attached is None and Stage.deploy in config.stages,
        independent=True,
    )
