"""What can be known of the chosen evaluations before anything is submitted: their files are there, and whole."""

from __future__ import annotations

from collections.abc import Collection

from evaluation.arguments import LambadaArguments, SquadArguments, TaskArguments, TextPairArguments
from evaluation.parity.arguments import ParityArguments, check_arguments
from handover.errors import ConfigError, nearest
from handover.templates import read_templates
from launcher.config.evaluation import DataTaskConfig
from launcher.config.nemo_keys import HARNESS
from launcher.config.schema import Config, Stage
from launcher.config.schema_help import legal_options, options
from launcher.plan.paths import RunPaths
from launcher.plan.stages.evaluate import task_arguments


def check_evaluations(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Read the files of every evaluation as the stage will.

    Raises:
        ConfigError: none is chosen, or a file is missing or malformed.
    """
    tasks = config.evaluation.tasks
    if not tasks:
        raise ConfigError("evaluate: no evaluation is chosen", f"evaluation=[...]: {legal_options('evaluation', '')}")
    _check_launcher_keys(config)
    for name, task in tasks.items():
        place = f"evaluation.{name}"
        if isinstance(task, DataTaskConfig) and task.data_path is None:
            raise ConfigError(f"{place}.data_path is not set", "name the file to evaluate on")
        arguments = task_arguments(config, paths, name, task)
        try:
            _read(arguments, paths, stages)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error.problem}", error.hint) from None


def _check_launcher_keys(config: Config) -> None:
    """Hold NeMo-Megatron-Launcher's ``run.tasks`` against what was chosen."""
    given, chosen = config.evaluation.run.tasks, list(config.evaluation.tasks)
    named = given if isinstance(given, list) else [] if given is None else [given]
    for name in (part.strip() for text in named for part in str(text).split(",")):
        if name not in chosen:
            is_ours = name in options("evaluation")
            hint = f"evaluation=[{','.join([*chosen, name])}]" if is_ours else f"legal: {', '.join(chosen)}; {HARNESS}"
            raise ConfigError(f"evaluation.run.tasks names {name}, which is not chosen", hint)


def _read(arguments: TaskArguments | ParityArguments, paths: RunPaths, stages: Collection[Stage]) -> None:
    if isinstance(arguments, ParityArguments):
        _check_parity(arguments, paths, stages)
    elif isinstance(arguments, LambadaArguments):
        from evaluation.tasks.lambada.data import check_data, read_texts

        check_data(arguments.data_path, arguments.data_sha256)
        read_texts(arguments.data_path, arguments.samples)
    elif isinstance(arguments, SquadArguments):
        from evaluation.tasks.squad.check import check_squad

        check_squad(arguments)
        _check_task(arguments, paths, stages)
    elif isinstance(arguments, TextPairArguments):
        from evaluation.tasks.text_pairs import check_pairs

        check_pairs(arguments)


def _check_task(arguments: SquadArguments, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Look for the p-tuned task in the FT checkpoint, where one was made before."""
    if arguments.taskname is None or Stage.convert in stages or not paths.ft_checkpoint.is_dir():
        return
    names = [str(template.get("taskname")) for template in read_templates(paths.ft_checkpoint)]
    if arguments.taskname not in names:
        hint = nearest(arguments.taskname, names) if names else "put the p-tuned .nemo beside the model's, and convert"
        raise ConfigError(f"{paths.ft_checkpoint} has no p-tuned task {arguments.taskname}", hint)


def _check_parity(arguments: ParityArguments, paths: RunPaths, stages: Collection[Stage]) -> None:
    check_arguments(arguments)
    if Stage.convert not in stages and not paths.checkpoint.exists():
        raise ConfigError(
            f"parity compares with the source, and there is no {paths.checkpoint}", "give export.model.checkpoint_path"
        )
    if arguments.data_path is not None and not arguments.data_path.is_file():
        raise ConfigError(f"there is no file {arguments.data_path}", "mend data_path")
