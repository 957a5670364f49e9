"""Scoring of the served model, one plan for each evaluation that was chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from evaluation.arguments import ConsistencyArguments, TaskArguments, result_name
from evaluation.divergence.arguments import DivergenceArguments
from evaluation.monitor.arguments import MonitorArguments
from evaluation.parity.arguments import ParityArguments
from evaluation.task_table import TASKS
from evaluation.tasks.check import check_scores
from ft_format.config_ini import FILE_NAME, ConfigIni
from handover.errors import ArtefactError, ConfigError
from launcher.config.choices import Engine, Stage
from launcher.config.nemo_keys import HARNESS
from launcher.config.options import filled
from launcher.config.schema import PROJECT_DIR, Config
from launcher.config.schema_help import legal_options, options
from launcher.plan.adapter_checks import asked_adapters, served_adapters
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial, python_module
from launcher.plan.stages.clients import api_tokenizer, check_server, served_by
from launcher.plan.stages.settings import Known, asked_endpoint, environment, expected_repository, resources

Arguments = TaskArguments | ConsistencyArguments | ParityArguments | DivergenceArguments | MonitorArguments
"""What an evaluation's program is given."""


def check(config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
    """Look for the server, read the files of every evaluation as the stage will, and look at an exported model.

    Raises:
        ConfigError: no evaluation is chosen, a file is missing or malformed, or the model cannot be asked this.
    """
    if not config.deployment.endpoint:
        _check_model(config, known if Stage.convert in stages else _exported_model(config, paths))
    check_server(config, paths, stages)
    if not config.evaluation.tasks:
        raise ConfigError("evaluate: no evaluation is chosen", f"evaluation=[...]: {legal_options('evaluation', '')}")
    _check_launcher_keys(config)
    converted = None if Stage.convert in stages else paths.ft_checkpoint
    for name, task, adapter in _asked(config):
        _check_given(name, task)
        try:
            arguments = task_arguments(config, paths, name, task, adapter)
            TASKS[name].check_files(_with_own_files(arguments, paths.project), converted)
        except ConfigError as error:
            raise ConfigError(f"evaluation.{name}: {error.problem}", error.hint) from None


def _with_own_files(arguments: Arguments, project: Path) -> Arguments:
    """Return the arguments with files of this checkout for those of one that only pods or nodes see, as in an image."""
    given = {name: value for name, value in vars(arguments).items() if isinstance(value, Path)}
    files = {name: value.relative_to(project) for name, value in given.items() if value.is_relative_to(project)}
    own: dict[str, Any] = {name: PROJECT_DIR / file for name, file in files.items() if (PROJECT_DIR / file).is_file()}
    return arguments if project.is_dir() else dataclasses.replace(arguments, **own)


def plan(config: Config, paths: RunPaths) -> list[StagePlan]:
    """Plan each evaluation against the run's own server, or against ``deployment.endpoint``."""
    return [_plan(config, paths, *asked) for asked in _asked(config)]


def _asked(config: Config) -> list[tuple[str, Any, str | None]]:
    """List each evaluation by name with its section, for the model and for each of its adapters that are asked."""
    return [(*task, adapter) for adapter in asked_adapters(config) for task in config.evaluation.tasks.items()]


def task_arguments(config: Config, paths: RunPaths, name: str, task: Any, adapter: str | None = None) -> Arguments:
    """Arguments of one evaluation, of the model or of an adapter; what is a file is absolute."""
    kind = TASKS[name].arguments
    names = {entry.name for entry in dataclasses.fields(kind)}
    if adapter and "lora_name" not in names:
        raise ConfigError(
            f"deployment.adapter={adapter} with evaluation={name}, which asks the model alone",
            "leave one of them out",
        )
    source = {"checkpoint": paths.checkpoint, "adapter": paths.adapter, "checkpoint_tokenizer": paths.tokenizer}
    lora_path = dict(served_adapters(config)).get(adapter or "")
    own: dict[str, Any] = {**source, "lora_name": adapter, "lora_path": Path(lora_path) if lora_path else None}
    own["tokenizer"] = api_tokenizer(config, paths)
    if "batch_size" in names:
        rows = config.evaluation.model.eval_batch_size or task.batch_size
        own["batch_size"] = min(rows, config.export.triton_deployment.max_batch_size)
    return filled(
        kind,
        task,
        endpoint=asked_endpoint(config, paths),
        output=partial(paths.evaluation / result_name(name, adapter)),
        model_repository=expected_repository(config, paths),
        endpoint_key_env=config.deployment.endpoint_key_env,
        **{argument: value for argument, value in own.items() if argument in names},
    )


def _plan(config: Config, paths: RunPaths, name: str, task: Any, adapter: str | None) -> StagePlan:
    run, attached, result = config.evaluation.run, config.deployment.endpoint, result_name(name, adapter)
    arguments = task_arguments(config, paths, name, task, adapter)
    return StagePlan(
        stage=Stage.evaluate.name,
        name=f"{run.name}_{result}",
        commands=(python_module(f"evaluation.{name}", arguments),),
        resources=resources(config, run.time_limit, nodes=1, gpus_per_node=0),
        inputs=arguments.files if attached else (*arguments.files, paths.model_repository),
        output=paths.evaluation / result,
        log=paths.log(f"evaluate_{result}"),
        env=environment(config),
        needs_server=attached is None and Stage.deploy in config.stages,
        independent=True,
        served_by=served_by(config, paths),
    )


def _check_given(name: str, task: Any) -> None:
    """Refuse an evaluation without what its program cannot do without; the run gives what is no key."""
    for entry in dataclasses.fields(TASKS[name].arguments):
        is_needed = entry.default is entry.default_factory is dataclasses.MISSING
        if is_needed and not getattr(task, entry.name, entry.name):
            hint = "name the file to evaluate on" if entry.name == "data_path" else f"give the {entry.metadata['help']}"
            raise ConfigError(f"evaluation.{name}.{entry.name} is not set", hint)


def _exported_model(config: Config, paths: RunPaths) -> Known:
    """Look at the model that was exported before; what is not there, other checks report."""
    from export_scripts.repository.names import ENGINE

    size = config.export.model.tensor_model_parallel_size
    shards = paths.model_repository / ENGINE / "1" / f"{size}-gpu"
    if not (shards / FILE_NAME).is_file():
        return Known()
    return Known(str(paths.model_repository), "encoder" in ConfigIni.read(shards, ArtefactError))


def _check_model(config: Config, known: Known) -> None:
    """Refuse evaluations that cannot be computed from the answers of this run's model."""
    can_score_answers = config.deployment.engine is not Engine.fastertransformer
    for name in config.evaluation.tasks:
        if known.model and TASKS[name].arguments.needs_scores:
            check_scores(name, known.model, known.is_encoder_decoder, can_score_answers)


def _check_launcher_keys(config: Config) -> None:
    """Hold NeMo-Megatron-Launcher's ``run.tasks`` against what was chosen."""
    given, chosen = config.evaluation.run.tasks, list(config.evaluation.tasks)
    named = given if isinstance(given, list) else [] if given is None else [given]
    for name in (part.strip() for text in named for part in str(text).split(",")):
        if name not in chosen:
            is_ours = name in options("evaluation")
            hint = f"evaluation=[{','.join([*chosen, name])}]" if is_ours else f"legal: {', '.join(chosen)}; {HARNESS}"
            raise ConfigError(f"evaluation.run.tasks names {name}, which is not chosen", hint)
