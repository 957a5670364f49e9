"""Stages that end: a Job, or a JobSet of several in their order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from launcher.submit import Job
from launcher.submit.kubernetes.pods import Manifest, Pods, deadline

_JOB_SETS = "jobset.x-k8s.io/v1alpha2"


def stages(pods: Pods, jobs: Sequence[Job], force: Collection[str]) -> list[Manifest]:
    """Return what runs these jobs, each after the success of the one before it."""
    if not jobs:
        return []
    if len(jobs) == 1:
        stage = jobs[0].plans[0].stage
        metadata = {"name": pods.names.job(stage), "labels": {**pods.names.labels(stage), **queue_label(pods)}}
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job(pods, jobs[0], force)}]
    replicated = []
    for before, job in zip((None, *jobs), jobs, strict=False):
        after = [{"name": before.plans[0].stage, "status": "Complete"}] if before else []
        template = {"metadata": {"labels": pods.names.labels(job.plans[0].stage)}, "spec": _job(pods, job, force)}
        entry: Manifest = {"name": job.plans[0].stage, "replicas": 1, "template": template}
        replicated.append({**entry, **({"dependsOn": after} if after else {})})
    metadata = {"name": pods.names.job_set, "labels": {**pods.names.selector, **queue_label(pods)}}
    # No pod asks another by name here, so none needs a Service.
    spec = {"network": {"enableDNSHostnames": False}, "replicatedJobs": replicated}
    return [{"apiVersion": _JOB_SETS, "kind": "JobSet", "metadata": metadata, "spec": spec}]


def queue_label(pods: Pods) -> dict[str, str]:
    """Return the label by which Kueue finds what it admits; empty where nothing is queued."""
    return {"kueue.x-k8s.io/queue-name": pods.given.queue} if pods.given.queue else {}


def _job(pods: Pods, job: Job, force: Collection[str]) -> Manifest:
    """Return the specification of a Job of one pod.

    A stage that failed fails again, so it is not repeated; one whose node was taken away goes on in a new pod. A JobSet
    would count the pods, and one pod of several is what a server takes an index for.
    """
    lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    template = pods.template(job, force, {}, restartPolicy="Never", **deadline(job))
    return {
        "completionMode": "NonIndexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [lost]},
        "template": template,
    }
