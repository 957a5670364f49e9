"""Write a run as manifests of Kubernetes into a directory. Nothing is started here: ``kubectl apply -k`` does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from deployment.replicas.haproxy import CONFIG_FILE
from handover.errors import ConfigError
from launcher.clusters.kubernetes_names import Names, run_name
from launcher.config.schema import Config
from launcher.plan.mounts import given_files
from launcher.plan.paths import RunPaths
from launcher.plan.plan import Command, Resources
from launcher.submit import Job
from launcher.submit.jobs import SubmittedJob, read_jobs, write_jobs
from launcher.submit.kubernetes.directory import check_directory, files_of, write
from launcher.submit.kubernetes.doors import doors_of
from launcher.submit.kubernetes.kubectl import job_id
from launcher.submit.kubernetes.pods import Pods, check_nodes, image_of, jobs_in
from launcher.submit.kubernetes.router import configuration
from launcher.submit.kubernetes.servers import server
from launcher.submit.kubernetes.stages import stages


class KubernetesExecutor:
    """A Job or a JobSet of the stages that end, a Deployment or a LeaderWorkerSet of a server that stays."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        self.config, self.paths = config, paths
        given, name = config.kubernetes, config.export.run.model_train_name
        names = Names(run_name(given.name, name, paths.results))
        self.pods = Pods(names, given, config.cluster.cpus_per_task, str(paths.project))
        self.directory = Path(given.directory or paths.results / "kubernetes").expanduser().absolute()

    def wrap(self, command: Command, resources: Resources, env: Mapping[str, str]) -> tuple[str, ...]:
        """Start in the pod of the runner, whose image has the interpreter under this name."""
        return command.argv

    def preview(self, jobs: Sequence[Job], force: Collection[str]) -> str:
        """The manifests as they would be written."""
        files = self.files(jobs, force).items()
        return "".join(f"=== {self.directory / name}\n{text}" for name, text in files if not name.endswith(".json"))

    def submit(self, jobs: Sequence[Job], force: Collection[str]) -> int:
        """Write the directory, and print one line a job and how they are started."""
        write(self.directory, self.files(jobs, force))
        rendered = self._rendered(jobs)
        logs = jobs[0].stages_file.parent
        write_jobs(logs, [*(job for job in read_jobs(logs) if job not in rendered), *rendered])
        for one in rendered:
            print(f"{'+'.join(one.stages):<36} rendered   {one.job_id}", flush=True)
        print(f"start it: kubectl apply -k {self.directory}", flush=True)
        return 0

    def files(self, jobs: Sequence[Job], force: Collection[str]) -> dict[str, str]:
        """Return the directory's files by name."""
        ending, staying = _divide(jobs)
        found = stages(self.pods, ending, force)
        deployment, more = self.config.deployment, dict[str, str]()
        for job in staying:
            found += server(self.pods, job, ending, deployment, self.config.container or image_of(job))
            if self.config.kubernetes.router:
                more[CONFIG_FILE] = configuration(self.pods, doors_of(deployment).routed(), deployment)
        return files_of(found, self.pods.names, self.config.kubernetes.namespace, jobs, more)

    def _rendered(self, jobs: Sequence[Job]) -> list[SubmittedJob]:
        """What status, logs and cancel ask kubectl for."""
        ending, staying = _divide(jobs)
        names, namespace = self.pods.names, self.config.kubernetes.namespace
        found = []
        for job in (*ending, *staying):
            stage = job.plans[0].stage
            if job.stays:
                kind = "leaderworkerset" if job.plans[0].resources.nodes > 1 else "deployment"
                place = job_id(namespace, kind, names.server)
            elif len(ending) > 1:
                place = job_id(namespace, "jobset", names.job_set, stage)
            else:
                place = job_id(namespace, "job", names.job(stage))
            told = tuple(dict.fromkeys(plan.stage for plan in job.plans))
            found.append(SubmittedJob(place, told, "", str(job.plans[0].log), "kubernetes"))
        return found

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse paths that no pod sees, and plans that one process a pod cannot run."""
        check_directory(self.directory)
        for job in jobs:
            check_nodes(job, self.config.deployment.engine)
            for plan in job.plans:
                for path in (plan.output, plan.log):
                    self._check_path(path, plan.stage, ())
                for path in plan.inputs:
                    self._check_path(path, plan.stage, (self.paths.project,))
        for path in given_files(self.config):
            self._check_path(path, "a stage", (self.paths.project,))
        if self.paths.hub_name:
            self._check_path(self.paths.checkpoint, "convert", ())

    def _check_path(self, path: Path, stage: str, more: Sequence[Path]) -> None:
        given = self.config.kubernetes
        places = [*map(Path, map(str, (*given.volumes.values(), *given.secret_files.values()))), *more]
        if not any(path.is_relative_to(place) for place in places):
            raise ConfigError(
                f"{stage} needs {path}, which is on none of kubernetes.volumes: no pod would see it",
                f"name the claim that has it and its path: kubernetes.volumes={{CLAIM: {path.parent}}}",
            )


def _divide(jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Return the jobs that end, as pods run them, and the server that stays."""
    return jobs_in([job for job in jobs if not job.stays]), [job for job in jobs if job.stays]


open_executor = KubernetesExecutor
