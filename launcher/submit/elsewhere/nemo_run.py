"""NeMo-Run: a program that hands a script to its SlurmExecutor (NeMo-Run 0.11)."""

from __future__ import annotations

from pathlib import Path

from launcher.submit.elsewhere.launcher import Launcher
from launcher.submit.elsewhere.script import Script

_PROGRAM = '''"""The job {name} for NeMo-Run; python3 {file} submits it, --dry-run shows what would be."""

import sys

import nemo_run as run

SCRIPT = {shell!r}
EXECUTOR = run.SlurmExecutor(
{arguments}
    tunnel=run.LocalTunnel(job_dir={jobs!r}),
    packager=run.Packager(),
)

with run.Experiment({name!r}) as experiment:
    experiment.add(run.Script(inline=SCRIPT), executor=EXECUTOR, name={name!r})
    experiment.dryrun() if "--dry-run" in sys.argv else experiment.run(detach=True)
'''


class NemoRun(Launcher):
    """Programs that hand a script to NeMo-Run."""

    name = "nemo_run"
    suffix = ".py"

    def lacks(self, script: Script) -> str:
        """Return why it cannot run such a job."""
        return "" if script.cluster.account else "its SlurmExecutor needs cluster.account"

    def render(self, script: Script, file: Path) -> str:
        """Return the program; NeMo-Run keeps its batch scripts beside it."""
        cluster = script.cluster
        arguments = {
            "account": cluster.account,
            "partition": cluster.partition,
            "time": script.job.time_limit,
            "nodes": script.nodes,
            "ntasks_per_node": 1,
            "cpus_per_task": script.cpus,
            "gpus_per_node": script.gpus or None,
            "exclusive": cluster.exclusive or None,
            "container_image": script.image,
            "container_mounts": [f"{path}:{path}" for path in script.mounts] if script.image else [],
            "env_vars": dict(script.variables),
        }
        given = "\n".join(f"    {name}={value!r}," for name, value in arguments.items() if value not in (None, [], {}))
        places = {"file": str(file), "jobs": str(file.parent / "jobs")}
        return _PROGRAM.format(name=script.name, shell=script.shell("SLURM_PROCID"), arguments=given, **places)

    def start(self, script: Script, file: Path) -> list[str]:
        """Return the command that starts it."""
        return ["python3", str(file)]
