"""Submit the jobs to Slurm through submitit and return at once.

submitit renders the sbatch file, calls sbatch and names the logs by job id. Nothing is pickled: a job is
``python -m launcher.runner`` on rendered plans, and the runner starts each command as an ``srun`` step.

submitit's public ``submit`` takes a function alone: it pickles it, and the file says submitit's own command line. A
command line is rendered by its private ``_make_sbatch_string`` and submitted by ``_submit_command`` (``sbatch.py``).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import _make_sbatch_string

from handover.clients import ask
from handover.errors import ConfigError, nearest
from handover.slurm_variables import defaults, unread
from launcher.config.cluster import ClusterConfig
from launcher.config.schema import Config
from launcher.config.secrets import passed_by_name
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Command, Resources
from launcher.plan.time_limit import limit_s
from launcher.run import console
from launcher.run.containers import RUNTIMES
from launcher.run.place import interpreter_in
from launcher.run.srun import SlurmSteps
from launcher.submit import Job
from launcher.submit.jobs import SubmittedJob, read_jobs, write_jobs
from launcher.submit.order import Order
from launcher.submit.partitions import partitions, word_of_endless_wait
from launcher.submit.sbatch import Sbatch

_CPUS_PER_TASK = 4  # of a job that shares its nodes: a server, its stubs and clients; Slurm itself would give one
_UNWRITABLE = (
    "\\",
    "%j",
    "%t",
    "%A",
    "%a",
)  # a backslash makes Slurm take %j itself literally; the others are submitit's
_CANCEL_S = 30.0
_NOTICE_S = 60  # before the time limit the runner alone gets SIGUSR2: it says so and stops its steps


class SlurmExecutor:
    """Slurm (``cluster_type=bcm``): one sbatch job for each job, each waiting for the one before.

    Args:
        cluster: conf/cluster/bcm.yaml.
        dependency: of every job, such as singleton: two runs at once then do not get in each other's way.
        directory: the project as the nodes see it.
        mounts: directories that containers must see.
        replaces: a server that is one of several is started again where its node dies.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        dependency: str | None,
        directory: Path,
        mounts: Sequence[Path],
        replaces: bool = False,
    ) -> None:
        self.cluster, self.dependency, self.replaces = cluster, dependency, replaces
        self.place = SlurmSteps(
            directory=str(directory),
            mounts=tuple(map(str, mounts)),
            srun_args=tuple(cluster.srun_args),
            runtime=str(cluster.container_runtime),
            container_args=tuple(cluster.container_args),
        )

    def wrap(self, command: Command, resources: Resources, env: Mapping[str, str]) -> tuple[str, ...]:
        """Start as a step of the allocation."""
        return self.place.wrap(command, resources, env)

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse what Slurm and submitit would read as something else in the names of output files."""
        for job in jobs:
            found = next((word for word in _UNWRITABLE if word in str(job.folder)), None)
            if found:
                raise ConfigError(
                    f"'{found}' in {job.folder} means something else to Slurm",
                    "take a base_results_dir and model_train_name without it",
                )

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> int:
        """Submit all jobs or none; each runs only if those that it needs succeeded. Prints one line a job."""
        if not shutil.which("sbatch"):
            raise ConfigError("there is no sbatch here", "start main.py on a Slurm login node")
        self._check_pyxis(jobs)
        self._warn(jobs)
        submitted: list[SubmittedJob] = []
        order = Order(self.dependency or "")
        try:
            for job in jobs:
                dependency = order.dependency(job)
                job_id = self._submit(job, force, order)
                order.append(job, job_id)
                stages = tuple(dict.fromkeys(plan.stage for plan in job.plans))
                submitted.append(SubmittedJob(job_id, stages, dependency, str(job.folder / f"{job_id}_0_log.out")))
        except ConfigError:
            if submitted:
                ask("scancel", *(job.job_id for job in submitted), timeout_s=_CANCEL_S)
            raise
        logs = jobs[0].stages_file.parent
        write_jobs(logs, [*read_jobs(logs), *submitted])
        for one in submitted:
            print(
                f"{'+'.join(one.stages):<36} submitted  job {one.job_id}  {one.dependency:<24} log {one.log}",
                flush=True,
            )
        return 0

    def preview(self, jobs: Sequence[Job], force: Collection[str]) -> str:
        """The sbatch files as they would be submitted; JOB1 stands where the id of the first will be."""
        lines, order = [], Order(self.dependency or "")
        for number, job in enumerate(jobs, 1):
            lines.append(f"=== sbatch JOB{number}: {job.name}\n")
            lines.append(self.render(job, force, order))
            order.append(job, f"JOB{number}")
        return "".join(lines)

    def _check_pyxis(self, jobs: Sequence[Job]) -> None:
        """Without pyxis, srun would refuse the container only once the first job has waited for its turn."""
        wanted = any(plan.resources.container for job in jobs for plan in job.plans)
        if not wanted or not (options := RUNTIMES[self.place.runtime].srun_options):
            return
        known = _output("srun", "--help")
        for option in options:
            if option not in known:
                what = "has no pyxis" if option == "--container-image" else "has a pyxis from before the end of 2022"
                raise ConfigError(
                    f"this Slurm {what}: srun does not know {option}",
                    "take cluster.container_runtime=docker or apptainer, or leave container unset",
                )

    def _warn(self, jobs: Sequence[Job]) -> None:
        """Name what sbatch accepts and never runs, and what of the environment it is not shown."""
        known = partitions()
        for job in jobs:
            if reason := word_of_endless_wait(self.parameters(job, None), known):
                console.say_error(f"note: {job.name} would wait for ever: {reason}")
        if names := unread(os.environ):
            said = "is" if len(names) == 1 else "are"
            console.say_error(
                f"note: {', '.join(names)} {said} not read, as a job is the same from wherever it is submitted: "
                "use the keys below cluster"
            )

    def _submit(self, job: Job, force: Collection[str], order: Order) -> str:
        folder = job.folder
        folder.mkdir(parents=True, exist_ok=True)
        executor = Sbatch(folder)
        executor.parameters.update(self.parameters(job, order.dependency(job)))
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                job_id = executor.submit_script(self.script(job, force, order.replicas))
        except FailedJobError:
            raise self._refusal(job, printed.getvalue()) from None
        except FailedSubmissionError as error:
            raise ConfigError(
                f"{job.name}: {error}", "see whether it runs (squeue --me), and which sbatch this is: type -a sbatch"
            ) from None
        sys.stderr.write(printed.getvalue())  # sbatch's warnings
        return job_id

    def _refusal(self, job: Job, printed: str) -> ConfigError:
        """Word what sbatch printed, with what would be legal."""
        unknown = re.search(r"unrecognized option '--([^'=]+)", printed)
        if unknown:
            options = re.findall(r"--([a-z][a-z-]+)", _output("sbatch", "--help"))
            return ConfigError(
                f"cluster.additional_parameters: sbatch has no option '{unknown[1]}'", nearest(unknown[1], set(options))
            )
        lines = [re.sub(r"^sbatch: (error: )?", "", line) for line in (printed.strip() or "no reason").splitlines()]
        if "invalid partition" in printed.lower():
            legal = nearest(str(self.cluster.partition), _output("sinfo", "-h", "-o", "%R").split())
            return ConfigError(f"cluster.partition={self.cluster.partition}: {lines[-1]}", legal)
        hint = "mend the keys below cluster; cluster.additional_parameters takes any option of sbatch"
        if "time limit" in printed.lower():
            hint = "a job has the sum of its stages' limits: lower deployment.run.time_limit and the like"
        elif "controller" in printed.lower() or "timed out" in printed.lower():
            hint = "wait until scontrol ping says UP; nothing is submitted, and the same command then does"
        elif "wckey" in printed.lower():
            hint = "name yours: cluster.additional_parameters={wckey: NAME}"
        return ConfigError(f"sbatch refused {job.name}: {'; '.join(lines)}", hint)

    def render(self, job: Job, force: Collection[str], order: Order) -> str:
        """The sbatch file, without submitting it; needs no Slurm."""
        parameters = self.parameters(job, order.dependency(job))
        return str(_make_sbatch_string(self.script(job, force, order.replicas), job.folder, **parameters))

    def script(self, job: Job, force: Collection[str], replicas: Sequence[str] = ()) -> str:
        """The job's command line, quoted for the sbatch file: the only shell text there is."""
        project = self.place.directory
        runner = [interpreter_in(project), "-m", "launcher.runner", f"--place={self.place.to_json()}"]
        runner += [f"--stages-file={job.stages_file}", f"--force={','.join(sorted(force))}"]
        if job.plans[0].replicas > 1:
            runner += [f"--replica-jobs={','.join(replicas)}"]
        runner += [str(path) for path in job.plan_files]
        return f"cd {shlex.quote(project)}\nexec {shlex.join(runner)}"

    def parameters(self, job: Job, dependency: str | None) -> dict[str, Any]:
        """Derive the parameters that submitit renders: everything in conf/cluster/bcm.yaml reaches sbatch."""
        cluster, plans = self.cluster, job.plans
        time_limit = job.time_limit
        notice_s = int(min(_NOTICE_S, limit_s(time_limit) / 4))
        extra: dict[str, Any] = {"signal": f"B:USR2@{notice_s}", "time": time_limit}
        extra |= {"overcommit": True} if cluster.overcommit else {}
        extra |= {("requeue" if self.replaces else "no-requeue"): True} if job.is_replica else {}
        if dependency:
            extra |= {"dependency": dependency, "kill-on-invalid-dep": "yes"}
        extra |= {option: _pattern(job.folder, ending) for option, ending in (("output", "out"), ("error", "err"))}
        extra |= cluster.additional_parameters
        is_router = plans[0].replicas > 1  # and its clients: they take part of a node
        is_exclusive = cluster.exclusive and not is_router
        nodes = max(plan.resources.nodes for plan in plans)
        tasks = max(command.tasks_per_node for plan in plans for command in plan.commands)
        chosen = {
            "job_name": job.name,
            "partition": cluster.partition,
            "account": cluster.account,
            "exclusive": is_exclusive or None,
            "mem": cluster.mem or None if is_router else cluster.mem,
            "nodes": nodes,
            "ntasks_per_node": tasks if tasks > 1 else None,  # a CPU each, else srun could not start them
            "cpus_per_task": cluster.cpus_per_task or (None if is_exclusive else _CPUS_PER_TASK),
            "setup": list(cluster.setup) or None,
            "use_srun": False,
            "additional_parameters": extra,
        }
        chosen |= self._gpus(job, nodes, tasks, extra)
        chosen = {name: value for name, value in chosen.items() if value is not None}
        for option, value in defaults(os.environ).items():
            if option not in chosen:
                extra.setdefault(option, value)
        return {"wckey": None, **chosen}

    def _gpus(self, job: Job, nodes: int, tasks: int, extra: dict[str, Any]) -> dict[str, int | None]:
        """GPUs of a job that needs some; with ``gpus_per_task`` sbatch must be told the number of tasks as well.

        ``gpus_per_node`` is said in any case: without it Slurm would give a client's one task the GPUs of one task.
        """
        cluster = self.cluster
        needed = max(plan.resources.gpus_per_node for plan in job.plans)
        if needed and cluster.gpus_per_task:
            extra.setdefault("ntasks", nodes * tasks)
            return {"gpus_per_task": cluster.gpus_per_task, "gpus_per_node": tasks * cluster.gpus_per_task}
        return {"gpus_per_node": cluster.gpus_per_node if needed and cluster.exclusive else needed or None}


def open_executor(config: Config, paths: RunPaths) -> SlurmExecutor:
    """Return the executor of a run, whose containers get its secrets by name."""
    cluster = replace(config.cluster, container_args=[*config.cluster.container_args, *passed_by_name(config)])
    dependency, replaces = config.export.run.dependency or None, config.deployment.restart > 0
    return SlurmExecutor(cluster, dependency, paths.project, paths.mounts, replaces)


def _pattern(folder: Path, ending: str) -> str:
    """Name of a job's output file for sbatch, which reads ``%u`` and the like in it."""
    return f"{str(folder).replace('%', '%%')}/%j_0_log.{ending}"


def _output(*command: str) -> str:
    return ask(*command).printed
