"""The engine's counters as Triton's metrics, with Triton's own module replaced by a fake."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.servers.fake_pb_utils import FakeMetric, FakePbUtils

from backends.fastertransformer import published_metrics as module
from backends.fastertransformer.engine.cache.page_allocator import PageAllocator
from backends.fastertransformer.engine.scheduling.metrics import EngineMetrics
from backends.fastertransformer.published_metrics import PublishedMetrics

LABELS = {"model_name": "gpt", "engine": "0"}
NAMES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "request_success_total"),
    *("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "iteration_tokens_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_accepted_tokens_per_pos_total",
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeMetric]:
    """Every series that is made from now on."""
    series: list[FakeMetric] = []
    monkeypatch.setattr(FakePbUtils.MetricFamily, "made", series)
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    return series


@pytest.fixture
def open_published(made: list[FakeMetric]) -> Iterator[Callable[..., PublishedMetrics]]:
    opened = []

    def make(metrics: EngineMetrics) -> PublishedMetrics:
        opened.append(PublishedMetrics(FakePbUtils("pb_utils"), metrics, LABELS, pages=7))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]


def value_of(made: list[FakeMetric], name: str, **labels: str) -> float:
    (metric,) = (each for each in made if each.family.name == f"vllm:{name}" and each.labels == LABELS | labels)
    return metric.value


def observed(made: list[FakeMetric], name: str) -> list[float]:
    (metric,) = (each for each in made if each.family.name == f"vllm:{name}")
    return metric.observed


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_changes_is_published_soon_and_once(open_published: Any, made: list[FakeMetric]) -> None:
    metrics, allocator = EngineMetrics(draft_tokens=3), PageAllocator(8)
    open_published(metrics)
    metrics.note_draft(3, 2)
    metrics.note_draft(1, 1)
    assert value_of(made, "cache_config_info", block_size="32", num_gpu_blocks="7") == 1
    allocator.take(60)
    metrics.prompt_tokens, metrics.finished["stop"] = 5, 2
    metrics.e2e_latency.observe(0.75)
    metrics.e2e_latency.observe(0.5)
    metrics.note_load(3, 1, allocator)
    wait_until(lambda: value_of(made, "request_success_total", finished_reason="stop") == 2)
    accepted, by_place = "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value_of(made, by_place, position=str(place)) for place in range(3)] == [2, 1, 0]
    assert value_of(made, "spec_decode_num_draft_tokens_total") == 4 and value_of(made, accepted) == 3
    assert value_of(made, "num_requests_running") == 3 and value_of(made, "num_requests_waiting") == 1
    assert value_of(made, "kv_cache_usage_perc") == 2 / 8 and value_of(made, "prompt_tokens_total") == 5
    metrics.prompt_tokens, allocator.prefixes.queried = 11, 40
    metrics.note_load(0, 0, allocator)
    wait_until(lambda: value_of(made, "prefix_cache_queries_total") == 40)
    assert value_of(made, "prompt_tokens_total") == 11 and value_of(made, "num_requests_running") == 0
    assert observed(made, "e2e_request_latency_seconds") == [0.75, 0.5]
    allocator.prefixes.queried = 3  # the engine has loaded its model again
    metrics.note_load(0, 0, allocator)
    wait_until(lambda: value_of(made, "prefix_cache_queries_total") == 43)


@pytest.mark.parametrize("has_histograms", [True, False])
def test_what_comes_with_every_token_costs_no_message_for_each(
    open_published: Any, made: list[FakeMetric], monkeypatch: pytest.MonkeyPatch, has_histograms: bool
) -> None:
    """As counters they are what Prometheus calls a histogram; so are all of them where Triton has no histograms."""
    if not has_histograms:
        monkeypatch.delattr(FakePbUtils.MetricFamily, "HISTOGRAM")
    metrics = EngineMetrics()
    open_published(metrics)
    for value, times in ((0.004, 5), (0.06, 2), (100.0, 1)):
        metrics.inter_token_latency.observe(value, times)
    metrics.time_to_first_token.observe(0.03)
    metrics.note_load(0, 0, PageAllocator(8))
    name = "inter_token_latency_seconds"
    wait_until(lambda: value_of(made, f"{name}_count") == 8)
    assert value_of(made, f"{name}_sum") == pytest.approx(0.02 + 0.12 + 100)
    bounds = ["0.01", "0.025", "0.05", "0.075", "0.1", "80", "+Inf"]
    assert [value_of(made, f"{name}_bucket", le=bound) for bound in bounds] == [5, 5, 5, 7, 7, 7, 8]
    if has_histograms:
        assert observed(made, "time_to_first_token_seconds") == [0.03]
    else:
        wait_until(lambda: value_of(made, "time_to_first_token_seconds_bucket", le="0.04") == 1)
        assert value_of(made, "time_to_first_token_seconds_bucket", le="0.02") == 0
        assert value_of(made, "time_to_first_token_seconds_count") == 1


def test_the_names_are_vllms(open_published: Any, made: list[FakeMetric]) -> None:
    open_published(EngineMetrics(draft_tokens=2))
    names = {each.family.name for each in made}
    frequent = ("inter_token_latency_seconds", "iteration_tokens_total")
    parts = {f"{name}_{part}" for name in frequent for part in ("bucket", "sum", "count")}
    assert names == {f"vllm:{name}" for name in {*NAMES, *parts} - {*frequent}}


def test_metrics_are_freed_when_the_model_is_unloaded(open_published: Any, made: list[FakeMetric]) -> None:
    """Before the interpreter ends: their memory is Triton's, and unmapped then."""
    published = open_published(EngineMetrics())
    references = [weakref.ref(each) for each in made] + [weakref.ref(each.family) for each in made]
    made.clear()
    published.close()
    assert not any(reference() for reference in references)


def test_closing_while_the_thread_clears_its_event_ends_it(open_published: Any) -> None:
    """Whoever closes sets two events, and the thread clears one of them: both may be set just before that."""
    metrics = EngineMetrics()

    class ClosedMeanwhile(threading.Event):
        def clear(self) -> None:
            published._is_closing.set()
            self.set()
            super().clear()

    metrics.changed = ClosedMeanwhile()
    published = open_published(metrics)
    metrics.changed.set()
    published._thread.join(240)
    assert not published._thread.is_alive()


def test_adapters_that_rows_have_are_labels(made: list[FakeMetric]) -> None:
    metrics, begun_s = EngineMetrics(), time.time()
    published = PublishedMetrics(FakePbUtils("pb_utils"), metrics, LABELS, pages=7, adapters=4)
    rows = [SimpleNamespace(adapter=name and SimpleNamespace(name=name)) for name in ("sql", None, "chat", "sql")]
    metrics.note_adapters(rows, rows[:1])  # type: ignore[arg-type]
    metrics.changed.set()
    labels = {"max_lora": "4", "running_lora_adapters": "chat,sql", "waiting_lora_adapters": "sql"}
    while not [each for each in made if each.labels == LABELS | labels and each.value]:
        assert time.time() < begun_s + 20
        time.sleep(0.01)
    assert value_of(made, "lora_requests_info", **labels) >= begun_s
    published.close()
