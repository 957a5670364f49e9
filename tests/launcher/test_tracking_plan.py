"""Who else is told a run's figures: a stage of its own after the report."""

from __future__ import annotations

import pytest
from support.runs.composed import FIVE, compose, plans_of

from handover.errors import ConfigError
from launcher.config.schema import register
from launcher.plan.paths import RunPaths
from launcher.plan.stages import report

register()


def test_trackers_are_told_after_the_report() -> None:
    config = compose([FIVE, "evaluation.tracking.wandb=offline", "evaluation.tracking.experiment=nightly"])
    *_, told_of, telling = plans_of(config)
    assert (told_of.stage, telling.stage, telling.always) == ("report", "tracking", True)
    (command,) = telling.commands
    assert {"--wandb=offline", "--experiment=nightly"} <= set(command.argv)
    assert (
        "--report=" + str(told_of.output) in command.argv
        and "--output=" + str(telling.output) + ".partial" in command.argv
    )


def test_without_trackers_there_is_no_such_stage() -> None:
    assert "tracking" not in [plan.stage for plan in plans_of(compose([FIVE]))]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("mlflow=https://me:secret-1@host", "evaluation.tracking.mlflow holds a password"),
        ("wandb=yes", "evaluation.tracking.wandb=yes"),
        ("wandb=offline", "this Python has no wandb"),
    ],
)
def test_what_cannot_be_told_stops_the_run_before_it(
    setting: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.plan.stages.report.find_spec", lambda name: None)
    config = compose([FIVE, "cluster_type=interactive", f"evaluation.tracking.{setting}"], cluster="interactive")
    with pytest.raises(ConfigError, match=expected) as refused:
        report.check(config, RunPaths.of(config))
    assert "secret-1" not in str(refused.value)
