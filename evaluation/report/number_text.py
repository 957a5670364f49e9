"""Numbers as people read them."""

from __future__ import annotations


def show_figure(value: float | None) -> str:
    """Show three or more digits; very large figures (an untrained model's perplexity) and tiny ones by magnitude."""
    if value is None:
        return ""
    if value >= 1e7 or 0 < value < 0.01:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def show_with_noise(value: float | None, noise: float | None) -> str:
    """Show a figure with half of its 95% interval; one that exceeds the figure itself is only called that."""
    if value is None or noise is None:
        return show_figure(value)
    return f"{show_figure(value)} ±{show_figure(noise) if noise <= value else '>100%'}"
