"""What a run's objects are called, and how Kubernetes writes names (RFC 1123, RFC 1035) and quantities."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from handover.errors import ConfigError

PLANS_PATH = "/etc/slipway/plans"
"""Where pods have the run's plans: files of a ConfigMap."""
ROUTER_PATH = "/etc/slipway/router"
"""Where the pod of a router has its configuration, as a file of another one."""

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_OF_A_SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LONGEST = 63 - len("-run-benchmark-0-0-xxxxx")
"""A pod of a JobSet is called by the set, the stage, two positions and five letters of its own."""


@dataclass(frozen=True)
class Names:
    """Names of a run's objects: all of them begin by the run's.

    Attributes:
        run: the run's, which its Service has.
    """

    run: str

    @property
    def plans(self) -> str:
        """The ConfigMap with the plans."""
        return f"{self.run}-plans"

    @property
    def job_set(self) -> str:
        """The JobSet of several stages."""
        return f"{self.run}-run"

    @property
    def server(self) -> str:
        """The Deployment or LeaderWorkerSet: the latter makes a Service of its own name, so it has not the run's."""
        return f"{self.run}-server"

    @property
    def pods(self) -> str:
        """The Service without an address of its own, whose name has those of all servers that are ready."""
        return f"{self.run}-pods"

    @property
    def router(self) -> str:
        """The router before several servers: its Deployment, and the ConfigMap with its configuration."""
        return f"{self.run}-router"

    def job(self, stage: str) -> str:
        """The Job of a stage that is alone."""
        return f"{self.run}-{stage}"

    def labels(self, stage: str) -> dict[str, str]:
        """Labels of what belongs to a stage of the run."""
        return {**self.selector, "app.kubernetes.io/component": stage}

    @property
    def selector(self) -> dict[str, str]:
        """Labels of all that belongs to the run."""
        return {"app.kubernetes.io/name": "slipway", "app.kubernetes.io/instance": self.run}


def run_name(given: str | None, model: str, results: Path) -> str:
    """Return the name of a run's objects: the one that is given, or one made of the model's and a digest.

    Raises:
        ConfigError: Kubernetes does not take it, or it is too long to make other names of it.
    """
    if given is not None:
        if not _OF_A_SERVICE.fullmatch(given) or len(given) > _LONGEST:
            raise ConfigError(
                f"kubernetes.name={given} cannot name objects of Kubernetes",
                f"small letters, digits and hyphens, a letter first and no hyphen last, {_LONGEST} characters at most",
            )
        return given
    digest = hashlib.sha256(str(results).encode()).hexdigest()[:6]
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    room = _LONGEST - len(digest) - 1
    begun = words if _OF_A_SERVICE.match(words) else f"run-{words}"
    return f"{begun[:room].strip('-')}-{digest}"


def check_name(key: str, name: object, legal: re.Pattern[str] = SUBDOMAIN) -> str:
    """Return a name of an object that is in the cluster already.

    Raises:
        ConfigError: there can be none of that name.
    """
    if not isinstance(name, str) or not legal.fullmatch(name):
        most = 63 if legal is LABEL else 253
        dots = "" if legal is LABEL else " and dots between them"
        raise ConfigError(
            f"{key}: '{name}' cannot name an object of Kubernetes (RFC 1123)",
            f"small letters, digits and hyphens{dots}, a letter or digit at both ends, {most} characters at most",
        )
    return name


def check_labels(key: str, labels: Mapping[str, object]) -> None:
    """Refuse labels that no node can have.

    Raises:
        ConfigError: there is one.
    """
    for name, value in labels.items():
        if not is_qualified(name) or not _LABEL_VALUE.fullmatch(str(value)):
            raise ConfigError(
                f"{key}: no node has a label {name}={value}", "label: value, such as nvidia.com/gpu.product: NVIDIA-L4"
            )


def is_qualified(name: str) -> bool:
    """Whether a label or a resource can have this name: letters, digits and . - _, after a domain and a slash."""
    return bool(_QUALIFIED.fullmatch(name))


def literal(text: str) -> str:
    """Return what stands for a text in a variable's value or a command: Kubernetes replaces ``$(NAME)`` and ``$$``."""
    return text.replace("$", "$$")


def quantity_bytes(text: str) -> float:
    """Return bytes of a quantity of memory as Kubernetes writes it: 512Mi, 64G."""
    units: dict[str, int] = {"": 1, **{unit: 1000**power for power, unit in enumerate("kMGT", 1)}}
    units |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)}
    digits = text.rstrip("KkMGTi")
    return float(digits) * units[text[len(digits) :]]
