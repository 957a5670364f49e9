"""Measure a deployment: ``python3 -m evaluation.benchmark --endpoint=... --output=... --batch-sizes=[1,8]``.

A static sweep over gRPC or an OpenAI API: batch sizes times (input length, output length) pairs, one request at a time,
random token ids from the model's vocabulary, and no end token, so that every requested token is
generated. Writes ``benchmark.csv`` (one row a point) and ``manifest.json`` into the output directory.
Points that an interrupted run with the same settings finished are kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TypeVar

import numpy as np

from evaluation.arguments import BenchmarkArguments
from evaluation.client.answer_tensors import read_generations
from evaluation.client.client import Client
from evaluation.client.errors import UnreachableError
from evaluation.client.request_tensors import IdsRequest, prepare_ids
from evaluation.client.served_model import DeployedModel, Target, open_named
from evaluation.speed.provenance import timestamp, wall_clock
from evaluation.speed.sweep import (
    MeasuredDeployment,
    Sweep,
    check_price,
    describe_deployment,
    find_vocab_size,
    usual_lengths,
)
from evaluation.speed.tables.costs import CostMeter, server_log
from evaluation.speed.tables.derived import derive
from evaluation.speed.tables.figures import compute_static_figures
from evaluation.speed.tables.raw_records import PointRecords, origin_of, write_records
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.tables.table import FAILED, OK, STATIC_TABLE, Row
from evaluation.speed.transport.openai_batches import OpenAIBatches, encode_batch
from evaluation.speed.transport.openai_dialect import open_dialect
from ft_format.tensors import NO_TOKEN
from handover.errors import ConfigError, ServerError, exit_status

MOST_FAILURES = 2
Point = tuple[int, int, int]
Batch = list[list[int]]
"""Token ids of a batch's prompts, all of one length."""
MeasureBatches = Callable[[Row, Iterator[Batch]], tuple[Row, PointRecords]]
Request = TypeVar("Request")


def main(argv: Sequence[str]) -> None:
    """Measure every point, write the table, and fail if no point could be measured."""
    arguments = BenchmarkArguments.from_argv(argv, description=__doc__)
    target = _open(arguments)
    served, endpoint = target.served, target.served.endpoint
    arguments = replace(arguments, model=target.model, lengths=arguments.lengths or usual_lengths(served.max_positions))
    vocab_size, points = find_vocab_size(arguments.vocab_size, served), plan_points(arguments)
    with _open_batches(arguments, target) as measure_batches:

        def measure(row: Row, advance: Callable[[], None]) -> Row:
            point = row.batch_size, row.input_length, row.output_length
            prompts = _counted(draw_prompts(arguments, point, vocab_size), advance)
            with CostMeter(endpoint, server_log(arguments.endpoint), arguments.model) as costs:
                row, records = measure_batches(row, prompts)
            records = replace(records, origin=origin_of(row), started_at=wall_clock(records.origin_ns))
            write_records(arguments.output / row.directory, records)
            figures = {**row.figures, **costs.figures} if row.state == OK else {}
            return derive(replace(row, figures=figures, timestamp=timestamp(), started_at=records.started_at))

        sweep = Sweep(
            name="benchmark",
            deployment=MeasuredDeployment(arguments.endpoint, endpoint, arguments.model),
            output=arguments.output,
            table=STATIC_TABLE,
            points=_rows(arguments, served, points),
            seed=arguments.seed,
            steps=arguments.warmup + arguments.repeats,
            unit="requests",
            measure=measure,
            describe=_line,
        )
        rows = sweep.run()
    sweep.finish(rows)


def _open(arguments: BenchmarkArguments) -> Target:
    """Find the served model, which must take token ids."""
    target = open_named(arguments)
    if not target.interface.takes_ids:
        raise ConfigError(
            f"model '{arguments.model}' takes no token ids, so lengths cannot be set through it",
            "take model=fastertransformer",
        )
    return target


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


@contextmanager
def _open_batches(arguments: BenchmarkArguments, target: Target) -> Iterator[MeasureBatches]:
    """Connect to the server, and yield what measures one point by Triton's gRPC or by an OpenAI API."""
    endpoint, dialect = target.served.endpoint, open_dialect(target, streaming=False)
    if dialect is not None:
        if not dialect.takes_lists:
            sys.stdout.write(f"{endpoint.address} takes one prompt a request: a batch is as many requests at once\n")
        with OpenAIBatches(endpoint, dialect, arguments.timeout_s) as batches:
            yield lambda row, prompts: measure_point(
                batches.send, row, (encode_batch(dialect, ids, row.output_length) for ids in prompts)
            )
        return
    # A request that is sent again would be measured as one slow request: no retries here.
    with Client(endpoint.grpc_url, arguments.timeout_s, retries=0) as client:

        def prepare(ids: Batch, output_length: int) -> IdsRequest:
            is_encoder_decoder = target.interface.is_encoder_decoder
            return prepare_ids(ids, output_length, end_id=NO_TOKEN, is_encoder_decoder=is_encoder_decoder)

        yield lambda row, prompts: measure_point(
            partial(_send, client, target.model), row, (prepare(ids, row.output_length) for ids in prompts)
        )


def draw_prompts(arguments: BenchmarkArguments, point: Point, vocab_size: int) -> Iterator[Batch]:
    """Draw the prompts of one point, each when it is needed: warm-up first, and other ids for every request.

    The prompts depend on the seed and the point only, so that two deployments get the same ones.
    """
    batch_size, input_length, _ = point
    random = np.random.default_rng((arguments.seed, *point))
    for _ in range(arguments.warmup + arguments.repeats):
        yield random.integers(0, vocab_size, (batch_size, input_length)).tolist()


def _send(client: Client, model: str, request: IdsRequest) -> tuple[int, int]:
    """Send a batch by gRPC; returns when it was sent and when its answer was there, in ns.

    Raises:
        ServerError: the request failed, or has not as many tokens as were asked for.
    """
    started_ns = time.perf_counter_ns()
    answer = client.send(model, request.inputs)
    ended_ns = time.perf_counter_ns()
    counts = {len(generation.tokens) for generation in read_generations(request, answer)}
    if counts != set(request.output_lengths):
        raise ServerError(f"{sorted(counts)} tokens were generated instead of {request.output_lengths[0]}")
    return started_ns, ended_ns


def measure_point(
    send: Callable[[Request], tuple[int, int]], row: Row, requests: Iterable[Request]
) -> tuple[Row, PointRecords]:
    """Send the requests of one point one after another and fill in its row; ``row.warmup_requests`` do not count.

    A request that fails is sent again, MOST_FAILURES times in a point, and counted among the failures.

    Args:
        send: sends a request; returns when it was sent and when its answer was there, in ns.
        row: the point's row without figures.
        requests: the warm-up's first.

    Raises:
        UnreachableError: the server is gone, so that no further point can be measured.
    """
    records: list[RequestRecord] = []
    failures: list[RequestRecord] = []
    for request in requests:
        while True:
            began_ns = time.perf_counter_ns()
            try:
                records.append(_record(row, *send(request)))
                break
            except UnreachableError:
                raise
            except ServerError as error:
                failures.append(_record(row, began_ns, time.perf_counter_ns(), str(error)))
                row = replace(row, failed_requests=len(failures), error=failures[0].error)
                if len(failures) > MOST_FAILURES:
                    return replace(row, state=FAILED), _point_records(row, records, failures)
    row = with_latencies(row, [record.done_ns - record.sent_ns for record in records[row.warmup_requests :]])
    return row, _point_records(row, records, failures)


def _point_records(row: Row, records: Sequence[RequestRecord], failures: Sequence[RequestRecord] = ()) -> PointRecords:
    """Join what was measured; failed tries are in no figure, as the warm-up is."""
    measured = records[row.warmup_requests :]
    return PointRecords(tuple(map(_window, measured)), (*records[: row.warmup_requests], *failures))


def with_latencies(row: Row, latencies_ns: Sequence[int]) -> Row:
    """Fill in the figures of a point whose requests all succeeded: each request is a repeat of the closed loop.

    Args:
        row: the point's row without figures.
        latencies_ns: time from sending each measured request to receiving its answer.
    """
    windows = [_window(_record(row, 0, latency_ns)) for latency_ns in latencies_ns]
    return replace(row, state=OK, figures=compute_static_figures(windows, row.batch_size, row.gpus))


def _record(row: Row, sent_ns: int, done_ns: int, error: str = "") -> RequestRecord:
    """Record a request of a whole batch; a failed one has no answer."""
    given, generated = row.batch_size * row.input_length, row.batch_size * row.output_length
    record = RequestRecord(sent_ns, sent_ns, done_ns, given, error=error)
    return record if error else replace(record, chunk_ns=(done_ns,), chunk_tokens=(generated,))


def _window(record: RequestRecord) -> Window:
    return Window((record,), record.sent_ns, record.done_ns)


def _counted(prompts: Iterable[Batch], advance: Callable[[], None]) -> Iterator[Batch]:
    """Yield batches, and advance the progress bar after each, outside the measured time."""
    for batch in prompts:
        yield batch
        advance()


def _rows(arguments: BenchmarkArguments, served: DeployedModel, points: Sequence[Point]) -> list[Row]:
    row = Row(
        triton_model=arguments.model,
        warmup_requests=arguments.warmup,
        repeats=arguments.repeats,
        gpu_hour_price=arguments.gpu_hour_price,
        given_gpus=arguments.gpus,
        deployment_label=arguments.label or "",
    )
    row = describe_deployment(served, row, (arguments.seed, arguments.vocab_size))
    check_price(row, served.endpoint.address)
    return [
        replace(row, batch_size=batch_size, workload=f"{input_length}/{output_length}")
        for batch_size, input_length, output_length in points
    ]


def _line(row: Row) -> str:
    latency_ms, tokens_per_s = row.figures.get("e2e_mean_ms"), row.figures.get("output_tokens_per_s")
    point = f"batch {row.batch_size:>4}  in {row.input_length:>4}  out {row.output_length:>4}"
    if row.state != OK or latency_ms is None or tokens_per_s is None:
        return f"{point}  failed: {row.error}"
    doubts = f": {row.validity_reasons}" if row.validity_reasons else ""
    return f"{point}  {latency_ms:10.1f} ms  {tokens_per_s:10.1f} tokens/s  {row.validity}{doubts}"


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmark"))
