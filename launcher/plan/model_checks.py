"""What the checkpoint, or the model exported before, says about the stages that are asked for. Nothing is written."""

from __future__ import annotations

import configparser
import re
from collections.abc import Collection

from evaluation.tasks.check import check_task
from handover.errors import ConfigError
from launcher.config.schema import Config, Engine, ModelType, Stage
from launcher.plan.paths import RunPaths

_T5 = "t5"
_SHA256 = re.compile("[0-9a-fA-F]{64}")


def check_checkpoint(config: Config, paths: RunPaths, stages: Collection[Stage]) -> None:
    """Open the checkpoint as the conversion will, and compare what it is with what shall be done with it.

    Raises:
        CheckpointError: it cannot be converted; see ``export_scripts.conversion.check.inspect_source``.
        ConfigError: it is another model than the configuration or a stage needs.
    """
    from export_scripts.checkpoints.huggingface.hub import is_fetched
    from export_scripts.conversion.check import inspect_source
    from export_scripts.conversion.description import is_description
    from export_scripts.conversion.random_weights import plan_random
    from export_scripts.conversion.special_ids import with_settled_ids

    model, checkpoint = config.export.model, paths.checkpoint
    if model.checkpoint_sha256 is not None and not _SHA256.fullmatch(model.checkpoint_sha256):
        raise ConfigError(
            f"export.model.checkpoint_sha256 is '{model.checkpoint_sha256}', not a SHA-256",
            "it has 64 hexadecimal digits: python -m export_scripts.inspect --sha256 <checkpoint> prints it",
        )
    if paths.hub_name and not is_fetched(paths.hub_name, checkpoint):
        return  # its name is all that is known here
    if model.random_weights:
        made_up = plan_random(checkpoint, model.tensor_model_parallel_size, str(model.weight_data_type))
        _check_family(config, str(checkpoint), made_up.source.family.name)
        return
    if is_description(checkpoint):
        if not config.dry_run:
            raise ConfigError(
                f"export.model.checkpoint_path {checkpoint} is the description of a checkpoint",
                "dry_run=true says what its conversion will take; to convert, give the checkpoint itself; "
                "export.model.random_weights=true makes weights of its shape, to measure them",
            )
        return
    opened = inspect_source(checkpoint, model.tensor_model_parallel_size, str(model.weight_data_type))
    source = with_settled_ids(opened, model.start_id, model.end_id)
    _check_family(config, str(checkpoint), source.family.name)
    if Stage.export in stages and not source.tokenizer.members:
        raise ConfigError(
            f"{checkpoint} has no tokenizer, which export needs",
            "put tokenizer.json, vocab.json and merges.txt, or tokenizer.model beside the weights; "
            "stages=[convert] does without",
        )
    if Stage.evaluate in stages and not config.deployment.endpoint:
        for task in config.evaluation.tasks:
            check_task(task, str(checkpoint), source.family.name == _T5, _can_score_answers(config))


def check_exported_task(config: Config, paths: RunPaths) -> None:
    """Compare the task with the model that was exported before; what is not there, other checks report.

    Raises:
        ConfigError: the task cannot be computed from this model's answers.
    """
    from export_scripts.repository.names import ENGINE

    parser = configparser.ConfigParser(interpolation=None)
    size = config.export.model.tensor_model_parallel_size
    parser.read(paths.model_repository / ENGINE / "1" / f"{size}-gpu" / "config.ini", encoding="utf-8")
    for task in config.evaluation.tasks if parser.sections() else ():
        check_task(task, str(paths.model_repository), parser.has_section("encoder"), _can_score_answers(config))


def _can_score_answers(config: Config) -> bool:
    """Whether an encoder-decoder served here scores given answers; that of an endpoint is asked itself."""
    return config.deployment.engine is Engine.slipway or config.deployment.endpoint is not None


def _check_family(config: Config, checkpoint: str, family: str) -> None:
    """A configuration for T5 names a T5; that for GPT is the default and says nothing."""
    wanted = config.export.run.model_type
    if wanted in (ModelType.t5, ModelType.mt5) and family != _T5:
        raise ConfigError(
            f"export.run.model_type is {wanted}, but {checkpoint} is no encoder-decoder: its family is {family}",
            "take export=gpt3/export_gpt3, or the path of the T5",
        )
    sessions = config.export.triton_deployment.interactive_sessions
    if sessions and family != "gpt":
        raise ConfigError(
            f"export.triton_deployment.interactive_sessions={sessions}, but {checkpoint} is of the family {family}: "
            "only GPT has interactive sessions",
            "take interactive_sessions=0",
        )
