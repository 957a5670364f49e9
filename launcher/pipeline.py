"""Order the stages, check what can be known now, plan them, hand the plans to the executor."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from handover.errors import ConfigError
from handover.manifest import FILE_NAME, Manifest
from launcher.clusters.table import cluster_of
from launcher.config.choices import Stage
from launcher.config.schema import Config
from launcher.plan import checks
from launcher.plan.adapter_checks import writes_adapter
from launcher.plan.mounts import with_mounts
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan
from launcher.plan.stages import convert, report
from launcher.plan.stages.table import STAGES
from launcher.run.results import StageResult, write_results
from launcher.submit import Executor, Job
from launcher.submit.jobs import forget_ended, kept_if_refused
from launcher.submit.kubernetes import kserve


def launch(config: Config, sweep: Path | None = None) -> None:
    """Plan the run and submit it; exit with the status of a stage that ran here and failed."""
    if not cluster_of(config).starts_runs():
        return
    paths = RunPaths.of(config)
    config = convert.with_format(config, paths)
    stages = ordered_stages(config, paths)
    checks.check(config, paths, stages)
    plans = with_mounts(config, paths, plan_stages(config, paths, stages, sweep))
    executor = executor_for(config, paths)
    force = {stage.name for stage in config.force}
    if config.deployment.engine.is_program and Stage.export in config.force:
        force.add(Stage.convert.name)  # there is nothing else that export would make again
    jobs = make_jobs(config, paths, plans)
    executor.check(jobs)
    kserve.check(config, paths)
    if config.dry_run:
        if Stage.convert in stages:
            show_size(config, paths)
        show(plans, executor)
        sys.stdout.write(executor.preview(jobs, force))
        sys.stdout.write(kserve.preview(config, paths))
        return
    if paths.hub_name:
        paths.checkpoint.parent.mkdir(parents=True, exist_ok=True)  # a container can only see what is there
    for job in jobs:
        job.write()
    kserve.write(config, paths)
    with kept_if_refused(paths.stages.parent):
        forget_ended(paths.stages.parent)
        write_results(paths.stages, [StageResult(plan.stage, plan.name, log=str(plan.log)) for plan in plans])
        status = executor.submit(jobs, force)
    if status:
        sys.exit(status)


def ordered_stages(config: Config, paths: RunPaths) -> list[Stage]:
    """The stages in their order; export brings convert along unless only its result is left."""
    wanted = set(config.stages)
    if not wanted:
        raise ConfigError("no stages", f"say which: stages=[{','.join(stage.name for stage in Stage)}]")
    if Stage.export in wanted and not (Stage.convert in wanted or _only_its_result_is_left(config, paths)):
        wanted.add(Stage.convert)
    return [stage for stage in Stage if stage in wanted]


def _only_its_result_is_left(config: Config, paths: RunPaths) -> bool:
    """Return whether the checkpoint is gone, and what was converted from it is there.

    Raises:
        ConfigError: what is there was converted from another one.
    """
    converted = convert.output(config, paths)
    if paths.checkpoint.exists() or not (converted / FILE_NAME).exists():
        return False
    made_from = Path(Manifest.read(converted).made_from.get("checkpoint", paths.checkpoint))
    if paths.checkpoint in (made_from, *made_from.parents):
        return True
    if paths.hub_name:
        return False  # it is fetched
    raise ConfigError(
        f"{paths.checkpoint} does not exist, and {converted} was made from {made_from}",
        f"give the right export.model.checkpoint_path; {made_from} itself if that model is meant",
    )


def plan_stages(config: Config, paths: RunPaths, stages: Sequence[Stage], sweep: Path | None = None) -> list[StagePlan]:
    """One plan a stage, one for each evaluation, the report over what clients measured, and the gate."""
    plans = [plan for stage in stages for plan in STAGES[stage].plan(config, paths)]
    if Stage.evaluate in stages or Stage.benchmark in stages:
        plans += report.plan(config, paths, sweep)
    return plans


def group(plans: Sequence[StagePlan]) -> list[list[StagePlan]]:
    """Split into jobs: each stage is one, but a server, its clients and the report share theirs."""
    jobs: list[list[StagePlan]] = []
    for plan in plans:
        is_more = bool(jobs) and plan.stage == jobs[-1][-1].stage  # another evaluation
        if jobs and (is_more or plan.always or (plan.needs_server and jobs[-1][0].service)):
            jobs[-1].append(plan)
        else:
            jobs.append([plan])
    return jobs


def make_jobs(config: Config, paths: RunPaths, plans: Sequence[StagePlan]) -> list[Job]:
    """Name the jobs that the plans come to."""
    prefix = config.cluster.job_name_prefix
    jobs = [Job(prefix + together[0].name, tuple(together), paths.stages) for together in group(plans)]
    router = next((job for job in jobs if job.plans[0].service and not job.is_replica), None)
    return [_lasting_as_long(job, router) if router and job.is_replica else job for job in jobs]


def _lasting_as_long(job: Job, router: Job) -> Job:
    """Return the job of a server with the time limit of its router's, which has the clients."""
    (plan,) = job.plans
    return replace(job, plans=(replace(plan, resources=replace(plan.resources, time_limit=router.time_limit)),))


def executor_for(config: Config, paths: RunPaths) -> Executor:
    """The executor of the cluster; imported only where it is used."""
    module = importlib.import_module(f"launcher.submit.{cluster_of(config).executor}")
    executor: Executor = module.open_executor(config, paths)
    return executor


def show_size(config: Config, paths: RunPaths) -> None:
    """Print what the conversion will take: bytes, files, memory and time."""
    from export_scripts.checkpoints.huggingface.hub import is_fetched
    from export_scripts.checkpoints.user_files import GivenFiles
    from export_scripts.conversion.plan.sizing import measure
    from export_scripts.targets.huggingface.sizing import measure_huggingface

    model = config.export.model
    if paths.hub_name and not is_fetched(paths.hub_name, paths.checkpoint):
        sys.stdout.write(f"convert: hf:{paths.hub_name} will be fetched into {paths.checkpoint} first\n")
        return
    size, data_type = model.tensor_model_parallel_size, str(model.weight_data_type)
    given = GivenFiles(paths.adapter, paths.tokenizer)
    if writes_adapter(config):
        sys.stdout.write(f"convert: {convert.adapter_size(config, paths)}\n")
        return
    if convert.writes_huggingface(config):
        sizing = measure_huggingface(paths.checkpoint, data_type, model.processes, given, model.quantization)
    else:
        sizing = measure(paths.checkpoint, size, data_type, model.processes, given)
    sys.stdout.write("".join(f"convert: {line}\n" for line in sizing.lines()))


def show(plans: Sequence[StagePlan], executor: Executor) -> None:
    """Print every plan and the commands that it comes to."""
    for plan in plans:
        sys.stdout.write(f"--- {plan.stage}\n{plan.to_json()}")
        for command in plan.commands:
            sys.stdout.write(f"$ {shlex.join(executor.wrap(command, plan.resources, plan.env))}\n")
