"""The server's own figures: Prometheus counters before and after a measurement, Triton's or those of vLLM's names."""

from __future__ import annotations

import http.client
import re
import time
import urllib.request
from collections.abc import Callable, Mapping

from handover.endpoint import Endpoint

_LINE = re.compile(r"^([\w:]+)\{([^}]*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)\{([^}]*)\}\s+(\S+)", re.MULTILINE)
_TIMEOUT_S = 5.0
LONGEST_IDLE_WAIT_S = 10.0
_IDLE_POLL_S = 0.05

SERVER_FIGURES = {
    "server_queue_mean_ms": "queue time / successful requests, from nv_inference_queue_duration_us",
    "server_compute_mean_ms": "compute time (input, inference, output) / successful requests; not of our engine",
    "server_request_mean_ms": "request time in the server / successful requests; our engine counts its own",
    "server_mean_batch": "inferences / executions, nv_inference_count / nv_inference_exec_count; not of our engine",
    "server_requests": "successful requests that the server counted",
    "server_failures": "failed requests that the server counted",
}
"""Columns and their formulas; each is a difference of counters over the whole point: its warm-up, its repeats and the
requests that were still in flight at their end. ``sent_requests`` is their number; others' requests count, too.

The drop-in engine's ``execute`` queues a request and returns, which ends Triton's request and compute times: they do
not include the generation. The engine counts the time to the final answer itself (_OWN_DURATION).
"""

_OWN_DURATION = "slipway_request_duration_us"
_TRITONS = "nv_inference_"

_MOST_BYTES = 16 << 20
VLLM_SUCCESSES, _VLLM_FAILURES = "vllm_successes", "vllm_failures"
_VLLM_FAILED = ("abort", "error")
_VLLM = {
    "vllm:request_success_total": VLLM_SUCCESSES,
    "vllm:request_queue_time_seconds_sum": "vllm_queue_s",
    "vllm:request_prefill_time_seconds_sum": "vllm_prefill_s",
    "vllm:request_decode_time_seconds_sum": "vllm_decode_s",
    "vllm:e2e_request_latency_seconds_sum": "vllm_request_s",
}
"""vLLM's metrics, and what they are called here: seconds, and numbers of requests."""
_ENDED = ("request_success", "request_failure", VLLM_SUCCESSES, _VLLM_FAILURES)
_SETTLING_S, _MISSING_S, _LONGEST_SETTLING_S, _SETTLING_POLL_S = 0.3, 1.0, 5.0, 0.1
"""Counters are published at least each 0.2 s; requests that a server does not count at all are awaited for a second."""
Counters = Mapping[str, float]
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


def read_counters(endpoint: Endpoint, model: str) -> dict[str, float]:
    """Sum a server's counters of one model; empty where it has no page of metrics."""
    page = _page(endpoint)
    if page is None:
        return {}
    return (parse_vllm_counters if endpoint.is_openai else parse_counters)(_read(page), model)


def read_settled(endpoint: Endpoint, model: str) -> Counters:
    """Read the counters once they stand still: an engine publishes them some times a second.

    A server that others ask too never stands still: its counters are read after _LONGEST_SETTLING_S.
    """
    return _read_until(endpoint, model, _SETTLING_S, lambda counters: False)


def read_after(endpoint: Endpoint, model: str, before: Counters, sent: int) -> Counters:
    """Read the counters once they have every request that was sent since ``before``, or stand still for a second."""

    def has_all(counters: Counters) -> bool:
        return sum(counters.get(name, 0.0) - before.get(name, 0.0) for name in _ENDED) >= sent

    return _read_until(endpoint, model, _MISSING_S, has_all)


def _read_until(endpoint: Endpoint, model: str, still_s: float, is_enough: Callable[[Counters], bool]) -> Counters:
    counters, began_s = read_counters(endpoint, model), time.monotonic()
    changed_s = began_s
    while counters and not is_enough(counters):
        time.sleep(_SETTLING_POLL_S)
        newer, now_s = read_counters(endpoint, model), time.monotonic()
        changed_s = now_s if newer != counters else changed_s
        counters = newer
        if now_s - changed_s >= still_s or now_s - began_s > _LONGEST_SETTLING_S:
            break
    return counters


def _read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # http or https: both callers build it
            return str(answer.read(_MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException):
        return ""


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


def parse_vllm_counters(text: str, model: str) -> dict[str, float]:
    """Sum vLLM's counters over engines, by names of ``_VLLM``; of a server whose lines name other models, of all."""
    sums: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if not found or found[1] not in _VLLM:
            continue
        labels, name = dict(_LABEL.findall(found[2])), _VLLM[found[1]]
        if name == VLLM_SUCCESSES and labels.get("finished_reason") in _VLLM_FAILED:
            name = _VLLM_FAILURES
        counters = sums.setdefault(labels.get("model_name", ""), {})
        counters[name] = counters.get(name, 0.0) + float(found[3])
    if model in sums:
        return sums[model]
    return sums.popitem()[1] if len(sums) == 1 else {}


def server_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """Compute SERVER_FIGURES from two readings; None where a counter is missing or nothing was served."""

    def risen(*names: str) -> float | None:
        if not all(name in before and name in after for name in names):
            return None
        return sum(after[name] - before[name] for name in names)

    def per(amount: float | None, count: float | None, divisor: float) -> float | None:
        return amount / count / divisor if amount is not None and count else None

    if VLLM_SUCCESSES in after:
        requests = risen(VLLM_SUCCESSES)
        return {
            "server_queue_mean_ms": per(risen("vllm_queue_s"), requests, 1e-3),
            "server_compute_mean_ms": per(risen("vllm_prefill_s", "vllm_decode_s"), requests, 1e-3),
            "server_request_mean_ms": per(risen("vllm_request_s"), requests, 1e-3),
            "server_mean_batch": None,
            "server_requests": requests,
            "server_failures": risen(_VLLM_FAILURES),
        }
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


def wait_until_idle(endpoint: Endpoint, model: str) -> tuple[float | None, int]:
    """Wait until a server with the engine's or vLLM's gauges has no request of a model in its batch or queue.

    Returns:
        The seconds that it took, None where the server does not say or stays busy; and the requests that are left.
    """
    began_s, page = time.monotonic(), _page(endpoint)
    while True:
        busy = None if page is None else count_busy(_read(page), model)
        lasted_s = time.monotonic() - began_s
        if busy is None:
            return None, 0
        if not busy:
            return lasted_s, 0
        if lasted_s > LONGEST_IDLE_WAIT_S:
            return None, busy
        time.sleep(_IDLE_POLL_S)


def count_busy(text: str, model: str) -> int | None:
    """Count the requests of a model that the gauges say run or wait; None without these gauges.

    Where the lines name one other model alone, it is that one: an OpenAI API may have a name of its own for it.
    """
    found: dict[str, list[str]] = {}
    for labels, value in _BUSY.findall(text):
        found.setdefault(dict(_LABEL.findall(labels)).get("model_name", ""), []).append(value)
    if model not in found and len(found) == 1:
        (model,) = found
    return round(sum(map(float, found[model]))) if model in found else None


def _page(endpoint: Endpoint) -> str | None:
    """Return the address of a server's metrics; None if it is unknown."""
    if endpoint.is_openai:
        return f"{endpoint.server_url}/metrics"
    return None if endpoint.metrics_port is None else f"http://{endpoint.host}:{endpoint.metrics_port}/metrics"
