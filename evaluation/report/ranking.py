"""Recommendation of a measured configuration: by throughput alone, or by throughput within a latency budget."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evaluation.report.comparable import COMPARABLE, group_comparable, parity_of
from evaluation.report.data import Findings
from evaluation.report.formatting import TextTable, show_figure, show_with_noise
from evaluation.speed.tables.figures import STATISTICS
from evaluation.speed.tables.table import OPENAI, STATIC, Row
from ft_format.weight_format import KEY, find_format

OFFLINE, ONLINE = "offline", "online"
FIGURES = ("ttft", "itl", "tpot", "e2e")
TOP = 5
"""Candidates that a report shows."""
RANKING_COLUMNS = ("Load", "Tokens/s", "vs best", "Tokens/s/GPU", "Tokens/s/user", "E2E p95, ms", "Deployment")


@dataclass(frozen=True)
class DeploymentCandidate:
    """One measured point of one deployment.

    Attributes:
        source: results directory of the measurement.
        workload: lengths as ``60/20``.
        load: ``batch 8``, ``concurrency 4``, ``2 requests/s``.
        settings: override keys of the deployment and their values.
        tokens_per_s: generated tokens/s of the whole deployment.
        tokens_per_s_per_gpu, tokens_per_s_per_user: the axes of the Pareto front; the first is None where the number
            of GPUs is unknown.
        noise_tokens_per_s: half of the 95% interval; None if unknown.
        latencies_ms: means and percentiles by column, such as ``e2e_p95_ms``; None where not observed.
        failed_requests: number of failed requests.
        validity_reasons: why the row is not valid; empty if it is.
        name: name of the deployment or, where it has none, of the served model.
        is_deployable: whether its settings are known, so that it can be deployed again.
        model_digest: digest of the served model.
        engine: what served it.
        parity: verdict of the run's parity evaluation; empty where it was not evaluated.
    """

    source: str
    benchmark: str
    workload: str
    load: str
    settings: Mapping[str, object]
    tokens_per_s: float
    tokens_per_s_per_gpu: float | None
    tokens_per_s_per_user: float
    noise_tokens_per_s: float | None
    latencies_ms: Mapping[str, float | None]
    failed_requests: int = 0
    model_digest: str = ""
    engine: str = ""
    parity: str = ""
    validity_reasons: str = ""
    is_deployable: bool = True
    name: str = ""


@dataclass(frozen=True)
class Budget:
    """Latency limits in ms by ttft, itl, tpot or e2e, and the percentile that must keep them."""

    limits_ms: Mapping[str, float]
    percentile: int = 95


@dataclass(frozen=True)
class Ranking:
    """The candidates for one goal and one workload, best first.

    Attributes:
        goal: ``offline`` or ``online``.
        workload: lengths as ``60/20``.
        considered: number of candidates.
        within_budget: number of candidates within the budget.
        invalid: number of candidates by the reason that their rows are not valid for; they are not among the best.
        group: engine whose candidates are comparable with no other engine's; COMPARABLE for all others.
    """

    goal: str
    workload: str
    best: tuple[DeploymentCandidate, ...]
    considered: int
    within_budget: int
    group: str = COMPARABLE
    invalid: Mapping[str, int] = field(default_factory=dict)

    def deviation(self, candidate: DeploymentCandidate) -> float:
        """Throughput relative to the first's, 0 for the first."""
        return candidate.tokens_per_s / self.best[0].tokens_per_s - 1


def find_candidates(findings: Findings, source: str) -> list[DeploymentCandidate]:
    """List every measured point of a run."""
    found = (_candidate(row, benchmark.name, source) for benchmark in findings.benchmarks for row in benchmark.measured)
    parity, _ = parity_of(findings)
    return [replace(candidate, parity=parity) for candidate in found if candidate is not None]


def rank_all(candidates: Sequence[DeploymentCandidate], budget: Budget | None, top: int = TOP) -> list[Ranking]:
    """Rank by throughput alone, then within the budget if it has limits; the ``top`` best of each workload are kept."""
    rankings = rank(candidates, OFFLINE, {}, 95, top)
    if budget is not None and budget.limits_ms:
        rankings += rank(candidates, ONLINE, budget.limits_ms, budget.percentile, top)
    return rankings


def rank(
    candidates: Sequence[DeploymentCandidate], goal: str, budget_ms: Mapping[str, float], percentile: int, top: int
) -> list[Ranking]:
    """Order the candidates of each workload by throughput; engines that are not comparable are ranked apart.

    Args:
        candidates: points of any number of deployments.
        goal: offline takes all that are valid; online only those of them that keep the budget.
        budget_ms: limits by ttft, itl, tpot or e2e.
        percentile: of the latency that must keep its limit: 50, 90, 95 or 99.
        top: how many to keep.
    """
    rankings = []
    for group, workload, same in group_candidates(candidates):
        valid = [candidate for candidate in same if not candidate.validity_reasons]
        fitting = valid if goal == OFFLINE else [c for c in valid if keeps_budget(c, budget_ms, percentile)]
        ordered = sorted(fitting, key=lambda candidate: -candidate.tokens_per_s)
        invalid = Counter(_kind_of(each.validity_reasons) for each in same if each.validity_reasons)
        rankings.append(Ranking(goal, workload, tuple(ordered[:top]), len(same), len(fitting), group, dict(invalid)))
    return rankings


def _kind_of(reasons: str) -> str:  # the first one without its numbers
    return re.sub(r"^\d+ | \(.*|:.*", "", reasons.partition(";")[0])


def group_candidates(candidates: Sequence[DeploymentCandidate]) -> Iterator[tuple[str, str, list[DeploymentCandidate]]]:
    """Yield the group, the workload and the candidates of what may be compared: comparable engines, same lengths."""
    groups = group_comparable(candidates)
    for workload in dict.fromkeys(candidate.workload for candidate in candidates):
        for group, members in groups.items():
            if same := [candidate for candidate in members if candidate.workload == workload]:
                yield group, workload, same


def keeps_budget(candidate: DeploymentCandidate, budget_ms: Mapping[str, float], percentile: int) -> bool:
    """Return whether the row is valid, no request failed, and every limited latency was observed within its limit."""
    observed = [candidate.latencies_ms.get(f"{name}_p{percentile}_ms") for name in budget_ms]
    limits = budget_ms.values()
    kept = all(value is not None and value <= limit for value, limit in zip(observed, limits, strict=True))
    return kept and not candidate.failed_requests and not candidate.validity_reasons


def pareto_front(candidates: Iterable[DeploymentCandidate]) -> list[DeploymentCandidate]:
    """Return the valid candidates that no other beats in both tokens/s/user and tokens/s/GPU, by growing first one."""
    front: list[DeploymentCandidate] = []
    valid = [each for each in candidates if not each.validity_reasons]
    placed = [(each.tokens_per_s_per_gpu, each) for each in valid if each.tokens_per_s_per_gpu is not None]
    most = -math.inf
    for per_gpu, candidate in sorted(placed, key=lambda pair: (-pair[1].tokens_per_s_per_user, -pair[0])):
        if per_gpu > most:
            most = per_gpu
            front.append(candidate)
    return front[::-1]


def ranking_title(ranking: Ranking, budget: Budget | None) -> str:
    """Name a ranking: ``Online, 60/20 tokens: e2e p95 within 800 ms``."""
    alone = f" ({ranking.group} alone: not comparable with the others)" if ranking.group else ""
    if ranking.goal == OFFLINE or budget is None:
        return f"Offline, {ranking.workload} tokens: most tokens per second{alone}"
    limits = [f"{name} p{budget.percentile} within {limit:g} ms" for name, limit in budget.limits_ms.items()]
    return f"Online, {ranking.workload} tokens: most tokens per second with {', '.join(limits)}{alone}"


def left_out(ranking: Ranking) -> str:
    """Return how many candidates are not valid, and why; empty where all are."""
    counts = [f"{count}: {reason}" for reason, count in ranking.invalid.items()]
    return f"left out as not valid: {', '.join(counts)}" if counts else ""


def ranking_table(
    ranking: Ranking, budget: Budget | None, name: Callable[[DeploymentCandidate], str] | None = None
) -> TextTable:
    """Show a ranking under RANKING_COLUMNS; the caption of an empty one says that no candidate keeps the budget.

    Args:
        ranking: best candidate first; deviations are from it.
        budget: latency limits that it was made with.
        name: names a candidate's deployment; None: all are of one deployment, and the last column is left out.
    """
    rows = tuple((*_cells(ranking, each), *([name(each)] if name else ())) for each in ranking.best)
    caption = ranking_title(ranking, budget)
    caption += "" if rows else f": none of {ranking.considered} measured points keeps the budget."
    caption += f" ({left_out(ranking)})" if ranking.invalid else ""
    return TextTable(caption, RANKING_COLUMNS if name else RANKING_COLUMNS[:-1], rows)


def _cells(ranking: Ranking, candidate: DeploymentCandidate) -> tuple[str, ...]:
    return (
        candidate.load,
        show_with_noise(candidate.tokens_per_s, candidate.noise_tokens_per_s),
        "" if candidate is ranking.best[0] else f"{100 * ranking.deviation(candidate):+.1f}%",
        show_figure(candidate.tokens_per_s_per_gpu),
        show_figure(candidate.tokens_per_s_per_user),
        show_figure(candidate.latencies_ms.get("e2e_p95_ms")),
    )


def deployment_text(candidate: DeploymentCandidate) -> str:
    """Name a deployment by its settings: ``gpt3_5b, TP 2, PP 1, fp16 weights, fp16, batch 64``."""
    settings = {key.rpartition(".")[2]: value for key, value in candidate.settings.items()}
    texts = {
        "model_train_name": "{}",
        "tensor_model_parallel_size": "TP {}",
        "pipeline_model_parallel_size": "PP {}",
        "weight_data_type": "{} weights",
        "data_type": "{}",
        "max_batch_size": "batch {}",
        "max_queue_delay_us": "delay {} us",
        KEY: find_format(settings.get(KEY)).name,
        "decoupled": "decoupled",
    }
    if not candidate.is_deployable:
        return ", ".join(part for part in (candidate.name, candidate.engine) if part) or candidate.source
    engine = [] if candidate.engine in ("", "slipway") else [candidate.engine]
    shown = [*engine, *(text.format(settings[name]) for name, text in texts.items() if settings.get(name))]
    return ", ".join(shown) or candidate.source


def _candidate(row: Row, benchmark: str, source: str) -> DeploymentCandidate | None:
    total = row.figures.get("output_tokens_per_s")
    per_gpu, per_user, noise = _rates(row)
    if total is None or per_user is None:
        return None
    columns = [f"{name}_{statistic}_ms" for name in FIGURES for statistic in STATISTICS]
    return DeploymentCandidate(
        source=source,
        benchmark=benchmark,
        workload=row.workload,
        load=row.label,
        settings=_settings(row),
        tokens_per_s=total,
        tokens_per_s_per_gpu=per_gpu,
        tokens_per_s_per_user=per_user,
        noise_tokens_per_s=noise,
        latencies_ms={name: row.figures[name] for name in columns if name in row.figures},
        failed_requests=row.failed_requests,
        model_digest=row.model_digest,
        engine=row.engine,
        name=row.deployment_label or row.model,
        validity_reasons=row.validity_reasons,
        is_deployable=row.endpoint_kind != OPENAI or bool(row.tensor_para_size),
    )


def _rates(row: Row) -> tuple[float | None, float | None, float | None]:
    """Return tokens/s of a GPU and of a user, and half of the 95% interval of tokens/s; a static table lacks them."""
    figures = row.figures
    if row.mode != STATIC:
        names = ("output_tokens_per_s_per_gpu", "output_tokens_per_s_per_user", "ci95_output_tokens_per_s")
        return figures.get(names[0]), figures.get(names[1]), figures.get(names[2])
    total, mean_ms = figures.get("output_tokens_per_s"), figures.get("e2e_mean_ms")
    noise_ms = figures.get("ci95_e2e_mean_ms")
    if total is None or not mean_ms:
        return None, None, None
    noise = None if noise_ms is None else total * noise_ms / mean_ms
    return total / row.gpus if row.gpus else None, 1e3 * row.output_length / mean_ms, noise


def _settings(row: Row) -> dict[str, object]:
    """Return the override keys of a deployment, as far as the row has them."""
    known: dict[str, object] = {
        "export.run.model_train_name": row.model if row.model != row.triton_model else None,
        "export.model.tensor_model_parallel_size": int(row.tensor_para_size) if row.tensor_para_size else None,
        "export.model.weight_data_type": row.weight_data_type or None,
        "export.triton_deployment.pipeline_model_parallel_size": int(row.pipeline_para_size)
        if row.pipeline_para_size
        else None,
        "export.triton_deployment.data_type": row.data_type or None,
        "deployment.replicas": row.replicas,
        f"export.triton_deployment.{KEY}": bool(row.weights) if row.weights is not None else None,
    }
    if row.endpoint_kind == OPENAI:
        pass  # what such a server was started with is not known
    elif row.mode == STATIC:
        known["export.triton_deployment.max_batch_size"] = row.batch_size
    else:
        known["export.triton_deployment.max_batch_size"] = row.max_batch_size
        known["export.triton_deployment.max_queue_delay_us"] = row.max_queue_delay_us
        known["export.triton_deployment.decoupled"] = row.is_streaming
    return {key: value for key, value in known.items() if value is not None}
