"""Figures of a point that follow from others of its row: what tokens cost, and the energy that one takes.

A figure without its ingredients is missing: there is no price unless ``benchmark.gpu_hour_price`` names one, and no
energy where NVML does not give it.
"""

from __future__ import annotations

from dataclasses import replace

from evaluation.speed.tables.table import Row

_SECONDS_PER_HOUR = 3600
_MILLION = 1_000_000


def derive(row: Row) -> Row:
    """Fill in DERIVED_FIGURES from the row's other figures."""
    figures, price = row.figures, row.gpu_hour_price
    total, output = figures.get("total_tokens_per_s"), figures.get("output_tokens_per_s")
    derived = {
        "cost_per_million_tokens": cost_per_million(price, row.gpus, total),
        "cost_per_million_output_tokens": cost_per_million(price, row.gpus, output),
        "gpu_energy_per_output_token_j": energy_per_token_j(figures.get("gpu_power_mean_watts"), output),
    }
    return replace(row, figures={**figures, **derived})


def cost_per_million(gpu_hour_price: float | None, gpus: int | None, tokens_per_s: float | None) -> float | None:
    """Price of a million tokens: gpu_hour_price x gpus / 3600 s / (tokens/s) x 1,000,000, in the price's currency.

    Args:
        gpu_hour_price: of one GPU for an hour, in any currency; None: there is no price.
        gpus: that serve, TP x PP; a deployment on the CPU counts as one; None if their number is unknown.
        tokens_per_s: of the whole deployment, input and output together or output alone.
    """
    if gpu_hour_price is None or gpus is None or not tokens_per_s:
        return None
    return gpu_hour_price * gpus / _SECONDS_PER_HOUR / tokens_per_s * _MILLION


def energy_per_token_j(power_watts: float | None, tokens_per_s: float | None) -> float | None:
    """Energy of one token in joules: mean power / (tokens/s)."""
    return None if power_watts is None or not tokens_per_s else power_watts / tokens_per_s
