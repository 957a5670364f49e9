"""A server that stays: a Deployment, or a LeaderWorkerSet over several nodes, with its Service and its PodMonitor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deployment.engines.table import PROGRAMS
from launcher.clusters.kubernetes_names import PLANS_PATH
from launcher.config.schema import DeploymentConfig
from launcher.plan.plan import PYTHON
from launcher.submit import Job
from launcher.submit.kubernetes.pods import DRAIN_S, Manifest, Pods
from launcher.submit.kubernetes.stages import queue_label

_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
"""Label of the pod of a LeaderWorkerSet that clients ask."""

_PROBE_PERIOD_S, _PROBE_TIMEOUT_S = 10, 5
_MISSES_TO_END = 6  # a server that has not answered for a minute; its own supervisor notices most ends before


class Doors(NamedTuple):
    """Where a server is asked.

    Attributes:
        ports: of each door by its name.
        health: name of the one that is asked for its health.
        health_path: there.
        metrics: names of those that have metrics.
    """

    ports: dict[str, int]
    health: str
    health_path: str
    metrics: tuple[str, ...]


def doors_of(deployment: DeploymentConfig) -> Doors:
    """Return where a server will be asked, once its ports are settled."""
    program = PROGRAMS.get(str(deployment.engine))
    if program is not None:
        return Doors({"http": deployment.http_port}, "http", program.health_path, ("http",))
    ports = {"http": deployment.http_port, "grpc": deployment.grpc_port, "metrics": deployment.metrics_port}
    if deployment.openai_port is None:
        return Doors(ports, "http", "/v2/health/ready", ("metrics",))
    return Doors({**ports, "openai": deployment.openai_port}, "openai", "/health", ("metrics", "openai"))


def server(pods: Pods, job: Job, before: Sequence[Job], deployment: DeploymentConfig) -> list[Manifest]:
    """Return what keeps a server up.

    Args:
        pods: of the run.
        job: the server.
        before: jobs of the same run that make what it serves.
        deployment: keys of it.
    """
    doors, nodes = doors_of(deployment), job.plans[0].resources.nodes
    waiting = {"initContainers": [_wait(pods, job, before)]} if before else {}
    template = pods.template(job, (), _asked(doors, deployment.start_timeout_s), **waiting)
    workload = _several(pods, job, template, waiting, nodes) if nodes > 1 else _one(pods, template, deployment)
    selector = pods.names.labels("deploy") | (_LEADER if nodes > 1 else {})
    found = [workload, _service(pods, doors, selector)]
    return [*found, _monitor(pods, doors, selector)] if pods.given.pod_monitor else found


def _wait(pods: Pods, job: Job, before: Sequence[Job]) -> Manifest:
    """Return the container that ends once the stages before have made what this run's plans say."""
    plans = [f"{PLANS_PATH}/{file.name}" for each in before for file in each.plan_files]
    template = pods.template(job, (), {})["spec"]["containers"][0]
    kept = {name: template[name] for name in ("image", "workingDir", "volumeMounts")}
    return {"name": "stages-before", "command": [PYTHON, "-m", "launcher.run.after", *plans], **kept}


def _asked(doors: Doors, start_timeout_s: int) -> Manifest:
    """Return the ports and probes of the container that clients ask."""
    asked = {"httpGet": {"path": doors.health_path, "port": doors.health}, "timeoutSeconds": _PROBE_TIMEOUT_S}
    every = {"periodSeconds": _PROBE_PERIOD_S}
    return {
        "ports": [{"name": name, "containerPort": port} for name, port in doors.ports.items()],
        "startupProbe": {**asked, **every, "failureThreshold": -(-start_timeout_s // _PROBE_PERIOD_S) + 1},
        "readinessProbe": {**asked, **every, "failureThreshold": 2},
        "livenessProbe": {**asked, **every, "failureThreshold": _MISSES_TO_END},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_S)]}}},
    }


def _one(pods: Pods, template: Manifest, deployment: DeploymentConfig) -> Manifest:
    """Return a Deployment of one pod. A second one beside it would find its directory locked, hence ``Recreate``."""
    metadata = {"name": pods.names.server, "labels": {**pods.names.labels("deploy"), **queue_label(pods)}}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": pods.names.labels("deploy")},
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _several(pods: Pods, job: Job, leader: Manifest, waiting: Manifest, nodes: int) -> Manifest:
    """Return a LeaderWorkerSet: a pod a node, started again together; clients ask the first."""
    worker = pods.template(job, (), {}, **waiting)
    container = worker["spec"]["containers"][0]  # the first says how the stage ends
    container["command"] = [word for word in container["command"] if not word.startswith("--stages-file=")]
    group = {
        "size": nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": worker,
    }
    metadata = {"name": pods.names.server, "labels": {**pods.names.labels("deploy"), **queue_label(pods)}}
    spec = {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": group}
    api = "leaderworkerset.x-k8s.io/v1"
    return {"apiVersion": api, "kind": "LeaderWorkerSet", "metadata": metadata, "spec": spec}


def _service(pods: Pods, doors: Doors, selector: dict[str, str]) -> Manifest:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in doors.ports.items()]
    metadata = {"name": pods.names.run, "labels": pods.names.labels("deploy")}
    spec = {"selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _monitor(pods: Pods, doors: Doors, selector: dict[str, str]) -> Manifest:
    metadata = {"name": pods.names.run, "labels": pods.names.labels("deploy")}
    endpoints = [{"port": name, "path": "/metrics"} for name in doors.metrics]
    spec = {"selector": {"matchLabels": selector}, "podMetricsEndpoints": endpoints}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata, "spec": spec}
