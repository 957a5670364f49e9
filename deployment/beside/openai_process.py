"""The OpenAI endpoint of a deployment: a child process that is started, watched and stopped with the server."""

from __future__ import annotations

import importlib.util
import urllib.request
from pathlib import Path
from typing import Any

from deployment.arguments import OF_OPENAI, ServeArguments
from deployment.doors.address import own_address, place_of
from deployment.doors.doors import Doors
from deployment.doors.ports import Ports
from deployment.openai.arguments import OpenAIArguments
from deployment.processes.watched import WatchedProcess
from handover.errors import ServerError

_PACKAGES = ("aiohttp", "jinja2", "tokenizers", "sentencepiece")
_QUESTION_S = 5.0
_GRACE_S = 2.0
"""For what is cut to be told so, and for its own processes."""


def check_packages() -> None:
    """Refuse to begin where the endpoint cannot run; ServerError."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerError(
            f"deployment.openai_port is given, and this Python has no {', '.join(missing)}",
            f"pip install {' '.join(missing)}, or leave deployment.openai_port at null",
        )


class OpenAIProcess(WatchedProcess):
    """The endpoint's process.

    Args:
        arguments: of the deployment.
        ports: that the endpoint listens on, among others.
        doors: where Triton listens.
        sockets: directory of the drop-in engine's sockets; None: the server has none.
    """

    def __init__(self, arguments: ServeArguments, ports: Ports, doors: Doors, sockets: Path | None) -> None:
        assert ports.openai is not None
        self.url = f"http://{place_of(own_address(arguments.host), ports.openai)}"
        given = OpenAIArguments(
            endpoint=f"{doors.address}:{doors.ports.grpc}",
            host=arguments.host,
            port=ports.openai,
            model_repository=arguments.model_repository.absolute(),
            sockets=sockets,
            metrics_url=f"http://{doors.address}:{doors.ports.metrics}/metrics",
            exit_timeout_s=max(0.0, arguments.exit_timeout_s),
            **_settings(arguments),
        )
        log = arguments.log.with_name("openai.log")
        super().__init__("deployment.openai", given, log, "the OpenAI endpoint", "the endpoint")

    def is_up(self) -> bool:
        """Ask for its health."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=_QUESTION_S):
            return True

    def stop(self, patience_s: float) -> None:
        """End it; requests in flight have that many seconds, and none where it is below 0."""
        super().stop(patience_s + _GRACE_S if patience_s > 0 else 0)


def _settings(arguments: ServeArguments) -> dict[str, Any]:
    """Return what the deployment sets of the endpoint; what it leaves out has the endpoint's own default."""
    given = {name.removeprefix("openai_"): getattr(arguments, name) for name in OF_OPENAI}
    return {
        name: value.absolute() if isinstance(value, Path) else value
        for name, value in given.items()
        if name != "port" and value is not None
    }
