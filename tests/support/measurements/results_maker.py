"""Results directories with figures of a test's choosing, written by the project's own table writers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from evaluation.benchmark import with_latencies
from evaluation.speed.tables.table import LOAD_TABLE, STATIC_TABLE, Row


def static_row(batch_size: int, latencies_ms: list[float], **changes: Any) -> Row:
    row = Row("demo", "ft", "slipway", "1", "1", "fp16", "fp32", "60/20", batch_size=batch_size)
    row = with_latencies(row, [round(latency * 1e6) for latency in latencies_ms])
    counts = {"warmup_requests": 1, "repeats": len(latencies_ms)}
    return dataclasses.replace(row, **{"model_digest": "sha256:m", **counts, **changes})


def load_row(concurrency: int | None = 4, rate: float | None = None, **changes: Any) -> Row:
    """A measured point; arguments that are no fields are figures."""
    fields = {column.name for column in dataclasses.fields(Row)}
    figures = {name: value for name, value in changes.items() if name not in fields}
    base = Row(
        model="demo",
        triton_model="ft",
        engine="slipway",
        tensor_para_size="1",
        pipeline_para_size="1",
        weight_data_type="fp16",
        data_type="fp32",
        max_batch_size=16,
        max_queue_delay_us=0,
        workload="60/20",
        mode="closed" if rate is None else "open",
        concurrency=concurrency if rate is None else None,
        request_rate_per_s=rate,
        arrival="" if rate is None else "poisson",
        is_streaming=False,
        requests=60,
        repeats=3,
        is_stable=True,
        duration_s=6.0,
        state="ok",
        figures=figures,
        model_digest="sha256:m",
        commit="c0ffee",
        cpu="CPU",
        cores=2,
        memory_bytes=8_000_000_000,
        timestamp="2026-01-01T00:00:00+00:00",
    )
    return dataclasses.replace(base, **{name: value for name, value in changes.items() if name in fields})


def write_results(
    results: Path,
    *,
    static: list[Row] | None = None,
    load: list[Row] | None = None,
    accuracy: dict[str, tuple[float, float]] | None = None,
    data_sha256: str = "5" * 64,
    failed: int = 0,
) -> Path:
    """Write what a run leaves; accuracy is value and standard error by name of the figure."""
    if static is not None:
        (results / "benchmark" / "static").mkdir(parents=True)
        STATIC_TABLE.write(results / "benchmark" / "static" / "benchmark.csv", static)
    if load is not None:
        (results / "benchmark" / "load").mkdir(parents=True)
        LOAD_TABLE.write(results / "benchmark" / "load" / "load.csv", load)
    if accuracy is not None:
        figures = [
            {"name": name, "value": value, "stderr": stderr, "n": 100, "failed": failed, "unit": "fraction"}
            | {"definition": "d"}
            for name, (value, stderr) in accuracy.items()
        ]
        content = {"task": "lambada", "metrics": figures, "samples": 100, "failed": failed}
        content |= {"data": {"sha256": data_sha256}, "model": {"model_digest": "sha256:m"}}
        (results / "evaluation" / "lambada").mkdir(parents=True)
        (results / "evaluation" / "lambada" / "metrics.json").write_text(json.dumps(content))
    return results
