"""A stand-in for the controllers of Job, JobSet, Deployment and LeaderWorkerSet, over the pods of ``kubelet.py``.

They make the pods that an object asks for, with the variables that the real ones give them, and keep the rules that
matter here: a JobSet's order by ``dependsOn``, a Job's single attempt (``backoffLimit: 0``), and of a LeaderWorkerSet
that its group is made again as a whole when one of its containers ends. The name of a Service without an address has
those of its pods that are ready. Scheduling, queues and other Services are not there.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.kubernetes.kubelet import NAMESPACE, Machine, Pod
from support.kubernetes.names import Names
from support.kubernetes.objects import Object, read_directory

_POLL_S = 0.05
_NAME_SERVER = "127.0.2.53"
_GROUP = "leaderworkerset.sigs.k8s.io/group-index"


class Cluster:
    """Objects of a directory of manifests; ``with`` ends whatever runs.

    Args:
        manifests: directory that was rendered.
        work: for what pods print and are given.
        secrets: values by name and key.
    """

    def __init__(self, manifests: Path, work: Path, secrets: Mapping[tuple[str, str], str] | None = None) -> None:
        self.objects, maps = read_directory(manifests)
        work.mkdir(parents=True, exist_ok=True)
        headless = [each["spec"]["ports"] for each in self.objects if each["spec"].get("clusterIP") == "None"]
        named = {each["name"]: each["port"] for ports in headless for each in ports}
        self._names = Names(self._addresses_of, named, _NAME_SERVER, 53) if headless else None
        self.machine = Machine(work, maps, secrets or {}, _NAME_SERVER if headless else "")
        self.pods: list[Pod] = []
        self.groups = 0  # of LeaderWorkerSets, made so far
        self._addresses = (f"127.0.1.{number}" for number in itertools.count(1))
        self._is_over = threading.Event()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for ending in [threading.Thread(target=pod.delete) for pod in self.pods if pod.thread.is_alive()]:
            ending.start()
        for pod in self.pods:
            pod.thread.join()
        if self._names is not None:
            self._names.close()

    def _addresses_of(self, name: str) -> list[str] | None:
        """Resolve the name of a Service."""
        service, *domain = name.split(".")
        found = [each for each in self.objects if each["kind"] == "Service" and each["metadata"]["name"] == service]
        if domain != [NAMESPACE, "svc", "cluster", "local"] or not found:
            return None
        selector = found[0]["spec"]["selector"].items()
        return [pod.address for pod in self.pods if pod.is_listed and selector <= pod.labels.items()]

    def found(self, kind: str, component: str = "deploy") -> Object:
        """The object of a kind; of several the one with that label."""
        (found,) = (
            each
            for each in self.objects
            if each["kind"] == kind
            and each["metadata"]["labels"].get("app.kubernetes.io/component", component) == component
        )
        return found

    def run_job(self, name: str, spec: Mapping[str, Any]) -> int:
        """Run a Job to its end; its pod's status."""
        assert spec["backoffLimit"] == 0 and spec["template"]["spec"]["restartPolicy"] == "Never"
        pod = self._pod(f"{name}-0", spec["template"])
        pod.thread.join()
        assert pod.status is not None
        return pod.status

    def run_job_set(self) -> dict[str, int]:
        """Run the JobSet; the status of each of its jobs, without those whose turn did not come."""
        found, ended = self.found("JobSet"), dict[str, int]()
        for entry in found["spec"]["replicatedJobs"]:
            assert entry["replicas"] == 1
            if all(
                each["status"] == "Complete" and ended.get(each["name"]) == 0 for each in entry.get("dependsOn", ())
            ):
                ended[entry["name"]] = self.run_job(
                    f"{found['metadata']['name']}-{entry['name']}", entry["template"]["spec"]
                )
        return ended

    def start_deployment(self, component: str = "deploy") -> list[Pod]:
        """Start the pods of a Deployment."""
        found = self.found("Deployment", component)
        return [self._of_deployment(found, number) for number in range(found["spec"]["replicas"])]

    def roll(self, pods: Sequence[Pod]) -> list[Pod]:
        """Replace the pods of the Deployment as ``kubectl rollout restart`` does, by its strategy; the new ones."""
        found = self.found("Deployment")
        assert found["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        made = []
        for old in pods:
            made.append(self._of_deployment(found, len(self.pods)))
            while not made[-1].is_ready and not self._is_over.is_set():
                time.sleep(_POLL_S)
            old.delete()
        return made

    def _of_deployment(self, found: Object, number: int) -> Pod:
        return self._pod(f"{found['metadata']['name']}-{number}", found["spec"]["template"])

    def start_group(self, group_index: int = 0) -> list[Pod]:
        """Start a group of the LeaderWorkerSet once; its pods, the leader first."""
        found, self.groups = self.found("LeaderWorkerSet"), self.groups + 1
        group = found["spec"]["leaderWorkerTemplate"]
        name, address, labels = found["metadata"]["name"], next(self._addresses), {_GROUP: str(group_index)}
        told = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(group["size"])}
        pods = []
        for index in range(group["size"]):
            template = group["workerTemplate"] if index or "leaderTemplate" not in group else group["leaderTemplate"]
            own = address if index == 0 else next(self._addresses)
            told = {**told, "LWS_WORKER_INDEX": str(index)}
            pods.append(self._pod(f"{name}-{group_index}-{index}.{self.groups}", template, own, told, labels))
        return pods

    def keep_group(self) -> Iterator[list[Pod]]:
        """Make the group, and as a whole again each time a container of it has ended; each group as it is made."""
        policy = self.found("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["restartPolicy"]
        assert policy == "RecreateGroupOnPodRestart"
        while not self._is_over.is_set():
            pods = self.start_group()
            yield pods
            while not any(pod.restarts for pod in pods) and not self._is_over.is_set():
                time.sleep(_POLL_S)
            for ending in [threading.Thread(target=pod.delete) for pod in pods]:
                ending.start()
            for pod in pods:
                pod.thread.join()

    def _pod(
        self,
        name: str,
        template: Mapping[str, Any],
        address: str = "",
        more: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Pod:
        pod = Pod(name, template, address or next(self._addresses), self.machine, more, labels)
        self.pods.append(pod)
        return pod
