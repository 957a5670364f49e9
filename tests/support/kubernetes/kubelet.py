"""A stand-in for the kubelet: it runs what a pod says as processes of this machine.

What is real: the commands, in order, in process and mount namespaces of their own, so that a container's program is
process 1 and all that it leaves ends with it; its variables and no others but the image's; a /dev/shm of its own;
probes; a pod's time limit; its end, by the preStop hook, SIGTERM, the time of grace and SIGKILL; restarts.
What is not: images (the machine's own interpreter and this checkout stand for one), limits of memory and processors,
devices, and volumes at other paths than this machine's: a claim is the directory of the same path, and the words of a
command that lead into a ConfigMap lead to its files elsewhere. A pod's address is one of the loopback network.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
NAMESPACE = "default"
_POLL_S = 0.05
_BACK_OFF_S = 0.2  # ten seconds in Kubernetes


@dataclass(frozen=True)
class Machine:
    """What pods find on the node.

    Attributes:
        directory: for ConfigMaps and what containers print.
        maps: data of the ConfigMaps.
        secrets: values by name and key.
        name_server: address of the cluster's; empty: there is none.
    """

    directory: Path
    maps: Mapping[str, Mapping[str, str]]
    secrets: Mapping[tuple[str, str], str] = field(default_factory=dict)
    name_server: str = ""

    def map_directory(self, name: str) -> Path:
        """Files of a ConfigMap."""
        directory = self.directory / "maps" / name
        for file, text in self.maps[name].items():
            directory.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text(text)
        return directory

    @property
    def image(self) -> dict[str, str]:
        """Variables of every image."""
        path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/sbin", "/usr/bin", "/bin"))
        given = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "OMP_NUM_THREADS") if name in os.environ}
        return {"PATH": path, "HOME": str(self.directory), "TOKENIZERS_PARALLELISM": "false", **given}


class Pod:
    """A pod, which runs in a thread until it ends or is ended.

    Args:
        name: of the pod.
        template: of it.
        address: of the pod.
        machine: where it runs.
        more: variables that a controller gives its containers.
        labels: that it adds.

    Attributes:
        is_ready: its readiness probe is answered.
        restarts: of its container.
        status: exit status of its container, or of the init container that failed; None while it runs.
        reason: why it was ended; empty: it ended by itself.
    """

    def __init__(
        self,
        name: str,
        template: Mapping[str, Any],
        address: str,
        machine: Machine,
        more: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.spec, self.address, self.machine, self.more = (
            name,
            template["spec"],
            address,
            machine,
            more or {},
        )
        self.labels = {**template["metadata"]["labels"], **(labels or {})}
        self.is_ready, self.restarts, self.status, self.reason = False, 0, None, ""
        self.ended_hard = False
        self._is_ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def output(self) -> str:
        """All that its containers printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def is_listed(self) -> bool:
        """Whether Services send it requests: not from the moment at which its end is decided."""
        return self.is_ready and not self._is_ending.is_set()

    def delete(self) -> None:
        """End it in good order, and wait until it is over."""
        self._end("deleted")
        self.thread.join()

    def kill(self) -> None:
        """Kill the program of its container, as a lack of memory does."""
        os.kill(self._first(), signal.SIGKILL)

    @property
    def _log(self) -> Path:
        return self.machine.directory / f"{self.name}.log"

    def _run(self) -> None:
        for container in self.spec.get("initContainers", ()):
            status = self._run_container(container)
            if status:
                self.status = status
                return
        (container,) = self.spec["containers"]
        started = time.monotonic()
        while not self._is_ending.is_set():
            status = self._run_container(container, started)
            if self.spec.get("restartPolicy", "Always") == "Never" or self._is_ending.is_set():
                self.status = status
                return
            self.restarts += 1
            time.sleep(_BACK_OFF_S)
        self.status = -signal.SIGTERM

    def _run_container(self, container: Mapping[str, Any], started: float | None = None) -> int:
        variables = self._variables(container)
        mounting = "".join((*self._own_mounts(container, variables), _OWN_MEMORY))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_NAMESPACES, "sh", "-c", mounting, "sh", *self._words(container["command"], container)],
                cwd=container.get("workingDir", "/"), env=variables,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        probes = _Probes(container, self.address)
        limit_s = self.spec.get("activeDeadlineSeconds")
        while (status := self._process.poll()) is None:
            time.sleep(_POLL_S)
            self.is_ready = probes.ask()
            if self._is_ending.is_set():
                self._terminate(container)
            elif probes.failed:
                self.reason = f"{probes.failed} failed"
                self._terminate(container)
            elif started is not None and limit_s is not None and time.monotonic() - started > limit_s:
                self._end("DeadlineExceeded")
        self.is_ready = False
        return status

    def _terminate(self, container: Mapping[str, Any]) -> None:
        """End the container as the kubelet does: all of it within the pod's time of grace."""
        assert self._process
        deadline = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook:  # in the container: its process 1 is not this machine's
            inside = ("nsenter", f"--target={self._first()}", "--mount", "--pid", "--")
            ended = -signal.SIGKILL, 128 + signal.SIGKILL  # with the container, whose program it had told to end
            status = subprocess.run([*inside, *hook], timeout=max(0.0, deadline - time.monotonic()), check=False)
            assert status.returncode in (0, *ended), f"{self.name}: {hook} ended by {status.returncode}"
        if self._process.poll() is None:
            os.kill(self._first(), signal.SIGTERM)
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.ended_hard = True
            self._process.kill()  # --kill-child
            self._process.wait()

    def _end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._is_ending.set()

    def _first(self) -> int:
        """Process 1 of the container, by its number outside of it."""
        assert self._process
        pid = self._process.pid
        for _ in range(200):
            if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                return int(children[0])
            time.sleep(_POLL_S)
        raise AssertionError(f"{self.name} has no process")

    def _words(self, words: Sequence[str], container: Mapping[str, Any]) -> list[str]:
        volumes = {each["name"]: each for each in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                directory = self.machine.map_directory(volume["configMap"]["name"])
                words = [word.replace(mount["mountPath"], str(directory)) for word in words]
            else:
                assert Path(mount["mountPath"]).is_dir(), mount
        return list(words)

    @property
    def fields(self) -> dict[str, str]:
        """What the downward API says of the pod."""
        own = {"status.podIP": self.address, "metadata.name": self.name, "metadata.namespace": NAMESPACE}
        return own | {f"metadata.labels['{name}']": value for name, value in self.labels.items()}

    def _own_mounts(self, container: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[str]:
        """What the shell runs first: mounts of directories within a claim, and the cluster's name server."""
        claims = {each["name"]: each["mountPath"] for each in container["volumeMounts"] if "subPathExpr" not in each}
        for mount in container["volumeMounts"]:
            if expression := mount.get("subPathExpr"):
                below = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], expression)
                directory = Path(claims[mount["name"]]) / below
                for each in (directory, Path(mount["mountPath"])):
                    each.mkdir(parents=True, exist_ok=True)
                yield f"mount --bind {shlex.quote(str(directory))} {shlex.quote(mount['mountPath'])} && "
        if self.machine.name_server:
            file = self.machine.directory / "resolv.conf"
            file.write_text(f"nameserver {self.machine.name_server}\n")
            yield f"mount --bind {shlex.quote(str(file))} /etc/resolv.conf && "

    def _variables(self, container: Mapping[str, Any]) -> dict[str, str]:
        found = {**self.machine.image, **self.more}
        for each in container.get("env", ()):
            source = each.get("valueFrom", {})
            if secret := source.get("secretKeyRef"):
                found[each["name"]] = self.machine.secrets[secret["name"], secret["key"]]
            elif source:
                found[each["name"]] = self.fields[source["fieldRef"]["fieldPath"]]
            else:
                found[each["name"]] = each["value"]
        return found


class _Probes:
    """The probes of a container by HTTP, each in its time; the others begin once the first has succeeded."""

    def __init__(self, container: Mapping[str, Any], address: str) -> None:
        self._ports = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
        self._container, self._address = container, address
        self._next = dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), 0.0)
        self._misses = dict.fromkeys(self._next, 0)
        self._is_started = "startupProbe" not in container
        self._is_ready = False
        self.failed = ""

    def ask(self) -> bool:
        """Ask those that are due; whether the container is ready."""
        due = ("readinessProbe", "livenessProbe") if self._is_started else ("startupProbe",)
        for name in due:
            probe = self._container.get(name)
            if probe is None or time.monotonic() < self._next[name]:
                continue
            self._next[name] = time.monotonic() + min(1.0, probe["periodSeconds"])
            self._misses[name] = 0 if self._answers(probe) else self._misses[name] + 1
            has_failed = self._misses[name] >= probe["failureThreshold"] * max(1, probe["periodSeconds"])
            self._is_started |= not self._misses[name]
            if name == "readinessProbe":
                self._is_ready = not self._misses[name]
            elif has_failed:
                self.failed = name
        return self._is_ready

    def _answers(self, probe: Mapping[str, Any]) -> bool:
        get = probe["httpGet"]
        url = f"http://{self._address}:{self._ports[get['port']]}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                return bool(answer.status < 400)
        except (OSError, urllib.error.URLError):
            return False
