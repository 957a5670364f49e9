"""The figures of a point in the formats of other tools: vLLM's ``bench serve`` and genai-perf's exports.

A field that does not apply (an observed TTFT without streaming) is null or absent, never 0. Field names and units are
those of vLLM's ``vllm/benchmarks/serve.py`` (durations of single requests in seconds, statistics in ms), of Perf
Analyzer's ``--profile-export-file`` (``profile_export.json``, nanoseconds), and of genai-perf's
``profile_export_genai_perf.json`` and ``.csv``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import Any

from evaluation.speed.tables import formulas
from evaluation.speed.tables.cells import csv_text
from evaluation.speed.tables.figures import BY_NAME, DISTRIBUTIONS, PERCENTILES
from evaluation.speed.tables.raw_records import write_records
from evaluation.speed.tables.record import RequestRecord
from evaluation.speed.tables.table import CLOSED, OK, PROFILE, SUMMARY, TRITON, Row
from evaluation.speed.under_load import Measured
from handover.durable import write_atomically

GENAI_PERF = "profile_export_genai_perf"
_VLLM_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
_GENAI_NAMES = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",  # genai-perf's, too, is (e2e - ttft) / (tokens - 1), one a request
    "request_latency": "e2e",
}
_GENAI_PERCENTILES = (99, 95, 90, 75, 50, 25)


def write_point(directory: Path, measured: Measured, slos: Mapping[str, float]) -> None:
    """Write one point's requests and, unless it failed, its figures in the formats of other tools."""
    write_records(directory, measured.raw)
    if measured.row.state != OK:
        return
    statistics_of = genai_perf_statistics(measured)
    write_atomically(directory / SUMMARY, _json(vllm_result(measured, slos)))
    write_atomically(directory / PROFILE, json.dumps(profile_export(measured)) + "\n")
    write_atomically(directory / f"{GENAI_PERF}.json", _json(statistics_of))
    write_atomically(directory / f"{GENAI_PERF}.csv", genai_perf_csv(statistics_of))


def write_summary(output: Path, rows: Sequence[Row]) -> None:
    """Collect the points' summaries, without single requests, into one file; failed points are null."""
    points = []
    for row in rows:
        path = output / row.directory / SUMMARY
        content = json.loads(path.read_text()) if row.state == OK and path.is_file() else None
        kept = content and {name: value for name, value in content.items() if not isinstance(value, list)}
        points.append({"workload": row.workload, "load": row.label, "state": row.state, "result": kept})
    write_atomically(output / SUMMARY, _json({"points": points}))


def vllm_result(measured: Measured, slos: Mapping[str, float]) -> dict[str, Any]:
    """Return a point in the format of ``vllm bench serve``'s result file.

    The lists ``input_lens``, ``output_lens``, ``ttfts``, ``itls`` and ``errors`` have one entry for each request, in
    seconds as in vLLM's.
    """
    row, figures = measured.row, measured.row.figures
    good = [record for record in measured.records if record.is_complete]
    content: dict[str, Any] = {
        "date": row.timestamp,
        "backend": row.endpoint_kind or TRITON,
        "endpoint_type": row.endpoint_kind or TRITON,
        "model_id": row.model,
        "model_digest": row.model_digest,
        "tokenizer_id": row.model,
        "num_prompts": row.requests,
        "request_rate": "inf" if row.mode == CLOSED else row.level,
        "burstiness": 1.0 if row.arrival == "poisson" else None,
        "max_concurrency": row.concurrency,
        "duration": row.duration_s,
        "completed": len(good),
        "failed": row.failed_requests,
        "total_input_tokens": sum(record.input_tokens for record in good),
        "total_output_tokens": sum(record.output_tokens for record in good),
        "request_throughput": figures.get("requests_per_s"),
        "request_goodput": figures.get("goodput_requests_per_s"),
        "goodput_slos_ms": dict(slos),
        "output_throughput": figures.get("output_tokens_per_s"),
        "total_token_throughput": figures.get("total_tokens_per_s"),
    }
    for distribution in DISTRIBUTIONS:
        name = _VLLM_NAMES.get(distribution.name)
        if name is not None:
            values = distribution.values_ms(measured.records)
            content[f"mean_{name}_ms"] = formulas.mean(values)
            content[f"median_{name}_ms"] = formulas.percentile(values, 50)
            content[f"std_{name}_ms"] = pstdev(values) if values else None
            content |= {f"p{percent}_{name}_ms": formulas.percentile(values, percent) for percent in PERCENTILES}
    return content | {
        "input_lens": [record.input_tokens for record in measured.records],
        "output_lens": [record.output_tokens for record in measured.records],
        "ttfts": [next(iter(_seconds("ttft", record)), None) for record in measured.records],
        "itls": [_seconds("itl", record) for record in measured.records],
        "errors": [record.error for record in measured.records],
    }


def profile_export(measured: Measured) -> dict[str, Any]:
    """Return a point in the format of Perf Analyzer's profile export: requests' times in monotonic nanoseconds."""
    row = measured.row
    is_closed = row.mode == CLOSED
    experiment = {"mode": "concurrency" if is_closed else "request_rate", "value": row.level}
    requests = [
        {
            "timestamp": record.sent_ns,
            "request_inputs": {"input_lengths": record.input_tokens, "request_output_len": record.output_tokens},
            "response_timestamps": list(record.chunk_ns),
            "response_outputs": [{"tokens": count} for count in record.chunk_tokens],
            "scheduled": record.scheduled_ns,
        }
        for record in measured.records
        if record.is_complete
    ]
    experiments = [{"experiment": experiment, "requests": requests, "window_boundaries": list(measured.window_ns)}]
    return {
        "experiments": experiments,
        "version": "2.51.0",
        "service_kind": row.endpoint_kind or TRITON,
        "endpoint": "",
    }


def genai_perf_statistics(measured: Measured) -> dict[str, Any]:
    """Return a point in the format of genai-perf's statistics, by the names of its metrics."""
    row = measured.row
    content: dict[str, Any] = {}
    for name, ours in _GENAI_NAMES.items():
        _add(content, name, "ms", BY_NAME[ours].values_ms(measured.records))
    good = [record for record in measured.records if record.is_complete]
    _add(content, "output_sequence_length", "tokens", [float(record.output_tokens) for record in good])
    _add(content, "input_sequence_length", "tokens", [float(record.input_tokens) for record in good])
    for name, unit, value in (
        ("output_token_throughput", "tokens/sec", row.figures.get("output_tokens_per_s")),
        ("request_throughput", "requests/sec", row.figures.get("requests_per_s")),
        ("request_goodput", "requests/sec", row.figures.get("goodput_requests_per_s")),
        ("request_count", "count", float(len(good))),
    ):
        if value is not None:
            content[name] = {"unit": unit, "avg": value}
    stimulus = {"concurrency": row.concurrency} if row.mode == CLOSED else {"request_rate": row.level}
    config = {"model_names": [row.model], "service_kind": row.endpoint_kind or TRITON, "streaming": row.is_streaming}
    content["input_config"] = {**config, "perf_analyzer": {"stimulus": stimulus}}
    return content


def genai_perf_csv(content: Mapping[str, Any]) -> str:
    """Return statistics in the format of genai-perf's CSV: distributions, an empty line, and single values."""
    measures = ("avg", "min", "max", *(f"p{percent}" for percent in _GENAI_PERCENTILES))
    distributions: list[tuple[str, ...]] = [("Metric", *measures)]
    values: list[tuple[str, ...]] = [("Metric", "Value")]
    for name, entry in content.items():
        if "p99" in entry:
            distributions.append((_title(name, entry["unit"]), *(f"{entry[measure]:,.2f}" for measure in measures)))
        elif "unit" in entry:
            values.append((_title(name, entry["unit"]), f"{entry['avg']:,.2f}"))
    return csv_text([*distributions, (), *values])


def _add(content: dict[str, Any], name: str, unit: str, values: Sequence[float]) -> None:
    if not values:
        return
    content[name] = {
        "unit": unit,
        "avg": formulas.mean(values),
        **{f"p{percent}": formulas.percentile(values, percent) for percent in _GENAI_PERCENTILES},
        "min": min(values),
        "max": max(values),
        "std": pstdev(values),
    }


def _title(name: str, unit: str) -> str:
    return f"{name.replace('_', ' ').title()} ({unit})"


def _seconds(name: str, record: RequestRecord) -> list[float]:
    """Return the values of a distribution that a request has, in seconds; a failed one has none."""
    if not record.is_complete:
        return []
    return [value / formulas.NANOSECONDS_PER_S for value in BY_NAME[name].values_ns(record)]


def _json(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"
