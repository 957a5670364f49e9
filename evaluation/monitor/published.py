"""The monitor's figures in Prometheus' text format, for node_exporter's textfile collector; docs/grafana shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evaluation.tasks.metric import Metric
from handover.durable import write_atomically


def write_metrics(path: Path, model: str, figures: Sequence[Metric], requests: int, limit: float, reason: str) -> None:
    """Write the file whole.

    Args:
        path: of the file; the collector wants a name that ends with ``.prom``.
        model: name of the served model, a label.
        figures: of the monitor.
        requests: that were counted.
        limit: evidence that raises the alarm.
        reason: why the alarm was raised; empty: it was not.
    """
    found = {
        "requests": (float(requests), "Requests that were scored again."),
        "alarm": (float(bool(reason)), "Whether the alarm was raised."),
        "evidence_limit": (limit, "Evidence that raises the alarm."),
    }
    found |= {figure.name: (figure.value, figure.definition) for figure in figures if figure.value is not None}
    lines = list[str]()
    for name, (value, meaning) in found.items():
        full = f"slipway_monitor_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} gauge", f'{full}{{model_name="{model}"}} {value!r}']
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines) + "\n")
