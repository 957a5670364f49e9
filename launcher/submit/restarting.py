"""``python -m launcher restart``: every replica of a deployment is started again, without a lost request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from deployment.life.restart_request import RestartRequest
from handover.endpoint import FILE_NAME, REPLICAS, Endpoint, deployment_of
from handover.errors import ArtefactError, ConfigError, ServerError
from handover.progress import human_time
from launcher.config.choices import Stage
from launcher.submit.jobs import STAGES_FILE, newest_run, read_jobs
from launcher.submit.kubernetes.kubectl import rollout_of

_POLL_S = 0.5
_SAY_EVERY_S = 30.0


def restart(results: Path) -> Iterator[str]:
    """Restart the replicas of the newest run's deployment, one after another; wait until all serve again.

    Raises:
        ArtefactError: nothing of these results is deployed.
        ConfigError: it is one server, or its servers are pods.
        ServerError: a replica did not come back, or the deployment ended.
    """
    file = _deployed(results)
    name, endpoint, request = deployment_of(file), Endpoint.read(file), RestartRequest(file)
    if REPLICAS not in endpoint.settings:
        raise ConfigError(
            f"{file} is that of one server, which nothing could stand in for while it is restarted",
            "stop it and start it again, or deploy with deployment.replicas=2 or more",
        )
    request.make()
    started = said = time.monotonic()
    yield f"  restarting {endpoint.settings[REPLICAS]} replicas, one after another"
    while request.is_made():
        if deployment_of(file) != name:
            request.forget()
            raise ServerError(f"the deployment of {file} ended")
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            yield f"  waiting    for {human_time(said - started)}"
        time.sleep(_POLL_S)
    if failure := request.failure():
        request.forget()
        raise ServerError(failure)
    yield f"  restarted  in {human_time(time.monotonic() - started)}"


def _deployed(results: Path) -> Path:
    """Find the endpoint file of the newest run.

    Raises:
        ArtefactError: there is none.
        ConfigError: its servers are pods.
    """
    logs = newest_run(results)[-1]
    entries = json.loads((logs / STAGES_FILE).read_text())
    outputs = [entry.get("output", "") for entry in entries if entry["stage"] == Stage.deploy]
    files = [logs.parent / Path(output).name / FILE_NAME for output in outputs if output]
    files += [Path(output) / FILE_NAME for output in outputs if output]
    for file in files:
        if file.is_file():
            return file
    for job in read_jobs(logs):
        if Stage.deploy in job.stages and (command := rollout_of(job.job_id)):
            raise ConfigError(f"the servers of {logs.parent} are pods, which Kubernetes restarts", command)
    raise ArtefactError(f"nothing of {logs.parent} is deployed", "start it: main.py stages=[deploy]")
