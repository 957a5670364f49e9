"""Where a server in a pod is asked: its ports, its health, its metrics."""

from __future__ import annotations

from typing import NamedTuple

from deployment.engines.table import PROGRAMS
from launcher.config.deployment import DeploymentConfig
from launcher.submit.kubernetes.pods import Manifest


class Doors(NamedTuple):
    """Where a server is asked.

    Attributes:
        ports: of each door by its name.
        health: name of the one that is asked for its health.
        health_path: there.
        metrics: name of the one whose page has all metrics, so that none is counted twice.
    """

    ports: dict[str, int]
    health: str
    health_path: str
    metrics: str

    def as_ports(self) -> list[Manifest]:
        """Return the ports of a container."""
        return [{"name": name, "containerPort": port} for name, port in self.ports.items()]

    def routed(self) -> Doors:
        """Return those of a router: metrics are each pod's own."""
        ports = {name: port for name, port in self.ports.items() if name != "metrics"}
        return self._replace(ports=ports, metrics="")


def doors_of(deployment: DeploymentConfig) -> Doors:
    """Return where a server will be asked, once its ports are settled."""
    program = PROGRAMS.get(str(deployment.engine))
    if program is not None:
        return Doors({"http": deployment.http_port}, "http", program.health_path, "http")
    ports = {"http": deployment.http_port, "grpc": deployment.grpc_port, "metrics": deployment.metrics_port}
    if deployment.openai_port is None:
        return Doors(ports, "http", "/v2/health/ready", "metrics")
    return Doors({**ports, "openai": deployment.openai_port}, "openai", "/health", "openai")
