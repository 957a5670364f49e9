"""What a run that writes a LoRA adapter by itself may ask for beside it."""

from __future__ import annotations

from collections.abc import Collection

from export_scripts.arguments import ConvertArguments
from handover.errors import ConfigError
from launcher.config.choices import Stage
from launcher.config.schema import Config

_KEY = "export.adapter.format=peft"


def writes_adapter(config: Config) -> bool:
    """Whether the conversion writes the adapter's own directory, and nothing of the model."""
    return config.export.adapter.format is not None


def check_adapter(config: Config, stages: Collection[Stage], arguments: ConvertArguments) -> None:
    """Work the adapter's directory out, as the conversion will.

    Raises:
        ConfigError: a stage or a key wants the model.
        CheckpointError: it does not work out; see ``plan_peft``.
    """
    from export_scripts.targets.peft.convert import inspect_peft

    model = config.export.model
    others = [stage.name for stage in stages if stage is not Stage.convert]
    if others:
        raise ConfigError(
            f"{_KEY} writes no model, which {' and '.join(others)} must have",
            "take stages=[convert]; without it the adapter is merged, and the model is served",
        )
    wanted = {"format": model.format, "random_weights": model.random_weights}
    if given := [name for name, value in wanted.items() if value]:
        raise ConfigError(
            f"export.model.{given[0]}={wanted[given[0]]} with {_KEY}: the adapter is written, and no model", "take one"
        )
    inspect_peft(arguments)
