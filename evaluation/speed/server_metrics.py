"""The server's own figures: Triton's Prometheus counters before and after a measurement."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from handover.endpoint import Endpoint

_LINE = re.compile(r"^(\w+)\{([^}]*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 5.0

SERVER_FIGURES = {
    "server_queue_mean_ms": "queue time / successful requests, from nv_inference_queue_duration_us",
    "server_compute_mean_ms": "compute time (input, inference, output) / successful requests; not of our engine",
    "server_request_mean_ms": "request time in the server / successful requests; our engine counts its own",
    "server_mean_batch": "inferences / executions, nv_inference_count / nv_inference_exec_count; not of our engine",
    "server_requests": "successful requests that the server counted",
    "server_failures": "failed requests that the server counted",
}
"""Columns and their formulas; each is a difference of counters over the measurement.

The drop-in engine's ``execute`` queues a request and returns, which ends Triton's request and compute times: they do
not include the generation. The engine counts the time to the final answer itself (_OWN_DURATION).
"""

_OWN_DURATION = "slipway_request_duration_us"
_TRITONS = "nv_inference_"

_COMPUTE = ("compute_input", "compute_infer", "compute_output")


def read_counters(endpoint: Endpoint, model: str) -> dict[str, float]:
    """Sum Triton's counters of one model over versions and instances; empty where there is no metrics port."""
    if endpoint.metrics_port is None:
        return {}
    url = f"http://{endpoint.host}:{endpoint.metrics_port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # http only: built above
            return parse_counters(answer.read().decode(errors="replace"), model)
    except (OSError, urllib.error.URLError):
        return {}


def parse_counters(text: str, model: str) -> dict[str, float]:
    """Sum ``nv_inference_*`` lines of one model, by name without that prefix, and the engine's own duration."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if not found or not (found[1].startswith(_TRITONS) or found[1] == _OWN_DURATION):
            continue
        if dict(_LABEL.findall(found[2])).get("model") != model:
            continue
        name = found[1].removeprefix(_TRITONS)
        counters[name] = counters.get(name, 0.0) + float(found[3])
    return counters


def server_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """Compute SERVER_FIGURES from two readings; None where a counter is missing or nothing was served."""

    def risen(*names: str) -> float | None:
        if not all(name in before and name in after for name in names):
            return None
        return sum(after[name] - before[name] for name in names)

    def per(amount: float | None, count: float | None, divisor: float) -> float | None:
        return amount / count / divisor if amount is not None and count else None

    requests, is_handed_over = risen("request_success"), _OWN_DURATION in after
    durations = risen(_OWN_DURATION if is_handed_over else "request_duration_us")
    computed = None if is_handed_over else risen(*(f"{name}_duration_us" for name in _COMPUTE))
    executions = None if is_handed_over else risen("exec_count")
    return {
        "server_queue_mean_ms": per(risen("queue_duration_us"), requests, 1e3),
        "server_compute_mean_ms": per(computed, requests, 1e3),
        "server_request_mean_ms": per(durations, requests, 1e3),
        "server_mean_batch": per(risen("count"), executions, 1.0),
        "server_requests": requests,
        "server_failures": risen("request_failure"),
    }
