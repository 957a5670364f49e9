"""A pod that runs plans: one container with the run's volumes, and ``python3 -m launcher.runner`` in it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handover.errors import ConfigError
from launcher.clusters.kubernetes_names import PLANS_PATH, Names, literal, quantity_bytes
from launcher.config.choices import Engine
from launcher.config.kubernetes import KubernetesConfig
from launcher.plan.plan import PYTHON, StagePlan
from launcher.plan.time_limit import limit_s
from launcher.submit import Job

Manifest = dict[str, Any]

DRAIN_S = 5
"""Between a pod's end being decided and its server hearing of it: until then Services still send it requests."""

ROLLING: Manifest = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
"""A new pod is ready before an old one ends."""

_REPLICA = "SLIPWAY_REPLICA"
_GROUP = "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"
"""Which server of several a pod is, or belongs to."""

_ENDING_S = 15
"""For a runner to end its command, and what is left to it itself, once it is told."""


@dataclass(frozen=True)
class Pods:
    """What the pods of a run have in common.

    Attributes:
        names: of the run's objects.
        given: keys of ``kubernetes``.
        cpus: that each asks for; None: none.
        directory: in which the image has the code.
    """

    names: Names
    given: KubernetesConfig
    cpus: int | None
    directory: str

    def template(self, job: Job, force: Collection[str], container: Mapping[str, Any], **spec: object) -> Manifest:
        """Return the pod that runs a job's plans.

        Args:
            job: its plans.
            force: stages to redo.
            container: more of its container, such as ports.
            spec: more of the pod.
        """
        stage = job.plans[0].stage
        serves = any(plan.service for plan in job.plans)
        gpus = max(plan.resources.gpus_per_node for plan in job.plans)
        runner = {
            "name": "runner",
            "image": image_of(job),
            "command": self.runner(job, force),
            "workingDir": self.directory,
            "env": self.environment(),
            "resources": self.resources(job, gpus),
            "volumeMounts": self.mounts(serves),
            **container,
        }
        if job.plans[0].replicas > 1:
            self._separate(runner, job.plans[0])
        pod = {
            **spec,
            "terminationGracePeriodSeconds": grace_s(job),
            "containers": [runner],
            "volumes": self.volumes(serves),
            **(self.placing() if gpus else {}),
        }
        # Where plans are others, so is the object: Kubernetes refuses it for a Job, and a Deployment restarts.
        digest = hashlib.sha256("".join(plan.to_json() for plan in job.plans).encode()).hexdigest()[:16]
        metadata = {"labels": self.names.labels(stage), "annotations": {"slipway/plans": digest}}
        return {"metadata": metadata, "spec": pod}

    def runner(self, job: Job, force: Collection[str]) -> list[str]:
        """Return the command of a pod: the plans are its last words."""
        words = [PYTHON, "-m", "launcher.runner"]
        words += (
            [] if job.plans[0].replicas > 1 else [literal(f"--stages-file={job.stages_file}")]
        )  # one could not say of all
        words += [f"--force={','.join(sorted(force))}"] if force else []
        return [*words, *(f"{PLANS_PATH}/{file.name}" for file in job.plan_files)]

    def _separate(self, runner: Manifest, plan: StagePlan) -> None:
        """Have each server see a directory of its own, on the claim, where its plan says that its files are.

        One of several pods shares it with them: its name is that of their group.
        """
        source = _GROUP if plan.resources.nodes > 1 else "metadata.name"
        runner["env"].append(field_variable(_REPLICA, source))
        claims = [(Path(str(path)), number) for number, path in enumerate(self.given.volumes.values())]
        place, number = max(
            (len(path.parts), path, number) for path, number in claims if plan.output.is_relative_to(path)
        )[1:]
        below = plan.output.relative_to(place) / f"replica-$({_REPLICA})"
        mount = {"name": _claim(number), "mountPath": str(plan.output), "subPathExpr": str(below)}
        runner["volumeMounts"].append(mount)

    def environment(self) -> list[Manifest]:
        """Variables: the pod's own address and, by reference, secrets; a plan has its variables itself."""
        return [field_variable("POD_IP", "status.podIP"), *self.secrets()]

    def secrets(self) -> list[Manifest]:
        """Variables whose values are those of secrets."""
        return [_secret(name, str(place)) for name, place in sorted(self.given.secrets.items())]

    def resources(self, job: Job, gpus: int) -> Manifest:
        """Return what the pod asks for and may use; of several plans, what the hungriest needs."""
        stated = [str(size) for plan in job.plans if (size := self.given.memory.get(plan.stage))]
        memory = {"memory": max(stated, key=quantity_bytes)} if stated else {}
        devices = {self.given.gpu_resource: gpus} if gpus else {}
        cpus = {"cpu": self.cpus} if self.cpus else {}
        return {"requests": {**cpus, **memory, **devices}, "limits": {**memory, **devices}}

    def mounts(self, serves: bool) -> list[Manifest]:
        """Where the container has the volumes."""
        found: list[Manifest] = [
            {"name": _claim(number), "mountPath": str(path)} for number, path in enumerate(self.given.volumes.values())
        ]
        found += [
            {"name": _files(number), "mountPath": str(path), "readOnly": True}
            for number, path in enumerate(self.given.secret_files.values())
        ]
        found += [{"name": "shared-memory", "mountPath": "/dev/shm"}] if serves else []
        return [{"name": "plans", "mountPath": PLANS_PATH, "readOnly": True}, *found]

    def volumes(self, serves: bool) -> list[Manifest]:
        """Return the pod's volumes: its plans, the claims, secrets as files, and the memory that a server shares."""
        found: list[Manifest] = [
            {"name": _claim(number), "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(self.given.volumes)
        ]
        found += [
            {"name": _files(number), "secret": {"secretName": secret}}
            for number, secret in enumerate(self.given.secret_files)
        ]
        memory = {"medium": "Memory", "sizeLimit": self.given.shared_memory}
        found += [{"name": "shared-memory", "emptyDir": memory}] if serves else []
        return [{"name": "plans", "configMap": {"name": self.names.plans}}, *found]

    def placing(self) -> Manifest:
        """On which nodes pods with GPUs may be: those that are kept free for such pods among them."""
        tolerated = {"key": self.given.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        labels = {name: str(value) for name, value in self.given.gpu_node_selector.items()}
        return {"tolerations": [tolerated], **({"nodeSelector": labels} if labels else {})}


def grace_s(job: Job) -> int:
    """Return the seconds that a pod has to end: until its runner is told, those of a server, and for the rest."""
    return math.ceil(sum(DRAIN_S + plan.grace_s for plan in job.plans if plan.service)) + _ENDING_S


def image_of(job: Job) -> str | None:
    """Return the image of a job's pods; that of its server, where it has one."""
    return job.plans[0].resources.container


def deadline(job: Job) -> Manifest:
    """Return the time limit of a pod: of a job's stages together; empty where there is none."""
    seconds = limit_s(job.time_limit)
    return {} if math.isinf(seconds) else {"activeDeadlineSeconds": math.ceil(seconds)}


def field_variable(name: str, field: str) -> Manifest:
    """Return a variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _secret(name: str, place: str) -> Manifest:
    secret, _, key = place.partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _claim(number: int) -> str:
    return f"claim-{number}"


def _files(number: int) -> str:
    return f"secret-{number}"


def jobs_in(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs as pods run them: those that nothing depends on share the pod of the job after them.

    A job that waits for another in Kubernetes waits for its success, while here one must follow after a failure too;
    the runner of one pod holds that order itself.
    """
    merged: list[Job] = []
    for job in jobs:
        if merged and all(plan.independent for plan in merged[-1].plans):
            before = merged.pop()
            job = Job(before.name, (*before.plans, *job.plans), job.stages_file)
        merged.append(job)
    return merged


def check_nodes(job: Job, engine: Engine) -> None:
    """Refuse a server over several pods or nodes that one process in each cannot serve.

    Raises:
        ConfigError: its clients would run on each of them, or its engine's processes do not find one another.
    """
    nodes = max(plan.resources.nodes for plan in job.plans)
    if nodes == 1:
        return
    if not job.stays:
        raise ConfigError(
            f"a server over {nodes} nodes with its clients in one run: they would be one job, which each node runs",
            "start the server in a run of its own, stages=[deploy], and give its address as deployment.endpoint",
        )
    if engine is Engine.fastertransformer:
        raise ConfigError(
            f"deployment.engine=fastertransformer over {nodes} nodes: its servers find one another by MPI, which is "
            "not there",
            "lower the tensor or pipeline parallelism to the GPUs of one node",
        )
