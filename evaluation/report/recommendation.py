"""Which measured configuration to run: for throughput alone, or for throughput within a latency budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evaluation.report.data import Findings
from evaluation.speed.benchmark_table import Row
from evaluation.speed.load_table import LoadRow

OFFLINE, ONLINE = "offline", "online"
FIGURES = ("ttft", "itl", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class Candidate:
    """One measured point of one deployment.

    Attributes:
        source: results directory that it was measured in.
        benchmark: name of the benchmark.
        workload: lengths as ``60/20``.
        load: ``batch 8``, ``concurrency 4``, ``2 requests/s``.
        settings: override keys of the deployment and their values.
        tokens_per_s: generated, of the whole deployment.
        tokens_per_s_per_gpu, tokens_per_s_per_user: the axes of the Pareto front.
        noise_tokens_per_s: half of the 95% interval; None where unknown.
        latencies_ms: means and percentiles by column, such as ``e2e_p95_ms``; None where not observed.
        failed_requests: among those counted.
        model_digest: of what was served.
    """

    source: str
    benchmark: str
    workload: str
    load: str
    settings: Mapping[str, object]
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    noise_tokens_per_s: float | None
    latencies_ms: Mapping[str, float | None]
    failed_requests: int = 0
    model_digest: str = ""


@dataclass(frozen=True)
class Ranking:
    """The candidates for one goal and one workload, best first.

    Attributes:
        goal: ``offline`` or ``online``.
        workload: lengths as ``60/20``.
        best: at most as many as were asked for.
        considered: candidates before the budget.
        within_budget: of those.
    """

    goal: str
    workload: str
    best: tuple[Candidate, ...]
    considered: int
    within_budget: int

    def deviation(self, candidate: Candidate) -> float:
        """Throughput relative to the first's, 0 for the first."""
        return candidate.tokens_per_s / self.best[0].tokens_per_s - 1


def find_candidates(findings: Findings, source: str) -> list[Candidate]:
    """List every measured point of a run."""
    static = [
        _of_static(row, benchmark.name, source) for benchmark in findings.benchmarks for row in benchmark.measured
    ]
    loaded = [_of_load(row, load.name, source) for load in findings.loads for row in load.measured]
    return [candidate for candidate in (*static, *loaded) if candidate is not None]


def rank(
    candidates: Sequence[Candidate], goal: str, budget_ms: Mapping[str, float], percentile: int, top: int
) -> list[Ranking]:
    """Order the candidates of each workload by throughput.

    Args:
        candidates: of any number of deployments.
        goal: offline takes all; online only those without a failed request that keep the budget.
        budget_ms: limits by ttft, itl, tpot or e2e.
        percentile: of the latency that must keep its limit: 50, 90, 95 or 99.
        top: how many to keep.
    """
    rankings = []
    for workload in dict.fromkeys(candidate.workload for candidate in candidates):
        same = [candidate for candidate in candidates if candidate.workload == workload]
        fitting = same if goal == OFFLINE else [c for c in same if keeps_budget(c, budget_ms, percentile)]
        ordered = sorted(fitting, key=lambda candidate: -candidate.tokens_per_s)
        rankings.append(Ranking(goal, workload, tuple(ordered[:top]), len(same), len(fitting)))
    return rankings


def keeps_budget(candidate: Candidate, budget_ms: Mapping[str, float], percentile: int) -> bool:
    """Whether every limited latency was observed and kept its limit, and no request failed."""
    observed = [candidate.latencies_ms.get(f"{name}_p{percentile}_ms") for name in budget_ms]
    limits = budget_ms.values()
    kept = all(value is not None and value <= limit for value, limit in zip(observed, limits, strict=True))
    return kept and not candidate.failed_requests


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Keep what no other candidate beats in tokens/s/user and tokens/s/GPU both; slowest for the user first."""
    front: list[Candidate] = []
    ordered = sorted(candidates, key=lambda c: (-c.tokens_per_s_per_user, -c.tokens_per_s_per_gpu))
    for candidate in ordered:
        if not front or candidate.tokens_per_s_per_gpu > front[-1].tokens_per_s_per_gpu:
            front.append(candidate)
    return front[::-1]


def _of_static(row: Row, benchmark: str, source: str) -> Candidate | None:
    mean_ms, tokens_per_s = row.latency_mean_ms, row.throughput_tokens_per_s
    if mean_ms is None or tokens_per_s is None:
        return None
    noise = None if row.ci95_latency_mean_ms is None else tokens_per_s * row.ci95_latency_mean_ms / mean_ms
    latencies = {f"e2e_{which}_ms": getattr(row, f"latency_{which}_ms") for which in STATISTICS}
    return Candidate(
        source=source,
        benchmark=benchmark,
        workload=f"{row.input_length}/{row.output_length}",
        load=f"batch {row.batch_size}",
        settings=_settings(row),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / _gpus(row),
        tokens_per_s_per_user=1e3 * row.output_length / mean_ms,
        noise_tokens_per_s=noise,
        latencies_ms=latencies,
        model_digest=row.model_digest,
    )


def _of_load(row: LoadRow, benchmark: str, source: str) -> Candidate | None:
    figures = row.figures
    total, per_gpu = figures.get("output_tokens_per_s"), figures.get("output_tokens_per_s_per_gpu")
    per_user = figures.get("output_tokens_per_s_per_user")
    if total is None or per_gpu is None or per_user is None:
        return None
    columns = [f"{name}_{which}_ms" for name in FIGURES for which in STATISTICS]
    return Candidate(
        source=source,
        benchmark=benchmark,
        workload=row.workload,
        load=row.label,
        settings=_settings(row),
        tokens_per_s=total,
        tokens_per_s_per_gpu=per_gpu,
        tokens_per_s_per_user=per_user,
        noise_tokens_per_s=figures.get("ci95_output_tokens_per_s"),
        latencies_ms={name: figures.get(name) for name in columns},
        failed_requests=row.failed_requests,
        model_digest=row.model_digest,
    )


def _settings(row: Row | LoadRow) -> dict[str, object]:
    """Override keys of a deployment, as far as the row knows them."""
    known: dict[str, object] = {
        "export.run.model_train_name": row.model if row.model != row.triton_model else None,
        "export.model.tensor_model_parallel_size": int(row.tensor_para_size) if row.tensor_para_size else None,
        "export.model.weight_data_type": row.weight_data_type or None,
        "export.model.random_weights": row.is_random_weights or None,
        "export.triton_deployment.pipeline_model_parallel_size": int(row.pipeline_para_size)
        if row.pipeline_para_size
        else None,
        "export.triton_deployment.data_type": row.data_type or None,
        "export.triton_deployment.int8_mode": row.int8_mode != "0" if row.int8_mode else None,
    }
    if isinstance(row, LoadRow):
        known["export.triton_deployment.max_batch_size"] = row.max_batch_size
        known["export.triton_deployment.max_queue_delay_us"] = row.max_queue_delay_us
        known["export.triton_deployment.decoupled"] = row.is_streaming
    else:
        known["export.triton_deployment.max_batch_size"] = row.batch_size
    return {key: value for key, value in known.items() if value is not None}


def _gpus(row: Row) -> int:
    return int(row.tensor_para_size or 1) * int(row.pipeline_para_size or 1) if row.gpu else 1
