"""The OpenAI endpoint of a deployment: a child process that is started, watched and stopped with the server."""

from __future__ import annotations

import importlib.util
import urllib.request
from pathlib import Path
from typing import Any

from deployment.arguments import ServeArguments
from deployment.doors.address import own_address
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
        address = own_address(arguments.host)
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{ports.openai}"
        given = OpenAIArguments(
            endpoint=f"{doors.address}:{doors.ports.grpc}",
            host=arguments.host,
            port=ports.openai,
            model_repository=arguments.model_repository.absolute(),
            sockets=sockets,
            api_keys_file=arguments.api_keys_file and arguments.api_keys_file.absolute(),
            processes=arguments.openai_processes or 1,
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
    files = {
        "access_log": arguments.openai_access_log,
        "adapter_keys_file": arguments.openai_adapter_keys_file,
        "sample_log": arguments.openai_sample_log,
        "chat_template": arguments.openai_chat_template,
    }
    others = {
        "sample_share": arguments.openai_sample_share,
        "sample_bytes": arguments.openai_sample_bytes,
        "tool_dialect": arguments.openai_tool_dialect,
        "max_body_bytes": arguments.openai_max_body_bytes,
        "max_sequences": arguments.openai_max_sequences,
        "max_requests": arguments.openai_max_requests,
    }
    found: dict[str, Any] = {name: path.absolute() for name, path in files.items() if path is not None}
    return found | {name: value for name, value in others.items() if value is not None}
