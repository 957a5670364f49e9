"""A recommendation's sentences and table cells, in its own files and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evaluation.report.number_text import show_figure, show_with_noise
from evaluation.report.recommendation import OFFLINE, Candidate, Ranking

RANKING_COLUMNS = ("Load", "Tokens/s", "vs best", "Tokens/s/GPU", "Tokens/s/user", "E2E p95, ms", "Deployment")


@dataclass(frozen=True)
class Budget:
    """Latency limits in ms by ttft, itl, tpot or e2e, and the percentile that must keep them."""

    limits_ms: Mapping[str, float]
    percentile: int = 95


def ranking_title(ranking: Ranking, budget: Budget | None) -> str:
    """Name a ranking: ``Online, 60/20 tokens: e2e p95 within 800 ms``."""
    if ranking.goal == OFFLINE or budget is None:
        return f"Offline, {ranking.workload} tokens: most tokens per second"
    limits = [f"{name} p{budget.percentile} within {limit:g} ms" for name, limit in budget.limits_ms.items()]
    return f"Online, {ranking.workload} tokens: most tokens per second with {', '.join(limits)}"


def candidate_cells(ranking: Ranking, candidate: Candidate) -> tuple[str, ...]:
    """One row of a ranking; the deviation is from its first."""
    is_first = candidate is ranking.best[0]
    return (
        candidate.load,
        show_with_noise(candidate.tokens_per_s, candidate.noise_tokens_per_s),
        "" if is_first else f"{100 * ranking.deviation(candidate):+.1f}%",
        show_figure(candidate.tokens_per_s_per_gpu),
        show_figure(candidate.tokens_per_s_per_user),
        show_figure(candidate.latencies_ms.get("e2e_p95_ms")),
        deployment_text(candidate),
    )


def deployment_text(candidate: Candidate) -> str:
    """Name a deployment by its settings: ``gpt3_5b, TP 2, PP 1, fp16 weights, fp16, batch 64``."""
    settings = {key.rpartition(".")[2]: value for key, value in candidate.settings.items()}
    texts = {
        "model_train_name": "{}",
        "random_weights": "random weights",
        "tensor_model_parallel_size": "TP {}",
        "pipeline_model_parallel_size": "PP {}",
        "weight_data_type": "{} weights",
        "data_type": "{}",
        "max_batch_size": "batch {}",
        "max_queue_delay_us": "delay {} us",
        "int8_mode": "int8",
        "decoupled": "decoupled",
    }
    return ", ".join(text.format(settings[name]) for name, text in texts.items() if settings.get(name))
