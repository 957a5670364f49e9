"""Routers of other projects that pass an OpenAI API on by what each server's prefix cache may hold.

Written for sglang-router 0.3 and vllm-router 0.1, which can be told workers while they run. Standard library only.
"""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from abc import abstractmethod
from http.client import HTTPException
from typing import Any, ClassVar

from deployment.doors.address import own_address
from deployment.doors.ports import choose_ports
from deployment.replicas.page import metrics_url
from deployment.replicas.router import Router
from handover.endpoint import Endpoint
from handover.errors import ServerError, shortened

_ANSWER_S = 30.0
_QUESTION_S = 2.0
_MOST_BYTES = 16 << 20
_BUSY = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE
)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not lead to these hosts


class WorkerRouter(Router):
    """A router that is told its workers by HTTP."""

    is_for_openai = True
    flags: ClassVar[tuple[str, ...]] = ("--policy", "cache_aware")

    def argv(self) -> tuple[str, ...]:
        """Its own metrics, which it has on a port whatever it is told, are on a free one of loopback."""
        own = choose_ports("127.0.0.1", {"http": 0, "grpc": 0, "metrics": 0}).metrics
        place = "--host", self._front.host, "--port", str(self._front.ports["http"])
        numbers = "--prometheus-host", "127.0.0.1", "--prometheus-port", str(own)
        self._workers: dict[int, Endpoint] = {}
        return (self.program(), *self._command[1:], *place, *numbers, *self.flags)

    def is_up(self) -> bool:
        """Whether it lists its workers."""
        try:
            return bool(self._ask("GET", "/workers", timeout_s=_QUESTION_S))
        except ServerError:
            return False

    def admit(self, number: int, endpoint: Endpoint) -> None:
        """Add a worker."""
        self._add(number, endpoint.server_url)
        self._workers[number] = endpoint

    def withdraw(self, number: int) -> None:
        """Take a worker away, if it is one."""
        if (endpoint := self._workers.get(number)) is not None:
            self._remove(number, endpoint.server_url)

    def in_flight(self, number: int) -> int | None:
        """Ask the replica itself: its engine counts what runs and waits."""
        if (endpoint := self._workers.get(number)) is None:
            return None
        try:
            with _OPENER.open(metrics_url(endpoint), timeout=_QUESTION_S) as answer:
                found = _BUSY.findall(answer.read(_MOST_BYTES).decode(errors="replace"))
        except (OSError, HTTPException) as error:
            raise ServerError(f"replica {number} does not tell its requests: {shortened(str(error))}") from error
        return round(sum(map(float, found))) if found else None

    def sent_bytes(self, number: int) -> int | None:
        """It does not count them."""
        return None

    @abstractmethod
    def _add(self, number: int, url: str) -> None: ...

    @abstractmethod
    def _remove(self, number: int, url: str) -> None: ...

    def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = _ANSWER_S) -> str:
        address = own_address(self._front.host)
        base = f"http://{f'[{address}]' if ':' in address else address}:{self._front.ports['http']}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return str(answer.read(_MOST_BYTES).decode(errors="replace"))
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.title} does not take {method} {path}: {shortened(str(error))}") from error


class SGLangRouter(WorkerRouter):
    """``sglang-router``."""

    name = "sglang"
    title = "SGLang's router"
    own_command = ("python3", "-m", "sglang_router.launch_router")

    def _add(self, number: int, url: str) -> None:
        self._ids: dict[int, str] = getattr(self, "_ids", {})
        self._ids[number] = str(json.loads(self._ask("POST", "/workers", {"url": url}))["worker_id"])

    def _remove(self, number: int, url: str) -> None:
        self._ask("DELETE", f"/workers/{self._ids[number]}")


class VLLMRouter(WorkerRouter):
    """``vllm-router``."""

    name = "vllm"
    title = "vLLM's router"
    own_command = ("vllm-router",)

    def _add(self, number: int, url: str) -> None:
        self._ask("POST", f"/add_worker?url={urllib.parse.quote(url, safe='')}")

    def _remove(self, number: int, url: str) -> None:
        self._ask("POST", f"/remove_worker?url={urllib.parse.quote(url, safe='')}")
