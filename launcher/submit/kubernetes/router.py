"""HAProxy before the pods of several servers, which it finds by the name of a Service without an address of its own."""

from __future__ import annotations

import hashlib

from deployment.replicas.haproxy import CONFIG_FILE, ROUTERS_HEALTH, HAProxy, render_for_names
from deployment.replicas.router import Front
from launcher.clusters.kubernetes_names import ROUTER_PATH
from launcher.config.deployment import DeploymentConfig
from launcher.plan.programs import words_of
from launcher.submit.kubernetes.doors import Doors
from launcher.submit.kubernetes.pods import DRAIN_S, ROLLING, Manifest, Pods, field_variable

_DRAINING = f"sleep {DRAIN_S}; kill -USR1 1; while kill -0 1; do sleep 1; done"
"""HAProxy takes no new connections, and ends with its last one."""
_REST_S = 15


def configuration(pods: Pods, doors: Doors, deployment: DeploymentConfig) -> str:
    """Return the configuration; address and namespace are known in the pod."""
    front = Front("${POD_IP}", doors.ports, 0, 0, deployment.replicas, deployment.affinity_header)
    name = f"{pods.names.pods}.${{POD_NAMESPACE}}.svc.cluster.local"
    return render_for_names(front, name, (doors.health, doors.health_path))


def router(pods: Pods, image: str | None, doors: Doors, deployment: DeploymentConfig) -> Manifest:
    """Return the Deployment.

    It has one pod: two could find the servers in other slots, and then would not agree on whose sessions a server has.
    """
    names, labels = pods.names, pods.names.labels("router")
    program = words_of(deployment.router_command, "deployment.router_command", "haproxy") or HAProxy.own_command
    often = {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3}
    asked = {"httpGet": {"path": ROUTERS_HEALTH, "port": doors.health}, **often}
    container = {
        "name": "router",
        "image": image,
        "command": [*program, "-db", "-f", f"{ROUTER_PATH}/{CONFIG_FILE}"],
        "env": [field_variable("POD_IP", "status.podIP"), field_variable("POD_NAMESPACE", "metadata.namespace")],
        "ports": doors.as_ports(),
        "resources": {"requests": {"cpu": 1}, "limits": {}},
        "volumeMounts": [{"name": "configuration", "mountPath": ROUTER_PATH, "readOnly": True}],
        **{probe: asked for probe in ("startupProbe", "readinessProbe", "livenessProbe")},
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", _DRAINING]}}},
    }
    pod = {
        "terminationGracePeriodSeconds": DRAIN_S + max(0, int(deployment.exit_timeout_s)) + _REST_S,
        "containers": [container],
        "volumes": [{"name": "configuration", "configMap": {"name": names.router}}],
    }
    digest = hashlib.sha256(configuration(pods, doors, deployment).encode()).hexdigest()[:16]
    spec = {
        "replicas": 1,
        "strategy": ROLLING,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels, "annotations": {"slipway/plans": digest}}, "spec": pod},
    }
    metadata = {"name": names.router, "labels": labels}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
