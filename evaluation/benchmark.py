"""Measure a deployment: ``python3 -m evaluation.benchmark --endpoint=... --output=... --batch-sizes=[1,8]``.

A static sweep over gRPC: batch sizes times (input length, output length) pairs, one request at a time,
random token ids from the model's vocabulary, and no end token, so that every requested token is
generated. Writes ``benchmark.csv`` (one row a point) and ``manifest.json`` into the output directory.
Points that a killed run of the same settings finished are kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from evaluation.arguments import BenchmarkArguments
from evaluation.client.answers import read_generations
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
from evaluation.client.tensors import NEVER_END_ID, IdsRequest, prepare_ids
from evaluation.report.provenance import describe_machine, timestamp
from evaluation.speed.benchmark_table import FAILED, FILE_NAME, OK, Row, read_rows, write_rows
from evaluation.speed.costs import CostMeter, server_log
from handover.endpoint import VERSIONS
from handover.errors import ConfigError, ServerError, exit_status
from handover.manifest import Manifest, record_files
from handover.progress import Progress
from handover.provenance import read_commit

Point = tuple[int, int, int]

_USUAL_LENGTHS = ((60, 20), (225, 20), (200, 200))
"""Question answering, intent classification and translation, as in NVIDIA's published performance tables."""


def main(argv: Sequence[str]) -> None:
    """Measure every point, write the table, and fail if no point could be measured."""
    arguments = BenchmarkArguments.from_argv(argv, description=__doc__)
    endpoint = find_endpoint(arguments.endpoint)
    check_identity(endpoint, expected_digest(arguments.model_digest, arguments.model_repository))
    # A request that is sent again would be measured as one slow request: no retries here.
    with Client(endpoint.grpc_url, arguments.timeout_s, retries=0) as client:
        interface = client.describe(arguments.model)
        if not interface.takes_ids:
            raise ConfigError(
                f"model '{arguments.model}' takes no token ids, so lengths cannot be set through it",
                "take model=fastertransformer",
            )
        served = inspect_endpoint(endpoint, interface.parameters)
        arguments = replace(arguments, lengths=arguments.lengths or usual_lengths(served.max_positions))
        points = plan_points(arguments)
        template = _template(arguments, served)
        arguments.output.mkdir(parents=True, exist_ok=True)
        rows = _measure_points(client, arguments, template, points, served, interface.is_encoder_decoder)
    _write_manifest(arguments, template)
    for row in rows:
        print(_line(row))
    if all(row.state == FAILED for row in rows):
        raise ServerError(f"none of {len(rows)} points could be measured; the first: {rows[0].error}")


def usual_lengths(max_positions: int | None) -> tuple[tuple[int, int], ...]:
    """Pairs of input and output length where none are asked for.

    Those of the published tables that the model has positions for; three quarters and one quarter of its positions
    where none fits.
    """
    fitting = tuple(pair for pair in _USUAL_LENGTHS if max_positions is None or sum(pair) <= max_positions)
    if fitting or max_positions is None:
        return fitting
    return ((max_positions - max_positions // 4, max_positions // 4),)


def plan_points(arguments: BenchmarkArguments) -> list[Point]:
    """List (batch size, input length, output length), smallest batches first.

    Batch sizes above max_batch_size are left out; if that leaves none, max_batch_size is measured.

    Raises:
        ConfigError: nothing to measure, or a size, length or count below 1.
    """
    lengths = [tuple(pair) for pair in arguments.lengths]
    if any(len(pair) != 2 for pair in lengths) or not lengths or not arguments.batch_sizes:
        raise ConfigError("a benchmark needs batch sizes and [input, output] pairs of lengths")
    if min(*arguments.batch_sizes, *(n for pair in lengths for n in pair), arguments.repeats) < 1:
        raise ConfigError("batch sizes, lengths and repeats of a benchmark must be at least 1")
    sizes = sorted({size for size in arguments.batch_sizes if size <= arguments.max_batch_size})
    return [(size, *pair) for pair, size in product(dict.fromkeys(lengths), sizes or [arguments.max_batch_size])]


def make_requests(
    arguments: BenchmarkArguments, point: Point, vocab_size: int, is_encoder_decoder: bool = False
) -> Iterator[IdsRequest]:
    """Draw the prompts of one point, each when it is needed: warm-up first, every request with ids of its own.

    The draw depends on the seed and the point only, so that two deployments get the same prompts.
    """
    batch_size, input_length, output_length = point
    random = np.random.default_rng((arguments.seed, *point))
    for _ in range(arguments.warmup + arguments.repeats):
        ids = random.integers(0, vocab_size, (batch_size, input_length)).tolist()
        yield prepare_ids(ids, output_length, end_id=NEVER_END_ID, is_encoder_decoder=is_encoder_decoder)


def measure_point(client: Client, model: str, row: Row, requests: Iterable[IdsRequest]) -> Row:
    """Send the requests of one point one after another and fill in its row.

    Args:
        client: without retries.
        model: Triton's name of the model.
        row: of the point, without figures.
        requests: the first ``row.warmup`` of them do not count.

    Raises:
        UnreachableError: the server is gone, and with it every further point.
    """
    latencies_ns = []
    for number, request in enumerate(requests):
        try:
            started_ns = time.perf_counter_ns()
            answer = client.send(model, request.inputs)
            elapsed_ns = time.perf_counter_ns() - started_ns
            counts = {len(generation.tokens) for generation in read_generations(request, answer)}
            if counts != {row.output_length}:
                raise ServerError(f"{sorted(counts)} tokens were generated instead of {row.output_length}")
        except UnreachableError:
            raise
        except ServerError as error:
            return replace(row, state=FAILED, errors=1, error=str(error))
        if number >= row.warmup:
            latencies_ns.append(elapsed_ns)
    return row.with_latencies(latencies_ns)


def _measure_points(
    client: Client,
    arguments: BenchmarkArguments,
    template: Row,
    points: Sequence[Point],
    served: ServedModel,
    is_encoder_decoder: bool,
) -> list[Row]:
    vocab_size, endpoint = _vocab_size(arguments, served), served.endpoint
    table = arguments.output / FILE_NAME
    rows = _finished_rows(arguments, template)
    each = arguments.warmup + arguments.repeats
    if rows:  # of an interrupted run, maybe of other points too
        write_rows(table, [rows[kept] for kept in points if kept in rows])
    outstanding = [point for point in points if point not in rows]
    with Progress("benchmark", len(outstanding) * each, "requests") as progress:
        for number, point in enumerate(outstanding, 1):
            row = replace(template, batch_size=point[0], input_length=point[1], output_length=point[2])
            requests = make_requests(arguments, point, vocab_size, is_encoder_decoder)
            with CostMeter(endpoint, server_log(arguments.endpoint), arguments.model) as costs:
                row = measure_point(client, arguments.model, row, _counted(requests, progress))
            if row.state == OK:  # else there is nothing that could be another model's
                check_unchanged(arguments.endpoint, endpoint, arguments.model)
            rows[point] = replace(row.with_costs(costs.figures), timestamp=timestamp())
            write_rows(table, [rows[planned] for planned in points if planned in rows])
            progress.advance(number * each - progress.done)  # it may have failed
    return [rows[point] for point in points]


def _counted(requests: Iterable[IdsRequest], progress: Progress) -> Iterator[IdsRequest]:
    """Pass requests on; each counts once the next is asked for, between two measurements."""
    for request in requests:
        yield request
        progress.advance()


def _finished_rows(arguments: BenchmarkArguments, template: Row) -> dict[Point, Row]:
    """Rows that a killed run measured under the same settings; none where the model has no digest."""
    table = arguments.output / FILE_NAME
    if not table.is_file() or not template.model_digest:
        return {}
    try:
        rows = read_rows(table)
    except ValueError:
        return {}
    return {
        row.point: row for row in rows if row.state == OK and row.settings_fingerprint == template.settings_fingerprint
    }


def _template(arguments: BenchmarkArguments, served: ServedModel) -> Row:
    endpoint, machine = served.endpoint, describe_machine()
    settings = endpoint.settings
    row = Row(
        model=served.name or arguments.model,
        triton_model=arguments.model,
        engine=endpoint.engine,
        tensor_para_size=settings.get("tensor_para_size", ""),
        pipeline_para_size=settings.get("pipeline_para_size", ""),
        weight_data_type=settings.get("weight_data_type", ""),
        data_type=settings.get("data_type", ""),
        batch_size=0,
        input_length=0,
        output_length=0,
        warmup=arguments.warmup,
        repeats=arguments.repeats,
        state=FAILED,
        model_digest=endpoint.model_digest,
        commit=read_commit(),
        int8_mode=settings.get("int8_mode", ""),
        versions=settings.get(VERSIONS, ""),
        cpu=machine.cpu,
        cores=machine.cores,
        memory_bytes=machine.memory_bytes,
        gpu=machine.gpu,
        is_random_weights=has_random_weights(endpoint),
    )
    decisive = json.dumps([repr(row), sorted(settings.items()), arguments.seed, arguments.vocab_size])
    return replace(row, settings_fingerprint=hashlib.sha256(decisive.encode()).hexdigest()[:12])


def _vocab_size(arguments: BenchmarkArguments, served: ServedModel) -> int:
    size = arguments.vocab_size or served.vocab_size
    if size is None:
        raise ConfigError(
            f"the vocabulary size of the model at {served.endpoint.grpc_url} is unknown: its config.ini is not here",
            "give --vocab-size (benchmark.vocab_size)",
        )
    return size


def _write_manifest(arguments: BenchmarkArguments, template: Row) -> None:
    made_from = {
        "model": template.model,
        "model_digest": template.model_digest,
        "settings_fingerprint": template.settings_fingerprint,
        "seed": arguments.seed,
    }
    files = record_files(arguments.output)
    Manifest("benchmark", files, made_from, {"commit": template.commit}).write(arguments.output)


def _line(row: Row) -> str:
    point = f"batch {row.batch_size:>4}  in {row.input_length:>4}  out {row.output_length:>4}"
    if row.state != OK or row.latency_mean_ms is None or row.throughput_tokens_per_s is None:
        return f"{point}  failed: {row.error}"
    return f"{point}  {row.latency_mean_ms:10.1f} ms  {row.throughput_tokens_per_s:10.1f} tokens/s"


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmark"))
