"""One measured point: what was measured, what came of it, and whether its figures may be relied on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from evaluation.speed.tables.cells import name_of_file, render
from evaluation.speed.tables.slo_verdict import HOLDS, UNDECIDED
from ft_format.weight_format import WeightFormat, find_format

OK, FAILED = "ok", "failed"
TRITON, OPENAI = "triton", "openai"
"""Kinds of an endpoint: Triton's gRPC, and an OpenAI API."""
VALID, INVALID = "VALID", "INVALID"
"""Whether the figures of a row may be relied on: only valid rows are recommended and pass the gate."""
SCHEMA_VERSION = 2
"""Version of the tables: 1 had no such column; 2 counts the latencies of an open loop from when a request was due."""
_LEAST_ANSWERED = 0.95
_DEVIATIONS = 3.0
"""An open loop is overloaded where fewer than this share of what became due was answered, and by chance never so few:
the backlog grew by more than this number of square roots of itself."""
TRACE = "trace"
"""What arrivals are called that a recorded trace says."""
STATIC, CLOSED, OPEN = "static", "closed", "open"
"""Modes of a point: batches sent one after another, a constant number of requests in flight, a rate of requests."""


@dataclass(frozen=True)
class Row:
    """One measured point.

    A static point is a closed loop with one request in flight, of ``batch_size`` sequences; each of its measured
    requests is a repeat.

    Attributes:
        model: name of the served model.
        triton_model: Triton's name of the model that was asked.
        engine: ``slipway`` or ``fastertransformer``; empty for a server that is not ours.
        tensor_para_size, pipeline_para_size: parallelism, as text.
        weight_data_type, data_type: on disk and at run time.
        workload: lengths in tokens as ``60/20``, or the name of the prompt file.
        mode: ``static``, ``closed`` or ``open``.
        batch_size: sequences in one request.
        concurrency: requests in flight, closed loop only.
        request_rate_per_s: open loop only.
        arrival: poisson or constant, open loop only.
        is_streaming: whether answers were streamed.
        max_batch_size: rows that the served model takes at once; None where it was not asked.
        max_queue_delay_us: of its dynamic batcher; None without one.
        warmup_requests: answers before the measured ones.
        requests, failed_requests: measured answers of a load, and failures among all.
        cancelled_requests: measured requests whose client hung up, which are in no other figure; None without hang-ups.
        clipped_share: share of the prepared requests of a load that were made shorter to fit the model's positions.
        remark: what a reader must know of the load, such as that it is no MLPerf result.
        slo_verdict: of a search: ``holds``, ``exceeded`` or ``undecided``.
        slo_limit: the limit that the fewest requests keep; ``backlog`` where answers do not keep up with arrivals.
        repeats: windows of equal size that the measured answers were cut into.
        is_stable: whether the repeats of a load agreed as closely as asked for.
        duration_s: of all repeats of a load.
        state: ``ok``, or ``failed`` with empty figures.
        error: the reason, or that of the first failed request.
        figures: by name, as ``figures``, ``server_metrics`` and ``costs`` define them; None for what cannot be
            computed.
        model_digest: digest of the model repository's manifest.
        is_random_weights: whether that manifest says that the weights are random.
        commit: of the code that measured.
        int8_mode: as config.pbtxt has it; empty where unknown.
        versions: of the programs that served, as ``handover.endpoint.VERSIONS``.
        cpu, cores, memory_bytes, gpu: of the client's host.
        timestamp: when the point was finished, UTC.
        settings_fingerprint: digest of the settings; a resumed run keeps only rows that have the same.
        endpoint_kind: ``triton`` or ``openai``; empty in tables of earlier versions.
        flags: of the engine, as its command line or its settings name them; empty where unknown.
        gpu_hour_price: of one GPU for an hour, in any currency; None where costs are not asked for.
        slos: the limits of a good request, as ``ttft 200 ms, e2e 2000 ms``.
        probe: 2 where a search measures a rate again, to confirm that it is exceeded; else None.
        started_at: wall clock when the first repeat began, UTC.
        sent_requests: all requests of a load's point, with those of the warm-up and after the last repeat.
        deployment_label: name that the user gave the deployment; empty for none.
        schema_version: SCHEMA_VERSION of the code that measured; None before there was one.
        replicas: servers behind the address; None for one, and where unknown.
        given_gpus: number of GPUs, where it was given rather than found out.
    """

    model: str = ""
    triton_model: str = ""
    engine: str = ""
    tensor_para_size: str = ""
    pipeline_para_size: str = ""
    weight_data_type: str = ""
    data_type: str = ""
    workload: str = ""
    mode: str = STATIC
    batch_size: int = 1
    concurrency: int | None = None
    request_rate_per_s: float | None = None
    arrival: str = ""
    is_streaming: bool = False
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None
    warmup_requests: int = 0
    requests: int = 0
    failed_requests: int = 0
    repeats: int = 0
    is_stable: bool = False
    duration_s: float | None = None
    state: str = FAILED
    error: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    model_digest: str = ""
    is_random_weights: bool = False
    commit: str = ""
    int8_mode: str = ""
    versions: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    gpu: str = ""
    timestamp: str = ""
    settings_fingerprint: str = ""
    flags: str = ""
    endpoint_kind: str = ""
    gpu_hour_price: float | None = None
    clipped_share: float | None = None
    cancelled_requests: int | None = None
    remark: str = ""
    slo_verdict: str = ""
    slo_limit: str = ""
    slos: str = ""
    probe: int | None = None
    started_at: str = ""
    sent_requests: int | None = None
    deployment_label: str = ""
    schema_version: int | None = None
    replicas: int | None = None
    given_gpus: int | None = None

    @property
    def point(self) -> tuple[str, str, float]:
        """What distinguishes the rows of one sweep."""
        return self.workload, f"{self.mode} again" if self.probe else self.mode, self.level

    @property
    def level(self) -> float:
        """Batch size, concurrency or request rate."""
        levels = {STATIC: self.batch_size, CLOSED: self.concurrency}
        return float(levels.get(self.mode, self.request_rate_per_s) or 0)

    @property
    def label(self) -> str:
        """Name of the level for people: ``batch 8``, ``concurrency 4``, ``8 requests/s``."""
        labels = {STATIC: f"batch {self.batch_size}", CLOSED: f"concurrency {self.concurrency}"}
        again = ", again" if self.probe else ""
        return labels.get(self.mode) or f"{self.level:g} requests/s{again}"

    @property
    def directory(self) -> str:
        """Name of the point in file names and in names of figures."""
        levels = {STATIC: f"batch{self.batch_size}", CLOSED: f"concurrency{self.concurrency}"}
        again = f"_probe{self.probe}" if self.probe else ""
        return f"{name_of_file(self.workload)}_{levels.get(self.mode) or f'rate{self.level:g}{again}'}"

    @property
    def input_length(self) -> int:
        """Tokens of each prompt of a static point."""
        return int(self.workload.partition("/")[0])

    @property
    def output_length(self) -> int:
        """Tokens generated for each prompt of a static point."""
        return int(self.workload.partition("/")[2])

    @property
    def ranks(self) -> int:
        """Ranks of the deployment: TP x PP of every replica."""
        return int(self.tensor_para_size or 1) * int(self.pipeline_para_size or 1) * (self.replicas or 1)

    @property
    def weights(self) -> WeightFormat | None:
        """Format of the matrices in the engine; None: unknown."""
        return find_format(self.int8_mode) if self.int8_mode else None

    @property
    def gpus(self) -> int | None:
        """GPUs of the deployment; 1 for one on the CPU; None for an OpenAI API that was not said to have any number."""
        if self.given_gpus is not None:
            return self.given_gpus
        if self.endpoint_kind == OPENAI and not self.tensor_para_size:
            return None
        return self.ranks if self.gpu else 1

    @property
    def sequences_per_s_per_rank(self) -> float | None:
        """Throughput divided by the ranks, from the digits that the table shows of it: who divides finds the same."""
        throughput = self.figures.get("sequences_per_s")
        return None if throughput is None else float(render(throughput)) / self.ranks

    @property
    def is_measured(self) -> bool:
        """Whether the row has figures."""
        return self.state == OK and (self.mode != STATIC or self.figures.get("e2e_mean_ms") is not None)

    @property
    def validity(self) -> str:
        """VALID, or INVALID where there are validity_reasons: such a row is neither recommended nor passes the gate."""
        return INVALID if self.validity_reasons else VALID

    @property
    def validity_reasons(self) -> str:
        """Why the row is INVALID, one reason after another; empty where it is VALID."""
        return "; ".join(self._doubts())

    def _doubts(self) -> Iterator[str]:
        if not self.is_measured:
            yield f"failed: {self.error or 'no figures'}"
            return
        if self.failed_requests:
            yield f"{self.failed_requests} request{'s' if self.failed_requests > 1 else ''} failed"
        yield from self._overload()
        if self.slo_verdict == UNDECIDED:
            yield f"undecided whether the SLOs hold ({self.slo_limit or 'too few requests'})"
        elif self.slo_verdict and self.slo_verdict != HOLDS:
            yield f"the SLOs are {self.slo_verdict} ({self.slo_limit})"
        elif not self.slo_verdict and not self.is_stable and self.mode != STATIC:
            yield "the trace was not replayed to its end" if self.arrival == TRACE else "the repeats did not agree"
        if self.is_random_weights:
            yield "the weights are random"

    @property
    def has_lost_answers(self) -> bool:
        """Whether requests failed, or became due faster than they were answered."""
        return bool(self.failed_requests) or any(self._overload())

    def _overload(self) -> Iterator[str]:
        """Yield a reason where answers did not keep up with what became due in an open loop."""
        due_per_s = self.figures.get("offered_requests_per_s") or self.level
        answered_per_s, lasted_s = self.figures.get("requests_per_s"), self.duration_s
        if self.mode != OPEN or answered_per_s is None or not lasted_s:
            return
        if self.cancelled_requests or self.failed_requests:
            answered_per_s = self.requests / lasted_s
        backlog = self.figures.get("backlog_at_end")
        by_chance = _DEVIATIONS * math.sqrt(due_per_s * lasted_s if backlog is None else backlog)
        if answered_per_s < _LEAST_ANSWERED * due_per_s and (due_per_s - answered_per_s) * lasted_s > by_chance:
            yield f"overloaded: {answered_per_s:.4g} requests/s were answered of {due_per_s:.4g} that were due"

    def value(self, name: str) -> Any:
        """One figure, or else field or property, by its name; None for a figure that is missing."""
        return self.figures[name] if name in self.figures else getattr(self, name, None)
