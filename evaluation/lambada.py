"""Evaluate a deployment on LAMBADA: ``python3 -m evaluation.lambada --endpoint=... --output=... --data-path=...``.

Writes ``metrics.json`` (each figure by its name, with standard error, definition and digests),
``samples.csv`` (one row a text, in file order) and ``manifest.json`` into the output directory.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from evaluation.arguments import LambadaArguments
from evaluation.check import check_task
from evaluation.client import Client, RequestError
from evaluation.lambada_task import (
    KNOWN_FILES,
    Metric,
    Query,
    Sample,
    Score,
    prepare_sample,
    read_texts,
    score_sample,
    summarise,
)
from evaluation.provenance import timestamp
from evaluation.served_model import ServedModel, check_identity, find_endpoint, inspect_endpoint
from evaluation.tensors import GREEDY_UNDER_THE_MODEL, NEVER_END_ID, Generation
from evaluation.tokenizer import load_tokenizer
from handover.digests import file_digest
from handover.errors import ConfigError, ServerError, exit_status
from handover.manifest import Manifest, record_files, write_atomically
from handover.progress import Progress
from handover.provenance import read_commit

ANY_FILE = "any"
METRICS_NAME = "metrics.json"
SAMPLES_NAME = "samples.csv"


def main(argv: Sequence[str]) -> None:
    """Evaluate, write the results, and fail if any sample has no score."""
    arguments = LambadaArguments.from_argv(argv, description=__doc__)
    digest = check_data(arguments.data_path, arguments.data_sha256)
    texts = read_texts(arguments.data_path, arguments.samples)
    served, batch_size = _inspect(arguments)
    samples = _prepare(arguments, texts, served)
    with Progress("evaluate", len({query for sample in samples for query in sample.queries}), "queries") as progress:
        answers = _ask(arguments, served.endpoint.grpc_url, samples, batch_size, progress)
    scores = [score_sample(sample, answers) for sample in samples]
    figures = summarise(scores)
    _write(arguments, served, digest, figures, scores)
    for figure in figures:
        print(_line(figure))
    failed = [score for score in scores if score.error]
    if failed:
        raise ServerError(
            f"{len(failed)} of {len(scores)} samples have no score; the first, line {failed[0].index + 1}: "
            f"{failed[0].error}"
        )


def check_data(path: Path, expected: str | None) -> str:
    """Return the hex sha256 of the data file, or refuse a file that is not the one meant.

    Args:
        path: the data file.
        expected: its digest (``sha256:`` before it is allowed), ``any``, or None for one of KNOWN_FILES.

    Raises:
        ConfigError: the file is missing or has another digest.
    """
    try:
        digest = file_digest(path).removeprefix("sha256:")
    except OSError as error:
        raise ConfigError(f"the LAMBADA file {path} cannot be read: {error.strerror}") from error
    if expected is None and digest not in KNOWN_FILES:
        known = "; ".join(f"{name}: {sha256}" for sha256, name in KNOWN_FILES.items())
        raise ConfigError(
            f"{path} is no known LAMBADA file: its sha256 is {digest}",
            f"known are: {known}; give data_sha256={digest} if this is the file you mean",
        )
    if expected not in (None, ANY_FILE) and digest != str(expected).lower().removeprefix("sha256:"):
        raise ConfigError(
            f"{path} is not the expected LAMBADA file: its sha256 is {digest}, expected is {expected}",
            "mend data_path or data_sha256",
        )
    return digest


def _inspect(arguments: LambadaArguments) -> tuple[ServedModel, int]:
    endpoint = find_endpoint(arguments.endpoint)
    check_identity(endpoint, arguments.model_digest)
    with Client(endpoint.grpc_url) as client:
        interface = client.describe(arguments.model)
    if not interface.takes_ids:
        raise ConfigError(
            f"model '{arguments.model}' takes no token ids, so LAMBADA's metrics cannot be computed through it",
            "take model=fastertransformer",
        )
    check_task("lambada", f"model '{arguments.model}' at {endpoint.grpc_url}", interface.is_encoder_decoder)
    return inspect_endpoint(endpoint, interface.parameters), min(arguments.batch_size, interface.max_batch_size)


def _prepare(arguments: LambadaArguments, texts: Sequence[str], served: ServedModel) -> list[Sample]:
    source = arguments.tokenizer or served.directory
    if source is None:
        raise ConfigError(
            f"the tokenizer of the model at {served.endpoint.grpc_url} is not on this machine",
            "name a directory of tokenizer files with --tokenizer",
        )
    tokenizer = load_tokenizer(source)
    samples = [prepare_sample(index, text, tokenizer, served.max_positions) for index, text in enumerate(texts)]
    cut = sum(1 for sample in samples if sample.cut_tokens)
    if cut:
        print(f"{cut} of {len(samples)} contexts are cut on the left to the model's {served.max_positions} positions")
    return samples


def _ask(
    arguments: LambadaArguments, url: str, samples: Sequence[Sample], batch_size: int, progress: Progress
) -> dict[Query, Generation | str]:
    """Answer every query once, in batches of similar length; a refused batch answers with its error."""
    local = threading.local()
    clients: list[Client] = []
    answers: dict[Query, Generation | str] = {}

    def connect() -> None:
        local.client = Client(url, arguments.timeout_s)
        clients.append(local.client)

    def ask(batch: Sequence[Query]) -> list[Generation | str]:
        try:
            return list(
                local.client.generate_ids(
                    [query.prompt for query in batch],
                    [query.output_length for query in batch],
                    model=arguments.model,
                    sampling=GREEDY_UNDER_THE_MODEL,
                    end_id=NEVER_END_ID,
                    context_log_probs=True,
                )
            )
        except RequestError as error:
            return [str(error)] * len(batch)

    batches = _batch({query for sample in samples for query in sample.queries}, batch_size)
    with ThreadPoolExecutor(max_workers=max(1, arguments.concurrency), initializer=connect) as pool:
        pending: dict[Future[list[Generation | str]], Sequence[Query]] = {pool.submit(ask, b): b for b in batches}
        try:
            _collect(pending, answers, progress)
        finally:
            pool.shutdown(cancel_futures=True)
            for client in clients:
                client.close()
    return answers


def _batch(queries: set[Query], batch_size: int) -> list[Sequence[Query]]:
    # Rows of one request cost as much as its longest; long ones first, so that none is left for the end.
    ordered = sorted(queries, key=lambda query: (query.output_length, len(query.prompt), query.prompt), reverse=True)
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def _collect(
    pending: dict[Future[list[Generation | str]], Sequence[Query]],
    answers: dict[Query, Generation | str],
    progress: Progress,
) -> None:
    for future in as_completed(pending):
        for query, answer in zip(pending[future], future.result(), strict=True):
            answers[query] = answer
        progress.advance(len(pending[future]))


def _write(
    arguments: LambadaArguments, served: ServedModel, digest: str, figures: Sequence[Metric], scores: Sequence[Score]
) -> None:
    arguments.output.mkdir(parents=True, exist_ok=True)
    _write_samples(arguments.output / SAMPLES_NAME, scores)
    endpoint = served.endpoint
    model = {
        "model": arguments.model,
        "engine": endpoint.engine,
        "model_digest": endpoint.model_digest,
        **endpoint.settings,
    }
    data = {"file": arguments.data_path.name, "sha256": digest, "known_as": KNOWN_FILES.get(digest, "")}
    content = {
        "task": "lambada",
        "metrics": [figure.to_json() for figure in figures],
        "samples": len(scores),
        "failed": sum(1 for score in scores if score.error),
        "cut_contexts": sum(1 for score in scores if score.cut_tokens),
        "data": data,
        "model": model,
        "commit": read_commit(),
        "timestamp": timestamp(),
    }
    write_atomically(arguments.output / METRICS_NAME, json.dumps(content, indent=1) + "\n")
    made_from = {"data": data, "model": model, "samples": len(scores)}
    Manifest("evaluation", record_files(arguments.output), made_from, {"commit": str(content["commit"])}).write(
        arguments.output
    )


def _write_samples(path: Path, scores: Sequence[Score]) -> None:
    def cell(value: Any) -> Any:
        return "" if value is None else int(value) if isinstance(value, bool) else value

    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([column.name for column in dataclasses.fields(Score)])
        writer.writerows([cell(value) for value in dataclasses.astuple(score)] for score in scores)


def _line(figure: Metric) -> str:
    if figure.value is None:
        return f"{figure.name:<28} no sample could be scored"
    scale, sign = (100, "%") if figure.unit == "fraction" else (1, "")
    error = "" if figure.stderr is None else f" +- {figure.stderr * scale:.5g}"
    return f"{figure.name:<28} {figure.value * scale:.5g}{sign}{error}  (n={figure.n})"


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "evaluate"))
