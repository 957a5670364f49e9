"""Publishes the engine's counters on Triton's metrics port, by vLLM's names, types, units and bounds.

The names and what they mean are in docs/metrics.md. Every operation on a metric of Triton is a message to the server's
process, of 30 to 100 us (measured, Triton 2.51), and a histogram takes its values one by one. So a thread of its own
publishes what has changed, at most every _PAUSE_S: a counter by one message however much it has risen, and a request's
histograms by one message for each request. What has a value for each token or step (``inter_token_latency_seconds`` and
``iteration_tokens_total``) would cost a message for each token. It is published as the counters ``_bucket``, ``_sum``
and ``_count``, which Prometheus reads as it reads a histogram; so are all histograms where Triton has none. Only rank
0 has an engine, and so metrics.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from .engine.cache.page_allocator import PAGE
from .engine.scheduling.metrics import EngineMetrics, Histogram

_PAUSE_S = 0.2
_PREFIX = "vllm:"

_GAUGES: dict[str, tuple[str, Callable[[EngineMetrics], float]]] = {
    "num_requests_running": ("Requests (rows) in the batch", lambda m: m.running),
    "num_requests_waiting": ("Requests (rows) in the queue", lambda m: m.waiting),
    "kv_cache_usage_perc": ("Share of the KV cache's pages that is in use, 0 to 1", lambda m: m.kv_cache_usage),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineMetrics], float]]] = {
    "prefix_cache_queries_total": ("Tokens that were looked for in the prefix cache", lambda m: m.prefix_queries),
    "prefix_cache_hits_total": ("Tokens that were found in the prefix cache", lambda m: m.prefix_hits),
    "num_preemptions_total": (
        "How often a request was set back to the queue for want of memory",
        lambda m: m.preemptions,
    ),
    "prompt_tokens_total": ("Tokens of prompts", lambda m: m.prompt_tokens),
    "generation_tokens_total": ("Tokens that were generated", lambda m: m.generation_tokens),
    "spec_decode_num_drafts_total": ("Drafts of tokens that were verified", lambda m: m.drafts),
    "spec_decode_num_draft_tokens_total": ("Tokens of these drafts", lambda m: m.draft_tokens),
    "spec_decode_num_accepted_tokens_total": ("Tokens of these that were right", lambda m: m.accepted_tokens),
}
_HISTOGRAMS: dict[str, tuple[str, Callable[[EngineMetrics], Histogram]]] = {
    "time_to_first_token_seconds": (
        "Time from a request's arrival to its first token",
        lambda m: m.time_to_first_token,
    ),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a request that has several",
        lambda m: m.time_per_output_token,
    ),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its last token", lambda m: m.e2e_latency),
    "request_queue_time_seconds": ("Time that a request has waited", lambda m: m.queue_time),
    "request_prefill_time_seconds": ("Time from the end of the wait to the first token", lambda m: m.prefill_time),
    "request_decode_time_seconds": ("Time from the first to the last token", lambda m: m.decode_time),
    "request_prompt_tokens": ("Tokens of a request's prompt", lambda m: m.request_prompt_tokens),
    "request_generation_tokens": ("Tokens that were generated for a request", lambda m: m.request_generation_tokens),
}
_FREQUENT: dict[str, tuple[str, Callable[[EngineMetrics], Histogram]]] = {
    "inter_token_latency_seconds": ("Time between two tokens of a request", lambda m: m.inter_token_latency),
    "iteration_tokens_total": (
        "Tokens of a step, those of prompts and those that were generated",
        lambda m: m.iteration_tokens,
    ),
}


class _Publisher(Protocol):
    def publish(self) -> None:
        """Send what has changed since the last call to Triton."""


class PublishedMetrics:
    """The metrics of one engine, and the thread that publishes them.

    Args:
        triton: the module triton_python_backend_utils.
        metrics: of the engine.
        labels: of every metric: model_name, and engine, which tells the instances of a model apart.
        pages: of the engine's KV cache.
        adapters: that there is room for at once; 0: the model has none.
    """

    def __init__(
        self, triton: Any, metrics: EngineMetrics, labels: Mapping[str, str], pages: int, adapters: int = 0
    ) -> None:
        self._triton, self._metrics, self._labels = triton, metrics, dict(labels)
        self._families: list[Any] = []
        self._published = [*self._gauges(), *self._counters(), *self._histograms()]
        info = self._family("cache_config_info", "Pages of the KV cache and tokens of a page", self._kinds.GAUGE)
        self._info = self._metric(info, block_size=str(PAGE), num_gpu_blocks=str(pages))
        self._info.set(1)
        if adapters:
            family = self._family("lora_requests_info", "When these LoRA adapters came to have rows", self._kinds.GAUGE)
            self._published.append(_AdapterInfo(partial(self._metric, family, max_lora=str(adapters)), metrics))
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and free the metrics before their families; see Replies.close."""
        self._is_closing.set()
        self._metrics.changed.set()
        self._thread.join()
        self._published, self._info = [], None
        self._families = []

    def _run(self) -> None:
        while self._metrics.changed.wait() and not self._is_closing.wait(_PAUSE_S):
            self._metrics.changed.clear()
            if self._is_closing.is_set():  # close may have set both events before one was cleared
                return
            for each in self._published:
                each.publish()

    @property
    def _kinds(self) -> Any:
        return self._triton.MetricFamily

    def _family(self, name: str, meaning: str, kind: Any) -> Any:
        family = self._triton.MetricFamily(name=_PREFIX + name, description=meaning, kind=kind)
        self._families.append(family)
        return family

    def _metric(self, family: Any, **labels: str) -> Any:
        return family.Metric(labels=self._labels | labels)

    def _gauges(self) -> list[_Publisher]:
        return [
            _Level(self._metric(self._family(name, meaning, self._kinds.GAUGE)), partial(read, self._metrics))
            for name, (meaning, read) in _GAUGES.items()
        ]

    def _counters(self) -> list[_Publisher]:
        kind, finished = self._kinds.COUNTER, self._metrics.finished
        counters = [
            _Rise(self._metric(self._family(name, meaning, kind)), partial(read, self._metrics))
            for name, (meaning, read) in _COUNTERS.items()
        ]
        ended = self._family("request_success_total", "Requests (rows) by what ended them", kind)
        for reason in finished:
            metric = self._metric(ended, finished_reason=reason)
            counters.append(_Rise(metric, lambda reason=reason: finished[reason]))  # type: ignore[misc]
        by_place = self._metrics.accepted_by_place
        accepted = self._family("spec_decode_num_accepted_tokens_per_pos_total", "The last by place in the draft", kind)
        for place in range(len(by_place)):
            metric = self._metric(accepted, position=str(place))
            counters.append(_Rise(metric, lambda place=place: by_place[place]))  # type: ignore[misc]
        return list(counters)

    def _histograms(self) -> list[_Publisher]:
        has_histograms, published = hasattr(self._kinds, "HISTOGRAM"), list[_Publisher]()
        for name, (meaning, read) in (_HISTOGRAMS | _FREQUENT).items():
            histogram = read(self._metrics)
            if has_histograms and name in _HISTOGRAMS:
                family = self._family(name, meaning, self._kinds.HISTOGRAM)
                metric = family.Metric(labels=self._labels, buckets=list(histogram.bounds))
                published.append(_Values(metric, histogram))
            else:
                published.append(self._buckets(name, meaning, histogram))
        return published

    def _buckets(self, name: str, meaning: str, histogram: Histogram) -> _Publisher:
        buckets, total, count = (
            self._family(f"{name}_{part}", meaning, self._kinds.COUNTER) for part in ("bucket", "sum", "count")
        )
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        by_bound = [self._metric(buckets, le=bound) for bound in bounds]
        return _Buckets(by_bound, self._metric(total), self._metric(count), histogram)


class _Level:
    """A gauge."""

    def __init__(self, metric: Any, read: Callable[[], float]) -> None:
        self._metric, self._read, self._last = metric, read, 0.0
        metric.set(0)

    def publish(self) -> None:
        if (value := self._read()) != self._last:
            self._metric.set(value)
            self._last = value


class _AdapterInfo:
    """The adapters that rows have now, as labels; the value is when that began, in seconds since 1970."""

    def __init__(self, make: Callable[..., Any], metrics: EngineMetrics) -> None:
        self._make, self._metrics = make, metrics
        self._metric: Any = None
        self._last: tuple[str, str] | None = None

    def publish(self) -> None:
        now = self._metrics.running_adapters, self._metrics.waiting_adapters
        if now != self._last:
            self._metric = None  # Triton drops what nothing refers to
            self._metric = self._make(running_lora_adapters=now[0], waiting_lora_adapters=now[1])
            self._metric.set(time.time())
            self._last = now


class _Rise:
    """A counter. It is raised by differences, for instances may share it."""

    def __init__(self, metric: Any, read: Callable[[], float] | None = None) -> None:
        self._metric, self._read, self._last = metric, read, 0.0

    def publish(self) -> None:
        assert self._read
        self.reach(self._read())

    def reach(self, value: float) -> None:
        """Raise the counter; a value below the last one has begun with 0 again."""
        if risen := value - self._last if value >= self._last else value:
            self._metric.increment(risen)
        self._last = value


class _Values:
    """A histogram of Triton."""

    def __init__(self, metric: Any, histogram: Histogram) -> None:
        self._metric, self._recent = metric, deque[float]()
        histogram.recent = self._recent

    def publish(self) -> None:
        while self._recent:
            self._metric.observe(self._recent.popleft())


class _Buckets:
    """A histogram as counters: one for the values up to each bound, their sum and their count."""

    def __init__(self, by_bound: list[Any], total: Any, count: Any, histogram: Histogram) -> None:
        self._by_bound, self._histogram = [_Rise(metric) for metric in by_bound], histogram
        self._total, self._count = _Rise(total), _Rise(count)

    def publish(self) -> None:
        counts = list(accumulate(self._histogram.counts[:]))
        for rise, count in zip(self._by_bound, counts, strict=True):
            rise.reach(count)
        self._total.reach(self._histogram.total)
        self._count.reach(counts[-1])
