"""What Kubernetes says of the objects of a run, asked through kubectl. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from handover.clients import NOT_FOUND, Answer, ask
from handover.errors import SlipwayError
from handover.progress import human_time
from launcher.submit.schedulers import TAIL_LINES, JobState, indented

_QUESTION_S, _CANCEL_S = 20.0, 60.0
_MEND = "check kubectl config current-context, and that it may read the namespace"


@dataclass(frozen=True)
class ObjectState:
    """What Kubernetes says of a job or a server.

    Attributes:
        state: PENDING, RUNNING, ...; ABSENT where there is no such object; unknown where kubectl does not answer.
        reason: why it waits, or why it failed.
        elapsed: since it was started.
        has_ended: whether it is known to be over; what is absent was not started, or is deleted.
    """

    state: str
    reason: str = ""
    elapsed: str = ""
    has_ended: bool = False
    is_ending: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, (self.state, f"({self.reason})" if self.reason else "", self.elapsed)))


class _Place(NamedTuple):
    """Where an object is: its namespace, empty for kubectl's own, what it is, and which of a JobSet's jobs is meant."""

    namespace: str
    kind: str
    name: str
    part: str = ""

    @classmethod
    def of(cls, job_id: str) -> _Place:
        return cls(*job_id.split("/"))

    @property
    def scope(self) -> tuple[str, ...]:
        return (f"--namespace={self.namespace}",) if self.namespace else ()

    @property
    def owner(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def runner(self) -> str:
        """The object that has the pods: of a JobSet's jobs it makes one each."""
        return f"job/{self.name}-{self.part}-0" if self.part else self.owner


def job_id(namespace: str | None, kind: str, name: str, part: str = "") -> str:
    """Return the id of a job: of one in a JobSet with its name there."""
    return "/".join([namespace or "", kind, name, *([part] if part else [])])


def rollout_of(job_id: str) -> str:
    """Return what restarts the pods of a server that stays, one after another; empty where it is none, or on Slurm."""
    if job_id.count("/") < 2:
        return ""
    place = _Place.of(job_id)
    if place.kind == "leaderworkerset":
        return f"delete the pods of {place.owner} one group after another"
    return " ".join(("kubectl rollout restart", place.owner, *place.scope)) if place.kind == "deployment" else ""


class Kubectl:
    """kubectl as a scheduler; see ``Scheduler``."""

    def absence(self) -> str:
        """Return why nothing can be asked here."""
        found = ask("kubectl", "version", "--client", timeout_s=_QUESTION_S)
        return "there is no kubectl here" if found.status == NOT_FOUND else ""

    def states(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Ask for each object, those of a namespace at once."""
        places = {each: _Place.of(each) for each in job_ids}
        found: dict[str, JobState] = {}
        for namespace in {place.namespace for place in places.values()}:
            ours = {each: place for each, place in places.items() if place.namespace == namespace}
            objects = _get(ours.values())
            found |= {each: _state(place, objects) for each, place in ours.items()}
        return {each: found[each] for each in job_ids}

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Delete what has the pods; a JobSet goes with all of its jobs.

        Raises:
            SlipwayError: kubectl is not here, or the cluster refuses or does not answer.
        """
        for place in {_Place.of(each)._replace(part="") for each in job_ids}:
            words = ("kubectl", "delete", place.owner, *place.scope, "--ignore-not-found", "--wait=false")
            answer = ask(*words, timeout_s=_CANCEL_S)
            if answer.status:
                raise SlipwayError(f"kubectl delete {place.owner}: {_said(answer)}", _MEND)

    def reason(self, state: JobState, errors: str | None, file: Path) -> str:
        """Nothing more: the state says itself why an object failed."""
        return ""

    def output(self, job_id: str, files: Sequence[Path]) -> list[str]:
        """Return the last lines of the pods' runners."""
        place = _Place.of(job_id)
        words = ("kubectl", "logs", place.runner, *place.scope, f"--tail={TAIL_LINES}", "--container=runner")
        answer = ask(*words, timeout_s=_QUESTION_S)
        printed = _said(answer) if answer.status else answer.printed
        return [f"==> kubectl logs {place.runner}", *indented(printed)]


def _get(places: Iterable[_Place]) -> dict[str, dict[str, Any]] | str:
    """Return the objects that are there, by kind and name; what kubectl says where the cluster does not answer.

    A kind that the cluster does not know has none: without JobSet's controller there is no JobSet.
    """
    found: dict[str, dict[str, Any]] = {}
    places = list(places)
    wanted = list(dict.fromkeys(each for place in places for each in (place.owner, place.runner)))
    for kind in dict.fromkeys(each.partition("/")[0] for each in wanted):
        named = [each for each in wanted if each.startswith(f"{kind}/")]
        words = ("kubectl", "get", *named, *places[0].scope, "--ignore-not-found", "--output=json")
        answer = ask(*words, timeout_s=_QUESTION_S)
        if answer.status and "doesn't have a resource type" not in answer.said:
            return _said(answer)
        if answer.status or not answer.printed.strip():
            continue
        content = json.loads(answer.printed)
        for each in content["items"] if content["kind"] == "List" else [content]:
            found[f"{each['kind'].lower()}/{each['metadata']['name']}"] = each
    return found


def _state(place: _Place, objects: dict[str, dict[str, Any]] | str) -> ObjectState:
    if isinstance(objects, str):
        return ObjectState("unknown", objects)
    owner, runner = objects.get(place.owner), objects.get(place.runner)
    if owner is None:
        return ObjectState("ABSENT", "not applied, or deleted", has_ended=True)
    if owner["metadata"].get("deletionTimestamp"):
        return ObjectState("ENDING", is_ending=True)
    if runner is None:
        failed = _condition(owner, "Failed")
        return ObjectState("NOT STARTED", failed, has_ended=True) if failed else ObjectState("PENDING", "Dependency")
    return _of_job(runner) if runner["kind"] == "Job" else _of_server(runner)


def _of_job(found: dict[str, Any]) -> ObjectState:
    status = found.get("status", {})
    elapsed = _elapsed(status)
    if _condition(found, "Complete"):
        return ObjectState("COMPLETED", "", elapsed, has_ended=True)
    if failed := _condition(found, "Failed"):
        return ObjectState("FAILED", failed, elapsed, has_ended=True)
    if _condition(found, "Suspended"):
        return ObjectState("PENDING", "Queued")
    return ObjectState("RUNNING", "", elapsed) if status.get("ready") else ObjectState("PENDING", "no pod is ready")


def _of_server(found: dict[str, Any]) -> ObjectState:
    status = found.get("status", {})
    ready = status.get("readyReplicas", 0)
    return ObjectState("RUNNING") if ready else ObjectState("PENDING", "no pod is ready")


def _condition(found: dict[str, Any], kind: str) -> str:
    """Return the reason of a condition that holds; empty where it does not."""
    conditions = found.get("status", {}).get("conditions", [])
    held = (each for each in conditions if each["type"] == kind and each["status"] == "True")
    return next((each.get("reason") or kind for each in held), "")


def _elapsed(status: dict[str, Any]) -> str:
    times = [status.get("startTime"), status.get("completionTime")]
    began, ended = (datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None for text in times)
    if began is None:
        return ""
    return human_time(((ended or datetime.now(timezone.utc)) - began).total_seconds())


def _said(answer: Answer) -> str:
    return answer.said.strip().split("\n")[-1] or f"exit status {answer.status}"
