"""Submit the jobs to Slurm through submitit and return at once.

submitit renders the sbatch file, calls sbatch and names the logs by job id. Nothing is pickled: a job is
``python -m launcher.runner`` on rendered plans, and the runner starts each command as an ``srun`` step.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor as SubmititSlurmExecutor
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import _make_sbatch_string

from handover.errors import ConfigError
from launcher.config import PROJECT_DIR, ClusterConfig
from launcher.executors import Job
from launcher.place import Place
from launcher.plan import Command, Resources, StagePlan

_SIGNAL_BEFORE_END = "B:USR2@60"  # to the runner alone, a minute before the time limit: it says so and stops its steps


class SlurmExecutor:
    """Slurm (``cluster_type=bcm``): one sbatch job for each job, each waiting for the one before.

    Args:
        cluster: conf/cluster/bcm.yaml.
        dependency: of the first job, such as singleton.
        mounts: directories that containers must see.
    """

    def __init__(self, cluster: ClusterConfig, dependency: str | None, mounts: Sequence[str]) -> None:
        self.cluster, self.dependency = cluster, dependency
        self.place = Place(steps=True, mounts=tuple(mounts), srun_args=tuple(cluster.srun_args))

    def wrap(self, command: Command, resources: Resources) -> tuple[str, ...]:
        """Start as a step of the allocation."""
        return self.place.wrap(command, resources)

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> bool:
        """Submit all jobs; each runs only if the one before succeeded. Prints one line a job."""
        if not shutil.which("sbatch"):
            raise ConfigError("there is no sbatch here", "start main.py on a Slurm login node")
        previous: str | None = None
        for job in jobs:
            dependency = f"afterok:{previous}" if previous else self.dependency
            previous = self._submit(job, force, dependency)
            stages = "+".join(plan.stage for plan in job.plans())
            log = _folder(job) / f"{previous}_0_log.out"
            print(f"{stages:<36} submitted  job {previous}  {dependency or '':<18} log {log}", flush=True)
        return True

    def _submit(self, job: Job, force: Collection[str], dependency: str | None) -> str:
        folder = _folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        executor = SubmititSlurmExecutor(folder)
        executor.parameters.update(self.parameters(job, dependency))
        try:
            submitted = executor._submit_command(self.script(job, force))
        except FailedJobError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(f"sbatch refused {job.name}: {reason}", "mend conf/cluster/bcm.yaml") from None
        return str(submitted.job_id)

    def render(self, job: Job, force: Collection[str], dependency: str | None) -> str:
        """The sbatch file, without submitting it; needs no Slurm."""
        return str(_make_sbatch_string(self.script(job, force), _folder(job), **self.parameters(job, dependency)))

    def script(self, job: Job, force: Collection[str]) -> str:
        """The job's command line, quoted for the sbatch file: the only shell text there is."""
        runner = [sys.executable, "-m", "launcher.runner", f"--place={self.place.to_json()}"]
        runner += [f"--stages-file={job.stages_file}", f"--force={','.join(sorted(force))}"]
        runner += [str(path) for path in job.plan_files]
        return f"cd {shlex.quote(str(PROJECT_DIR))}\nexec {shlex.join(runner)}"

    def parameters(self, job: Job, dependency: str | None) -> dict[str, Any]:
        """Derive the parameters that submitit renders: everything in conf/cluster/bcm.yaml reaches sbatch."""
        cluster, plans = self.cluster, job.plans()
        extra: dict[str, Any] = {"signal": _SIGNAL_BEFORE_END, "time": _longest(plans)}
        extra |= {"overcommit": True} if cluster.overcommit else {}
        if dependency:
            extra |= {"dependency": dependency, "kill-on-invalid-dep": "yes"}
        extra |= cluster.additional_parameters
        gpus = max(plan.resources.gpus_per_node for plan in plans)
        chosen = {
            "job_name": job.name,
            "partition": cluster.partition,
            "account": cluster.account,
            "exclusive": cluster.exclusive or None,
            "mem": cluster.mem,
            "nodes": max(plan.resources.nodes for plan in plans),
            "gpus_per_node": cluster.gpus_per_node if gpus and cluster.exclusive else gpus or None,
            "gpus_per_task": cluster.gpus_per_task,
            "setup": list(cluster.setup) or None,
            "use_srun": False,
            "additional_parameters": extra,
        }
        return {name: value for name, value in chosen.items() if value is not None}


def _folder(job: Job) -> Path:
    return job.stages_file.parent / "slurm"


def _longest(plans: Sequence[StagePlan]) -> str:
    """The longest of the plans' time limits: they share one allocation."""
    return max((plan.resources.time_limit for plan in plans), key=_seconds)


def _seconds(time_limit: str) -> int:
    days, _, clock = time_limit.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86400 + seconds
