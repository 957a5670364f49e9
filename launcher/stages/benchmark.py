"""Plan the latency sweep over the served model."""

from __future__ import annotations

from evaluation.arguments import BenchmarkArguments
from launcher.config import Config, Stage
from launcher.paths import RunPaths
from launcher.plan import StagePlan, partial, python_module
from launcher.stages.settings import environment, resources


def benchmark(config: Config, paths: RunPaths) -> StagePlan:
    """Plan a static sweep against the run's own server, or against ``deployment.endpoint``."""
    sweep = config.benchmark
    attached = config.deployment.endpoint
    arguments = BenchmarkArguments(
        endpoint=attached or str(paths.endpoint),
        output=partial(paths.benchmark),
        model=sweep.model,
        batch_sizes=tuple(sweep.batch_sizes),
        lengths=tuple((pair[0], pair[1]) for pair in sweep.lengths),
        warmup=sweep.warmup,
        repeats=sweep.repeats,
        vocab_size=sweep.vocab_size,
        max_batch_size=config.export.triton_deployment.max_batch_size,
    )
    return StagePlan(
        stage="benchmark",
        name=sweep.run.name,
        commands=(python_module("evaluation.benchmark", arguments),),
        resources=resources(config, sweep.run.time_limit, nodes=1, gpus_per_node=0),
        inputs=() if attached else (paths.model_repository,),
        output=paths.benchmark,
        log=paths.log("benchmark"),
        env=environment(config),
        needs_server=attached is None and Stage.deploy in config.stages,
    )
