"""Which direction of a benchmark's figure is better, declared for every one: a new figure without it ends the report.

The figures of evaluations say so themselves (``Metric.better``).
"""

from __future__ import annotations

import re

from evaluation.tasks.metric import HIGHER, LOWER, NEITHER

_DECLARED = (
    (r"(ttft|itl|tpot|e2e|latency|client_queue|server_queue|server_compute|server_request|client_lag)\w*_ms", LOWER),
    (r"server_(memory_peak_bytes|start_s|load_s|idle_s|failures)|gpu_memory_peak_bytes", LOWER),
    (r"cost_per_million_(output_)?tokens|gpu_energy_per_output_token_j", LOWER),
    (r"(failed|cancelled)_requests", LOWER),
    (r"(goodput_)?requests_per_s|(output|total)_tokens_per_s(_per_user|_per_gpu)?", HIGHER),
    (r"throughput_tokens_per_s|(throughput_)?sequences?_per_s(_per_rank)?|rate_per_s", HIGHER),
    (r"slo_kept_(share|low|high)|is_stable|validity", HIGHER),
    (r"server_(mean_batch|requests)|(server|client)_cpu_cores", NEITHER),
    (r"gpu_(utilisation_mean_percent|power_mean_watts)", NEITHER),
    (r"offered_requests_per_s|backlog_\w+|clipped_share|exceeded_at_per_s", NEITHER),
)
MAY_BE_NEGATIVE = re.compile(r"backlog_growth_\w+")
"""Figures that are differences: any other one below zero was not measured."""
_OF_EARLIER_METRICS = (
    (r"\w*perplexity|\w*_difference|passage_rounding|norm_scale_resolution", LOWER),
    (r"tokens_per_s|bleu|rouge\w*|f1|\w+_f1|\w*exact(_match)?|[\w-]*_accuracy\w*", HIGHER),
    (r"greedy_agreement|identical_continuations", HIGHER),
)


def direction(column: str) -> str:
    """Return which direction of a benchmark's figure is better: LOWER, HIGHER or NEITHER.

    Raises:
        KeyError: it is not declared.
    """
    found = next((better for pattern, better in _DECLARED if re.fullmatch(pattern, column)), None)
    if found is None:
        raise KeyError(f"no direction is declared for the figure {column}: add it to {__name__}")
    return found


def direction_of_metric(name: str) -> str:
    """Return the direction of an evaluation's figure in files that do not say it; NEITHER where it is not known."""
    return next((better for pattern, better in _OF_EARLIER_METRICS if re.fullmatch(pattern, name)), NEITHER)
