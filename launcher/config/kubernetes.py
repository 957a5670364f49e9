"""Keys of ``kubernetes``: what the objects of ``cluster_type=kubernetes`` say beside the plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KubernetesConfig:
    """Names of what is in the cluster already, and sizes; see docs/kubernetes.md."""

    directory: str | None = None  # that gets the manifests; None: kubernetes, below the run's results
    name: str | None = None  # of the run's objects; None: made of model_train_name and a digest of the results' path
    namespace: str | None = None  # None: kubectl's own
    volumes: dict[str, Any] = field(default_factory=dict)  # persistent volume claim: path at which pods have it
    secrets: dict[str, Any] = field(default_factory=dict)  # VARIABLE: secret/key
    secret_files: dict[str, Any] = field(default_factory=dict)  # secret: path at which pods have its keys as files
    queue: str | None = None  # Kueue's local queue; None: pods are not queued
    gpu_resource: str = "nvidia.com/gpu"
    gpu_node_selector: dict[str, Any] = field(default_factory=dict)  # label: value, of nodes for pods with GPUs
    memory: dict[str, Any] = field(default_factory=dict)  # stage: request and limit of its pod, such as 512Mi
    shared_memory: str = "8Gi"  # of /dev/shm in pods with a server
    router: bool = False  # HAProxy before the pods of several servers; without it a Service spreads connections
    pod_monitor: bool = True  # of a server that stays, for the Prometheus operator
