"""Every launcher that jobs are written for."""

from __future__ import annotations

from launcher.submit.elsewhere.kuberay import KubeRay
from launcher.submit.elsewhere.launcher import Launcher
from launcher.submit.elsewhere.lepton import Lepton
from launcher.submit.elsewhere.nemo_run import NemoRun
from launcher.submit.elsewhere.skypilot import SkyPilot

LAUNCHERS: tuple[Launcher, ...] = (NemoRun(), SkyPilot(), Lepton(), KubeRay())
