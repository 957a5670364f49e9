"""Plan the scoring of the served model."""

from __future__ import annotations

from pathlib import Path

from evaluation.arguments import LambadaArguments
from launcher.config import Config, Stage
from launcher.paths import RunPaths
from launcher.plan import StagePlan, partial, python_module
from launcher.stages.settings import environment, resources


def evaluate(config: Config, paths: RunPaths) -> StagePlan:
    """Plan a task against the run's own server, or against ``deployment.endpoint``."""
    task, run = config.evaluation.task, config.evaluation.run
    data_path = Path(task.data_path).expanduser().absolute()
    attached = config.deployment.endpoint
    arguments = LambadaArguments(
        endpoint=attached or str(paths.endpoint),
        output=partial(paths.evaluation),
        data_path=data_path,
        data_sha256=task.data_sha256,
        samples=task.samples,
        batch_size=min(task.batch_size, config.export.triton_deployment.max_batch_size),
        concurrency=task.concurrency,
        model=task.model,
    )
    return StagePlan(
        stage="evaluate",
        name=run.name,
        commands=(python_module("evaluation.lambada", arguments),),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=(data_path,) if attached else (data_path, paths.model_repository),
        output=paths.evaluation,
        log=paths.log("evaluate"),
        env=environment(config),
        needs_server=attached is None and Stage.deploy in config.stages,
    )
