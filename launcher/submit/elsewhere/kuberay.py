"""KubeRay: a RayJob, whose entrypoint runs on the head of a Ray cluster of its own (``ray.io/v1``, KubeRay 1.4).

The image has Ray. An entrypoint runs on one node, so there is no file of a job over several.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from launcher.clusters.kubernetes_names import literal
from launcher.submit.elsewhere.launcher import Launcher
from launcher.submit.elsewhere.script import Script
from launcher.submit.kubernetes.directory import as_text


def _variables(script: Script) -> list[dict[str, Any]]:
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    plain = [{"name": name, "value": literal(value)} for name, value in script.variables.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": place.partition("/")[0], "key": place.partition("/")[2]}}}
        for name, place in script.secrets.items()
    ]
    return [address, *plain, *secret]


class KubeRay(Launcher):
    """Objects of KubeRay."""

    name = "kuberay"
    suffix = ".yaml"

    def lacks(self, script: Script) -> str:
        """Return why it cannot run such a job."""
        if script.nodes > 1:
            return f"its entrypoint runs on one node, not on {script.nodes}"
        if not script.image:
            return "a pod has an image, which is container"
        for path in (script.job.stages_file, *(plan.output for plan in script.job.plans)):
            if not any(path.is_relative_to(place) for place in script.volumes.values()):
                return f"its pod would not see {path}; kubernetes.volumes={{CLAIM: {path.parent}}} names who has it"
        for name, place in script.secrets.items():
            if not place:
                return f"its pod inherits nothing of this environment; kubernetes.secrets={{{name}: SECRET/KEY}}"
        return ""

    def render(self, script: Script, file: Path) -> str:
        """Return the object."""
        sizes = {"cpu": str(script.cpus), **({"memory": script.memory} if script.memory else {})}
        devices = {script.given.gpu_resource: script.gpus} if script.gpus else {}
        mounts = [{"name": f"claim-{number}", "mountPath": path} for number, path in enumerate(script.volumes.values())]
        volumes: list[dict[str, Any]] = [
            {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(script.volumes)
        ]
        memory = {"medium": "Memory", "sizeLimit": script.given.shared_memory}
        head = {
            "name": "ray-head",
            "image": script.image,
            "env": _variables(script),
            "resources": {"requests": {**sizes, **devices}, "limits": {**sizes, **devices}},
            "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
        }
        pod = {"containers": [head], "volumes": [*volumes, {"name": "shared-memory", "emptyDir": memory}]}
        spec = {
            "entrypoint": shlex.join(["bash", "-c", script.shell("")]),
            **({"entrypointNumGpus": script.gpus} if script.gpus else {}),
            **({"activeDeadlineSeconds": script.limit_s} if script.limit_s else {}),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {"headGroupSpec": {"rayStartParams": {}, "template": {"spec": pod}}},
        }
        return as_text({"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": script.name}, "spec": spec})

    def start(self, script: Script, file: Path) -> list[str]:
        """Return the command that starts it."""
        return ["kubectl", "create", f"--filename={file}"]
