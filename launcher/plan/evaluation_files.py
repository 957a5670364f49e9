"""The files that an evaluation reads, read before anything is submitted."""

from __future__ import annotations

from collections.abc import Collection

from evaluation.arguments import LambadaArguments, SquadArguments, TaskArguments, TextPairArguments
from evaluation.parity.arguments import ParityArguments, check_arguments
from handover.errors import ConfigError, nearest
from handover.templates import read_templates
from launcher.config.schema import Stage
from launcher.plan.paths import RunPaths


def check_files(arguments: TaskArguments | ParityArguments, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Read the files of one evaluation as its stage will.

    Raises:
        ConfigError: one is missing or malformed.
    """
    if isinstance(arguments, ParityArguments):
        _check_parity(arguments, paths, stages)
    elif isinstance(arguments, LambadaArguments):
        from evaluation.tasks.lambada.data import check_data, read_texts

        check_data(arguments.data_path, arguments.data_sha256)
        read_texts(arguments.data_path, arguments.samples)
    elif isinstance(arguments, SquadArguments):
        from evaluation.tasks.squad.data import check_squad

        check_squad(arguments)
        _check_task(arguments, paths, stages)
    elif isinstance(arguments, TextPairArguments):
        from evaluation.tasks.texts.pairs import check_pairs

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
