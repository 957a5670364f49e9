"""What is asked of an engine's HTTP server: whether it is up, its model, its version, and one real generation."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from deployment.engines.table import EngineProgram
from deployment.life.background_probe import BackgroundProbe
from handover.errors import ServerError, shortened

_PROMPT = "Hello"
_QUESTION_S = 5.0
_PAUSE_S = 0.2
_MOST_BYTES = 1 << 20
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not lead to this host


def ask(url: str, body: dict[str, Any] | None = None, timeout_s: float = _QUESTION_S) -> Any:
    """Get JSON, or post some; what is no JSON is given as text.

    Raises:
        OSError: nothing answers, or with a status other than 200 (``urllib.error.HTTPError``).
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            text = answer.read(_MOST_BYTES).decode(errors="replace")
    except HTTPException as error:
        raise OSError(f"no HTTP: {error!r}") from error
    try:
        return json.loads(text)
    except ValueError:
        return text


def ask_version(base: str, program: EngineProgram) -> str:
    """Ask which version serves; empty where it does not say."""
    with contextlib.suppress(OSError):
        answer = ask(f"{base}{program.version_path}")
        if isinstance(answer, dict) and isinstance(answer.get("version"), str):
            return str(answer["version"])
    return ""


class CompletionProbe(BackgroundProbe):
    """One completion of one token, tried in the background until the server takes requests.

    The health path says only that the server listens; that the model computes, only a generation says.

    Args:
        base: ``http://host:port``.
        program: of the engine.
        timeout_s: seconds for everything together.

    Attributes:
        model: name by which the server knows the model; empty until it has said so.
    """

    def __init__(self, base: str, program: EngineProgram, timeout_s: float) -> None:
        self._base, self._program, self.model = base, program, ""
        super().__init__(timeout_s)

    def _probe(self) -> None:
        try:
            self._wait_until_it_listens()
            self.model = self._ask_model()
            self._generate()
        except OSError as error:
            raise ServerError(f"the server is up, but a generation failed: {_worded(error)}") from error

    def _wait_until_it_listens(self) -> None:
        while time.monotonic() < self._deadline:
            with contextlib.suppress(OSError):  # nothing listens yet, or 503: the model is being loaded
                ask(f"{self._base}{self._program.health_path}")
                return
            time.sleep(_PAUSE_S)
        raise ServerError("the server took no request in time")

    def _ask_model(self) -> str:
        answer = ask(f"{self._base}/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            said = shortened(json.dumps(answer))
            raise ServerError(f"the server is up, but {self._base}/v1/models names no model: {said}") from None

    def _generate(self) -> None:
        body = {"model": self.model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        answer = ask(f"{self._base}/v1/completions", body, max(1.0, self._deadline - time.monotonic()))
        if not _is_generation(answer):
            raise ServerError(
                f"the server is up, but what it answers is no generation: {shortened(json.dumps(answer))}"
            )


def _is_generation(answer: Any) -> bool:
    """Whether an answer holds a generated token: one that is counted, or its text where nothing is counted."""
    try:
        text, usage = answer["choices"][0]["text"], answer.get("usage") or {}
        return isinstance(text, str) and (int(usage["completion_tokens"]) > 0 if usage else bool(text))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False


def _worded(error: OSError) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with contextlib.suppress(OSError, HTTPException):
            return f"{error.code} {error.reason}: {shortened(error.read(_MOST_BYTES).decode(errors='replace'))}"
    return str(error)
