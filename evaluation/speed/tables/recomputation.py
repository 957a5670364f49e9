"""Compute a row's figures again from the point's requests, and compare them with what the table says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evaluation.speed.tables.backlog import BACKLOG_FIGURES, growth_figures
from evaluation.speed.tables.cells import render
from evaluation.speed.tables.costs import COST_FIGURES, ENERGY_FIGURES
from evaluation.speed.tables.derived import derive
from evaluation.speed.tables.figures import (
    BY_NAME,
    FURTHER_STATISTICS,
    FigureContext,
    compute_figures,
    compute_newer_figures,
    compute_static_figures,
)
from evaluation.speed.tables.formulas import NANOSECONDS_PER_S
from evaluation.speed.tables.raw_records import PointRecords
from evaluation.speed.tables.server_metrics import server_figures
from evaluation.speed.tables.slo_verdict import judge
from evaluation.speed.tables.table import OK, SLO_FIGURES, STATIC, Row, Table

READINGS = {*COST_FIGURES, *ENERGY_FIGURES, "server_idle_s", "gpu_energy_per_output_token_j"}
"""Figures that do not follow from requests."""
_OF_LIMITS = {"goodput_requests_per_s", *SLO_FIGURES}


@dataclass(frozen=True)
class Comparison:
    """What came of one point.

    Attributes:
        equal: columns whose recomputed value has the digits that the table shows.
        different: the table's and the recomputed cell, by column.
        unknown: columns of figures that the records do not hold enough for.
    """

    equal: tuple[str, ...]
    different: Mapping[str, tuple[str, str]]
    unknown: tuple[str, ...] = ()


def compare(table: Table, row: Row, point: PointRecords) -> Comparison:
    """Compare every column that requests and the server's counters decide; readings of the machine are no such ones."""
    computed = recompute(row, point)
    equal, different, unknown = [], {}, []
    for column, name in table.columns.items():
        if name not in computed:
            if column in table.figures and name not in READINGS:
                unknown.append(column)
            continue
        said, found = str(render(row.value(name))), str(render(computed[name]))
        if said == found:
            equal.append(column)
        else:
            different[column] = said, found
    return Comparison(tuple(equal), different, tuple(unknown))


def recompute(row: Row, point: PointRecords) -> dict[str, Any]:
    """Compute figures and counts of a point by the names of the row's fields and figures.

    A failed point has counts and empty figures. What was left out of the records leaves its figures out: with requests
    missing all of them, with token times missing those of the inter-token latency.
    """
    if point.requests_left_out:
        return {}
    records, windows = point.records, point.windows
    counts: dict[str, Any] = {"failed_requests": sum(bool(record.error) for record in records)}
    if row.mode == STATIC:
        # A failed request of the warm-up ends a static point, too.
        counts["failed_requests"] += sum(bool(record.error) for record in point.warmups)
        figures = compute_static_figures(windows, row.batch_size, row.gpus)
    else:
        if row.cancelled_requests is not None:
            counts["cancelled_requests"] = sum(record.is_cancelled for record in records)
        counts |= {"requests": len(records), "repeats": len(windows), "warmup_requests": len(point.warmups)}
        context = FigureContext(point.slos, row.gpus)
        figures = {**compute_figures(windows, context), **compute_newer_figures(windows, context)}
        figures |= server_figures(*point.counters)
        figures |= _figures_of_search(row, point)
    derived = derive(replace(row, figures=figures)).figures
    figures = {name: value for name, value in derived.items() if name not in READINGS}
    if row.state != OK:
        return counts | dict.fromkeys(figures)
    if row.mode != STATIC:
        counts["duration_s"] = (windows[-1].ended_ns - windows[0].started_ns) / NANOSECONDS_PER_S
    if point.token_times_left_out:
        gaps = {*BY_NAME["itl"].columns(), *(f"itl_{statistic}_ms" for statistic in FURTHER_STATISTICS)}
        figures = {name: value for name, value in figures.items() if name not in gaps}
        if "itl" in point.slos:  # this limit decides which requests are good
            figures = {name: value for name, value in figures.items() if name not in _OF_LIMITS}
    return counts | figures


def _figures_of_search(row: Row, point: PointRecords) -> dict[str, float | None]:
    """Compute the figures of a rate that a search measured; they do not depend on the percentile that it asked for."""
    if not row.slo_verdict or not point.slos:
        return dict.fromkeys((*SLO_FIGURES, *BACKLOG_FIGURES))
    judgement = judge(point.records, point.slos, percentile=50.0)
    shares = dict(zip(SLO_FIGURES, (judgement.share, judgement.low, judgement.high), strict=True))
    return {**shares, **growth_figures(point.windows)}
