"""A sweep, ``python main.py -m key=a,b ...``: one configuration after another; their results meet in one report.

A configuration that fails does not stop the others. What each one is called and where its results are stands in the
sweep's ``points.json``, from which every point's report stage renders the sweep's report again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from evaluation.arguments import POINTS_NAME, SweepReportArguments
from ft_format.weight_format import KEY
from handover.durable import write_atomically
from handover.errors import ConfigError, SlipwayError
from launcher import compose, pipeline
from launcher.config.choices import Engine
from launcher.config.schema import PROJECT_DIR, Config
from launcher.plan.paths import RunPaths
from launcher.plan.plan import python_module
from launcher.plan.stages.report import report_title
from launcher.run import console

_IN_THE_PATH = (
    "base_results_dir",
    *(f"export.run.{name}" for name in ("model_train_name", "config_summary", "results_dir")),
    *(f"export.model.{name}" for name in ("tensor_model_parallel_size", "weight_data_type", "random_weights")),
    *(
        f"export.triton_deployment.{name}"
        for name in (
            *("pipeline_model_parallel_size", "data_type", KEY, "quantization"),
            *("decoupled", "interactive_sessions"),
        )
    ),
)
"""Keys that lead to another results directory by themselves."""
_ENGINE = "engine"
_QUOTED = re.compile(r"""^(["'])(.*)\1$""", re.DOTALL)
_SHORT = {"tensor_model_parallel_size": "TP", "pipeline_model_parallel_size": "PP", "model_train_name": ""}


def launch(cfg: DictConfig) -> str | None:
    """Run one configuration, alone or as the next point of a sweep.

    Returns:
        The label of a point that failed, for ``SweepCallback``; None otherwise.
    """
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        pipeline.launch(compose.finish(cfg))
        return None
    label = ", ".join(f"{_SHORT.get(key, key)} {value}".strip() for key, value in _own_settings())
    directory = _sweep_directory(HydraConfig.get())
    print(f"#{HydraConfig.get().job.num} {label}", flush=True)
    try:
        config = compose.finish(cfg, _results_suffix())
        if not config.dry_run:
            _note(directory, label, config)
        pipeline.launch(config, None if config.dry_run else directory)
    except SlipwayError as error:
        console.say_error(f"{label}: {error}")
        if not cfg.dry_run:
            _note(directory, label, None, error.problem)
        return label
    except SystemExit as exit_:
        return label if exit_.code else None
    return None


class SweepCallback(Callback):
    """Collects the points of a sweep that failed; Hydra calls it, as ``hydra.callbacks`` in conf/config.yaml says."""

    def __init__(self) -> None:
        self._failed: list[str] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Note a point that failed: ``launch`` has returned its label."""
        if job_return.status is JobStatus.COMPLETED and job_return.return_value is not None:
            self._failed.append(job_return.return_value)

    def on_multirun_end(self, config: DictConfig, **kwargs: object) -> None:
        """Name the points that failed, and end the command with status 1.

        Hydra turns an exception here into a warning, so this ends the command itself.
        """
        if not self._failed:
            return
        directory = _sweep_directory(config.hydra)
        if (directory / POINTS_NAME).exists():
            # A point that could not be planned has no report stage of its own that would show it.
            command = python_module("evaluation.sweep_report", SweepReportArguments(sweep=directory))
            subprocess.run([sys.executable, *command.argv[1:]], cwd=PROJECT_DIR, check=False)
        with console.worded_errors():
            points = "1 point" if len(self._failed) == 1 else f"{len(self._failed)} points"
            raise ConfigError(
                f"{points} of the sweep failed: {'; '.join(self._failed)}",
                "the same command continues with them; what is finished is skipped",
            )


def _sweep_directory(hydra: Any) -> Path:
    return Path(hydra.sweep.dir).absolute()


def swept_keys(overrides: Sequence[str]) -> list[str]:
    """Keys that a command line gives several values."""
    parsed = OverridesParser.create().parse_overrides([text for text in overrides if not text.startswith("-")])
    return [override.key_or_group for override in parsed if override.is_sweep_override()]


def _own_settings() -> list[tuple[str, str]]:
    """What this point has of its own, by the last word of its keys."""
    keys = {*swept_keys(sys.argv[1:]), *(HydraConfig.get().sweeper.get("params") or {})}
    # Hydra writes a value of a sweep with backslashes before what its grammar would read.
    pairs = (re.sub(r"\\(.)", r"\1", text).split("=", 1) for text in compose.written_overrides() if "=" in text)
    return [(key.rpartition(".")[2], _QUOTED.sub(r"\2", value)) for key, value in pairs if key.lstrip("+") in keys]


def _results_suffix() -> str:
    """What keeps this point's results apart from the others', as far as their path does not: ``max_batch_size=8``."""
    named = {key.rpartition(".")[2] for key in _IN_THE_PATH}
    own = [name_setting(key, value) for key, value in _own_settings() if key not in named]
    return "_".join(re.sub(r"[^\w.=-]+", "-", text).strip("-") for text in own if text)


def name_setting(key: str, value: str) -> str:
    """Name what a point has of its own for its results' directory; empty where a single run would have no other path.

    Engines that read a form of their own are in the path already, and results of the drop-in engine are where a run
    without a sweep has them, so that both share them.
    """
    if key != _ENGINE or value not in Engine.__members__:
        return f"{key}={value}"
    engine = Engine[value]
    return value if engine.reads_shards and engine is not Engine.slipway else ""


def _note(directory: Path, label: str, config: Config | None, error: str = "") -> None:
    """Enter a point into the sweep's list; a point that could not be planned has no results."""
    file = directory / POINTS_NAME
    points = json.loads(file.read_text()) if file.exists() else []
    if error and points and points[-1]["label"] == label:
        points.pop()
    title = "" if config is None else report_title(config)
    results = "" if config is None else str(RunPaths.of(config).results)
    points.append({"label": label, "title": title, "results": results, "error": error})
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(points, indent=1) + "\n")
