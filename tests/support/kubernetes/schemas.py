"""Schemas of the custom resources that are written: the fields that are used, in our words, and no other.

From the types of JobSet 0.9 (jobset.x-k8s.io/v1alpha2), LeaderWorkerSet 0.7 (v1), the Prometheus operator's PodMonitor
(v1) and kustomize (v1beta1). What their pods and jobs hold is checked against Kubernetes' own schemas.
"""

from __future__ import annotations

from typing import Any

_LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_TEMPLATE = {"type": "object", "required": ["spec"]}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    """An object with these properties alone."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _resource(api: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = _object(["name", "labels"], name=_NAME, labels=_LABELS)
    head = {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": metadata}
    return _object(["apiVersion", "kind", "metadata", "spec"], **head, spec=spec)


_DEPENDENCY = _object(["name", "status"], name=_NAME, status={"enum": ["Ready", "Complete"]})
_REPLICATED = _object(
    ["name", "template"],
    name=_NAME,
    replicas={"type": "integer", "minimum": 0},
    template=_TEMPLATE,
    dependsOn={"type": "array", "items": _DEPENDENCY, "maxItems": 1},
)
_NETWORK = _object([], enableDNSHostnames={"type": "boolean"})
_GROUP = _object(
    ["workerTemplate"],
    size={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
    leaderTemplate=_TEMPLATE,
    workerTemplate=_TEMPLATE,
)
_ROLLING = _object(
    [],
    partition={"type": "integer", "minimum": 0},
    maxUnavailable={"type": ["integer", "string"]},
    maxSurge={"type": ["integer", "string"]},
)
_ROLLOUT = _object(["type"], type={"enum": ["RollingUpdate"]}, rollingUpdateConfiguration=_ROLLING)
_ENDPOINT = _object(["port"], port={"type": "string"}, path={"type": "string", "pattern": "^/"})

SCHEMAS = {
    "JobSet": _resource(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        _object(
            ["replicatedJobs"], network=_NETWORK, replicatedJobs={"type": "array", "items": _REPLICATED, "minItems": 1}
        ),
    ),
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        _object(
            ["leaderWorkerTemplate"],
            replicas={"type": "integer", "minimum": 0},
            rolloutStrategy=_ROLLOUT,
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            leaderWorkerTemplate=_GROUP,
        ),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _object(
            ["selector", "podMetricsEndpoints"],
            selector=_object([], matchLabels=_LABELS),
            podMetricsEndpoints={"type": "array", "items": _ENDPOINT, "minItems": 1},
        ),
    ),
    "Kustomization": _object(
        ["apiVersion", "kind", "resources"],
        apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
        kind={"const": "Kustomization"},
        namespace=_NAME,
        resources={"type": "array", "items": {"type": "string"}, "minItems": 1},
        configMapGenerator={
            "type": "array",
            "items": _object(["name", "files"], name=_NAME, files={"type": "array", "items": {"type": "string"}}),
        },
        generatorOptions=_object([], disableNameSuffixHash={"type": "boolean"}, labels=_LABELS),
    ),
}
"""By kind."""
