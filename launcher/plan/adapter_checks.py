"""LoRA adapters of a run: what one that writes an adapter by itself may ask for, and those that are served."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from evaluation.report.published import PARTIAL
from export_scripts.arguments import ConvertArguments
from handover.errors import ConfigError
from handover.manifest import REPLACED
from launcher.config.choices import Engine, ModelFormat, Stage
from launcher.config.schema import Config
from models.peft import check_name

_KEY = "export.adapter.format=peft"


def writes_adapter(config: Config) -> bool:
    """Whether the conversion writes the adapter's own directory, and nothing of the model."""
    return config.export.adapter.format is not None


def served_adapters(config: Config) -> tuple[tuple[str, str], ...]:
    """List the adapters that are served beside the model: name and path of each.

    Raises:
        ConfigError: ``export.adapters`` is neither names with paths nor a directory of adapters, or nothing that the
            run makes serves them.
    """
    given = config.export.adapters
    if given is None:
        return ()
    if isinstance(given, str):
        found = sorted(Path(given).iterdir()) if Path(given).is_dir() else []
        given = {each.name.removesuffix(".nemo"): str(each) for each in found if not each.name.startswith(".")}
    if not (isinstance(given, dict) and given and all(isinstance(path, str) and path for path in given.values())):
        raise ConfigError(
            f"export.adapters is {str(config.export.adapters)[:200]!r}",
            "give names with paths, export.adapters={sql: /data/sql}, or a directory with some adapters",
        )
    for name in map(str, given):
        check_name(name, ConfigError)
    if config.export.model.format is not ModelFormat.huggingface or config.deployment.engine is not Engine.slipway:
        raise ConfigError(
            "export.adapters are served by the drop-in engine, over a Hugging Face directory",
            "take export.model.format=huggingface and deployment.engine=slipway",
        )
    return tuple((str(name), os.path.abspath(path)) for name, path in given.items())


def asked_adapters(config: Config) -> tuple[str | None, ...]:
    """List the adapters that evaluations ask, by name; None: the model alone.

    Raises:
        ConfigError: ``deployment.adapter`` is neither a name nor some of them, or names what is not served.
    """
    given = config.deployment.adapter
    names = tuple(None if each is None else str(each) for each in (given if isinstance(given, list) else [given]))
    if not names or isinstance(given, dict) or len(set(names)) < len(names):
        raise ConfigError(
            f"deployment.adapter is {str(given)[:200]}",
            "give a name, or several that differ, [null,sql]: null is the model alone",
        )
    served = dict(served_adapters(config))
    for name in filter(None, names):
        check_name(name, ConfigError)
        if served and name not in served:
            raise ConfigError(f"deployment.adapter={name} is none of export.adapters", f"legal: {', '.join(served)}")
        if name.endswith(PARTIAL) or REPLACED in name:
            raise ConfigError(
                f"the results of deployment.adapter={name} would look unfinished", "export it by another name"
            )
    return names


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
