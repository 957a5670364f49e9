"""Base Command Platform: main.py runs inside a multi-node job and starts its commands on the nodes with bcprun.

Not a submitit plugin: nothing is submitted. The job is there already, its stages run one after another in this
process, and an executor of submitit would add a pickle and a queue to a function call.
"""

from __future__ import annotations

from launcher.config.schema import Config
from launcher.plan.paths import RunPaths
from launcher.run.bcprun import BcpNodes
from launcher.submit.interactive import InteractiveExecutor


def open_executor(config: Config, paths: RunPaths) -> InteractiveExecutor:
    """Return the executor of a run, over the nodes that each stage needs."""
    return InteractiveExecutor(BcpNodes(config.launcher_scripts_path, redirect=not config.bcp_no_redirect))
