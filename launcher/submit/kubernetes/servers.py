"""A server that stays: a Deployment, or a LeaderWorkerSet over several nodes, with its Service and its PodMonitor."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.clusters.kubernetes_names import PLANS_PATH
from launcher.config.deployment import DeploymentConfig
from launcher.plan.plan import PYTHON
from launcher.submit import Job
from launcher.submit.kubernetes.doors import Doors, doors_of
from launcher.submit.kubernetes.pods import DRAIN_S, ROLLING, Manifest, Pods
from launcher.submit.kubernetes.router import router
from launcher.submit.kubernetes.stages import queue_label

_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
"""Label of the pod of a LeaderWorkerSet that clients ask."""

_PROBE_PERIOD_S, _PROBE_TIMEOUT_S = 10, 5
_MISSES_TO_END = 6  # a server that has not answered for a minute; its own supervisor notices most ends before


def server(
    pods: Pods, job: Job, before: Sequence[Job], deployment: DeploymentConfig, image: str | None
) -> list[Manifest]:
    """Return what keeps a server up, or several of them.

    Args:
        pods: of the run.
        job: the server.
        before: jobs of the same run that make what it serves.
        deployment: keys of it.
        image: of a router.
    """
    doors, nodes = doors_of(deployment), job.plans[0].resources.nodes
    waiting = {"initContainers": [_wait(pods, job, before)]} if before else {}
    template = pods.template(job, (), _asked(doors, deployment.start_timeout_s), **waiting)
    workload = (
        _several(pods, job, template, waiting, nodes) if nodes > 1 else _one(pods, template, job.plans[0].replicas)
    )
    selector = pods.names.labels("deploy") | (_LEADER if nodes > 1 else {})
    if pods.given.router:
        routed, headless = doors.routed(), {"clusterIP": "None"}
        found = [workload, _service(pods, pods.names.pods, doors, selector, headless)]
        found += [
            router(pods, image, routed, deployment),
            _service(pods, pods.names.run, routed, pods.names.labels("router")),
        ]
    else:
        found = [workload, _service(pods, pods.names.run, doors, selector)]
    return [*found, _monitor(pods, doors, selector)] if pods.given.pod_monitor else found


def _wait(pods: Pods, job: Job, before: Sequence[Job]) -> Manifest:
    """Return the container that ends once the stages before have made what this run's plans say."""
    plans = [f"{PLANS_PATH}/{file.name}" for each in before for file in each.plan_files]
    template = pods.template(job, (), {})["spec"]["containers"][0]
    kept = {name: template[name] for name in ("image", "workingDir")}
    kept["volumeMounts"] = [mount for mount in template["volumeMounts"] if "subPathExpr" not in mount]
    return {"name": "stages-before", "command": [PYTHON, "-m", "launcher.run.after", *plans], **kept}


def _asked(doors: Doors, start_timeout_s: int) -> Manifest:
    """Return the ports and probes of the container that clients ask."""
    asked = {"httpGet": {"path": doors.health_path, "port": doors.health}, "timeoutSeconds": _PROBE_TIMEOUT_S}
    every = {"periodSeconds": _PROBE_PERIOD_S}
    return {
        "ports": doors.as_ports(),
        "startupProbe": {**asked, **every, "failureThreshold": -(-start_timeout_s // _PROBE_PERIOD_S) + 1},
        "readinessProbe": {**asked, **every, "failureThreshold": 2},
        "livenessProbe": {**asked, **every, "failureThreshold": _MISSES_TO_END},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_S)]}}},
    }


def _one(pods: Pods, template: Manifest, replicas: int) -> Manifest:
    """Return a Deployment. A second pod beside a single one would find its directory locked, hence ``Recreate``."""
    metadata = {"name": pods.names.server, "labels": {**pods.names.labels("deploy"), **queue_label(pods)}}
    spec = {
        "replicas": replicas,
        "strategy": ROLLING if replicas > 1 else {"type": "Recreate"},
        "selector": {"matchLabels": pods.names.labels("deploy")},
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _several(pods: Pods, job: Job, leader: Manifest, waiting: Manifest, nodes: int) -> Manifest:
    """Return a LeaderWorkerSet: of each server a pod a node, started again together; clients ask the first."""
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
    replicas = job.plans[0].replicas
    rollout = {"type": ROLLING["type"], "rollingUpdateConfiguration": ROLLING["rollingUpdate"]}
    several = {"rolloutStrategy": rollout} if replicas > 1 else {}
    spec = {"replicas": replicas, "startupPolicy": "LeaderCreated", **several, "leaderWorkerTemplate": group}
    api = "leaderworkerset.x-k8s.io/v1"
    return {"apiVersion": api, "kind": "LeaderWorkerSet", "metadata": metadata, "spec": spec}


def _service(
    pods: Pods, name: str, doors: Doors, selector: dict[str, str], more: dict[str, str] | None = None
) -> Manifest:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in doors.ports.items()]
    metadata = {"name": name, "labels": pods.names.labels(selector["app.kubernetes.io/component"])}
    spec = {**(more or {}), "selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _monitor(pods: Pods, doors: Doors, selector: dict[str, str]) -> Manifest:
    metadata = {"name": pods.names.run, "labels": pods.names.labels("deploy")}
    page = {"port": doors.metrics, "path": "/metrics"}
    spec = {"selector": {"matchLabels": selector}, "podMetricsEndpoints": [page]}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata, "spec": spec}
