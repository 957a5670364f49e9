"""Put a deployment under load, point by point: ``python3 -m evaluation.load --endpoint=... --output=...``.

A point is a pair of lengths (or a prompt file) under one load: a concurrency (closed loop) or a request rate (open
loop). Each row of ``load.csv`` has the figures of a point and their model; ``summary.json`` and a directory for each
point have the same in vLLM's and genai-perf's formats. Points that an interrupted run with the same settings finished
are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from evaluation.client.served_model import DeployedModel, Target, open_named
from evaluation.client.tokenizer import load_tokenizer
from evaluation.speed.exports import write_point, write_summary
from evaluation.speed.load_arguments import LoadArguments, check_arguments
from evaluation.speed.load_requests import LoadTarget
from evaluation.speed.probe import CLIENT_LAG, longest_probe
from evaluation.speed.prompts.prompt_file import read_prompt_file
from evaluation.speed.prompts.tokens import CommonWords, RandomIds, Words
from evaluation.speed.prompts.trace import Trace, read_trace
from evaluation.speed.prompts.workload import LoadPrompt, Tokens
from evaluation.speed.rate_search import RateSearch, search_rates, write_found
from evaluation.speed.sweep import (
    MeasuredDeployment,
    Sweep,
    check_price,
    describe_deployment,
    find_vocab_size,
    usual_lengths,
)
from evaluation.speed.tables.backlog import BACKLOG_FIGURES
from evaluation.speed.tables.costs import server_log
from evaluation.speed.tables.slo_verdict import BACKLOG
from evaluation.speed.tables.table import CLOSED, LOAD_TABLE, OK, OPEN, SLO_FIGURES, Row
from evaluation.speed.transport.openai_dialect import open_dialect
from evaluation.speed.under_load import measure_point, probe
from handover.errors import ConfigError, exit_status
from handover.regular_file import read_bytes


def main(argv: Sequence[str]) -> None:
    """Measure every point, write the files, and fail if no point could be measured."""
    arguments = LoadArguments.from_argv(argv, description=__doc__)
    check_arguments(arguments)
    arguments, target, points = _prepare(arguments)

    def measure(row: Row, advance: Callable[[], None]) -> Row:
        measured = measure_point(arguments, target, row, advance)
        write_point(arguments.output / row.directory, measured, dict(arguments.slos))
        return measured.row

    sweep = Sweep(
        name="load",
        deployment=MeasuredDeployment(arguments.endpoint, target.endpoint, arguments.model),
        output=arguments.output,
        table=LOAD_TABLE,
        points=points,
        seed=arguments.seed,
        steps=arguments.repeats if arguments.search_percentile is None else longest_probe(arguments),
        unit="repeats",
        measure=measure,
        describe=_line,
        prepare=functools.cache(lambda: probe(arguments, target, points[0])),
    )
    if arguments.remark:
        sys.stdout.write(f"{arguments.remark}\n")
    if arguments.search_percentile is None:
        rows = sweep.run()
    else:
        rows = _search(arguments, sweep, arguments.search_percentile)
    write_summary(arguments.output, rows)
    sweep.finish(rows)


def _search(arguments: LoadArguments, sweep: Sweep, percentile: float) -> list[Row]:
    """Search for the highest rate of each workload, write what was found, and say it."""

    def new_search() -> RateSearch:
        return RateSearch(arguments.search_low, arguments.search_high, arguments.search_precision)

    rows, found = search_rates(sweep, new_search, percentile, dict(arguments.slos))
    write_found(arguments.output, found, rows)
    for one in found:
        sys.stdout.write(f"{one}\n")
    return rows


def _prepare(arguments: LoadArguments) -> tuple[LoadArguments, LoadTarget, list[Row]]:
    """Read what the server serves, and plan the points as rows without figures."""
    target = _open(arguments)
    interface, served = target.interface, target.served
    dialect = open_dialect(target, arguments.streaming)
    is_streaming = _choose_streaming(arguments, target)
    arguments = dataclasses.replace(arguments, streaming=is_streaming, model=target.model)
    prompts = _read_prompts(arguments, served)
    needs_text = not dialect.takes_ids if dialect else interface.takes_text
    if needs_text and not all(prompt.text for prompt in prompts):
        raise ConfigError(
            f"model '{arguments.model}' takes text, but {arguments.prompt_file} holds token ids",
            "give texts, or take model=fastertransformer",
        )
    trace = _read_trace(arguments)
    row = Row(
        mode=CLOSED,
        remark=arguments.remark,
        triton_model=arguments.model,
        max_batch_size=None if target.is_openai else interface.max_batch_size,
        max_queue_delay_us=interface.max_queue_delay_us,
        is_streaming=is_streaming,
        gpu_hour_price=arguments.gpu_hour_price,
        given_gpus=arguments.gpus,
        deployment_label=arguments.label or "",
        slos=", ".join(f"{name} {limit:g} ms" for name, limit in arguments.slos),
    )
    row = describe_deployment(served, row, _decisive(arguments))
    check_price(row, served.endpoint.address)
    load_target = LoadTarget(
        served.endpoint,
        server_log(arguments.endpoint),
        None if prompts else _tokens(arguments, served, needs_text),
        tuple(prompts),
        trace,
        needs_text,
        served.max_positions,
        row.gpus,
        interface.is_encoder_decoder,
        dialect,
    )
    if trace is not None:
        return arguments, load_target, [_replay_point(arguments, trace, row)]
    return arguments, load_target, plan_points(arguments, row, served.max_positions)


def _open(arguments: LoadArguments) -> Target:
    """Find the served model, which must take token ids or text."""
    target = open_named(arguments, may_chat=True)
    if not target.interface.takes_ids and not target.interface.takes_text:
        raise ConfigError(
            f"model '{arguments.model}' takes neither token ids nor text",
            "take model=fastertransformer or model=ensemble",
        )
    return target


def _choose_streaming(arguments: LoadArguments, target: Target) -> bool:
    """Return whether answers will be streamed: as a model of Triton's does it, or as an OpenAI API is asked."""
    is_streaming = arguments.streaming is not False if target.is_openai else target.interface.is_decoupled
    if arguments.streaming not in (None, is_streaming):
        have = "streams its answers (decoupled)" if is_streaming else "does not stream (it is not decoupled)"
        raise ConfigError(f"model '{arguments.model}' {have}", f"take streaming={str(is_streaming).lower()}")
    _check_streaming(arguments, is_streaming)
    return is_streaming


def _check_streaming(arguments: LoadArguments, is_streaming: bool) -> None:
    if arguments.cancel_share and not is_streaming:
        raise ConfigError(
            "clients hang up in the middle of a stream, and these answers are not streamed",
            "take cancel_share=0; or export with export.triton_deployment.decoupled=true, or streaming=true of an API",
        )
    streamed = [name for name, _ in arguments.slos if name in ("ttft", "tpot", "itl")]
    if arguments.search_percentile is not None and streamed and not is_streaming:
        raise ConfigError(
            f"model '{arguments.model}' does not stream, so no request has a {streamed[0]}",
            "give benchmark.slos.e2e_ms, or export with export.triton_deployment.decoupled=true",
        )


def plan_points(arguments: LoadArguments, template: Row, max_positions: int | None) -> list[Row]:
    """List the points by their lengths, with increasing loads."""
    if arguments.prompt_file is not None:
        workloads = [f"file:{arguments.prompt_file.name}"]
    else:
        usual = ["{}/{}".format(*usual_lengths(max_positions)[0])]
        workloads = list(dict.fromkeys(arguments.lengths or usual))
    if arguments.search_percentile is not None:
        probed = dataclasses.replace(template, mode=OPEN, request_rate_per_s=arguments.search_low, arrival="poisson")
        return [dataclasses.replace(probed, workload=name) for name in workloads]
    closed = [
        dataclasses.replace(template, mode=CLOSED, concurrency=level) for level in sorted(set(arguments.concurrencies))
    ]
    opened = [
        dataclasses.replace(template, mode=OPEN, request_rate_per_s=float(rate), arrival=arguments.arrival)
        for rate in sorted(set(arguments.request_rates))
    ]
    return [dataclasses.replace(row, workload=name) for name, row in product(workloads, [*closed, *opened])]


def _replay_point(arguments: LoadArguments, trace: Trace, template: Row) -> Row:
    assert arguments.trace is not None
    rate = trace.rate_per_s(arguments.trace_speed)
    workload = f"trace:{arguments.trace.name}"
    return dataclasses.replace(
        template, workload=workload, mode=OPEN, request_rate_per_s=float(f"{rate:.6g}"), arrival="trace"
    )


def _read_trace(arguments: LoadArguments) -> Trace | None:
    if arguments.trace is None:
        return None
    trace = read_trace(arguments.trace, arguments.trace_block_size)
    lasts_s = trace.duration_s / arguments.trace_speed
    if lasts_s > arguments.max_point_s:
        sys.stdout.write(f"the replay lasts {lasts_s:.0f} s and is cut after max_point_s={arguments.max_point_s:g} s\n")
    return trace


def _read_prompts(arguments: LoadArguments, served: DeployedModel) -> list[LoadPrompt]:
    if arguments.prompt_file is None:
        return []
    if not arguments.prompt_file.is_file():
        raise ConfigError(f"there is no prompt file {arguments.prompt_file}")
    encode = load_tokenizer(served.directory).encode if served.directory is not None else None
    prompts, left_out = read_prompt_file(arguments.prompt_file, encode, served.max_positions)
    if left_out:
        sys.stdout.write(f"{left_out} lines of {arguments.prompt_file.name} are left out: no answer, or too long\n")
    return prompts


def _tokens(arguments: LoadArguments, served: DeployedModel, is_text: bool) -> Tokens:
    """Find what random prompts are made of: token ids, or the words of random texts."""
    if is_text and served.endpoint.is_openai:
        return CommonWords()
    vocab_size = find_vocab_size(arguments.vocab_size, served)
    if not is_text:
        return RandomIds(vocab_size)
    if served.directory is None:
        raise ConfigError(
            f"model '{arguments.model}' takes text, but its tokenizer is not on this machine",
            "take model=fastertransformer",
        )
    return Words(load_tokenizer(served.directory), vocab_size)


def _decisive(arguments: LoadArguments) -> tuple[tuple[str, ...], str]:
    """Return the settings that must be equal for a point to be kept; the resumed run may have more points."""
    ours = dataclasses.replace(arguments, endpoint="", output=Path(), lengths=(), concurrencies=(), request_rates=())
    given = arguments.prompt_file or arguments.trace
    return ours.to_argv(), hashlib.sha256(read_bytes(given)).hexdigest() if given else ""


def _line(row: Row) -> str:
    figures = row.figures
    rate, latency = figures.get("output_tokens_per_s"), figures.get("e2e_p50_ms")
    name = f"{row.workload:<12} {row.label:<18}"
    if row.state != OK or rate is None or latency is None:
        return f"{name} failed: {row.error}"
    failed = f"  {row.failed_requests} failed" if row.failed_requests else ""
    if row.cancelled_requests:
        failed += f"  {row.cancelled_requests} cancelled"
    clipped = f"  {row.clipped_share:.1%} shortened to the model's positions" if row.clipped_share else ""
    if row.slo_verdict:
        return f"{name} {rate:10.1f} tokens/s  {row.slo_verdict}: {_reason(row)}{failed}{clipped}"
    good = figures.get("goodput_requests_per_s")
    goodput = "" if good is None else f"  {good:.4g} good requests/s"
    reasons = f": {row.validity_reasons}" if row.validity_reasons else ""
    offered = figures.get("offered_requests_per_s")
    due = "" if offered is None else f"  {offered:.4g} requests/s were due"
    shown = f"{rate:10.1f} tokens/s  e2e p50 {latency:9.1f} ms{due}{goodput}{failed}{clipped}"
    return f"{name} {shown}  {row.validity}{reasons}"


def _reason(row: Row) -> str:
    """Return which figure decides the verdict on a rate."""
    growth, low, high = (row.figures[name] for name in BACKLOG_FIGURES)
    if row.slo_limit == CLIENT_LAG:
        return f"the client itself was late, by {row.figures['client_lag_p99_ms']:.3g} ms (p99)"
    if row.slo_limit != BACKLOG:
        share, least, most = (row.figures[name] for name in SLO_FIGURES)
        return f"{row.slo_limit} kept by {share:.2%} ({least:.2%} to {most:.2%})"
    if growth is None:
        return "too few repeats show whether answers keep up with arrivals"
    return f"{growth:.3g} requests/s more arrive than are answered ({low:.3g} to {high:.3g})"


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "load"))
