"""The report over whatever the run produced, and the gate."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evaluation.arguments import GateArguments, ReportArguments, SweepReportArguments, TrackArguments
from evaluation.report.thresholds import read_thresholds
from handover.errors import ConfigError
from launcher.clusters.table import cluster_of
from launcher.config.options import filled
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.plan import VERDICT_FILE, StagePlan, partial, python_module
from launcher.plan.stages.settings import environment, resources, signing


def check(config: Config, paths: RunPaths) -> None:
    """Read the gate's limits, look for what the run is compared with, and for the libraries that others are told by.

    Raises:
        ConfigError: a file is missing or malformed, or a library is not installed.
    """
    _track_arguments(config, paths)
    for name in ("mlflow", "wandb"):
        is_here = cluster_of(config).runs_here and not config.container
        if getattr(config.evaluation.tracking, name) and is_here and find_spec(name) is None:
            raise ConfigError(
                f"evaluation.tracking.{name} is given, and this Python has no {name}", f"pip install 'slipway[{name}]'"
            )
    given = config.evaluation.gate
    if given.thresholds:
        read_thresholds(Path(given.thresholds).expanduser())
    if given.baseline and not Path(given.baseline).expanduser().is_dir():
        raise ConfigError(
            f"evaluation.gate.baseline: there is no directory {given.baseline}", "give a run's results directory"
        )


def plan(config: Config, paths: RunPaths, sweep: Path | None) -> list[StagePlan]:
    """Plan the report, the report of the sweep that the run is a point of, and the gate where limits are given."""
    stages = [_report(config, paths, sweep)]
    if config.evaluation.tracking.mlflow or config.evaluation.tracking.wandb:
        stages.append(_tracking(config, paths))
    if config.evaluation.gate.thresholds:
        stages.append(_gate(config, paths))
    return stages


def report_title(config: Config) -> str:
    """Return the name of what is reported; empty where it is that of the model which a foreign API serves."""
    is_foreign = (config.deployment.endpoint or "").startswith(("http://", "https://"))
    return config.deployment.label or ("" if is_foreign else config.export.run.model_train_name)


def _report(config: Config, paths: RunPaths, sweep: Path | None) -> StagePlan:
    """Plan the report. It is written also where an earlier stage failed, and says so."""
    arguments = ReportArguments(
        results=paths.results,
        output=partial(paths.report),
        title=report_title(config),
        stages=paths.stages,
        **vars(signing(config)),
        **_held_against(config),
    )
    commands = [python_module("evaluation.report", arguments)]
    if sweep is not None:
        commands.append(python_module("evaluation.sweep_report", SweepReportArguments(sweep=sweep)))
    return StagePlan(
        stage="report",
        name=f"report_{config.export.run.model_train_name}",
        commands=tuple(commands),
        resources=resources(config, "0:10:00", nodes=1, gpus_per_node=0),
        inputs=(),
        output=paths.report,
        log=paths.log("report"),
        env=environment(config),
        always=True,
    )


def _tracking(config: Config, paths: RunPaths) -> StagePlan:
    """Plan to tell the figures to others, whose failure is none of the report."""
    return StagePlan(
        stage="tracking",
        name=f"tracking_{config.export.run.model_train_name}",
        commands=(python_module("evaluation.track", _track_arguments(config, paths)),),
        resources=resources(config, "0:10:00", nodes=1, gpus_per_node=0),
        inputs=(),
        output=paths.results / "tracking",
        log=paths.log("tracking"),
        env=environment(config),
        always=True,
    )


def _track_arguments(config: Config, paths: RunPaths) -> TrackArguments:
    return filled(
        TrackArguments,
        config.evaluation.tracking,
        results=paths.results,
        report=paths.report,
        output=partial(paths.results / "tracking"),
        title=report_title(config) or paths.results.name,
    )


def _gate(config: Config, paths: RunPaths) -> StagePlan:
    """Plan the decision over the run's figures: it fails where the verdict is not GO."""
    output = paths.results / "gate"
    limits = _held_against(config)
    arguments = GateArguments(results=paths.results, output=partial(output) / VERDICT_FILE, **limits)
    return StagePlan(
        stage="gate",
        name=f"gate_{config.export.run.model_train_name}",
        commands=(python_module("evaluation.gate", arguments),),
        resources=resources(config, "0:10:00", nodes=1, gpus_per_node=0),
        inputs=tuple(limits.values()),
        output=output,
        log=paths.log("gate"),
        env=environment(config),
        always=True,
    )


def _held_against(config: Config) -> dict[str, Any]:
    given = config.evaluation.gate
    named = {"thresholds": given.thresholds, "baseline": given.baseline}
    return {name: Path(path).expanduser().absolute() for name, path in named.items() if path}
