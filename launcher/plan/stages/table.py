"""Every stage by its name.

A new stage is a module of this folder, a line in ``STAGES``, and a name in ``launcher.config.choices.Stage``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from launcher.config.choices import Stage
from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan
from launcher.plan.stages import benchmark, convert, deploy, evaluate, export
from launcher.plan.stages.settings import Known


class StageModule(Protocol):
    """What a module of a stage has. Neither function writes anything, nor changes the configuration."""

    def check(self, config: Config, paths: RunPaths, stages: Collection[Stage], known: Known) -> None:
        """Refuse what can be known to fail, given the stages of the run; the first problem is raised.

        What it finds out for those after it goes to ``known``.
        """

    def plan(self, config: Config, paths: RunPaths) -> list[StagePlan]:
        """Return what the stage will run."""


STAGES: Mapping[Stage, StageModule] = {
    Stage.convert: convert,
    Stage.export: export,
    Stage.deploy: deploy,
    Stage.evaluate: evaluate,
    Stage.benchmark: benchmark,
}
