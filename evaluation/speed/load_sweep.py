"""Put a deployment under load, point by point: ``python3 -m evaluation.load --endpoint=... --output=...``.

A point is a pair of lengths (or a prompt file) under one load: a concurrency (closed loop) or a request rate (open
loop). Each row of ``load.csv`` says what was measured on which model; ``summary.json`` and a directory a point hold the
same in vLLM's and genai-perf's shapes. Points that a killed run of the same settings finished are kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tritonclient import grpc as triton

from evaluation.benchmark import usual_lengths
from evaluation.client.client import Client, UnreachableError
from evaluation.client.served_model import (
    ServedModel,
    check_identity,
    check_unchanged,
    expected_digest,
    find_endpoint,
    has_random_weights,
    inspect_endpoint,
)
from evaluation.client.tokenizer import load_tokenizer
from evaluation.report.provenance import describe_machine
from evaluation.speed.costs import server_log
from evaluation.speed.exports import write_point, write_summary
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.load_check import check_arguments
from evaluation.speed.load_point import Target, measure_point, probe
from evaluation.speed.load_table import CLOSED, FAILED, FILE_NAME, OK, OPEN, LoadRow, read_rows, write_rows
from evaluation.speed.text_prompts import Words
from evaluation.speed.workload import Prompt, read_prompt_file
from handover.endpoint import VERSIONS, Endpoint
from handover.errors import ConfigError, ServerError
from handover.manifest import Manifest, record_files
from handover.progress import Progress
from handover.provenance import made_by, read_commit
from handover.regular_file import read_bytes


@dataclass(frozen=True)
class _Sweep:
    """Everything that stays the same from point to point."""

    arguments: LoadArguments
    target: Target
    template: LoadRow


def main(argv: Sequence[str]) -> None:
    """Measure every point, write the files, and fail if no point could be measured."""
    arguments = LoadArguments.from_argv(argv, description=__doc__)
    check_arguments(arguments)
    expected = expected_digest(arguments.model_digest, arguments.model_repository)
    endpoint = find_endpoint(arguments.endpoint)
    check_identity(endpoint, expected)
    sweep, points = _prepare(arguments, endpoint)
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = _measure_points(sweep, points, expected)
    write_summary(arguments.output, rows)
    _write_manifest(sweep)
    for row in rows:
        sys.stdout.write(_line(row) + "\n")
    if all(row.state == FAILED for row in rows):
        raise ServerError(f"none of {len(rows)} points could be measured; the first: {rows[0].error}")


def _prepare(arguments: LoadArguments, endpoint: Endpoint) -> tuple[_Sweep, list[LoadRow]]:
    """Ask the server what it serves, and plan the points: rows without figures."""
    with Client(endpoint.grpc_url, arguments.timeout_s, retries=0) as client:
        interface = client.describe(arguments.model)
    if not interface.takes_ids and not interface.takes_text:
        raise ConfigError(
            f"model '{arguments.model}' takes neither token ids nor text",
            "take model=fastertransformer or model=ensemble",
        )
    is_decoupled, queue_delay_us, max_batch_size = _transaction_policy(endpoint, arguments.model)
    if arguments.streaming not in (None, is_decoupled):
        have = "streams its answers (decoupled)" if is_decoupled else "does not stream (it is not decoupled)"
        raise ConfigError(f"model '{arguments.model}' {have}", f"take streaming={str(is_decoupled).lower()}")
    arguments = dataclasses.replace(arguments, streaming=is_decoupled)
    served = inspect_endpoint(endpoint, interface.parameters)
    prompts = _read_prompts(arguments, served)
    if interface.takes_text and not all(prompt.text for prompt in prompts):
        raise ConfigError(
            f"model '{arguments.model}' takes text, but {arguments.prompt_file} holds token ids",
            "give texts, or take model=fastertransformer",
        )
    vocab_size = arguments.vocab_size or served.vocab_size
    if vocab_size is None and not prompts:
        raise ConfigError(
            f"the vocabulary size of the model at {endpoint.grpc_url} is unknown: its config.ini is not here",
            "give --vocab-size (benchmark.vocab_size)",
        )
    template = _template(arguments, served, queue_delay_us, max_batch_size)
    target = Target(
        endpoint,
        server_log(arguments.endpoint),
        vocab_size or 0,
        tuple(prompts),
        _words(arguments, served, vocab_size or 0) if interface.takes_text else None,
        _gpus(template),
        interface.is_encoder_decoder,
    )
    return _Sweep(arguments, target, template), plan_points(arguments, template, served.max_positions)


def plan_points(arguments: LoadArguments, template: LoadRow, max_positions: int | None) -> list[LoadRow]:
    """List the points, lengths by lengths, light loads first."""
    if arguments.prompt_file is not None:
        workloads = [f"file:{arguments.prompt_file.name}"]
    else:
        usual = ["{}/{}".format(*usual_lengths(max_positions)[0])]
        workloads = list(dict.fromkeys(arguments.lengths or usual))
    closed = [
        dataclasses.replace(template, mode=CLOSED, concurrency=level) for level in sorted(set(arguments.concurrencies))
    ]
    opened = [
        dataclasses.replace(template, mode=OPEN, request_rate_per_s=float(rate), arrival=arguments.arrival)
        for rate in sorted(set(arguments.request_rates))
    ]
    return [dataclasses.replace(row, workload=name) for name, row in product(workloads, [*closed, *opened])]


def _measure_points(sweep: _Sweep, points: Sequence[LoadRow], expected: str | None) -> list[LoadRow]:
    arguments, table = sweep.arguments, sweep.arguments.output / FILE_NAME
    rows = _finished_rows(sweep)
    outstanding = [point for point in points if point.point not in rows]
    if rows:  # of an interrupted run, maybe of other points too
        write_rows(table, [rows[kept.point] for kept in points if kept.point in rows])
    if outstanding:
        probe(arguments, sweep.target, points[0])
    with Progress("load", len(outstanding) * arguments.repeats, "repeats") as progress:
        for number, point in enumerate(outstanding, 1):
            check_unchanged(arguments.endpoint, sweep.target.endpoint, arguments.model, expected)
            measured = measure_point(arguments, sweep.target, point, progress.advance)
            if measured.row.state != FAILED:
                check_unchanged(arguments.endpoint, sweep.target.endpoint, arguments.model, expected)
            write_point(arguments.output / point.directory, measured, dict(arguments.slos))
            rows[point.point] = measured.row
            write_rows(table, [rows[planned.point] for planned in points if planned.point in rows])
            if measured.row.state == FAILED:
                _check_alive(sweep.target.endpoint)
            progress.advance(number * arguments.repeats - progress.done)  # it may have ended early
    return [rows[point.point] for point in points]


def _check_alive(endpoint: Endpoint) -> None:
    with Client(endpoint.grpc_url, retries=0) as client:
        if not client.is_live():
            raise UnreachableError(
                f"no server answers at {endpoint.grpc_url}", "start it and run again: points are kept"
            )


def _finished_rows(sweep: _Sweep) -> dict[tuple[str, str, float], LoadRow]:
    """Rows that a killed run measured under the same settings; none where the model has no digest."""
    table = sweep.arguments.output / FILE_NAME
    if not table.is_file() or not sweep.template.model_digest:
        return {}
    try:
        rows = read_rows(table)
    except ValueError:
        return {}
    wanted = sweep.template.settings_fingerprint
    return {row.point: row for row in rows if row.state == OK and row.settings_fingerprint == wanted}


def _transaction_policy(endpoint: Endpoint, model: str) -> tuple[bool, int | None, int]:
    """Whether the model is decoupled, what its batcher waits in microseconds, and its largest batch."""
    with triton.InferenceServerClient(endpoint.grpc_url) as client:
        config = client.get_model_config(model).config
    delay_us = config.dynamic_batching.max_queue_delay_microseconds if config.HasField("dynamic_batching") else None
    return bool(config.model_transaction_policy.decoupled), delay_us, max(1, config.max_batch_size)


def _read_prompts(arguments: LoadArguments, served: ServedModel) -> list[Prompt]:
    if arguments.prompt_file is None:
        return []
    if not arguments.prompt_file.is_file():
        raise ConfigError(f"there is no prompt file {arguments.prompt_file}")
    encode = load_tokenizer(served.directory).encode if served.directory is not None else None
    prompts, left_out = read_prompt_file(arguments.prompt_file, encode, served.max_positions)
    if left_out:
        sys.stdout.write(f"{left_out} lines of {arguments.prompt_file.name} are left out: no answer, or too long\n")
    return prompts


def _words(arguments: LoadArguments, served: ServedModel, vocab_size: int) -> Words:
    """Find what random texts can be made of."""
    if served.directory is None:
        raise ConfigError(
            f"model '{arguments.model}' takes text, but its tokenizer is not on this machine",
            "take model=fastertransformer",
        )
    return Words(load_tokenizer(served.directory), vocab_size)


def _gpus(row: LoadRow) -> int:
    return int(row.tensor_para_size or 1) * int(row.pipeline_para_size or 1) if row.gpu else 1


def _template(
    arguments: LoadArguments, served: ServedModel, queue_delay_us: int | None, max_batch_size: int
) -> LoadRow:
    endpoint, machine = served.endpoint, describe_machine()
    settings = endpoint.settings
    row = LoadRow(
        model=served.name or arguments.model,
        triton_model=arguments.model,
        engine=endpoint.engine,
        tensor_para_size=settings.get("tensor_para_size", ""),
        pipeline_para_size=settings.get("pipeline_para_size", ""),
        weight_data_type=settings.get("weight_data_type", ""),
        data_type=settings.get("data_type", ""),
        max_batch_size=max_batch_size,
        max_queue_delay_us=queue_delay_us,
        workload="",
        mode="",
        concurrency=None,
        request_rate_per_s=None,
        arrival="",
        is_streaming=bool(arguments.streaming),
        model_digest=endpoint.model_digest,
        is_random_weights=has_random_weights(endpoint),
        commit=read_commit(),
        int8_mode=settings.get("int8_mode", ""),
        versions=settings.get(VERSIONS, ""),
        cpu=machine.cpu,
        cores=machine.cores,
        memory_bytes=machine.memory_bytes,
        gpu=machine.gpu,
    )
    # Which points there are does not matter: more of them may be asked for after an interruption.
    ours = dataclasses.replace(arguments, endpoint="", output=Path(), lengths=(), concurrencies=(), request_rates=())
    file = hashlib.sha256(read_bytes(arguments.prompt_file)).hexdigest() if arguments.prompt_file else ""
    decisive = json.dumps([repr(row), sorted(settings.items()), ours.to_argv(), file])
    return dataclasses.replace(row, settings_fingerprint=hashlib.sha256(decisive.encode()).hexdigest()[:12])


def _write_manifest(sweep: _Sweep) -> None:
    row = sweep.template
    made_from = {
        "model": row.model,
        "model_digest": row.model_digest,
        "settings_fingerprint": row.settings_fingerprint,
        "seed": sweep.arguments.seed,
    }
    output = sweep.arguments.output
    Manifest("benchmark", record_files(output), made_from, made_by()).write(output)


def _line(row: LoadRow) -> str:
    figures = row.figures
    rate, latency = figures.get("output_tokens_per_s"), figures.get("e2e_p50_ms")
    name = f"{row.workload:<12} {row.label:<18}"
    if row.state != OK or rate is None or latency is None:
        return f"{name} failed: {row.error}"
    failed = f"  {row.failed_requests} failed" if row.failed_requests else ""
    shaky = "" if row.is_stable else "  not stable"
    return f"{name} {rate:10.1f} tokens/s  e2e p50 {latency:9.1f} ms{failed}{shaky}"
